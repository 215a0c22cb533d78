//! Attacks by an unprivileged process on the machine, while real faults arrive: each fault
//! quarantines its node, probes respond, memory stays bounded, and recovered nodes return.
//! `hostile_ports.rs` covers the other ports.
//!
//! Every attack has a product and a node. The attacker is this test binary under another user,
//! with the access of every local user: to the socket and to the page. `GPUWARDEN_SOAK_SECONDS`
//! sets the duration of the attacks (`cargo xtask soak` asks for ten minutes). Each real fault
//! must then cordon its node within a second, as observed by this process. Without it, each
//! attack runs once, and no time is asserted.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use contract::{HealthEvent, keys};
use serde_json::Value;
use testkit::{ControlPlane, Version, wait_for};

use crate::support::{SOON, Scene, event, send, xid};

/// Id of the user "nobody".
const NOBODY: u32 = 65_534;
/// Environment variable that tells the attacking process the kind of attack and its target.
const ATTACK: &str = "GPUWARDEN_HOSTILE_ATTACK";
const SOCKET: &str = "GPUWARDEN_HOSTILE_SOCKET";
const ADDRESS: &str = "GPUWARDEN_HOSTILE_ADDRESS";
const NODE: &str = "GPUWARDEN_HOSTILE_NODE";
/// Line that the attacker prints once the preparations for the fault are done, and again for
/// each later action.
const DONE: &str = "done";
/// Limit of the product's memory under attack, in MiB: several times its normal use.
pub(crate) const MOST_MEMORY: u64 = 256;
/// Longest time for a cordon under attack, in the soak.
const SECOND: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Attack {
    /// Sends events with the ids of future log records, so that the real events look like
    /// retries.
    ForgesRecords,
    /// Opens more faults than a node has room for. They do not quarantine nodes.
    FillsTheBook,
    /// Requests much data without reading it.
    ReadsSlowly,
    /// Holds hundreds of connections to the page open, and reads nothing.
    HoldsConnections,
    /// Opens a fault with a later time than every future recovery.
    OutlivesRecoveries,
    /// Reports permanently that all is well.
    Recovers,
    /// Invents checks, until a node has no room for a condition.
    TakesConditions,
    /// Sends as much as it can, permanently.
    Floods,
    /// Reports in turn that a GPU has failed and that all is well.
    Flaps,
}

