//! Client of the `supervise` program, which starts control planes and finds running ones.
//!
//! A control plane lives in a directory, which identifies a shared one. The supervisor runs
//! while any process holds a shared lock on `hold.lock` there, however the holders end. It holds
//! a lock on `supervise.lock` while it lives. All functions block; [`crate::ControlPlane`] is
//! the asynchronous interface.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions, TryLockError},
    io::{BufRead as _, BufReader, Read as _, Seek as _, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use serde::Deserialize;

use crate::components::{Component, Version, cache_dir, path_key};

/// Time for a control plane to start. The supervisor has shorter limits for each step, and
/// reports which one was missed.
const START_LIMIT: Duration = Duration::from_secs(200);

/// Time that a shared control plane outlives its last user, so that the next test binary of the
/// same run need not start another.
const LINGER: Duration = Duration::from_secs(15);

/// Program that marks nodes as unreachable.
const CONTROLLER_MANAGER: &str = "kube-controller-manager";
/// Flag of that program: no node becomes unreachable during a test, also without a kubelet or
/// where kwok gets no turn on a busy machine. The default is 50 seconds.
const SILENT_NODES_STAY: &str = "--node-monitor-grace-period=1h";

/// State of a control plane, as reported by its supervisor.
#[derive(Clone, Debug, Deserialize)]
pub struct State {
    /// Directory of certificates, data and logs.
    pub dir: PathBuf,
    /// Address of the API server, `https://127.0.0.1:PORT`.
    pub server: String,
    /// Path of the administrator's kubeconfig.
    pub kubeconfig: PathBuf,
    /// Process id of the supervisor.
    pub supervisor: i32,
    /// Process ids of the running programs, by name.
    pub pids: BTreeMap<String, i32>,
}

/// Programs of a control plane.
#[derive(Clone, Debug)]
pub struct Programs {
    assets: PathBuf,
    supervise: PathBuf,
    kwok: Option<PathBuf>,
}

/// A share in a control plane with other users, released on drop.
#[derive(Debug)]
pub struct Shared {
    state: State,
    _hold: File,
}

/// A control plane with one user, which ends on drop.
#[derive(Debug)]
pub struct Owned {
    state: State,
    child: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    kubectl: PathBuf,
}

/// Options of an owned control plane.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Extra flags, each with the name of its program.
    pub args: Vec<(String, String)>,
    /// True if etcd syncs to disk.
    pub fsync: bool,
}

/// Returns the directory of the shared control plane of these programs, the same for the tests
/// of all clones.
pub fn shared_dir(programs: &Programs, version: Version) -> anyhow::Result<PathBuf> {
    let Programs {
        assets,
        supervise,
        kwok,
    } = programs;
    let paths = [Some(assets), Some(supervise), kwok.as_ref()];
    let key = path_key(paths.into_iter().flatten().map(PathBuf::as_path));
    Ok(cache_dir()?.join("run").join(format!("{version}-{key}")))
}

/// Keeps the control plane in `dir` alive while the result is held, also if it is started later.
/// Waits for one that is shutting down.
pub fn hold(dir: &Path) -> anyhow::Result<File> {
    fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    let hold = open_lock(&dir.join("hold.lock"))?;
    hold.lock_shared()
        .with_context(|| format!("lock {}", dir.join("hold.lock").display()))?;
    Ok(hold)
}

/// Returns the control plane in `dir`, if it runs and is ready.
pub fn running(dir: &Path) -> anyhow::Result<Option<State>> {
    if !supervised(dir)? {
        return Ok(None);
    }
    read_state(dir)
}

/// Starts a control plane in `dir` that runs until [`stop_detached`].
pub fn start_detached(programs: &Programs, dir: &Path) -> anyhow::Result<State> {
    fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    let mut command = programs.command(dir, &Settings::default());
    command.arg("--detach");
    start_in_background(command, dir)
}

