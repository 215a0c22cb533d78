//! gpuwarden, started from this very executable for a benchmark, as one process or as an agent
//! and its controller: with directories, sockets and ports of its own, and without anything
//! from the environment.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use console::api::StatusView;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::args::{BenchArgs, BenchLog, ServerArgs};
use crate::client::Client;
use crate::settings::Endpoint;

/// Longest time for a start.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Pause before the process is asked again whether it is ready.
const ASK_AGAIN: Duration = Duration::from_millis(20);
/// The part of its log that an error quotes (bytes).
const QUOTED: usize = 2_000;
/// Severity of the lines that are written to the running kernel's log: "debug", which no
/// console shows, so that a slow one does not hold them up.
const LEVEL: u8 = 7;
/// The running kernel's log. A program that writes to it locks it: one runs at a time.
const KERNEL_LOG: &str = "/dev/kmsg";
/// File of the log of a process, in its data directory.
const LOG: &str = "log";

/// A `FaultLog` is the kernel log that the product reads faults from.
pub(super) enum FaultLog {
    /// A file.
    File(File),
    /// The running kernel's log, which is locked against others meanwhile.
    Kmsg {
        /// Given up on drop.
        _lock: File,
    },
}

/// A `Setup` is one of the ways to start the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setup {
    /// `run` without a cluster.
    Alone,
    /// `run` with the cluster, in which it acts.
    Run,
    /// An agent and its controller, which acts in the cluster.
    Apart,
}

/// A `Product` is a running gpuwarden, which is killed on drop.
pub(super) struct Product {
    /// A client of the API of the process that decides.
    pub(super) client: Client,
    /// The socket on which monitors report.
    pub(super) socket: PathBuf,
    /// Its kernel log.
    pub(super) log: FaultLog,
    /// The process that reads the log, where there is one, and its controller.
    processes: Vec<Process>,
    /// The directory of them all; removed at last.
    home: TempDir,
}

/// A `Process` is one that we have started.
struct Process {
    child: Child,
    /// The directory of its data and its log.
    data: PathBuf,
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
    /// Starts it for `node`, where it acts in the cluster that `args` name, and waits until it
    /// is ready.
    pub(super) async fn start(args: &BenchArgs, node: &str, role: Setup) -> anyhow::Result<Self> {
        let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        let home = tempfile::Builder::new()
            .prefix("gpuwarden-bench-")
            .tempdir_in(&dir)
            .with_context(|| format!("make a directory in {}", dir.display()))?;
        let file = home.path().join("kernel.log");
        let log = FaultLog::new(args.via, &file)?;
        let spawn = |name: &str, flags: Vec<OsString>| Process::spawn(home.path(), name, flags);
        let reads: Vec<OsString> = {
            let log = match args.via {
                BenchLog::File => file.clone().into_os_string(),
                BenchLog::Kmsg => "kmsg".into(),
            };
            // What others have left in the kernel's log is not ours to act on.
            let flags = ["--node-name", node, "--history", "0s"];
            let flags = flags.into_iter().map(OsString::from);
            flags.chain(["--kernel-log".into(), log]).collect()
        };
        let mut processes = Vec::new();
        if role == Setup::Alone {
            processes.push(spawn("run", reads)?);
        } else if role == Setup::Run {
            processes.push(spawn("run", [reads, acts(args)?].concat())?);
        } else {
            let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
            // No other acts in the test cluster, and it may lack the namespace of the Lease.
            let listens = [
                "--grpc-insecure",
                "--leader-elect",
                "false",
                "--grpc-listen",
            ];
            let listens = listens.map(OsString::from).into_iter();
            let listens: Vec<OsString> = listens.chain([free.to_string().into()]).collect();
            let reports = ["--controller", &format!("http://{free}")].map(Into::into);
            processes.push(spawn("agent", [reads, reports.to_vec()].concat())?);
            processes.push(spawn("controller", [acts(args)?, listens].concat())?);
        }
        let mut endpoints = Vec::new();
        for process in &mut processes {
            endpoints.push(process.ready().await?);
        }
        let ends = endpoints.first().zip(endpoints.last());
        let (first, last) = ends.context("nothing was started")?;
        Ok(Self {
            client: client(last)?,
            socket: first.socket.clone(),
            log,
            processes,
            home,
        })
    }