const ATTACKS: [Attack; 9] = [
    Attack::ForgesRecords,
    Attack::FillsTheBook,
    Attack::ReadsSlowly,
    Attack::HoldsConnections,
    Attack::OutlivesRecoveries,
    Attack::Recovers,
    Attack::TakesConditions,
    Attack::Floods,
    Attack::Flaps,
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_faults_take_effect_whatever_an_unprivileged_process_does() -> anyhow::Result<()> {
    if std::fs::metadata("/proc/self")?.uid() != 0 {
        testkit::skip("root: it runs a process as another user");
        return Ok(());
    }
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let duration = soak()?;
    let (begin, mut turns) = (Instant::now(), 0);
    let mut slowest = (Duration::ZERO, None);
    let mut failed = Vec::new();
    loop {
        for attack in ATTACKS {
            match withstand(attack, &plane).await {
                Ok(took) if !duration.is_zero() && took > SECOND => {
                    failed.push(format!("{attack:?}: the cordon took {took:?}"));
                }
                Ok(took) => slowest = slowest.max((took, Some(attack))),
                Err(error) => failed.push(format!("{attack:?}: {error:#}")),
            }
            turns += 1;
        }
        if begin.elapsed() >= duration || !failed.is_empty() {
            break;
        }
    }
    println!("{turns} attacks; the slowest cordon: {slowest:?}");
    ensure!(
        failed.is_empty(),
        "{} of {turns} attacks succeeded:\n\n{}",
        failed.len(),
        failed.join("\n\n")
    );
    Ok(())
}

/// Runs one attack on one product, with a real fault. Returns the time until its cordon.
async fn withstand(attack: Attack, plane: &ControlPlane) -> anyhow::Result<Duration> {
    let scene = Scene::new(plane, |node| node, |launch| launch).await?;
    // An older harmless event, because users of the page know the form of our events.
    let harmless = "Graphics SM Warp Exception";
    scene.product.append_kernel_log(&xid(13, harmless))?;
    scene.taken_in(1).await?;
    let attacker = Attacker::start(attack, &scene)?;
    attacker.until(1, &scene).await.context("the attacker")?;

    let began = Instant::now();
    scene.product.append_kernel_log(&xid(79, harmless))?;
    // The attacker may have cordoned the node before. The fault of our own monitor must be a
    // reason for the cordon.
    scene
        .node_until("the monitor's own fault, cordoned", |node| {
            let annotations = &node["metadata"]["annotations"];
            let listed = annotations["quarantineHealthEvent"]
                .as_str()
                .unwrap_or_default();
            let listed: Value = serde_json::from_str(listed).map_err(|error| error.to_string())?;
            let mut listed = listed.as_array().into_iter().flatten();
            let is_ours = |event: &Value| {
                let by = &event["metadata"]["gpuwarden.dev/reported-by"];
                event["errorCode"].to_string().contains("\"79\"")
                    && (by.is_null() || by == "monitor")
            };
            let holds = listed.any(is_ours) && node["spec"]["unschedulable"] == true;
            holds.then_some(()).ok_or(annotations.to_string())
        })
        .await
        .context("the real fault")?;
    let took = began.elapsed();
    scene
        .condition("SysLogsXIDError", "True")
        .await
        .context("the real fault's condition")?;
    let probe = |path: &'static str| {
        let product = &scene.product;
        product.wait_for(path, SOON, move || async move {
            let answer = product.get(path).await.map_err(|error| error.to_string())?;
            let good = answer == "ok\n" || answer.contains("# EOF");
            good.then_some(()).ok_or(answer)
        })
    };
    probe("/healthz").await?;
    probe("/metrics").await?;
    let memory = memory(scene.product.pid())?;
    ensure!(memory < MOST_MEMORY, "the product takes {memory} MiB");

    // The attack continues, and the fault stays.
    if attack == Attack::Recovers {
        let more = attacker.done() + 20;
        attacker.until(more, &scene).await?;
        scene.cordoned().await.context("after forged recoveries")?;
        let story = scene.story().await?;
        let given_back = story.iter().find(|(_, text)| text.contains("release: "));
        ensure!(given_back.is_none(), "it was given back: {given_back:?}");
    }
    if attack == Attack::Flaps {
        let more = attacker.done() + 20;
        attacker.until(more, &scene).await?;
        let story = scene.story().await?;
        let returns = story.iter().filter(|(_, text)| text.contains("release: "));
        let returns = returns.count();
        // The first return within the hour is immediate, the second after half a minute.
        ensure!(returns <= 2, "it was given back {returns} times");
    }
    drop(attacker);
    // Recoveries are never blocked.
    let product = &scene.product;
    product
        .wait_for("the operator's recovery", SOON, || async {
            // Events in flight when the attacker ended may arrive after the recovery.
            let answer = product.client(["inject", "recovery"]).await;
            let answer = answer.map_err(|error| error.to_string())?;
            (answer.code == Some(0)).then_some(()).ok_or(answer.stdout)
        })
        .await?;
    scene.restored().await.context("the operator's recovery")?;
    Ok(took)
}

/// Returns the duration of the attacks; zero for a single run.
pub(crate) fn soak() -> anyhow::Result<Duration> {
    let asked = std::env::var("GPUWARDEN_SOAK_SECONDS");
    Ok(Duration::from_secs(
        asked.map_or(Ok(0), |text| text.parse())?,
    ))
}

/// Returns the resident memory of the process, in MiB.
pub(crate) fn memory(pid: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kib.context("no VmRSS")?.parse::<u64>()? / 1_024)
}

/// The attacking process, under another user. Killed on drop.
struct Attacker {
    process: Child,
    done: Arc<AtomicU64>,
    _dir: tempfile::TempDir,
}

