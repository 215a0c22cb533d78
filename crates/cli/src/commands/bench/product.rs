//! `gpuwarden run`, started from this very executable for a benchmark: with a directory, a
//! socket and a port of its own, and without anything from the environment.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use console::api::Status;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::args::{BenchArgs, BenchLog, ServerArgs};
use crate::client::Client;
use crate::settings::Endpoint;

/// How long a start may take.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Pause before the process is asked again whether it is ready.
const ASK_AGAIN: Duration = Duration::from_millis(20);
/// How much of its log an error quotes (bytes).
const QUOTED: usize = 2_000;
/// Severity of the lines that are written to the running kernel's log: "debug", which no
/// console shows, so that a slow one does not hold them up.
const LEVEL: u8 = 7;
/// Who writes to the running kernel's log locks it: one such program runs at a time.
const KERNEL_LOG: &str = "/dev/kmsg";

/// Where faults are written for the product to read.
pub(super) enum FaultLog {
    /// A file.
    File(File),
    /// The running kernel's log, which is locked against others meanwhile.
    Kmsg {
        /// Given up on drop.
        _lock: File,
    },
}

/// A running `gpuwarden run`; killed on drop.
pub(super) struct Product {
    /// A client of its API.
    pub(super) client: Client,
    /// Its connector's socket.
    pub(super) socket: PathBuf,
    /// Its kernel log.
    pub(super) log: FaultLog,
    child: Child,
    home: TempDir,
}

// === impl FaultLog ===

impl FaultLog {
    fn new(via: BenchLog, file: &Path) -> anyhow::Result<Self> {
        match via {
            BenchLog::File => Ok(Self::File(File::create_new(file)?)),
            BenchLog::Kmsg => Ok(Self::Kmsg {
                _lock: lock(KERNEL_LOG)?,
            }),
        }
    }

    /// Writes one line.
    pub(super) fn write(&mut self, line: &str) -> anyhow::Result<()> {
        match self {
            // One write: a half line would be waited for.
            Self::File(file) => file.write_all(format!("{line}\n").as_bytes())?,
            Self::Kmsg { .. } => host::kernel_log::write_kmsg(LEVEL, line)?,
        }
        Ok(())
    }
}

/// Waits for the lock of a file, which may belong to another user and is made where it is
/// missing.
fn lock(path: &str) -> anyhow::Result<File> {
    let file = File::open(path).with_context(|| format!("open {path}"))?;
    file.lock().with_context(|| format!("lock {path}"))?;
    Ok(file)
}

// === impl Product ===

impl Product {
    /// Starts it for `node`, with the cluster that `args` name where `cluster` says so, and
    /// waits until it is ready.
    pub(super) async fn start(args: &BenchArgs, node: &str, cluster: bool) -> anyhow::Result<Self> {
        let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        let home = tempfile::Builder::new()
            .prefix("gpuwarden-bench-")
            .tempdir_in(&dir)
            .with_context(|| format!("make a directory in {}", dir.display()))?;
        let (data, file) = (home.path().join("data"), home.path().join("kernel.log"));
        let log = FaultLog::new(args.via, &file)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("run").arg("--data-dir").arg(&data);
        command.arg("--socket").arg(data.join("gpuwarden.sock"));
        command.args(["--listen", "127.0.0.1:0", "--node-name", node]);
        // A burst is reported for many nodes.
        command.args(["--accept-nodes", "any"]);
        // What others have left in the kernel's log is not ours to act on.
        command.args(["--history", "0s", "--kernel-log"]);
        match args.via {
            BenchLog::File => command.arg(&file),
            BenchLog::Kmsg => command.arg("kmsg"),
        };
        if let (true, Some(kubeconfig)) = (cluster, &args.kubeconfig) {
            command
                .args(["--quarantine", "--circuit-breaker", "false"])
                .arg("--kubeconfig")
                .arg(kubeconfig);
            if let Some(context) = &args.context {
                command.args(["--context", context]);
            }
        }
        for (name, _) in std::env::vars_os() {
            let shown = name.to_string_lossy();
            if shown.starts_with("GPUWARDEN_") || shown == "KUBERNETES_SERVICE_HOST" {
                command.env_remove(name);
            }
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(home.path().join("log"))?)
            .kill_on_drop(true)
            .spawn()
            .context("start gpuwarden run")?;
        let mut started = Started { child, home };
        let endpoint = started.ready(&data).await?;
        Ok(Self {
            client: client(&endpoint)?,
            socket: endpoint.socket,
            log,
            child: started.child,
            home: started.home,
        })
    }

    /// The process id; `None` where it has ended.
    pub(super) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Kills it, and waits until it is gone.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        self.child.kill().await.context("end gpuwarden run")
    }

    /// Adds the end of its log to an error.
    pub(super) fn blame(&self, error: &anyhow::Error) -> anyhow::Error {
        anyhow::anyhow!("{error:#}; the end of its log:\n{}", tail(&self.home))
    }
}

/// A process that may not be ready yet.
struct Started {
    child: Child,
    home: TempDir,
}

// === impl Started ===

impl Started {
    async fn ready(&mut self, data: &Path) -> anyhow::Result<Endpoint> {
        let began = Instant::now();
        let mut missing = vec!["it has not said where it listens".to_owned()];
        while began.elapsed() < START_LIMIT {
            if let Some(status) = self.child.try_wait()? {
                bail!("gpuwarden run has ended ({status}):\n{}", tail(&self.home));
            }
            if let Some(endpoint) = Endpoint::read(data) {
                let status: Status = client(&endpoint)?.get("/api/v1/status").await?;
                if status.ready {
                    return Ok(endpoint);
                }
                missing = status.not_ready;
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
        bail!(
            "gpuwarden run is not ready after {} s: {}; the end of its log:\n{}",
            START_LIMIT.as_secs(),
            missing.join("; "),
            tail(&self.home)
        )
    }
}

fn client(endpoint: &Endpoint) -> anyhow::Result<Client> {
    Client::new(&ServerArgs {
        server: Some(endpoint.server.clone()),
        data_dir: None,
    })
}

fn tail(home: &TempDir) -> String {
    let log = fs::read(home.path().join("log")).unwrap_or_default();
    let start = log.len().saturating_sub(QUOTED);
    String::from_utf8_lossy(log.get(start..).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_one_whole_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = FaultLog::new(BenchLog::File, &path).unwrap();
        log.write("one").unwrap();
        log.write("two").unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "one\ntwo\n");
    }

    #[test]
    fn a_lock_is_held_until_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        File::create(&path).unwrap();
        let held = lock(path.to_str().unwrap()).unwrap();
        let other = File::open(&path).unwrap();
        assert!(other.try_lock().is_err());
        drop(held);
        assert!(other.try_lock().is_ok());
    }
}
