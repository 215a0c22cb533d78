//! The product as its users run it: a process of the real binary.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tempfile::TempDir;

use crate::wait::wait_for;

/// Time for the product to write its addresses.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Time for the product to end after SIGTERM.
const END_LIMIT: Duration = Duration::from_secs(60);

/// Time for a client command.
const COMMAND_LIMIT: Duration = Duration::from_secs(60);

/// Length of the quoted end of each output stream in an error, in bytes.
const QUOTED: usize = 6000;

/// Text of the product's log lines for warnings of the API server, such as of an unknown field
/// that was dropped.
const WARNED: &str = "the API server warns of a request";

/// Returns the path of the `gpuwarden` binary: `GPUWARDEN_BIN`, the one that cargo names to the
/// tests of its package, or the one built beside this test.
pub fn binary() -> anyhow::Result<PathBuf> {
    for name in ["GPUWARDEN_BIN", "CARGO_BIN_EXE_gpuwarden"] {
        if let Some(path) = env::var_os(name).filter(|path| !path.is_empty()) {
            return Ok(PathBuf::from(path));
        }
    }
    let test = env::current_exe()?;
    // target/PROFILE/deps/TEST
    let profile = test.ancestors().nth(2).unwrap_or_else(|| Path::new(""));
    let path = profile.join("gpuwarden");
    if !path.is_file() {
        bail!(
            "no {}: run 'cargo build -p gpuwarden', or set GPUWARDEN_BIN",
            path.display()
        );
    }
    Ok(path)
}

/// Sends a GET to a server at `http://HOST:PORT`. Returns the body, whatever the status.
pub async fn get(address: &str, path: &str) -> anyhow::Result<String> {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let address = address.trim_start_matches("http://");
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    // With HTTP/1.0, the response ends with the connection and is not chunked.
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    tokio::time::timeout(COMMAND_LIMIT, stream.read_to_end(&mut answer)).await??;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (_, body) = (answer.split_once("\r\n\r\n"))
        .with_context(|| format!("{path}: no HTTP answer in {answer:?}"))?;
    Ok(body.to_owned())
}

/// A launch of the product: `gpuwarden run`, or another role, with a new data directory, a free
/// port, and an empty file as kernel log unless set otherwise.
#[derive(Clone, Debug)]
pub struct Launch {
    role: Role,
    program: Option<PathBuf>,
    home: Arc<TempDir>,
    kernel_log: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    output: Option<Arc<OwnedFd>>,
}

/// Subcommand that starts the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Run,
    Agent,
    Controller,
}

/// A running `gpuwarden run`, `agent` or `controller`. It is killed on drop; errors quote its
/// output.
///
/// # Panics
///
/// On drop, if the API server has warned of a request of the product.
#[derive(Debug)]
pub struct Product {
    launch: Launch,
    child: Child,
    exit: Option<ExitStatus>,
    endpoint: Option<Endpoint>,
}

/// Addresses of a running product in `endpoint.json`.
#[derive(Clone, Debug, Deserialize)]
struct Endpoint {
    server: String,
    socket: PathBuf,
    pid: u32,
}

/// Exit code and output of a client command.
#[derive(Clone, Debug)]
pub struct Output {
    /// Exit code; `None` after a signal.
    pub code: Option<i32>,
    /// Standard output of the command.
    pub stdout: String,
    /// Standard error of the command.
    pub stderr: String,
}

// === impl Launch ===

impl Launch {
    /// Returns a launch with a new data directory, which is removed with its last user.
    pub fn new() -> anyhow::Result<Self> {
        Self::of(Role::Run)
    }

    /// Returns a launch of `gpuwarden agent`, which needs a controller.
    pub fn agent() -> anyhow::Result<Self> {
        Self::of(Role::Agent)
    }

    /// Returns a launch of `gpuwarden controller`, which needs a port for its agents.
    pub fn controller() -> anyhow::Result<Self> {
        Self::of(Role::Controller)
    }

    fn of(role: Role) -> anyhow::Result<Self> {
        let home = tempfile::Builder::new()
            .prefix("gpuwarden-test-")
            .tempdir()?;
        let kernel_log = home.path().join("kernel.log");
        File::create(&kernel_log)?;
        Ok(Self {
            role,
            program: None,
            home: Arc::new(home),
            kernel_log,
            args: Vec::new(),
            env: Vec::new(),
            output: None,
        })
    }

