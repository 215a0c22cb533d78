//! `nccl-loopback`: an all-reduce over all GPUs of the pod. A single GPU has no peer to reduce
//! with: its memory is tested instead, and no bandwidth can fail.

use std::time::Duration;

use contract::RecommendedAction;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::environment::{BadVariable, Environment};
use crate::expected::{Scope, Threshold, ThresholdSettings};
use crate::outcome::{CheckOutcome, Finding, Result as Meaning};
use crate::refusal::Variables;
use crate::verdict;
use crate::worker::{
    Benchmark, FromWorker, Join, Launcher, Libraries, Measured, Operation, SeenGpu, Worker,
    WorkerFailure, WorkerRequest,
};

/// Agent of the check's events (NVSentinel's name).
pub(crate) const AGENT: &str = "preflight-nccl-loopback";
/// Name of the check in its events (NVSentinel's).
pub(crate) const CHECK: &str = "NCCLLoopbackTest";
/// Code of every failure except a low bandwidth (NVSentinel's).
const TEST_ERROR: &str = "NCCL_TEST_ERROR";
/// Code of a bandwidth below the threshold (NVSentinel's).
const BANDWIDTH_DEGRADED: &str = "NCCL_BW_DEGRADED";

/// Default threshold (GB/s) and default size of the message (MiB), of the preflight
/// configuration.
const THRESHOLD: f64 = 150.0;
const SIZE_MB: u64 = 256;
/// Largest message that can be set (MiB).
const MAX_SIZE_MB: u64 = 128 * 1024;
/// Default time limit of the check (preflight ADR, `checkTimeout`).
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);
/// Number of untimed and of timed iterations, as in nccl-tests.
const WARMUPS: u32 = 5;
const ITERATIONS: u32 = 20;

struct Settings {
    libraries: Libraries,
    threshold: ThresholdSettings,
    sizes: Vec<u64>,
    timeout: Duration,
    /// Variables set by the user, which may slow NCCL down on good links.
    inherited: Vec<String>,
    /// Variables that reach NCCL, from any source.
    variables: Variables,
}

/// Results of the measurement.
struct Figures {
    devices: u32,
    gpus: Vec<SeenGpu>,
    measured: Vec<Measured>,
}

pub(crate) async fn execute(
    environment: &Environment,
    launcher: &Launcher,
    stop: &CancellationToken,
) -> Result<CheckOutcome, BadVariable> {
    let settings = Settings::read(environment)?;
    let until = Instant::now() + settings.timeout;
    let (first, is_wrong) = test(&settings, launcher, until, stop).await;
    let has_passed = first.result == Meaning::Passed;
    // A wrong sum is a fault, whatever the variables.
    if settings.inherited.is_empty() || is_wrong || has_passed {
        return Ok(first);
    }
    let names = settings.inherited.join(", ");
    tracing::warn!("measures again without {names}: {}", first.text);
    let launcher = launcher.without(&settings.inherited);
    let (second, _) = test(&settings, &launcher, until, stop).await;
    Ok(of_both(&first, second, &names))
}

/// Tests once. Also returns whether a sum was wrong.
async fn test(
    settings: &Settings,
    launcher: &Launcher,
    until: Instant,
    stop: &CancellationToken,
) -> (CheckOutcome, bool) {
    let mut gpus = Vec::new();
    let measured = tokio::select! {
        measured = measure(settings, launcher, until, &mut gpus) => measured,
        () = stop.cancelled() => Err(WorkerFailure::Crashed("was stopped".to_owned())),
    };
    match measured {
        Ok((devices, measured)) => {
            let figures = Figures {
                devices,
                gpus,
                measured,
            };
            (judge(settings, &figures), false)
        }
        Err(failure) => {
            // Variables that were left out cannot be the cause.
            let failure = if launcher.left_out.is_empty() {
                settings.variables.explain(failure, "this pod")
            } else {
                failure
            };
            let is_wrong = matches!(failure, WorkerFailure::Wrong { .. });
            let mut outcome = verdict::outcome(CHECK, TEST_ERROR, &failure, &gpus);
            if verdict::is_of_container(&failure) {
                outcome.result = Meaning::NotTested;
            }
            (outcome, is_wrong)
        }
    }
}

