//! A gpuwarden process that watches the GPUs of this machine, for the checks to query.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tempfile::TempDir;

/// Longest time until the GPUs are listed: a driver that is not in use takes seconds per GPU to
/// start.
const LOOK_LIMIT: Duration = Duration::from_secs(60);
/// Time to end after SIGTERM, before SIGKILL.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Interval between two queries.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// A running `gpuwarden run` with a new data directory and without a cluster. Ended on drop.
pub(super) struct Watcher {
    program: PathBuf,
    home: TempDir,
    child: Child,
}

// === impl Watcher ===

impl Watcher {
    /// Starts the process. `kernel_log` is the option's value, or `None` for an unreadable
    /// kernel log, so that the driver's own events count.
    pub(super) fn start(program: &Path, kernel_log: Option<&str>) -> anyhow::Result<Self> {
        let home = tempfile::Builder::new().prefix("gpuwarden-").tempdir()?;
        let at = |name: &str| home.path().join(name);
        let mut command = Command::new(program);
        for (name, _) in env::vars_os() {
            let shown = name.to_string_lossy();
            if shown.starts_with("GPUWARDEN_") || shown == "KUBERNETES_SERVICE_HOST" {
                command.env_remove(name);
            }
        }
        let unseen = at("no-kernel-log");
        let kernel_log = kernel_log.map_or(unseen, PathBuf::from);
        command.args(["run", "--observe", "--listen", "127.0.0.1:0"]);
        command.arg("--data-dir").arg(home.path());
        command.arg("--socket").arg(at("gpuwarden.sock"));
        command.arg("--gpu-metadata").arg(at("gpu_metadata.json"));
        command.arg("--kernel-log").arg(kernel_log);
        let log = fs::File::create(at("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?);
        let child = command.stderr(log).spawn();
        let child = child.with_context(|| format!("start {}", program.display()))?;
        Ok(Self {
            program: program.to_owned(),
            home,
            child,
        })
    }

    /// Waits for `count` GPUs and the metadata file, and returns the GPUs; after a minute,
    /// returns the GPUs there are. Fails if the process has ended or has never responded.
    pub(super) fn wait_for_gpus(&mut self, count: usize) -> anyhow::Result<Vec<Value>> {
        let start = Instant::now();
        loop {
            let devices = self.devices();
            let is_whole = devices.as_ref().is_ok_and(|devices| devices.len() >= count);
            if (is_whole && self.metadata().is_object()) || start.elapsed() > LOOK_LIMIT {
                return devices.with_context(|| format!("gpuwarden said: {}", self.log()));
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("gpuwarden has ended ({status}): {}", self.log());
            }
            sleep(ASK_AGAIN);
        }
    }

    /// Returns the current GPUs.
    pub(super) fn devices(&self) -> anyhow::Result<Vec<Value>> {
        self.ask("devices")
    }

    /// Returns the events after a position; none while the process does not respond.
    pub(super) fn events_after(&self, position: u64) -> Vec<Value> {
        let mut events = self.ask::<Vec<Value>>("events").unwrap_or_default();
        events.retain(|event| event["seq"].as_u64() > Some(position));
        events
    }

    /// Runs a client command and parses its output. Exit code 1 only means that something is
    /// unhealthy.
    fn ask<T: DeserializeOwned>(&self, command: &str) -> anyhow::Result<T> {
        let mut asked = Command::new(&self.program);
        asked.args([command, "--output", "json", "--data-dir"]);
        let output = asked.arg(self.home.path()).output()?;
        serde_json::from_slice(&output.stdout).with_context(|| {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("gpuwarden {command}: {}: {}", output.status, said.trim())
        })
    }

    /// Returns the content of the GPU metadata file; null before it is written.
    pub(super) fn metadata(&self) -> Value {
        let text = fs::read(self.home.path().join("gpu_metadata.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Returns the state of an event source, as text.
    pub(super) fn source(&self, name: &str) -> String {
        let status: Value = self.ask("status").unwrap_or_default();
        let sources = status["sources"].as_array().cloned().unwrap_or_default();
        let source = sources.iter().find(|source| source["name"] == name);
        source.map_or("not known".to_owned(), |source| {
            let word = |key: &str| source[key].as_str().unwrap_or_default().to_owned();
            format!("{}, {}", word("state"), word("detail"))
        })
    }

    fn log(&self) -> String {
        fs::read_to_string(self.home.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        let asked = pid.is_some_and(|pid| kill_process(pid, Signal::TERM).is_ok());
        let start = Instant::now();
        while asked && start.elapsed() < END_LIMIT {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            sleep(ASK_AGAIN);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