impl Attacker {
    fn start(attack: Attack, scene: &Scene) -> anyhow::Result<Self> {
        // A directory that every user can read, with the program and a link to the socket, which
        // is in a private directory.
        let dir = tempfile::tempdir()?;
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755))?;
        let (program, socket) = (dir.path().join("attacker"), dir.path().join("socket"));
        // Copied by another process: a process started by a concurrent test would inherit our
        // writable file, and nobody could execute it then.
        let mut copy = Command::new("cp");
        copy.arg(std::env::current_exe()?).arg(&program);
        ensure!(copy.status()?.success(), "cp of the attacker");
        std::fs::hard_link(scene.product.socket(), &socket)?;
        let mut process = Attacker::command(&program)
            .env(ATTACK, format!("{attack:?}"))
            .env(SOCKET, socket)
            .env(ADDRESS, scene.product.address())
            .env(NODE, &scene.node)
            .spawn()?;
        let done = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&done);
        let errors = process.stderr.take().context("its standard error")?;
        std::thread::spawn(move || {
            use std::io::BufRead as _;
            for line in std::io::BufReader::new(errors).lines() {
                match line.as_deref() {
                    Ok(DONE) => drop(counted.fetch_add(1, Ordering::Relaxed)),
                    Ok(other) => drop(writeln!(std::io::stderr(), "attacker: {other}")),
                    Err(_) => break,
                }
            }
        });
        Ok(Self {
            process,
            done,
            _dir: dir,
        })
    }

    fn command(program: &Path) -> Command {
        use std::os::unix::process::CommandExt as _;
        let mut command = Command::new(program);
        command
            .args(["--exact", "hostile::the_process_that_attacks"])
            .args(["--nocapture", "--test-threads=1"])
            .current_dir("/")
            .uid(NOBODY)
            .gid(NOBODY)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command
    }

    fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Waits until the attacker has acted `count` times.
    async fn until(&self, count: u64, scene: &Scene) -> anyhow::Result<()> {
        let probe = || async {
            let done = self.done();
            if done >= count { Ok(()) } else { Err(done) }
        };
        let waited = wait_for("what the attacker has done", 3 * SOON, probe).await;
        waited.map_err(|error| scene.product.failure(&format!("{error:#}")))
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Not a test, but the entry point of the attacking process. Refusals are expected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_attacks() {
    if let Ok(name) = std::env::var(ATTACK) {
        let attack = ATTACKS
            .into_iter()
            .find(|attack| format!("{attack:?}") == name);
        Side::of_environment().attack(attack.unwrap()).await;
    }
}

/// The product as seen by the attacker.
struct Side {
    socket: PathBuf,
    address: String,
    node: String,
}

impl Side {
    fn of_environment() -> Self {
        let of = |name| std::env::var(name).unwrap();
        Self {
            socket: of(SOCKET).into(),
            address: of(ADDRESS).trim_start_matches("http://").to_owned(),
            node: of(NODE),
        }
    }

    async fn attack(&self, attack: Attack) {
        match attack {
            Attack::ForgesRecords => self.forges_records().await,
            Attack::FillsTheBook => self.fills_the_book().await,
            Attack::ReadsSlowly => self.reads_slowly().await,
            Attack::HoldsConnections => self.holds_connections(),
            Attack::OutlivesRecoveries => self.outlives_recoveries().await,
            Attack::Recovers => self.recovers().await,
            Attack::TakesConditions => self.takes_conditions().await,
            Attack::Floods => self.floods().await,
            Attack::Flaps => self.flaps().await,
        }
        done();
        std::future::pending::<()>().await;
    }

    /// Sends in small batches, because a refusal affects the whole batch.
    async fn send(&self, events: Vec<HealthEvent>) {
        for part in events.chunks(500) {
            let _ = send(&self.socket, part.to_vec()).await;
        }
    }

    fn request(&self, path: &str) -> Option<TcpStream> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        Some(stream)
    }

    /// Returns our own monitor's event of the harmless line, as the page shows it to everybody.
    fn shown(&self) -> HealthEvent {
        let mut answer = String::new();
        let mut stream = self.request("/api/v1/events?limit=1").unwrap();
        stream.read_to_string(&mut answer).unwrap();
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        let body: Value = serde_json::from_str(body).unwrap();
        contract::json::from_value(body[0]["event"].clone()).unwrap()
    }

    /// Returns the event that our own monitor will create for the future line.
    fn foreseen(&self) -> HealthEvent {
        let shown = self.shown();
        HealthEvent {
            message: shown.message.replace("): 13,", "): 79,"),
            error_code: vec!["79".to_owned()],
            is_fatal: true,
            id: String::new(),
            ..shown
        }
    }

    async fn forges_records(&self) {
        let foreseen = self.foreseen();
        let place = foreseen.metadata[keys::META_LOG_PLACE].clone();
        let (file, offset) = place.rsplit_once(':').unwrap();
        let offset: u64 = offset.parse().unwrap();
        let forged = (1..=1_000).map(|ahead| {
            let mut event = foreseen.clone();
            let place = format!("{file}:{}", offset + ahead);
            event.metadata.insert(keys::META_LOG_PLACE.into(), place);
            event
                .metadata
                .insert(keys::META_EARLIER_IN_BOOT.into(), "true".into());
            event
        });
        self.send(forged.collect()).await;
    }

    async fn fills_the_book(&self) {
        let made_up = (0..1_100).map(|code| HealthEvent {
            agent: "nobody".into(),
            error_code: vec![code.to_string()],
            quarantine_overrides: Some(contract::BehaviourOverrides {
                force: false,
                skip: true,
            }),
            ..event(&self.node, "0")
        });
        self.send(made_up.collect()).await;
    }

    /// Makes eight requests for thirty megabytes each, without reading the responses.
    async fn reads_slowly(&self) {
        for number in 0..30 {
            let text = "x".repeat(4 * 1_024);
            let large = HealthEvent {
                agent: "nobody".into(),
                message: number.to_string(),
                is_fatal: false,
                metadata: (0..120)
                    .map(|key| (format!("{key:04}{}", &text[4..]), text.clone()))
                    .collect(),
                ..event(&self.node, "0")
            };
            let _ = send(&self.socket, vec![large]).await;
        }
        let open: Vec<_> = (0..8)
            .filter_map(|_| self.request("/api/v1/events?limit=10000"))
            .collect();
        // The responses arrive without further requests, after a while.
        for stream in &open {
            let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
            let _ = (&*stream).read(&mut [0; 16]);
        }
        std::mem::forget(open);
    }

    /// Opens more connections than the page permits. Most request more than fits into the
    /// buffers without reading, and a tenth stops in the middle of the request head.
    fn holds_connections(&self) {
        let ask = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(2_000);
        for number in 0..300 {
            let say = if number % 10 == 0 { "GET / HT" } else { &ask };
            let Ok(mut stream) = TcpStream::connect(&self.address) else {
                continue;
            };
            // A full buffer must not block the attacker.
            let _ = stream.set_nonblocking(true);
            let _ = stream.write(say.as_bytes());
            std::mem::forget(stream);
        }
    }

    async fn outlives_recoveries(&self) {
        let mut event = self.foreseen();
        // Another GPU than the real fault's, which would replace this fault.
        for entity in &mut event.entities_impacted {
            entity.entity_value = entity.entity_value.replace("b3", "13");
        }
        event.metadata.clear();
        let taken_over = (keys::META_TAKEN_OVER.to_owned(), "x".to_owned());
        event.metadata.extend([taken_over]);
        // The year 9999 is the last one accepted.
        event.generated_timestamp = Some(prost_types::Timestamp {
            seconds: 253_370_764_800,
            nanos: 0,
        });
        self.send(vec![event]).await;
    }

    async fn recovers(&self) {
        let well = HealthEvent {
            is_fatal: false,
            is_healthy: true,
            error_code: Vec::new(),
            entities_impacted: Vec::new(),
            metadata: [].into(),
            ..self.foreseen()
        };
        for count in 0_i64.. {
            let event = HealthEvent {
                // Each event is different.
                message: format!("all fine {count}"),
                generated_timestamp: None,
                ..well.clone()
            };
            self.send(vec![event]).await;
            done();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn flaps(&self) {
        for count in 0_i64.. {
            let event = HealthEvent {
                agent: "nobody".into(),
                // Each event is different.
                message: count.to_string(),
                generated_timestamp: None,
                is_fatal: count % 2 == 0,
                is_healthy: count % 2 == 1,
                ..event(&self.node, "0")
            };
            self.send(vec![event]).await;
            done();
            // Slow enough that each event is acted upon separately.
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Sends from four tasks, each with consecutive requests.
    async fn floods(&self) {
        let flood = async |task: u32| {
            for round in 0_u64.. {
                let made_up = (0..500).map(|code| HealthEvent {
                    agent: "nobody".into(),
                    message: format!("{task} {round}"),
                    error_code: vec![code.to_string()],
                    is_fatal: false,
                    ..event(&self.node, "0")
                });
                let _ = send(&self.socket, made_up.collect()).await;
                if task == 0 && round == 10 {
                    done();
                }
            }
        };
        tokio::join!(flood(0), flood(1), flood(2), flood(3));
    }

    async fn takes_conditions(&self) {
        for healthy in [false, true] {
            let made_up = (0..64).map(|check| HealthEvent {
                agent: "nobody".into(),
                check_name: format!("MadeUp{check}"),
                is_fatal: !healthy,
                is_healthy: healthy,
                quarantine_overrides: Some(contract::BehaviourOverrides {
                    force: false,
                    skip: true,
                }),
                ..event(&self.node, "0")
            });
            self.send(made_up.collect()).await;
            // The conditions must be written before the checks recover.
            tokio::time::sleep(Duration::from_secs(3)).await;
        }
    }
}

fn done() {
    let _ = writeln!(std::io::stderr(), "{DONE}");
}