    /// Returns the process ids: of the one that reads the log, and of its controller.
    pub(super) fn pids(&self) -> anyhow::Result<Vec<u32>> {
        let pid = |process: &Process| process.child.id().context("gpuwarden has ended");
        self.processes.iter().map(pid).collect()
    }

    /// Kills it, and waits until it is gone.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        for process in &mut self.processes {
            process.child.kill().await.context("end gpuwarden")?;
        }
        self.home.close().context("remove its directory")
    }

    /// Adds the end of its log to an error.
    pub(super) fn blame(&self, error: &anyhow::Error) -> anyhow::Error {
        let tails = self.processes.iter().map(|process| tail(&process.data));
        let tails = tails.collect::<Vec<String>>().join("\n");
        anyhow::anyhow!("{error:#}; the end of its log:\n{tails}")
    }
}

/// Returns the flags with which a process acts in the cluster that `args` name.
fn acts(args: &BenchArgs) -> anyhow::Result<Vec<OsString>> {
    let kubeconfig = args.kubeconfig.as_ref().context("no cluster is named")?;
    let mut flags: Vec<OsString> = ["--quarantine", "--circuit-breaker", "false"]
        .map(Into::into)
        .into();
    flags.extend(["--kubeconfig".into(), kubeconfig.into()]);
    if let Some(context) = &args.context {
        flags.extend(["--context".into(), context.into()]);
    }
    Ok(flags)
}

// === impl Process ===

impl Process {
    fn spawn(home: &Path, command: &str, flags: Vec<OsString>) -> anyhow::Result<Self> {
        let data = home.join(command);
        fs::create_dir(&data)?;
        let mut process = Command::new(std::env::current_exe()?);
        process.arg(command).arg("--data-dir").arg(&data);
        process.args(["--listen", "127.0.0.1:0"]).args(flags);
        if command != "controller" {
            process.arg("--socket").arg(data.join("gpuwarden.sock"));
        }
        for (name, _) in std::env::vars_os() {
            let shown = name.to_string_lossy();
            if shown.starts_with("GPUWARDEN_") || shown == "KUBERNETES_SERVICE_HOST" {
                process.env_remove(name);
            }
        }
        let child = process
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(data.join(LOG))?)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start gpuwarden {command}"))?;
        Ok(Self { child, data })
    }

    async fn ready(&mut self) -> anyhow::Result<Endpoint> {
        let began = Instant::now();
        let mut missing = vec!["it has not said where it listens".to_owned()];
        while began.elapsed() < START_LIMIT {
            if let Some(status) = self.child.try_wait()? {
                bail!("gpuwarden has ended ({status}):\n{}", tail(&self.data));
            }
            let noted = Endpoint::read(&self.data);
            let noted = noted.filter(|noted| Some(noted.pid) == self.child.id());
            if let Some(endpoint) = noted {
                let status: StatusView = client(&endpoint)?.get("/api/v1/status").await?;
                if status.ready {
                    return Ok(endpoint);
                }
                missing = status.not_ready;
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
        bail!(
            "gpuwarden is not ready after {} s: {}; the end of its log:\n{}",
            START_LIMIT.as_secs(),
            missing.join("; "),
            tail(&self.data)
        )
    }
}

fn client(endpoint: &Endpoint) -> anyhow::Result<Client> {
    Client::new(&ServerArgs {
        config: None,
        server: Some(endpoint.server.clone()),
        data_dir: None,
    })
}

fn tail(data: &Path) -> String {
    let log = fs::read(data.join(LOG)).unwrap_or_default();
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
