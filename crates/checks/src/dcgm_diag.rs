//! `dcgm-diag`: DCGM's diagnosis of exactly the GPUs of this container, by the node's host
//! engine.
//!
//! The container identifies its GPUs by UUID, and the host engine by its own numbers; `dcgmi`
//! reports both. The same numbers inside this container would mean other GPUs of the node.

mod dcgmi;
mod discovery;
mod judge;
mod result;

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::environment::{BadVariable, Environment};
use crate::outcome::{CheckOutcome, Finding, Result as Meaning};
use crate::verdict;
use crate::worker::{FromWorker, Launcher, Libraries, SeenGpu, Worker, WorkerRequest};
use dcgmi::{Dcgmi, Trouble};

/// Agent of the check's events (NVSentinel's name).
pub(crate) const AGENT: &str = "preflight-dcgm-diag";
/// Name of the check for findings without a single test, and prefix of those with one
/// (NVSentinel's names).
pub(crate) const CHECK: &str = "DcgmDiagnostic";
/// Code of a diagnosis that did not end in time.
const TIMEOUT_CODE: &str = "DCGM_DIAG_TIMEOUT";
/// Code of an answer from another node's host engine.
const OTHER_HOST: &str = "DCGM_WRONG_HOSTENGINE";

/// Default address of the host engine (preflight configuration).
const ADDRESS: &str = "nvidia-dcgm.gpu-operator.svc:5555";
/// Attempts while the host engine is busy, and the seconds between them (NVSentinel's).
const ATTEMPTS: u64 = 10;
const INTERVAL_SECONDS: u64 = 10;

struct Settings {
    level: u64,
    address: String,
    dcgmi: PathBuf,
    attempts: u64,
    interval: Duration,
    timeout: Duration,
    libraries: Libraries,
}

/// GPU with both of its identifiers.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KnownGpu {
    uuid: String,
    /// Number of the GPU at the host engine.
    number: u32,
}

pub(crate) async fn execute(
    environment: &Environment,
    launcher: &Launcher,
    stop: &CancellationToken,
) -> Result<CheckOutcome, BadVariable> {
    let settings = Settings::read(environment)?;
    let until = Instant::now() + settings.timeout;
    let seen = tokio::select! {
        seen = see(&settings, launcher, until) => seen,
        () = stop.cancelled() => return Ok(stopped()),
    };
    let gpus = match seen {
        Ok(gpus) => gpus,
        Err(outcome) => return Ok(outcome),
    };
    let dcgmi = Dcgmi {
        program: settings.dcgmi.clone(),
        address: settings.address.clone(),
        until,
        stop: stop.clone(),
    };
    Ok(diagnose(&settings, &dcgmi, &gpus).await)
}

/// Returns the GPUs of this container. If they cannot be determined, the check ends without
/// stopping the pod.
async fn see(
    settings: &Settings,
    launcher: &Launcher,
    until: Instant,
) -> Result<Vec<SeenGpu>, CheckOutcome> {
    let failed = |failure| match verdict::outcome(CHECK, "NVML_ERROR", &failure, &[]) {
        outcome if outcome.result == Meaning::Failed => CheckOutcome {
            result: Meaning::NotTested,
            ..outcome
        },
        outcome => outcome,
    };
    let mut worker = Worker::start(launcher).map_err(failed)?;
    let request = WorkerRequest::Gpus(settings.libraries.clone());
    match worker.ask(&request, until).await.map_err(failed)? {
        FromWorker::Gpus(gpus) if gpus.is_empty() => {
            let text = "this container has no GPU that could be tested".to_owned();
            Err(CheckOutcome::misconfigured(text))
        }
        FromWorker::Gpus(gpus) => Ok(gpus),
        answer => Err(failed(answer.unexpected())),
    }
}

/// Tests the GPUs, and retries while another client's diagnosis runs.
async fn diagnose(settings: &Settings, dcgmi: &Dcgmi, gpus: &[SeenGpu]) -> CheckOutcome {
    let mut attempt = 1;
    loop {
        let tried = async {
            let known = dcgmi.discover(gpus).await?;
            let result = dcgmi.diagnose(settings.level, &known).await?;
            Ok::<_, Trouble>((known, result))
        };
        let trouble = match tried.await {
            Ok::<_, Trouble>((known, result)) => {
                return judge::outcome(settings.level, &known, result);
            }
            Err(trouble) if trouble.may_pass() && attempt < settings.attempts => trouble,
            Err(trouble) => return end(settings, &trouble, attempt),
        };
        tracing::info!(attempt, "the host engine cannot test now: {trouble}");
        tokio::select! {
            () = tokio::time::sleep(settings.interval) => {}
            () = dcgmi.stop.cancelled() => return stopped(),
            () = tokio::time::sleep_until(dcgmi.until) => return end(settings, &trouble, attempt),
        }
        attempt += 1;
    }
}

