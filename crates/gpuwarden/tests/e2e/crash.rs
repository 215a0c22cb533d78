//! Kills at random moments of a stream of events: no acknowledged event is lost or duplicated,
//! and the node ends in the state of its faults.
//!
//! `GPUWARDEN_SOAK_KILLS` sets the number of kills (`cargo xtask soak` asks for 1,000).

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{Entity, HealthEvent, HealthEvents};
use serde_json::Value;
use testkit::{ControlPlane, Launch, Product, Version};
use tonic::transport::Endpoint;

use crate::support::{SOON, Scene};

/// Events in the stream: by default, and in the soak.
const EVENTS: u32 = 500;
const SOAK_EVENTS: u32 = 2_000;
/// Kills outside of the soak.
const KILLS: u32 = 10;
/// Environment variable with the number of kills in the soak.
const SOAK_KILLS: &str = "GPUWARDEN_SOAK_KILLS";
/// Time to send all events, also on a very busy machine.
pub(crate) const ALL_SENT: Duration = Duration::from_secs(600);
/// Time to read and count the lines of the storm, also on a very busy machine.
const ALL_READ: Duration = Duration::from_secs(600);

/// Returns event `index` of the stream: five GPUs, each failing and recovering in turn. The last
/// event is a fault of GPU 0 instead of GPU 4's recovery, so these two are faulty at the end.
fn event(node: &str, index: u32) -> HealthEvent {
    let last = index == events() - 1;
    let gpu = if last { 0 } else { index % 5 };
    let healthy = !last && (index / 5) % 2 == 1;
    HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        is_fatal: !healthy,
        is_healthy: healthy,
        node_name: node.into(),
        message: format!("event {index}"),
        entities_impacted: vec![Entity {
            entity_type: "GPU".into(),
            entity_value: gpu.to_string(),
        }],
        generated_timestamp: Some(prost_types::Timestamp {
            seconds: 1_800_000_000 + i64::from(index),
            nanos: 0,
        }),
        ..HealthEvent::default()
    }
}

