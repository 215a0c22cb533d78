//! `nccl-loopback`: an all-reduce over all GPUs of the pod. With one GPU there is nobody to reduce with: its
//! memory is tested instead, and no bandwidth can fail.

use std::time::Duration;

use contract::RecommendedAction;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::environment::{BadVariable, Environment};
use crate::expected::{Scope, Threshold, ThresholdSettings};
use crate::outcome::{Finding, Outcome};
use crate::verdict;
use crate::worker::{
    Benchmark, Failure, Join, Launcher, Libraries, Measured, Operation, Request, Said, SeenGpu,
    Worker,
};

/// The agent of its events (NVSentinel's name).
pub(crate) const AGENT: &str = "preflight-nccl-loopback";
/// The check of its events (NVSentinel's name).
const CHECK: &str = "NCCLLoopbackTest";
/// The code of whatever fails (NVSentinel's).
const TEST_ERROR: &str = "NCCL_TEST_ERROR";
/// The code of a bandwidth below the threshold (NVSentinel's).
const BANDWIDTH_DEGRADED: &str = "NCCL_BW_DEGRADED";

/// Least bandwidth in gigabytes a second, and size of the message in MiB, where nothing else is set
/// (preflight configuration).
const THRESHOLD: f64 = 150.0;
const SIZE_MB: u64 = 256;
/// Largest message that can be set, in MiB.
const MAX_SIZE_MB: u64 = 128 * 1024;
/// Time for the check where nothing else is set (preflight ADR, `checkTimeout`).
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);
/// Runs before the time is taken, and those of which it is taken, as nccl-tests have them.
const WARMUPS: u32 = 5;
const ITERATIONS: u32 = 20;

/// Variables of NCCL by which a message goes another way than the fastest: a pod that sets one is slow on
/// good links too, and its node is not to blame.
const LIMITING: [&str; 9] = [
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_NVLS_ENABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MAX_CTAS",
    "NCCL_BUFFSIZE",
];

struct Settings {
    libraries: Libraries,
    threshold: ThresholdSettings,
    sizes: Vec<u64>,
    timeout: Duration,
    /// The variables that are set by which NCCL goes other ways than the best.
    limiting: Vec<&'static str>,
}

/// What was measured.
struct Figures {
    devices: u32,
    gpus: Vec<SeenGpu>,
    measured: Vec<Measured>,
}

pub(crate) async fn execute(
    environment: &Environment,
    launcher: &Launcher,
    stop: &CancellationToken,
) -> Result<Outcome, BadVariable> {
    let settings = Settings::read(environment)?;
    let until = Instant::now() + settings.timeout;
    let mut gpus = Vec::new();
    let measured = tokio::select! {
        measured = measure(&settings, launcher, until, &mut gpus) => measured,
        () = stop.cancelled() => Err(Failure::Crashed("was stopped".to_owned())),
    };
    Ok(match measured {
        Ok((devices, measured)) => judge(
            &settings,
            &Figures {
                devices,
                gpus,
                measured,
            },
        ),
        Err(failure) => verdict::outcome(CHECK, TEST_ERROR, &failure, &gpus),
    })
}