    /// Sets the program to run instead of [`binary`], such as a wrapper.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = Some(program.into());
        self
    }

    /// Sets the name of the product's node.
    #[must_use]
    pub fn node_name(self, name: impl AsRef<OsStr>) -> Self {
        self.option("--node-name", name)
    }

    /// Sets the cluster that the product watches.
    #[must_use]
    pub fn kubeconfig(self, path: impl AsRef<OsStr>) -> Self {
        self.option("--kubeconfig", path)
    }

    /// Lets the product act on its cluster without the circuit breaker, which would count the
    /// nodes of other tests in a shared cluster.
    #[must_use]
    pub fn quarantine(self) -> Self {
        self.arg("--quarantine")
            .option("--circuit-breaker", "false")
    }

    /// Lets the product act on its cluster with the circuit breaker: for private clusters.
    #[must_use]
    pub fn quarantine_with_brake(self) -> Self {
        self.arg("--quarantine")
    }

    /// Sets the kernel log: `kmsg`, or a file.
    #[must_use]
    pub fn kernel_log(mut self, source: impl Into<PathBuf>) -> Self {
        self.kernel_log = source.into();
        self
    }

    /// Adds an argument to the command line.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds an option with its value.
    #[must_use]
    pub fn option(self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.arg(name).arg(value)
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env
            .push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets the file descriptor for standard output and error, instead of the files that
    /// [`Product::stdout`] and [`Product::stderr`] read.
    #[must_use]
    pub fn output(mut self, to: impl Into<OwnedFd>) -> Self {
        self.output = Some(Arc::new(to.into()));
        self
    }

    /// Returns the product's data directory.
    pub fn data_dir(&self) -> PathBuf {
        self.home.path().join("data")
    }

    /// Returns the path of the kernel log's file, to append to.
    pub fn kernel_log_file(&self) -> &Path {
        &self.kernel_log
    }

    /// Starts the product without waiting: for tests of a start that fails.
    pub fn spawn(self) -> anyhow::Result<Product> {
        let program = match &self.program {
            Some(program) => program.clone(),
            None => binary()?,
        };
        let data_dir = self.data_dir();
        let output = |name| {
            if let Some(output) = &self.output {
                return Ok(Stdio::from(output.try_clone()?));
            }
            let path = self.home.path().join(name);
            let file = OpenOptions::new().create(true).append(true).open(&path);
            let file = file.with_context(|| format!("open {}", path.display()))?;
            anyhow::Ok(Stdio::from(file))
        };
        let mut command = Command::new(&program);
        let role = match self.role {
            Role::Run => "run",
            Role::Agent => "agent",
            Role::Controller => "controller",
        };
        command.arg(role).arg("--data-dir").arg(&data_dir);
        if self.role != Role::Controller {
            let socket = data_dir.join("gpuwarden.sock");
            command.arg("--socket").arg(socket);
            command.arg("--kernel-log").arg(&self.kernel_log);
        }
        let child = command
            .args(["--listen", "127.0.0.1:0"])
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(output("stdout")?)
            .stderr(output("stderr")?)
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        Ok(Product {
            launch: self,
            child,
            exit: None,
            endpoint: None,
        })
    }

    /// Starts the product and waits until it has written its addresses.
    pub async fn start(self) -> anyhow::Result<Product> {
        let mut product = self.spawn()?;
        product.wait_endpoint().await?;
        Ok(product)
    }
}

// === impl Product ===

impl Product {
    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the data directory.
    pub fn data_dir(&self) -> PathBuf {
        self.launch.data_dir()
    }

    /// Returns the address of page, API and metrics: `http://127.0.0.1:PORT`.
    ///
    /// # Panics
    ///
    /// Unless [`Launch::start`] started the product.
    pub fn address(&self) -> &str {
        &self.endpoint().server
    }

    /// Returns the path of the platform connector's socket.
    ///
    /// # Panics
    ///
    /// Unless [`Launch::start`] started the product.
    pub fn socket(&self) -> &Path {
        &self.endpoint().socket
    }

