//! Parent side of a worker: starts it, sends requests, and ends it in any state.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use host::program::ProcessGroup;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::{FromWorker, WorkerFailure, WorkerRequest};

/// Time for a killed worker to end; one that hangs in the driver is left behind.
const GONE: Duration = Duration::from_secs(2);

/// Command line and environment of a worker.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// Path of the program.
    pub program: PathBuf,
    /// Arguments of the program.
    pub arguments: Vec<OsString>,
    /// Additional variables for the worker.
    pub variables: Vec<(OsString, OsString)>,
    /// Variables of this process that the worker does not get.
    pub left_out: Vec<OsString>,
}

/// Running worker. Killed when dropped, together with all processes started by the libraries.
pub(crate) struct Worker {
    /// Process group led by the worker. Dropped before the child, while the process id is still
    /// in use.
    _group: ProcessGroup,
    child: Child,
    socket: BufReader<UnixStream>,
    /// Last call announced by the worker.
    doing: Option<String>,
    line: Vec<u8>,
}

// === impl Launcher ===

impl Launcher {
    /// Returns a launcher for this very program, even if its file has been replaced since.
    pub fn own() -> Self {
        Self {
            program: PathBuf::from("/proc/self/exe"),
            arguments: vec!["check-worker".into()],
            variables: Vec::new(),
            left_out: Vec::new(),
        }
    }

    /// Returns a launcher whose workers do not get these variables of this process.
    pub(crate) fn without(&self, names: &[String]) -> Self {
        let mut launcher = self.clone();
        launcher.left_out.extend(names.iter().map(OsString::from));
        launcher
    }
}

// === impl Worker ===

impl Worker {
    pub(crate) fn start(launcher: &Launcher) -> Result<Self, WorkerFailure> {
        let started = Self::spawn(launcher);
        started.map_err(|error| {
            let program = launcher.program.display();
            WorkerFailure::Crashed(format!("cannot be started as {program}: {error}"))
        })
    }

    fn spawn(launcher: &Launcher) -> io::Result<Self> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let mut command = Command::new(&launcher.program);
        for name in &launcher.left_out {
            command.env_remove(name);
        }
        let child = command
            .args(&launcher.arguments)
            .envs(launcher.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            // The libraries write to standard output, and this process's is for the result.
            .stdout(Stdio::from(io::stderr().as_fd().try_clone_to_owned()?))
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        Ok(Self {
            _group: ProcessGroup::of(&child),
            child,
            socket: BufReader::new(UnixStream::from_std(ours)?),
            doing: None,
            line: Vec::new(),
        })
    }

    /// Sends a request, and waits for the answer until `until`.
    pub(crate) async fn ask(
        &mut self,
        request: &WorkerRequest,
        until: Instant,
    ) -> Result<FromWorker, WorkerFailure> {
        let began = Instant::now();
        let mut line = serde_json::to_vec(request)
            .map_err(|error| WorkerFailure::Crashed(format!("cannot be asked: {error}")))?;
        line.push(b'\n');
        // If sending fails the worker is gone, which shows below.
        drop(self.socket.write_all(&line).await);
        match tokio::time::timeout_at(until, self.answer()).await {
            Ok(Some(FromWorker::Failed(failure))) => Err(failure),
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(WorkerFailure::Crashed(self.end().await)),
            Err(_) => Err(WorkerFailure::Late {
                seconds: began.elapsed().as_secs(),
                doing: self.while_doing(),
            }),
        }
    }

    /// Returns the next answer; `None` if the worker has ended.
    async fn answer(&mut self) -> Option<FromWorker> {
        loop {
            self.line.clear();
            let read = self.socket.read_until(b'\n', &mut self.line).await;
            if !matches!(read, Ok(1..)) {
                return None;
            }
            match serde_json::from_slice(&self.line) {
                Ok(FromWorker::Doing { call, device }) => {
                    let device = device.map(|number| format!(" of device {number}"));
                    self.doing = Some(format!("{call}{}", device.unwrap_or_default()));
                }
                Ok(answer) => return Some(answer),
                Err(_) => return None,
            }
        }
    }

    /// Describes how the worker has ended.
    async fn end(&mut self) -> String {
        let status = tokio::time::timeout(GONE, self.child.wait()).await;
        let status = match status {
            Ok(Ok(status)) => format!("ended by itself ({status})"),
            _ => "does not answer any more".to_owned(),
        };
        format!("{status}, {}", self.while_doing())
    }

    fn while_doing(&self) -> String {
        match &self.doing {
            Some(call) => format!("in {call}"),
            None => "before its first call".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::super::Libraries;
    use super::*;

    /// Waits until a process whose id a script writes into a file exists, then until it is
    /// gone.
    async fn is_gone(file: &Path, end: impl FnOnce()) {
        let wait = Duration::from_millis(20);
        let pid = loop {
            let noted = fs::read_to_string(file).unwrap_or_default();
            if let Some(pid) = noted.strip_suffix('\n') {
                break pid.to_owned();
            }
            tokio::time::sleep(wait).await;
        };
        end();
        // A zombie counts as gone, too.
        let stat = format!("/proc/{pid}/stat");
        while fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            tokio::time::sleep(wait).await;
        }
    }

    #[tokio::test]
    async fn what_a_library_starts_ends_with_its_worker() {
        let directory = tempfile::tempdir().unwrap();
        for (name, then) in [("hangs", "sleep 1000"), ("crashes", "exit 1")] {
            let file = directory.path().join(name);
            let script = format!("sleep 1000 & echo $! > {}; {then}", file.display());
            let launcher = Launcher {
                program: "sh".into(),
                arguments: vec!["-c".into(), script.into()],
                variables: Vec::new(),
                left_out: Vec::new(),
            };
            let mut worker = Worker::start(&launcher).unwrap();
            if name == "crashes" {
                let request = WorkerRequest::Gpus(Libraries::default());
                let until = Instant::now() + Duration::from_secs(60);
                let asked = worker.ask(&request, until).await;
                assert!(matches!(asked, Err(WorkerFailure::Crashed(_))), "{asked:?}");
            }
            let gone = is_gone(&file, || drop(worker));
            let gone = tokio::time::timeout(Duration::from_secs(60), gone).await;
            assert!(gone.is_ok(), "{name}: it is still there");
        }
    }
}