/// Measures; what is seen of the GPUs is noted also where that fails.
async fn measure(
    settings: &Settings,
    launcher: &Launcher,
    until: Instant,
    gpus: &mut Vec<SeenGpu>,
) -> Result<(u32, Vec<Measured>), Failure> {
    let libraries = &settings.libraries;
    // A process of its own: a driver that tells nothing by NVML may work all the same.
    let mut asked = Worker::start(launcher)?;
    match asked.ask(&Request::Gpus(libraries.clone()), until).await {
        Ok(Said::Gpus(seen)) => *gpus = seen,
        Ok(said) => return Err(said.unexpected()),
        Err(failure) => tracing::warn!("the GPUs are not known by name: {failure}"),
    }
    drop(asked);
    let mut worker = Worker::start(launcher)?;
    let devices = match worker
        .ask(&Request::Devices(libraries.clone()), until)
        .await?
    {
        Said::Devices(devices) => devices,
        said => return Err(said.unexpected()),
    };
    let benchmark = Benchmark {
        sizes: settings.sizes.clone(),
        warmups: WARMUPS,
        iterations: ITERATIONS,
        operation: Operation::Sum,
    };
    let request = if devices > 1 {
        let id = match worker.ask(&Request::Id(libraries.clone()), until).await? {
            Said::Id(id) => id,
            said => return Err(said.unexpected()),
        };
        let join = Join {
            id,
            ranks: devices,
            first: 0,
        };
        Request::AllReduce(libraries.clone(), join, benchmark)
    } else {
        Request::Copy(libraries.clone(), benchmark)
    };
    match worker.ask(&request, until).await? {
        Said::Measured(measured) => Ok((devices, measured)),
        said => Err(said.unexpected()),
    }
}

/// Judges by the largest message: small ones never reach the bandwidth of a link.
fn judge(settings: &Settings, figures: &Figures) -> Outcome {
    let product = figures.gpus.first().map(|gpu| gpu.product.clone());
    let product = product
        .map(|product| format!(" ({product})"))
        .unwrap_or_default();
    let Some(largest) = figures.measured.last() else {
        return Outcome::misconfigured("MESSAGE_SIZES names no size".to_owned());
    };
    if figures.devices < 2 {
        let text = format!(
            "1 GPU{product} keeps what is written to it; its memory copies {} bytes with {:.2} GB/s",
            largest.bytes,
            largest.copy_bandwidth()
        );
        let finding = Finding::healthy(CHECK, text.clone());
        return Outcome::passed(text, vec![finding]);
    }
    let threshold = settings.threshold.of(&figures.gpus);
    let gb_s = largest.bus_bandwidth(figures.devices);
    let text = told(figures.devices, &product, largest, gb_s, &threshold);
    let metadata = vec![
        ("bandwidth_gb_s".to_owned(), format!("{gb_s:.2}")),
        ("message_bytes".to_owned(), largest.bytes.to_string()),
        ("gpus".to_owned(), figures.devices.to_string()),
    ];
    if threshold.passes(gb_s) {
        let mut finding = Finding::healthy(CHECK, text.clone());
        finding.metadata = metadata;
        return Outcome::passed(text, vec![finding]);
    }
    if !settings.limiting.is_empty() {
        let names = settings.limiting.join(", ");
        let text = format!("{text}; {names} is set, which may be why");
        let mut finding = Finding::harmless(CHECK, BANDWIDTH_DEGRADED, text);
        finding.metadata = metadata;
        return Outcome::failed(finding);
    }
    Outcome::failed(Finding {
        check: CHECK.to_owned(),
        fatal: true,
        action: RecommendedAction::ContactSupport,
        code: BANDWIDTH_DEGRADED.to_owned(),
        message: text,
        metadata,
        ..Finding::default()
    })
}

fn told(
    devices: u32,
    product: &str,
    largest: &Measured,
    gb_s: f64,
    threshold: &Threshold,
) -> String {
    let limit = match threshold.gb_s {
        Some(least) if gb_s >= least => format!("at least {least} GB/s is wanted"),
        Some(least) => format!("below the {least} GB/s that are wanted"),
        None => "no least bandwidth is wanted".to_owned(),
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
            limiting: LIMITING
                .into_iter()
                .filter(|name| environment.first(&[name]).is_some())
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The defaults of the preflight configuration, and of the ADR's `checkTimeout`.
    #[test]
    fn the_defaults_are_those_of_the_documents() {
        let settings = Settings::read(&Environment::default()).unwrap();
        assert_eq!(settings.sizes, [256 << 20]);
        assert_eq!(settings.threshold.of(&[]).gb_s, Some(150.0));
        assert_eq!(settings.timeout, Duration::from_secs(300));
        assert_eq!((WARMUPS, ITERATIONS), (5, 20));
    }
}