/// Returns the outcome of a check without a diagnosis. None of the reasons is evidence about a
/// GPU, so the pod is not stopped.
fn end(settings: &Settings, trouble: &Trouble, attempts: u64) -> CheckOutcome {
    let code = match trouble {
        Trouble::Busy { code, .. } => *code,
        Trouble::Unreachable { .. } => "DCGM_CONNECTIVITY_ERROR",
        Trouble::Late { .. } => TIMEOUT_CODE,
        Trouble::OtherHost { .. } => OTHER_HOST,
        Trouble::Stopped => return stopped(),
        Trouble::NoProgram(text) => return CheckOutcome::misconfigured(text.clone()),
        Trouble::Unclear(_) => "DCGM_DIAG_ERROR",
    };
    let mut text = trouble.to_string();
    if attempts > 1 {
        text.push_str(&format!(" ({attempts} attempts)"));
    }
    let usual = usual_time(settings.level);
    if matches!(trouble, Trouble::Late { .. }) && settings.timeout < usual {
        text.push_str(&format!(
            "; level {} needs up to {} s, and CHECK_TIMEOUT_SECONDS (checkTimeout) gives it {}",
            settings.level,
            usual.as_secs(),
            settings.timeout.as_secs()
        ));
    }
    let finding = Finding::harmless(CHECK, code, text);
    CheckOutcome {
        result: Meaning::NotTested,
        ..CheckOutcome::failed(finding)
    }
}

/// Returns the outcome of a check that was stopped.
fn stopped() -> CheckOutcome {
    CheckOutcome::failed(Finding::harmless(
        CHECK,
        "STOPPED",
        "was stopped".to_owned(),
    ))
}

// === impl Settings ===

impl Settings {
    fn read(environment: &Environment) -> Result<Self, BadVariable> {
        let level = environment.whole("DCGM_DIAG_LEVEL", 2, (1, 4))?;
        let attempts =
            environment.whole("DCGM_DIAG_STATUS_RETRY_MAX_ATTEMPTS", ATTEMPTS, (1, 1000))?;
        let interval = environment.whole(
            "DCGM_DIAG_STATUS_RETRY_INTERVAL_SECONDS",
            INTERVAL_SECONDS,
            (0, 3600),
        )?;
        let address = environment.first(&["DCGM_HOSTENGINE_ADDR"]);
        let dcgmi = environment.first(&["GPUWARDEN_DCGMI"]);
        let timeout = environment.time(&["CHECK_TIMEOUT_SECONDS", "CHECK_TIMEOUT"])?;
        Ok(Self {
            level,
            address: address.map_or(ADDRESS, |(_, address)| address).to_owned(),
            dcgmi: PathBuf::from(dcgmi.map_or("dcgmi", |(_, path)| path)),
            attempts,
            interval: Duration::from_secs(interval),
            timeout: timeout.unwrap_or_else(|| usual_time(level)),
            libraries: Libraries::of(environment),
        })
    }
}

/// Returns the default time limit of a level. By the preflight configuration the levels take 30
/// s, 2 min, 15 min and 1 to 2 h.
fn usual_time(level: u64) -> Duration {
    Duration::from_secs(match level {
        3 => 30 * 60,
        4 => 3 * 3600,
        _ => 300,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeout(variables: &[(&str, &str)]) -> Duration {
        let variables = variables.iter();
        let environment = variables.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Settings::read(&environment.collect()).unwrap().timeout
    }

    /// 300 s, and 30 min and 3 h for levels 3 and 4, by the preflight configuration.
    #[test]
    fn each_level_has_its_time_unless_another_is_set() {
        let minutes = |minutes: u64| Duration::from_secs(minutes * 60);
        assert_eq!(timeout(&[]), minutes(5));
        for (level, usual) in [("1", 5), ("2", 5), ("3", 30), ("4", 180)] {
            let level = ("DCGM_DIAG_LEVEL", level);
            assert_eq!(timeout(&[level]), minutes(usual), "{level:?}");
            let set = [level, ("CHECK_TIMEOUT_SECONDS", "300s")];
            assert_eq!(timeout(&set), minutes(5), "{level:?}");
        }
    }
}