/// Combines two tests, the second without the user's variables: only the second is evidence
/// about the node.
fn of_both(first: &CheckOutcome, mut second: CheckOutcome, names: &str) -> CheckOutcome {
    let (text, of_first) = (&second.text, &first.text);
    let text = match second.findings.first() {
        Some(finding) if finding.healthy => {
            format!("{text}; measured without the pod's {names}, with which {of_first}")
        }
        Some(finding) if finding.fatal => {
            format!("{text}; measured without the pod's {names}, too")
        }
        _ => {
            let text = format!(
                "{of_first}; the cause may be the pod's {names}, without which there is no result: {text}"
            );
            let both = CheckOutcome::failed(Finding::harmless(CHECK, &first.code, text));
            return match (first.result, second.result) {
                (result @ Meaning::NotTested, Meaning::NotTested) => {
                    CheckOutcome { result, ..both }
                }
                _ => both,
            };
        }
    };
    if let Some(finding) = second.findings.first_mut() {
        finding.message.clone_from(&text);
    }
    CheckOutcome { text, ..second }
}

/// Measures. Fills in the known GPUs even if the measurement fails.
async fn measure(
    settings: &Settings,
    launcher: &Launcher,
    until: Instant,
    gpus: &mut Vec<SeenGpu>,
) -> Result<(u32, Vec<Measured>), WorkerFailure> {
    let libraries = &settings.libraries;
    // In a process of its own, since a driver whose NVML fails may still work.
    let mut asked = Worker::start(launcher)?;
    match asked
        .ask(&WorkerRequest::Gpus(libraries.clone()), until)
        .await
    {
        Ok(FromWorker::Gpus(seen)) => *gpus = seen,
        Ok(answer) => return Err(answer.unexpected()),
        Err(failure) => tracing::warn!("the GPUs are not known by name: {failure}"),
    }
    drop(asked);
    let mut worker = Worker::start(launcher)?;
    let devices = match worker
        .ask(&WorkerRequest::Devices(libraries.clone()), until)
        .await?
    {
        FromWorker::Devices(devices) => devices,
        answer => return Err(answer.unexpected()),
    };
    let benchmark = Benchmark {
        sizes: settings.sizes.clone(),
        warmups: WARMUPS,
        iterations: ITERATIONS,
        operation: Operation::Sum,
    };
    let request = if devices > 1 {
        let id = match worker
            .ask(&WorkerRequest::Id(libraries.clone()), until)
            .await?
        {
            FromWorker::Id(id) => id,
            answer => return Err(answer.unexpected()),
        };
        let join = Join {
            id,
            ranks: devices,
            first: 0,
        };
        WorkerRequest::AllReduce(libraries.clone(), join, benchmark)
    } else {
        WorkerRequest::Copy(libraries.clone(), benchmark)
    };
    match worker.ask(&request, until).await? {
        FromWorker::Measured(measured) => Ok((devices, measured)),
        answer => Err(answer.unexpected()),
    }
}