/// Ends the control plane in `dir`. Returns `false` if none runs there.
pub fn stop_detached(dir: &Path) -> anyhow::Result<bool> {
    if !supervised(dir)? {
        return Ok(false);
    }
    let state = read_state(dir)?
        .with_context(|| format!("the control plane in {} is still starting", dir.display()))?;
    let pid = rustix::process::Pid::from_raw(state.supervisor)
        .with_context(|| format!("no process id in {}", dir.join("state.json").display()))?;
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)
        .with_context(|| format!("end the supervisor, process {}", state.supervisor))?;
    let start = Instant::now();
    while supervised(dir)? {
        if start.elapsed() > Duration::from_secs(20) {
            bail!("the supervisor, process {}, does not end", state.supervisor);
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok(true)
}

fn open_lock(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(path)
        .with_context(|| format!("open {}", path.display()))
}

/// Returns true if a supervisor lives in `dir`. Its lock is released when it dies.
fn supervised(dir: &Path) -> anyhow::Result<bool> {
    let path = dir.join("supervise.lock");
    if !path.exists() {
        return Ok(false);
    }
    // A shared lock, so that two concurrent checks do not mistake each other for the supervisor.
    match open_lock(&path)?.try_lock_shared() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("lock {}", path.display()))
        }
    }
}

fn read_state(dir: &Path) -> anyhow::Result<Option<State>> {
    let path = dir.join("state.json");
    match fs::read(&path) {
        Ok(text) => Ok(Some(
            serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))?,
        )),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
    }
}

/// Starts the supervisor in another process group, so that an interrupt from the terminal ends
/// the test and not its control plane, and waits until it is ready.
fn start_in_background(mut command: Command, dir: &Path) -> anyhow::Result<State> {
    let log = create_log(dir)?;
    // The state of an earlier control plane must not be taken for the new one's.
    let _ = fs::remove_file(dir.join("state.json"));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log.try_clone()?)
        .process_group(0)
        .spawn()
        .with_context(|| format!("start {}", command.get_program().display()))?;
    let start = Instant::now();
    loop {
        if let Some(state) = read_state(dir)? {
            return Ok(state);
        }
        if let Some(status) = child.try_wait()? {
            return Err(start_failure(status, log));
        }
        if start.elapsed() > START_LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            bail!(
                "no control plane after {START_LIMIT:?}: see {}",
                dir.join("log").display()
            );
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Creates the file for the supervisor's messages. They are read from the open file, because the
/// directory may be removed by then.
fn create_log(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join("supervise.log");
    OpenOptions::new()
        .create(true)
        .truncate(true)
        .read(true)
        .write(true)
        .open(&path)
        .with_context(|| format!("create {}", path.display()))
}

fn start_failure(status: ExitStatus, mut log: File) -> anyhow::Error {
    let mut said = Vec::new();
    let _ = log.rewind().and_then(|()| log.read_to_end(&mut said));
    let said = String::from_utf8_lossy(&said);
    anyhow!(
        "the control plane did not start ({status}): {}",
        said.trim()
    )
}

// === impl Programs ===

impl Programs {
    /// Finds the programs for a control plane of this version. Returns `None` if they are not
    /// set up.
    pub fn locate(version: Version) -> anyhow::Result<Option<Self>> {
        let assets = Component::ControlPlane(version).locate()?;
        let supervise = Component::Supervise.locate()?;
        let kwok = Component::Kwok.locate()?;
        Ok(assets.zip(supervise).map(|(assets, supervise)| Self {
            assets,
            supervise,
            kwok,
        }))
    }

    /// Returns the path of kubectl for this version.
    pub fn kubectl(&self) -> PathBuf {
        self.assets.join("kubectl")
    }

    fn command(&self, dir: &Path, settings: &Settings) -> Command {
        let mut command = Command::new(&self.supervise);
        command
            .arg("--assets")
            .arg(&self.assets)
            .arg("--dir")
            .arg(dir);
        if let Some(kwok) = &self.kwok {
            command.arg("--kwok").arg(kwok);
        }
        if settings.fsync {
            command.arg("--fsync");
        }
        // The supervisor refuses flags of a program that is missing.
        if self.assets.join(CONTROLLER_MANAGER).is_file() {
            let arg = format!("{CONTROLLER_MANAGER}={SILENT_NODES_STAY}");
            command.arg("--arg").arg(arg);
        }
        for (program, arg) in &settings.args {
            command.arg("--arg").arg(format!("{program}={arg}"));
        }
        command
    }
}

// === impl Shared ===

impl Shared {
    /// Takes a share in the control plane in `dir`, starting it if needed.
    pub fn join(programs: &Programs, dir: &Path) -> anyhow::Result<Self> {
        Self::join_lingering(programs, dir, LINGER)
    }

    /// Takes a share as [`Shared::join`] does. `linger` applies only if this call starts the
    /// control plane.
    pub fn join_lingering(
        programs: &Programs,
        dir: &Path,
        linger: Duration,
    ) -> anyhow::Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        // One process starts the control plane while the others wait here.
        let starting = open_lock(&dir.join("start.lock"))?;
        starting.lock()?;
        let hold = hold(dir)?;
        let start = Instant::now();
        while supervised(dir)? {
            if let Some(state) = read_state(dir)? {
                return Ok(Self { state, _hold: hold });
            }
            // The process that started it was killed during the start: the control plane becomes
            // ready or ends.
            if start.elapsed() > START_LIMIT {
                bail!("a control plane in {} does not get ready", dir.display());
            }
            thread::sleep(Duration::from_millis(50));
        }
        let mut command = programs.command(dir, &Settings::default());
        command.arg("--hold").arg(dir.join("hold.lock"));
        command
            .arg("--linger")
            .arg(format!("{}ms", linger.as_millis()));
        let state = start_in_background(command, dir)?;
        Ok(Self { state, _hold: hold })
    }

    /// Returns the state of the control plane at the time it became ready.
    pub fn state(&self) -> &State {
        &self.state
    }
}

