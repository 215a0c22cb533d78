//! Frame shared by all checks: the reporter and its destination, exit codes, and handling of
//! the signals that end a container.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use contract::preflight::{FindPassRequest, ReportCheckRequest};
use contract::{EVENT_VERSION, HealthEvent, ProcessingStrategy};
use preflight::inject::RESULT_CACHE_VARIABLE;
use runtime::logging::plain;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::environment::{BadVariable, Environment};
use crate::outcome::{CheckOutcome, Finding, Result as Meaning};
use crate::report::{ReportError, Way};
use crate::worker::Launcher;
use crate::{allreduce, cache, count, dcgm_diag, exit, loopback, report};

/// Variable with the name of the node.
const NODE: &str = "NODE_NAME";
/// Variable set where a check that tests nothing must count as failed, as in a Job that
/// validates a node.
const UNTESTED_FAILS: &str = "GPUWARDEN_UNTESTED_FAILS";
/// Default file of the termination message in Kubernetes.
const TERMINATION_LOG: &str = "/dev/termination-log";
/// Longest termination message that the kubelet keeps (bytes).
const MAX_TERMINATION: usize = 4096;
/// Time limit for reporting a failure: the pod does not start anyway.
const REPORT_FAILURE: Duration = Duration::from_secs(30);
/// Time limit for reporting a pass, which the pod waits for.
const REPORT_PASS: Duration = Duration::from_secs(5);
/// Time for a check to stop after a signal; the kubelet waits for 30 s.
const GRACE: Duration = Duration::from_secs(15);

/// Checks that this program provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckName {
    /// DCGM's diagnosis of the GPUs of the pod.
    DcgmDiag,
    /// All-reduce over all GPUs of the pod.
    NcclLoopback,
    /// All-reduce over all GPUs of the gang.
    NcclAllreduce,
}

/// Settings that all checks have.
struct Common {
    node: String,
    way: Way,
    /// Largest age of a pass that still counts for the same GPUs; `None` always runs the check.
    cache: Option<Duration>,
    /// True if a check that could test nothing exits like a failed one.
    untested_fails: bool,
}

/// End of the wait for a check.
enum End {
    Outcome(CheckOutcome),
    Signal(&'static str, i32),
}

// === impl CheckName ===

impl CheckName {
    /// All checks, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::DcgmDiag, Self::NcclLoopback, Self::NcclAllreduce];

    /// Returns the name of the check on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::DcgmDiag => "dcgm-diag",
            Self::NcclLoopback => "nccl-loopback",
            Self::NcclAllreduce => "nccl-allreduce",
        }
    }

    /// Returns the agent and the component class of the check's events (NVSentinel's names).
    fn sender(self) -> (&'static str, &'static str) {
        match self {
            Self::DcgmDiag => (dcgm_diag::AGENT, "GPU"),
            Self::NcclLoopback => (loopback::AGENT, "Node"),
            Self::NcclAllreduce => (allreduce::AGENT, "Node"),
        }
    }

    /// Returns the name of the check in its events (NVSentinel's).
    fn in_events(self) -> &'static str {
        match self {
            Self::DcgmDiag => dcgm_diag::CHECK,
            Self::NcclLoopback => loopback::CHECK,
            Self::NcclAllreduce => allreduce::CHECK,
        }
    }

    /// Executes the check. It stops by itself when `stop` is cancelled.
    async fn execute(
        self,
        environment: &Environment,
        launcher: &Launcher,
        stop: &CancellationToken,
    ) -> Result<CheckOutcome, BadVariable> {
        match self {
            Self::DcgmDiag => dcgm_diag::execute(environment, launcher, stop).await,
            Self::NcclLoopback => loopback::execute(environment, launcher, stop).await,
            Self::NcclAllreduce => allreduce::execute(environment, launcher, stop).await,
        }
    }
}