/// Judges the largest message: small ones never reach the bandwidth of a link.
fn judge(settings: &Settings, figures: &Figures) -> CheckOutcome {
    let product = figures.gpus.first().map(|gpu| gpu.product.clone());
    let product = product
        .map(|product| format!(" ({product})"))
        .unwrap_or_default();
    let Some(largest) = figures.measured.last() else {
        return CheckOutcome::misconfigured("MESSAGE_SIZES names no size".to_owned());
    };
    if figures.devices < 2 {
        let text = format!(
            "1 GPU{product} keeps what is written to it; its memory copies {} bytes with {:.2} GB/s",
            largest.bytes,
            largest.copy_bandwidth()
        );
        let finding = Finding::healthy(CHECK, text.clone()).about_gpus(&figures.gpus);
        return CheckOutcome::passed(text, vec![finding]);
    }
    let threshold = settings.threshold.of(&figures.gpus);
    let gb_s = largest.bus_bandwidth(figures.devices);
    let text = describe(figures.devices, &product, largest, gb_s, &threshold);
    let metadata = [
        ("bandwidth_gb_s", format!("{gb_s:.2}")),
        ("message_bytes", largest.bytes.to_string()),
        ("gpus", figures.devices.to_string()),
        // Further columns of nccl-tests.
        ("count", (largest.bytes / 4).to_string()),
        ("type", "float".to_owned()),
        ("redop", "sum".to_owned()),
        ("time_us", format!("{:.2}", largest.seconds * 1e6)),
        ("algbw_gb_s", format!("{:.2}", largest.bandwidth())),
    ];
    let metadata = metadata
        .map(|(name, value)| (name.to_owned(), value))
        .into();
    if threshold.passes(gb_s) {
        let mut finding = Finding::healthy(CHECK, text.clone()).about_gpus(&figures.gpus);
        finding.metadata = metadata;
        return CheckOutcome::passed(text, vec![finding]);
    }
    let finding = Finding {
        check: CHECK.to_owned(),
        fatal: true,
        action: RecommendedAction::ContactSupport,
        code: BANDWIDTH_DEGRADED.to_owned(),
        message: text,
        metadata,
        ..Finding::default()
    };
    CheckOutcome::failed(finding.about_gpus(&figures.gpus))
}

fn describe(
    devices: u32,
    product: &str,
    largest: &Measured,
    gb_s: f64,
    threshold: &Threshold,
) -> String {
    let limit = match threshold.gb_s {
        Some(least) if gb_s >= least => format!("at least {least} GB/s is required"),
        Some(least) => format!("below the {least} GB/s that are required"),
        None => "no least bandwidth is required".to_owned(),
    };
    format!(
        "{devices} GPUs{product} reduce {} bytes with a bus bandwidth of {gb_s:.2} GB/s in {:.3} ms; \
         {limit} ({})",
        largest.bytes,
        largest.seconds * 1e3,
        threshold.basis
    )
}

// === impl Settings ===

impl Settings {
    fn read(environment: &Environment) -> Result<Self, BadVariable> {
        let names = ["BW_THRESHOLD_GBPS"];
        let megabytes = environment.whole("TEST_SIZE_MB", SIZE_MB, (1, MAX_SIZE_MB))?;
        let timeout = environment.time(&["CHECK_TIMEOUT_SECONDS", "CHECK_TIMEOUT"])?;
        Ok(Self {
            libraries: Libraries::of(environment),
            threshold: ThresholdSettings::read(environment, Scope::Node, &names, THRESHOLD)?,
            sizes: environment.sizes("MESSAGE_SIZES", &[megabytes << 20])?,
            timeout: timeout.unwrap_or(TIMEOUT),
            inherited: environment.inherited().into_keys().collect(),
            variables: Variables::of(environment),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Defaults of the preflight configuration, and of the ADR's `checkTimeout`.
    #[test]
    fn the_defaults_are_those_of_the_documents() {
        let settings = Settings::read(&Environment::default()).unwrap();
        assert_eq!(settings.sizes, [256 << 20]);
        assert_eq!((THRESHOLD, settings.threshold.of(&[]).gb_s), (150.0, None));
        assert_eq!(settings.timeout, Duration::from_secs(300));
        assert_eq!((WARMUPS, ITERATIONS), (5, 20));
    }

    #[test]
    fn without_a_second_result_a_pods_own_variables_keep_its_node_from_blame() {
        let failed = |code: &str, fatal| {
            CheckOutcome::failed(Finding {
                fatal,
                ..Finding::harmless(CHECK, code, format!("{code} came out"))
            })
        };
        let first = failed(BANDWIDTH_DEGRADED, true);
        let both = of_both(&first, failed(TEST_ERROR, false), "NCCL_ALGO");
        assert_eq!(both.code, BANDWIDTH_DEGRADED);
        assert_eq!(
            both.text,
            "NCCL_BW_DEGRADED came out; the cause may be the pod's NCCL_ALGO, without which there is no \
             result: NCCL_TEST_ERROR came out"
        );
        assert!(!both.findings[0].fatal);
        let both = of_both(&first, failed(TEST_ERROR, true), "NCCL_ALGO");
        assert!(both.findings[0].fatal && both.code == TEST_ERROR);
    }
}
