//! BMCs with false responses: the reset and the password are sent only to the configured BMC,
//! whatever path a response names.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::ensure;
use gpuwarden_janitor::Provider as _;
use gpuwarden_janitor::conformance::Weather;
use gpuwarden_janitor::redfish::Redfish;
use maintenance::janitor::Class;
use maintenance::janitor::redfish::RedfishConfig;
use serde_json::{Value, json};
use testkit::{ControlPlane, Version, unique};
use tokio::net::TcpListener;

use super::redfish::{Fake, Nodes, credentials, reboot};

/// Path of the machine.
const MACHINE: &str = "/redfish/v1/Systems/1";
/// Number of responses per round.
const ROUND: usize = 30;
/// Longest time for a signal to a BMC that responds at once.
const SOON: Duration = Duration::from_secs(30);
/// Most characters of a failure message.
const LONGEST: usize = 1000;

/// Node with a BMC, and another host that must not be called.
struct Scene {
    fake: Arc<Fake>,
    provider: Redfish,
    node: String,
    other: TcpListener,
    _secrets: tempfile::TempDir,
}

impl Scene {
    async fn new() -> anyhow::Result<Option<Self>> {
        let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
            return Ok(None);
        };
        let nodes = Nodes::of(plane).await?;
        let (secrets, config) = credentials()?;
        let fake = Fake::new(&Arc::new(Mutex::new(Weather::Fine)));
        let address = Arc::clone(&fake).listen().await?;
        let node = unique("lie");
        nodes.make(&node).await;
        let config = RedfishConfig {
            addresses: BTreeMap::from([(node.clone(), address)]),
            ..config
        };
        Ok(Some(Self {
            fake,
            provider: Redfish::open(Arc::clone(&nodes.cluster), config)?,
            node,
            other: TcpListener::bind("127.0.0.1:0").await?,
            _secrets: secrets,
        }))
    }

    /// Returns values for a path that point to the other host.
    fn elsewhere(&self) -> anyhow::Result<[String; 6]> {
        let other = self.other.local_addr()?;
        Ok([
            format!("@{other}"),
            format!(":1@{other}"),
            format!("//{other}"),
            format!("http://{other}"),
            format!("/\\{other}"),
            ".localhost".to_owned(),
        ])
    }

    fn resets(&self) -> usize {
        self.fake.resets.lock().unwrap().len()
    }

    async fn nobody_else_was_called(&self) -> anyhow::Result<()> {
        let called = tokio::time::timeout(Duration::from_millis(100), self.other.accept()).await;
        ensure!(called.is_err(), "another host was called");
        Ok(())
    }
}