/// Runs a check to its end: writes the result to `out`, reports it, writes the termination
/// message, and returns the exit code. `launcher` starts the processes that call vendors'
/// libraries.
pub async fn run(
    check: CheckName,
    environment: &Environment,
    launcher: &Launcher,
    out: &mut (dyn Write + Send),
) -> u8 {
    let log = environment.first(&["GPUWARDEN_TERMINATION_LOG"]);
    let log = PathBuf::from(log.map_or(TERMINATION_LOG, |(_, path)| path));
    let strategy = match strategy(environment) {
        Ok(strategy) => strategy,
        Err(error) => return refuse(check, environment, &error, false, &log, out).await,
    };
    let stores_only = strategy == ProcessingStrategy::StoreOnly;
    let common = match common(environment) {
        Ok(common) => common,
        Err(error) => return refuse(check, environment, &error, stores_only, &log, out).await,
    };
    let begun = Instant::now();
    let mut gpus = Vec::new();
    let ended = ended(check, &common, environment, launcher, &mut gpus).await;
    let (mut outcome, error) = match ended {
        Ok(End::Outcome(outcome)) => {
            let code = outcome.code.clone();
            (outcome, code)
        }
        Ok(End::Signal(name, number)) => {
            let text = format!("{name} ended the check before it was done");
            print_end(check, "ended", "SIGNAL", &text, &log, out);
            return exit::of_signal(number);
        }
        Err(error) => (misconfigured(&error), error.variable().to_owned()),
    };
    let counted = count::request(
        check.name(),
        &common.node,
        &outcome,
        &error,
        begun.elapsed(),
        gpus,
    );
    if outcome.result == Meaning::Misconfigured && outcome.findings.is_empty() {
        // By the ADR such an event is not fatal and does not blame the hardware.
        let (code, text) = (&outcome.code, outcome.text.clone());
        let finding = Finding::harmless(check.in_events(), code, text);
        outcome.findings.push(finding);
    }
    let blank = blank(check, &common, strategy);
    if report_outcome(check, &common.way, &outcome, &blank).await {
        count(check, &common.way, counted).await;
    }
    if outcome.result == Meaning::NotTested && common.untested_fails {
        outcome.result = Meaning::Failed;
        outcome.text = format!(
            "{UNTESTED_FAILS} is set, and it tested nothing: {}",
            outcome.text
        );
    }
    conclude(check, &outcome, stores_only, &log, out)
}

/// Ends a check that lacks the settings for reporting.
async fn refuse(
    check: CheckName,
    environment: &Environment,
    error: &BadVariable,
    stores_only: bool,
    log: &Path,
    out: &mut (dyn Write + Send),
) -> u8 {
    let outcome = misconfigured(error);
    if let Ok(way) = Way::read(environment) {
        let node = environment.first(&[NODE]).map_or("", |(_, node)| node);
        let took = Duration::ZERO;
        let variable = error.variable();
        let counted = count::request(check.name(), node, &outcome, variable, took, Vec::new());
        count(check, &way, counted).await;
    }
    conclude(check, &outcome, stores_only, log, out)
}

/// Reports an outcome. Returns false if no connector is known to be there.
async fn report_outcome(
    check: CheckName,
    way: &Way,
    outcome: &CheckOutcome,
    blank: &HealthEvent,
) -> bool {
    let within = if outcome.result == Meaning::Failed {
        REPORT_FAILURE
    } else {
        REPORT_PASS
    };
    let findings = outcome.findings.iter().cloned();
    let events: Vec<HealthEvent> = findings.map(|one| one.into_event(blank.clone())).collect();
    if events.is_empty() {
        return true;
    }
    let reported = report::report(way, events, within).await;
    if let Err(error) = &reported {
        complain(check, &error.to_string());
    }
    matches!(reported, Ok(()) | Err(ReportError::Refused(_)))
}

/// Sends the report that counts a check.
async fn count(check: CheckName, way: &Way, counted: ReportCheckRequest) {
    if let Err(error) = count::send(way, counted).await {
        complain(
            check,
            &format!("the connector does not count this check: {error}"),
        );
    }
}

/// Runs a check until it ends by itself, or a signal arrives. Records the GPUs that a pass is
/// to be remembered for.
async fn ended(
    check: CheckName,
    common: &Common,
    environment: &Environment,
    launcher: &Launcher,
    gpus: &mut Vec<String>,
) -> Result<End, BadVariable> {
    let kinds = [SignalKind::terminate(), SignalKind::interrupt()];
    let (mut terminate, mut interrupt) = match kinds.map(signal) {
        [Ok(terminate), Ok(interrupt)] => (terminate, interrupt),
        [Err(error), _] | [_, Err(error)] => {
            let text = format!("signals cannot be received: {error}");
            return Ok(End::Outcome(CheckOutcome::misconfigured(text)));
        }
    };
    let stop = CancellationToken::new();
    let executed = async {
        // Members of a gang have to test together, so a past pass cannot replace their test.
        let longest = common.cache.filter(|_| check != CheckName::NcclAllreduce);
        if let (Some(longest), Way::Socket(socket)) = (longest, &common.way) {
            tokio::select! {
                known = cache::gpus(environment, launcher) => *gpus = known,
                () = stop.cancelled() => {}
            }
            let request = FindPassRequest {
                node: common.node.clone(),
                check: check.name().to_owned(),
                gpu_uuids: gpus.clone(),
            };
            if let Some(outcome) = cache::passed(socket, request, longest).await {
                return Ok(outcome);
            }
        }
        check.execute(environment, launcher, &stop).await
    };
    tokio::pin!(executed);
    let signalled = tokio::select! {
        outcome = &mut executed => {
            return outcome.map(End::Outcome);
        }
        _ = terminate.recv() => End::Signal("SIGTERM", SignalKind::terminate().as_raw_value()),
        _ = interrupt.recv() => End::Signal("SIGINT", SignalKind::interrupt().as_raw_value()),
    };
    stop.cancel();
    if tokio::time::timeout(GRACE, executed).await.is_err() {
        complain(check, "what it had begun does not end");
    }
    Ok(signalled)
}