// === impl Owned ===

#[derive(Deserialize)]
struct Answer {
    error: Option<String>,
    state: State,
}

impl Owned {
    /// Starts a control plane in `dir` and waits until it is ready. The directory is removed at
    /// the end, unless the command `keep` is sent.
    pub fn start(programs: &Programs, dir: &Path, settings: &Settings) -> anyhow::Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        let log = create_log(dir)?;
        let mut child = programs
            .command(dir, settings)
            .arg("--remove")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log.try_clone()?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {}", programs.supervise.display()))?;
        let commands = child.stdin.take();
        let mut answers = BufReader::new(child.stdout.take().context("no output to read")?);
        let mut line = String::new();
        answers.read_line(&mut line)?;
        if line.is_empty() {
            return Err(start_failure(child.wait()?, log));
        }
        let state = serde_json::from_str(&line).with_context(|| format!("read '{line}'"))?;
        Ok(Self {
            state,
            child,
            commands,
            answers,
            kubectl: programs.kubectl(),
        })
    }

    /// Returns the last state of the control plane.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns the path of kubectl for its version.
    pub fn kubectl(&self) -> &Path {
        &self.kubectl
    }

    /// Sends one command and waits for the response.
    pub fn command(&mut self, verb: &str, program: &str) -> anyhow::Result<()> {
        let commands = self
            .commands
            .as_mut()
            .context("the control plane has ended")?;
        writeln!(commands, "{verb} {program}").context("the supervisor is gone")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        if line.is_empty() {
            bail!("the supervisor ended without an answer to '{verb} {program}'");
        }
        let answer: Answer =
            serde_json::from_str(&line).with_context(|| format!("read '{line}'"))?;
        self.state = answer.state;
        match answer.error {
            None => Ok(()),
            Some(error) => Err(anyhow!("{verb} {program}: {error}")),
        }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // At the end of its input, the supervisor ends with all its programs.
        drop(self.commands.take());
        let _ = self.child.wait();
    }
}