#[tokio::test]
async fn no_answer_of_a_bmc_sends_anything_to_another_host() -> anyhow::Result<()> {
    let Some(scene) = Scene::new().await? else {
        return Ok(());
    };
    let mut sent = 0;
    // With a false path of the log, the log is not read, and the right machine is reset.
    for (place, goes_on) in [
        ("", false),
        ("/Actions/ComputerSystem.Reset", false),
        ("/ResetActionInfo", false),
        ("/LogServices", true),
        ("/LogServices/SEL", true),
        ("/LogServices/SEL/Entries", true),
        ("next", true),
    ] {
        for before in scene.elsewhere()? {
            let (truth, lie) = if place == "next" {
                let next = json!(format!("{before}/redfish/v1/x"));
                let lie = format!(r#""Members":[],"Members@odata.nextLink":{next}"#);
                (r#""Members":[]"#.to_owned(), lie)
            } else {
                let (truth, lie) = (
                    format!("{MACHINE}{place}"),
                    format!("{before}{MACHINE}{place}"),
                );
                (json!(truth).to_string(), json!(lie).to_string())
            };
            *scene.fake.lie.lock().unwrap() = Some(Box::new(move |told: &Value| {
                told.to_string().replace(&truth, &lie).into_bytes()
            }));
            let signal = reboot(&scene.node, &unique("op"));
            let answer = scene.provider.send(&signal).await;
            assert_eq!(answer.is_ok(), goes_on, "{place} {before}: {answer:?}");
            if let Err(failure) = answer {
                assert_eq!(failure.class, Class::Permanent, "{place} {before}");
                let why = "not a path on this BMC";
                assert!(
                    failure.message.contains(why),
                    "{place} {before}: {failure:?}"
                );
            } else {
                sent += 1;
            }
            assert_eq!(scene.resets(), sent, "{place} {before}");
        }
    }
    scene.nobody_else_was_called().await
}

/// Pseudo-random numbers from a seed.
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: usize) -> usize {
        // Xorshift by George Marsaglia.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % sides as u64).unwrap()
    }

    /// Turns a true response into a false one.
    fn answer(&mut self, truth: &Value, elsewhere: &[String]) -> Vec<u8> {
        let mut told = truth.clone();
        match self.throw(8) {
            0 => return truth.to_string().into_bytes(),
            1 => {
                let mut text = truth.to_string().into_bytes();
                text.truncate(self.throw(text.len()));
                return text;
            }
            2 => return vec![0xff; self.throw(10_000)],
            3 => return "[".repeat(self.throw(100_000)).into_bytes(),
            4 => {
                told["Members@odata.nextLink"] =
                    json!("/redfish/v1/Systems/1/LogServices/SEL/Entries");
            }
            _ => {}
        }
        self.change(&mut told, elsewhere);
        told.to_string().into_bytes()
    }

    fn change(&mut self, value: &mut Value, elsewhere: &[String]) {
        match value {
            Value::Array(all) => all.iter_mut().for_each(|one| self.change(one, elsewhere)),
            Value::Object(all) => all.values_mut().for_each(|one| self.change(one, elsewhere)),
            Value::String(text) => {
                *value = match self.throw(12) {
                    0 => json!(format!("{}{text}", elsewhere[self.throw(elsewhere.len())])),
                    1 => json!("x".repeat(self.throw(100_000))),
                    2 => json!(format!("{text}\r\nHost: elsewhere\u{1b}[2J")),
                    3 => json!([text, null, 7]),
                    4 => Value::Null,
                    _ => return,
                }
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn whatever_a_bmc_answers_its_machine_alone_is_reset_and_every_signal_ends()
-> anyhow::Result<()> {
    let Some(scene) = Scene::new().await? else {
        return Ok(());
    };
    let asked = std::env::var("GPUWARDEN_SOAK_SECONDS");
    let duration = Duration::from_secs(asked.map_or(Ok(0), |text| text.parse())?);
    let seed = u64::try_from(std::time::UNIX_EPOCH.elapsed()?.as_micros())? | 1;
    println!("seed {seed}");
    let (elsewhere, mut dice) = (scene.elsewhere()?, Dice(seed));
    *scene.fake.lie.lock().unwrap() = Some(Box::new(move |truth: &Value| {
        dice.answer(truth, &elsewhere)
    }));
    let begin = Instant::now();
    let mut sent = 0;
    loop {
        for _ in 0..ROUND {
            let signal = reboot(&scene.node, &unique("op"));
            let answer = tokio::time::timeout(SOON, scene.provider.send(&signal)).await?;
            match answer {
                Ok(_) => sent += 1,
                Err(failure) => {
                    let length = failure.message.chars().count();
                    ensure!(length <= LONGEST, "seed {seed}: {length}");
                    // An ambiguous failure would claim that a reset may have happened.
                    ensure!(
                        failure.class != Class::Ambiguous,
                        "seed {seed}: {failure:?}"
                    );
                }
            }
            ensure!(scene.resets() == sent, "seed {seed}");
        }
        if begin.elapsed() >= duration {
            break;
        }
    }
    scene.nobody_else_was_called().await
}