fn misconfigured(error: &BadVariable) -> CheckOutcome {
    CheckOutcome::misconfigured(error.to_string())
}

fn strategy(environment: &Environment) -> Result<ProcessingStrategy, BadVariable> {
    let allowed = "EXECUTE_REMEDIATION or STORE_ONLY";
    let strategy = environment.parsed(&["PROCESSING_STRATEGY"], allowed, |text| match text {
        "EXECUTE_REMEDIATION" => Some(ProcessingStrategy::ExecuteRemediation),
        "STORE_ONLY" => Some(ProcessingStrategy::StoreOnly),
        _ => None,
    })?;
    Ok(strategy.unwrap_or(ProcessingStrategy::ExecuteRemediation))
}

fn common(environment: &Environment) -> Result<Common, BadVariable> {
    Ok(Common {
        node: environment.required(&[NODE], "the name of the node that this runs on")?,
        way: Way::read(environment)?,
        cache: environment.time(&[RESULT_CACHE_VARIABLE])?,
        untested_fails: environment.yes(UNTESTED_FAILS)?,
    })
}

/// Returns an event with the reporter and the time filled in.
fn blank(check: CheckName, common: &Common, strategy: ProcessingStrategy) -> HealthEvent {
    let (agent, class) = check.sender();
    HealthEvent {
        version: EVENT_VERSION,
        agent: agent.to_owned(),
        component_class: class.to_owned(),
        node_name: common.node.clone(),
        processing_strategy: strategy as i32,
        generated_timestamp: Some(prost_types::Timestamp::from(SystemTime::now())),
        ..HealthEvent::default()
    }
}

/// Prints the outcome of a check, and returns its exit code.
fn conclude(
    check: CheckName,
    outcome: &CheckOutcome,
    stores_only: bool,
    log: &Path,
    out: &mut (dyn Write + Send),
) -> u8 {
    let (word, code) = match outcome.result {
        Meaning::Passed => ("passed", exit::PASSED),
        Meaning::Failed => ("failed", exit::FAILED),
        Meaning::NotTested => ("not tested", exit::PASSED),
        Meaning::Misconfigured => ("misconfigured", exit::MISCONFIGURED),
    };
    for finding in &outcome.findings {
        if outcome.findings.len() > 1 {
            let state = if finding.healthy { "well" } else { "not well" };
            let line = format!("  {} {state}: {}", finding.check, finding.message);
            // Fails only if nobody reads the output.
            drop(writeln!(out, "{}", one_line(&line)));
        }
    }
    print_end(check, word, &outcome.code, &outcome.text, log, out);
    if stores_only && code != exit::PASSED {
        complain(
            check,
            "exits 0 all the same, for PROCESSING_STRATEGY is STORE_ONLY",
        );
        return exit::PASSED;
    }
    code
}

/// Prints the outcome for a person, and writes the termination message.
fn print_end(
    check: CheckName,
    word: &str,
    code: &str,
    text: &str,
    log: &Path,
    out: &mut (dyn Write + Send),
) {
    let text = one_line(text);
    // Fails only if nobody reads the output.
    drop(writeln!(out, "{}: {word}: {text}", check.name()).and_then(|()| out.flush()));
    let mut message = format!("{code}: {text}");
    message.truncate(model::event::floor_char_boundary(&message, MAX_TERMINATION));
    match write(log, &message) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            complain(check, &format!("cannot write {}: {error}", log.display()));
        }
        _ => {}
    }
}

/// Writes the termination message, if the file exists.
fn write(log: &Path, message: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).truncate(true).open(log)?;
    file.write_all(message.as_bytes())
}

/// Prints a problem that is not the result to standard error.
fn complain(check: CheckName, text: &str) {
    // Fails only if nobody reads the output.
    drop(writeln!(
        io::stderr(),
        "{}: {}",
        check.name(),
        one_line(text)
    ));
}

/// Returns text on one line without control characters: parts of it come from programs and
/// other pods.
fn one_line(text: &str) -> String {
    plain(&text.replace(['\n', '\r', '\t'], " "))
}