/// Sends the stream in order, each event until it is acknowledged, across any number of
/// restarts. Returns how many sends were repeated.
pub(crate) async fn send_all(socket: PathBuf, node: String) -> anyhow::Result<u32> {
    let address = format!("unix://{}", socket.display());
    let mut again = 0;
    let mut client = None;
    for index in 0..events() {
        let batch = HealthEvents {
            version: 1,
            events: vec![event(&node, index)],
        };
        loop {
            if client.is_none() {
                let endpoint = Endpoint::try_from(address.clone())?.timeout(Duration::from_secs(5));
                client = endpoint
                    .connect()
                    .await
                    .ok()
                    .map(PlatformConnectorClient::new);
            }
            if let Some(open) = &mut client {
                if open.health_event_occurred_v1(batch.clone()).await.is_ok() {
                    break;
                }
                again += 1;
                client = None;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    Ok(again)
}

/// Returns the number of kills: `usual`, unless the soak sets another one.
pub(crate) fn kills(usual: u32) -> anyhow::Result<u32> {
    let asked = std::env::var(SOAK_KILLS);
    Ok(asked.map_or(Ok(usual), |text| text.parse())?)
}

/// Returns the number of events in the stream.
pub(crate) fn events() -> u32 {
    if std::env::var_os(SOAK_KILLS).is_some() {
        SOAK_EVENTS
    } else {
        EVENTS
    }
}

/// Random moments for kills. A fixed seed would not reproduce the same moments on slow and fast
/// machines anyway.
pub(crate) struct Moments(u64);

impl Moments {
    pub(crate) fn new() -> Self {
        Self(u64::from(std::process::id()) | 1)
    }

    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

#[tokio::test]
async fn killed_at_random_moments_it_loses_and_doubles_nothing() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let kills = kills(KILLS)?;
    let mut scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    let socket = scene.product.socket().to_owned();
    let mut sender = tokio::spawn(send_all(socket, scene.node.clone()));
    let mut moments = Moments::new();
    let mut done = 0;
    while done < kills {
        tokio::time::sleep(Duration::from_millis(20 + moments.below(180))).await;
        scene.product.kill9()?;
        scene.product.restart().await?;
        done += 1;
    }
    let again = tokio::time::timeout(ALL_SENT, &mut sender).await???;
    println!("{done} kills, {again} events sent again");

    all_once_and_in_order(&scene).await?;
    scene
        .product
        .client(["inject", "recovery"])
        .await?
        .expect(0)?;
    scene.restored_by_hand().await
}

/// Checks that each event of the stream is stored once and in order, and that the node is in the
/// state of the last events.
pub(crate) async fn all_once_and_in_order(scene: &Scene) -> anyhow::Result<()> {
    // Each event of the stream is stored once, in order.
    let output = scene
        .product
        .client(["events", "--limit", "10000", "-o", "json"])
        .await?;
    let stored: Vec<Value> = serde_json::from_str(output.expect(0)?)?;
    let messages: Vec<String> = stored
        .iter()
        .map(|view| {
            view["event"]["message"]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        })
        .collect();
    let expected: Vec<String> = (0..events())
        .map(|index| format!("event {index}"))
        .collect();
    let mut seen = BTreeSet::new();
    let odd: Vec<&Value> = stored
        .iter()
        .filter(|view| {
            let message = view["event"]["message"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            !expected.contains(&message) || !seen.insert(message)
        })
        .collect();
    assert!(odd.is_empty(), "doubled or foreign events: {odd:#?}");
    assert_eq!(messages, expected, "events are lost or out of order");

    // The open faults hold the node, and their recovery releases it.
    scene.taken_in(events().into()).await?;
    scene.cordoned().await?;
    let status = scene.shown().await?;
    let faults = status["faults"].as_array().cloned().unwrap_or_default();
    let mut broken: Vec<&str> = faults
        .iter()
        .filter_map(|one| one["subject"].as_str())
        .collect();
    broken.sort_unstable();
    assert_eq!(broken, ["GPU 0", "GPU 4"], "{status}");
    Ok(())
}

/// Distinct faults of the storm, as many as behind 800,000 lines of one code in the field.
const FAULTS: u64 = 29;
/// Lines of the storm.
const STORM: u64 = 40_000;

/// Returns the number of lines that the stored fault events stand for, and the number of these
/// events.
async fn counted(product: &testkit::Product) -> anyhow::Result<(u64, usize)> {
    let output = product
        .client(["events", "--limit", "10000", "-o", "json"])
        .await?;
    let stored: Vec<Value> = serde_json::from_str(output.expect(0)?)?;
    let faults = stored
        .iter()
        .map(|view| &view["event"])
        .filter(|event| event["isHealthy"] == false);
    let counts: Vec<u64> = faults
        .map(|event| match event["metadata"]["count"].as_str() {
            Some(count) => count.parse().unwrap_or(0),
            None => 1,
        })
        .collect();
    Ok((counts.iter().sum(), counts.len()))
}

#[tokio::test]
async fn killed_in_a_storm_it_counts_every_line_once() -> anyhow::Result<()> {
    let mut product = Launch::new()?.node_name("storm").start().await?;
    let mut line = 0;
    let mut kills = 0;
    while line < STORM {
        let lines = (line..line + 4_000).map(|line| {
            let gpu = line % FAULTS;
            format!("NVRM: Xid (PCI:0000:{gpu:02x}:00): 95, pid=1, name=a, line {line}\n")
        });
        let part = lines.collect::<Vec<_>>().concat();
        line += 4_000;
        product.append_kernel_log(&part)?;
        // A different moment for each kill, mostly while the lines are being read.
        tokio::time::sleep(Duration::from_millis(10 + kills * 37 % 160)).await;
        product.kill9()?;
        product.restart().await?;
        kills += 1;
    }
    let read = || async {
        let output = product.client(["status", "-o", "json"]).await;
        let status: Value = output
            .map_err(|error| error.to_string())
            .and_then(|out| serde_json::from_str(&out.stdout).map_err(|error| error.to_string()))?;
        let source = &status["sources"][0];
        if source["state"] == "following" {
            Ok(())
        } else {
            Err(source.to_string())
        }
    };
    product
        .wait_for("the log to be read", ALL_READ, read)
        .await?;
    // A recovery ends the windows, so that the counted repeats are reported now.
    product.client(["inject", "recovery"]).await?.expect(0)?;
    let all = || async {
        match counted(&product).await.map_err(|error| error.to_string())? {
            (STORM, events) => Ok(events),
            other => Err(format!("{other:?} of {STORM}")),
        }
    };
    let events = product
        .wait_for("every line counted", ALL_READ, all)
        .await?;
    // Each start may end the windows of the previous process.
    let most = usize::try_from(FAULTS * (2 * kills + 2))?;
    assert!(events <= most, "{events} events, at most {most}");
    Ok(())
}

/// Returns a line with XID 79 of the GPU on this bus.
fn fall(bus: u32) -> String {
    format!("[  100.000001] NVRM: Xid (PCI:0000:{bus:02x}:00): 79, GPU has fallen off the bus.\n")
}

/// Size of a page of the database.
const PAGE: u64 = 4096;
/// Fewer pages than the faults need.
const FEW_PAGES: u64 = 30;

/// Ends the product. The end of a busy one may leave the pages in the write-ahead log, which the end
/// of the next one moves to the database. Returns the path of the database.
async fn ended(product: &mut Product) -> anyhow::Result<PathBuf> {
    let database = product.data_dir().join("events.db");
    for _ in 0..5 {
        product.terminate().await?;
        if std::fs::metadata(&database)?.len() / PAGE > FEW_PAGES {
            return Ok(database);
        }
        product.restart().await?;
    }
    anyhow::bail!("the pages stay in the write-ahead log")
}

/// Overwrites every third page of the database with noise, from page `first` on.
fn spoil(database: &Path, first: u64) -> anyhow::Result<()> {
    let noise = vec![0xA5; usize::try_from(PAGE)?];
    let file = OpenOptions::new().write(true).open(database)?;
    let pages = file.metadata()?.len() / PAGE;
    anyhow::ensure!(pages > FEW_PAGES, "{pages} pages");
    for page in (first..pages).step_by(3) {
        file.write_all_at(&noise, page * PAGE)?;
    }
    Ok(())
}

/// Returns the status once it shows the fault of the GPU on this bus.
async fn shown(product: &Product, bus: u32) -> anyhow::Result<Value> {
    let output = product.client(["status", "-o", "json"]).await?;
    let status: Value = serde_json::from_str(&output.stdout)?;
    let gpu = format!("0000:{bus:02x}:00");
    anyhow::ensure!(
        status["fleet"]["nodes"].to_string().contains(&gpu),
        "{status}"
    );
    Ok(status)
}

#[tokio::test]
async fn a_damaged_store_leaves_no_machine_unwatched() -> anyhow::Result<()> {
    const GPUS: u32 = 200;
    for first in 0..3 {
        let mut product = Launch::new()?.start().await?;
        product.append_kernel_log(&(1..=GPUS).map(fall).collect::<String>())?;
        product
            .wait_for("the faults", SOON, || shown(&product, GPUS))
            .await?;
        spoil(&ended(&mut product).await?, first)?;

        // As a supervisor does: damage that the start does not read is found later, and ends the
        // process once.
        let mut starts = 0;
        let status = loop {
            starts += 1;
            anyhow::ensure!(starts <= 2, "no sound store after two starts");
            if product.restart().await.is_err() {
                continue;
            }
            let bus = GPUS + starts;
            product.append_kernel_log(&fall(bus))?;
            let ended = async {
                while product.get("/healthz").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            tokio::select! {
                seen = product.wait_for("a new fault", SOON, || shown(&product, bus)) => break seen?,
                () = ended => println!("it ended: {}", product.stderr()),
            }
        };
        let is_ready = || async {
            product
                .get("/readyz")
                .await
                .map_err(|error| error.to_string())
        };
        product.wait_for("being ready", SOON, is_ready).await?;
        // If the fault book was saved after all events, history is not read, and its damage is
        // not found. The first page is always read.
        let notes = status["store"]["notes"].to_string();
        let is_met = notes.contains("events.db.damaged-");
        assert!(is_met || first > 0, "{status}");
        let data_dir = product.data_dir();
        let arguments = ["doctor", "--data-dir"].map(OsStr::new);
        let arguments = arguments.into_iter().chain([data_dir.as_os_str()]);
        let doctor = product.command(arguments).await?;
        let is_told = doctor.stdout.contains("store-history");
        assert_eq!(is_told, is_met, "{}", doctor.stdout);
    }
    Ok(())
}
