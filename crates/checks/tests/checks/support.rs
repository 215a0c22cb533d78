//! Container for running a check in tests.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use contract::HealthEvent;
use fakes::Scenario;
use gpuwarden_checks::environment::Environment;
use gpuwarden_checks::witness::Witness;
use gpuwarden_checks::{CheckName, Launcher};

/// Variable set for a process of the test program that is to be a worker.
const WORKER: &str = "GPUWARDEN_TEST_WORKER";
/// Variable set for a process that is to be a check, with the check's name.
const CHECK: &str = "GPUWARDEN_TEST_CHECK";

/// Not a test, but the entry point of the process that calls the fake libraries.
#[test]
fn worker_process() {
    if env::var_os(WORKER).is_some() {
        gpuwarden_checks::worker::run().unwrap();
    }
}

/// Not a test, but the entry point of a process that is a check.
#[test]
#[allow(clippy::exit)]
fn check_process() {
    if let Ok(name) = env::var(CHECK) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let environment = Environment::of_process();
        let (launcher, mut out) = (launcher(), std::io::stderr());
        let run = gpuwarden_checks::run(check(&name), &environment, &launcher, &mut out);
        let code = runtime.block_on(run);
        // The test harness would exit with its own code.
        std::process::exit(code.into());
    }
}

pub(super) fn check(name: &str) -> CheckName {
    let mut all = CheckName::ALL.into_iter();
    all.find(|check| check.name() == name).unwrap()
}

/// Returns a launcher for the test program as a worker.
pub(super) fn launcher() -> Launcher {
    Launcher {
        program: env::current_exe().unwrap(),
        arguments: door("worker_process"),
        variables: vec![(WORKER.into(), "1".into())],
        left_out: Vec::new(),
    }
}

/// Returns the invocation of the test program as a check: a variable, the program, its
/// arguments.
pub(super) fn as_check(check: CheckName) -> (OsString, OsString, Vec<OsString>) {
    let variable = format!("{CHECK}={}", check.name());
    let program = env::current_exe().unwrap();
    (variable.into(), program.into(), door("check_process"))
}

fn door(name: &str) -> Vec<OsString> {
    let name = format!("support::{name}");
    let arguments = ["--exact", &name, "--nocapture", "--test-threads=1"];
    arguments.map(Into::into).into()
}

/// Container with GPUs and a connector.
pub(super) struct Container {
    pub(super) witness: Witness,
    pub(super) variables: BTreeMap<String, String>,
    pub(super) directory: tempfile::TempDir,
}

/// Outcome of a check.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) code: u8,
    pub(super) out: String,
    pub(super) termination: String,
    pub(super) events: Vec<HealthEvent>,
}

impl Container {
    /// Returns a container with these GPUs.
    pub(super) fn new(scenario: &Scenario) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fakes::install(directory.path(), scenario).unwrap();
        let witness = Witness::listen(directory.path()).unwrap();
        let mut container = Self {
            witness,
            variables: BTreeMap::new(),
            directory,
        };
        let termination = container.file("termination-log");
        fs::write(&termination, "").unwrap();
        let socket = format!("unix://{}", container.witness.socket().display());
        container.set("NODE_NAME", "gpu-7");
        container.set("PLATFORM_CONNECTOR_SOCKET", &socket);
        for (name, file) in [
            ("GPUWARDEN_CUDA_LIBRARY", fakes::CUDA_LIBRARY),
            ("GPUWARDEN_NCCL_LIBRARY", fakes::NCCL_LIBRARY),
            ("GPUWARDEN_NVML_LIBRARY", fakes::LIBRARY),
            ("GPUWARDEN_TERMINATION_LOG", "termination-log"),
        ] {
            let path = container.file(file).display().to_string();
            container.set(name, &path);
        }
        container
    }

    pub(super) fn set(&mut self, name: &str, value: &str) -> &mut Self {
        self.variables.insert(name.to_owned(), value.to_owned());
        self
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs a check to its end.
    pub(super) async fn run(&self, check: CheckName) -> Ended {
        let environment: Environment = self.variables.clone().into_iter().collect();
        let mut out = Vec::new();
        let before = self.witness.events().len();
        let code = gpuwarden_checks::run(check, &environment, &launcher(), &mut out).await;
        Ended {
            code,
            out: String::from_utf8(out).unwrap(),
            termination: fs::read_to_string(self.file("termination-log")).unwrap(),
            events: self.witness.events().split_off(before),
        }
    }

    /// Returns the command of a check as a separate process, with the variables.
    pub(super) fn command(&self, check: CheckName) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(env::current_exe().unwrap());
        command
            .args(door("check_process"))
            .env(CHECK, check.name())
            .envs(&self.variables)
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true);
        command
    }
}

impl Ended {
    /// Returns the only event.
    pub(super) fn event(&self) -> &HealthEvent {
        assert_eq!(self.events.len(), 1, "{self:#?}");
        &self.events[0]
    }
}

/// Waits until a condition holds.
pub(super) async fn wait_for(state: impl Fn() -> bool) {
    let begun = Instant::now();
    while !state() {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "it does not come about"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