    fn endpoint(&self) -> &Endpoint {
        match &self.endpoint {
            Some(endpoint) => endpoint,
            None => panic!("the product was spawned and not waited for: use Launch::start"),
        }
    }

    /// Returns the standard output so far, including that before restarts.
    pub fn stdout(&self) -> String {
        self.output("stdout")
    }

    /// Returns the standard error so far, including that before restarts.
    pub fn stderr(&self) -> String {
        self.output("stderr")
    }

    fn output(&self, name: &str) -> String {
        let bytes = fs::read(self.launch.home.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Sends a GET to the product. Returns the body, whatever the status.
    pub async fn get(&self, path: &str) -> anyhow::Result<String> {
        get(self.address(), path).await
    }

    /// Appends lines to the kernel log's file.
    pub fn append_kernel_log(&self, lines: &str) -> anyhow::Result<()> {
        use std::io::Write as _;
        let path = &self.launch.kernel_log;
        let mut file = OpenOptions::new().append(true).open(path)?;
        file.write_all(lines.as_bytes())
            .with_context(|| format!("append to {}", path.display()))
    }

    /// Waits for a line of standard output or error that contains `text`. Returns the line.
    pub async fn wait_line(&mut self, text: &str, timeout: Duration) -> anyhow::Result<String> {
        let start = Instant::now();
        loop {
            // The exit status is read first: once the process has ended, its output is complete.
            let ended = self.try_exit()?;
            let output = self.stdout() + "\n" + &self.stderr();
            if let Some(line) = output.lines().find(|line| line.contains(text)) {
                return Ok(line.to_owned());
            }
            if let Some(status) = ended {
                return Err(self.failure(&format!("ended ({status}) without printing '{text}'")));
            }
            if start.elapsed() > timeout {
                return Err(self.failure(&format!("did not print '{text}' in {timeout:?}")));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn wait_endpoint(&mut self) -> anyhow::Result<()> {
        let path = self.data_dir().join("endpoint.json");
        let start = Instant::now();
        loop {
            // A file with another process id is left over from a killed process.
            let found = fs::read(&path)
                .ok()
                .and_then(|text| serde_json::from_slice(&text).ok());
            match found {
                Some(Endpoint { pid, .. }) if pid != self.pid() => {}
                Some(endpoint) => {
                    self.endpoint = Some(endpoint);
                    return Ok(());
                }
                None => {}
            }
            if let Some(status) = self.try_exit()? {
                return Err(self.failure(&format!("ended ({status}) before it was ready")));
            }
            if start.elapsed() > START_LIMIT {
                let missing = format!("wrote no {} in {START_LIMIT:?}", path.display());
                return Err(self.failure(&missing));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until the product ends by itself. Returns its exit status.
    pub async fn wait_exit(&mut self, timeout: Duration) -> anyhow::Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.try_exit()? {
                return Ok(status);
            }
            if start.elapsed() > timeout {
                return Err(self.failure(&format!("still runs after {timeout:?}")));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Kills the product with SIGKILL. Returns once the process is gone.
    pub fn kill9(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.exit = Some(self.child.wait()?);
        Ok(())
    }

    /// Sends SIGTERM. Returns the exit status and the time until the end.
    pub async fn terminate(&mut self) -> anyhow::Result<(ExitStatus, Duration)> {
        let start = Instant::now();
        self.signal(Signal::TERM)?;
        let status = self.wait_exit(END_LIMIT).await?;
        Ok((status, start.elapsed()))
    }

    /// Stops the process (SIGSTOP), as a hanging machine would. Returns once all its threads
    /// have stopped, which takes a while on a busy machine.
    pub async fn stop(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)?;
        self.wait_for("all threads to stop", END_LIMIT, || async {
            all_stopped(self.pid())
        })
        .await
    }

    /// Resumes a stopped process.
    pub fn cont(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        // After the wait, the process id may belong to another process.
        if let Some(status) = self.exit {
            return Err(self.failure(&format!("has ended ({status})")));
        }
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        kill_process(pid.context("no process id")?, signal)?;
        Ok(())
    }

    /// Starts the product again with the same arguments and data, after killing it if it still
    /// runs.
    pub async fn restart(&mut self) -> anyhow::Result<()> {
        if self.exit.is_none() {
            self.kill9()?;
        }
        *self = self.launch.clone().start().await?;
        Ok(())
    }

    /// Runs a client command against this product: `gpuwarden ARGS --server ADDRESS`.
    pub async fn client<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<Output> {
        let mut all: Vec<OsString> = args
            .into_iter()
            .map(|arg| arg.as_ref().to_owned())
            .collect();
        all.extend(["--server".into(), self.address().into()]);
        self.command(all).await
    }

    /// Runs a command without the address of this product: `gpuwarden ARGS`.
    pub async fn command<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
    ) -> anyhow::Result<Output> {
        let mut command = tokio::process::Command::new(binary()?);
        let output = Output::of(command.args(args)).await;
        output.map_err(|error| self.failure(&format!("{error:#}")))
    }

    /// Polls as [`wait_for`] does, and adds the product's output to the error.
    pub async fn wait_for<T, S, F>(
        &self,
        what: &str,
        timeout: Duration,
        probe: impl FnMut() -> F,
    ) -> anyhow::Result<T>
    where
        S: std::fmt::Display,
        F: Future<Output = Result<T, S>>,
    {
        wait_for(what, timeout, probe)
            .await
            .map_err(|error| self.failure(&format!("{error:#}")))
    }

    /// Returns an error with this message that quotes the end of the product's output.
    pub fn failure(&self, what: &str) -> anyhow::Error {
        let (stdout, stderr) = (self.stdout(), self.stderr());
        anyhow!(
            "gpuwarden (process {}): {what}\n--- stdout\n{}\n--- stderr\n{}\n---",
            self.pid(),
            tail(&stdout),
            tail(&stderr)
        )
    }

    fn try_exit(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        if self.exit.is_none() {
            self.exit = self.child.try_wait()?;
        }
        Ok(self.exit)
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        if self.exit.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if let Some(line) = warning_in(&self.stderr()).filter(|_| !std::thread::panicking()) {
            panic!("gpuwarden (process {}): {line}", self.pid());
        }
    }
}

/// Returns the first log line with a warning of the API server. Warnings of deprecated API
/// versions are ignored: they are used if a cluster has no newer one.
pub fn warning_in(log: &str) -> Option<&str> {
    log.lines()
        .find(|line| line.contains(WARNED) && !line.contains(" is deprecated in "))
}

/// Returns an error unless all threads of a process are stopped.
fn all_stopped(pid: u32) -> Result<(), String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).map_err(|error| error.to_string())?;
    for task in tasks.flatten() {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // The state follows the name, which is in parentheses.
        let state = stat.rsplit(") ").next().unwrap_or_default();
        if !stat.is_empty() && !state.starts_with('T') {
            return Err(stat);
        }
    }
    Ok(())
}

fn tail(text: &str) -> &str {
    let mut start = text.len().saturating_sub(QUOTED);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    text.get(start..).unwrap_or(text).trim_end()
}

// === impl Output ===

impl Output {
    /// Runs a command to its end, within a minute, without standard input.
    pub async fn of(command: &mut tokio::process::Command) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(COMMAND_LIMIT, command.output()).await;
        let shown = command.as_std();
        let output = output.with_context(|| format!("{shown:?} takes over {COMMAND_LIMIT:?}"))?;
        let output = output.with_context(|| format!("{shown:?}"))?;
        Ok(Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout)?,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Parses standard output as JSON. Fails unless the command ended with `code`.
    pub fn json(&self, code: i32) -> anyhow::Result<serde_json::Value> {
        self.expect(code)?;
        serde_json::from_str(&self.stdout).with_context(|| format!("not JSON: {}", self.stdout))
    }

    /// Returns standard output. Fails unless the command ended with `code`.
    pub fn expect(&self, code: i32) -> anyhow::Result<&str> {
        if self.code != Some(code) {
            let Self {
                code: got,
                stdout,
                stderr,
            } = self;
            bail!("exit code {got:?}, expected {code}\n--- stdout\n{stdout}\n--- stderr\n{stderr}");
        }
        Ok(&self.stdout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_starts_at_a_character() {
        let text = "é".repeat(QUOTED);
        let end = tail(&text);
        assert!(end.len() <= QUOTED && end.chars().all(|c| c == 'é'));
    }
}
