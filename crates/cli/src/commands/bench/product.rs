//! Starts gpuwarden from this executable for a benchmark, as one process or as an agent with its
//! controller, with its own directories, sockets and ports, and without gpuwarden's environment
//! variables.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::args::{BenchArgs, BenchLog, ServerArgs};
use crate::client::Client;
use crate::settings::Endpoint;

/// Longest wait for a start.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Pause before the readiness is requested again.
const ASK_AGAIN: Duration = Duration::from_millis(20);
/// Most bytes of a log that an error quotes.
const QUOTED: usize = 2_000;
/// Severity of the lines in the running kernel's log: "debug", which no console shows, so that a
/// slow console does not delay the lines.
const LEVEL: u8 = 7;
/// The running kernel's log, which one benchmark at a time locks.
const KERNEL_LOG: &str = "/dev/kmsg";
/// File of a process's log, in its data directory.
const LOG: &str = "log";

/// Kernel log that the product reads faults from.
pub(super) enum FaultLog {
    File(File),
    /// The running kernel's log, and the lock on it, which is released on drop.
    Kmsg {
        _lock: File,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setup {
    /// `run` without a cluster.
    Alone,
    /// `run` that acts in the cluster.
    Run,
    /// An agent, and its controller that acts in the cluster.
    Apart,
}

/// A running gpuwarden, which is killed on drop.
pub(super) struct Product {
    /// Client of the process that decides.
    pub(super) client: Client,
    /// Socket for the reports of monitors.
    pub(super) socket: PathBuf,
    pub(super) log: FaultLog,
    /// The process that reads the log, and its controller, if there is one.
    processes: Vec<Process>,
    /// Directory of all data, which is removed last.
    home: TempDir,
}

struct Process {
    child: Child,
    /// Directory of the data and the log.
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

    /// Writes a line of kernel log.
    pub(super) fn write(&mut self, line: &str) -> anyhow::Result<()> {
        match self {
            // A single write, since the reader would wait for the rest of a partial line.
            Self::File(file) => file.write_all(format!("{line}\n").as_bytes())?,
            Self::Kmsg { .. } => host::kernel_log::write_kmsg(LEVEL, line)?,
        }
        Ok(())
    }
}

/// Waits for the lock of a file, which may belong to another user.
fn lock(path: &str) -> anyhow::Result<File> {
    let file = File::open(path).with_context(|| format!("open {path}"))?;
    file.lock().with_context(|| format!("lock {path}"))?;
    Ok(file)
}

// === impl Product ===

impl Product {
    /// Starts gpuwarden for `node`, and waits until it is ready.
    pub(super) async fn start(args: &BenchArgs, node: &str, role: Setup) -> anyhow::Result<Self> {
        let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        let home = tempfile::Builder::new()
            .prefix("gpuwarden-bench-")
            .tempdir_in(&dir)
            .with_context(|| format!("create a directory in {}", dir.display()))?;
        let file = home.path().join("kernel.log");
        let log = FaultLog::new(args.via, &file)?;
        let spawn = |name: &str, flags: Vec<OsString>| Process::spawn(home.path(), name, flags);
        let reads: Vec<OsString> = {
            let log = match args.via {
                BenchLog::File => file.clone().into_os_string(),
                BenchLog::Kmsg => "kmsg".into(),
            };
            // Faults of other programs in the kernel's log must not count.
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
            // No election: no other controller acts there, and the Lease's namespace may not exist.
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

    /// Returns the ids of all processes; the controller's is the last.
    pub(super) fn pids(&self) -> anyhow::Result<Vec<u32>> {
        let pid = |process: &Process| process.child.id().context("gpuwarden has ended");
        self.processes.iter().map(pid).collect()
    }

    /// Kills all processes, and waits for their end.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        for process in &mut self.processes {
            process.child.kill().await.context("kill gpuwarden")?;
        }
        self.home.close().context("remove the directory")
    }

    /// Adds the end of the logs to an error.
    pub(super) fn blame(&self, error: &anyhow::Error) -> anyhow::Error {
        let tails = self.processes.iter().map(|process| tail(&process.data));
        let tails = tails.collect::<Vec<String>>().join("\n");
        anyhow::anyhow!("{error:#}; the end of its log:\n{tails}")
    }
}

/// Returns the flags of a process that acts in the cluster that `args` name.
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
        let mut missing = vec!["it has not written its endpoint".to_owned()];
        while began.elapsed() < START_LIMIT {
            if let Some(status) = self.child.try_wait()? {
                bail!("gpuwarden has ended ({status}):\n{}", tail(&self.data));
            }
            let noted = Endpoint::read(&self.data);
            let noted = noted.filter(|noted| Some(noted.pid) == self.child.id());
            if let Some(endpoint) = noted {
                let status = client(&endpoint)?.status().await?;
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
