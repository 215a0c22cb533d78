//! `nccl-allreduce`: an all-reduce over all GPUs of a gang, and if it fails or is slow, a
//! search for the member at fault.
//!
//! ```text
//! gang         waits until the gang's files name all members
//! topology     chooses the topology file for NCCL
//! coordinator  (rank 0 only) gathers the members over TCP, orders tests, asks search for the next
//! member       executes rank 0's orders with a collective, and receives the verdict
//! ```
//!
//! Each check reports only about its own node. A failure that is no evidence about a node, such
//! as missing members, is never fatal.

mod collective;
mod coordinator;
mod gang;
mod member;
mod messages;
mod port;
mod rendezvous;
mod search;
mod topology;
mod wire;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use contract::RecommendedAction;
use preflight::rendezvous::Topology;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::environment::{BadVariable, Environment};
use crate::expected::{Scope, ThresholdSettings};
use crate::loopback;
use crate::outcome::{CheckOutcome, Finding, GangWait, Result as Meaning};
use crate::refusal::Variables;
use crate::verdict;
use crate::worker::{Benchmark, Launcher, Libraries, Operation, SeenGpu, WorkerFailure};
use collective::Collective;
use collective::nccl::Nccl;
use collective::tcp::Tcp;
use coordinator::ExaminationPlan;
use gang::{Gang, GangError, GangSources};
use messages::{Hello, MemberVerdict, PROTOCOL, VerdictKind};
use rendezvous::RendezvousAddress;
use wire::GangKey;

/// Agent of the check's events (NVSentinel's name).
pub(crate) const AGENT: &str = "preflight-nccl-allreduce";
/// Name of the check in its events (NVSentinel's).
pub(crate) const CHECK: &str = "NCCLAllReduceTest";
/// Codes of NVSentinel, and one of gpuwarden for failures after the group has formed.
const BANDWIDTH_DEGRADED: &str = "NCCL_ALLREDUCE_BW_DEGRADED";
const TIMEOUT: &str = "NCCL_ALLREDUCE_TIMEOUT";
const INIT_FAILED: &str = "NCCL_ALLREDUCE_INIT_FAILED";
const FAILED: &str = "NCCL_ALLREDUCE_ERROR";
const GANG_CONFIG: &str = "NCCL_GANG_CONFIG_ERROR";
const GANG_TIMEOUT: &str = "NCCL_GANG_TIMEOUT";
/// Code of a gang that may not test without a topology file, while a machine lacks one.
const NO_TOPOLOGY: &str = "NO_TOPOLOGY";

/// Defaults of the preflight configuration: gigabytes per second, size of the message,
/// iterations, and the time for the gang to form.
const THRESHOLD: f64 = 100.0;
const SIZE: u64 = 4 << 30;
const ITERATIONS: u64 = 20;
const WARMUPS: u64 = 5;
const FORM: Duration = Duration::from_secs(600);
/// Largest number of iterations that can be set.
const MOST_ITERATIONS: u64 = 100_000;
/// Time after the end of the tests for rank 0 to send the verdict.
const BEYOND: Duration = Duration::from_secs(60);

struct Settings {
    pod: String,
    node: String,
    places: GangSources,
    form: Duration,
    timeout: Duration,
    benchmark: Benchmark,
    threshold: ThresholdSettings,
    libraries: Libraries,
    /// Secret of the gang, if it has one.
    secret: Option<Vec<u8>>,
    /// True if the reduction uses sockets and processors instead of GPUs.
    tcp: bool,
    topology: topology::Settings,
    /// Variables set by the pod itself.
    inherited: BTreeMap<String, String>,
    /// Variables that reach NCCL, from any source.
    variables: Variables,
}

pub(crate) async fn execute(
    environment: &Environment,
    launcher: &Launcher,
    stop: &CancellationToken,
) -> Result<CheckOutcome, BadVariable> {
    if environment.first(&["GANG_CONFIG_DIR", "GANG_ID"]).is_none() {
        let text = "this pod is in no gang, so there is no peer to reduce with";
        return Ok(not_tested("NO_GANG", text.to_owned()));
    }
    let settings = Settings::read(environment)?;
    Ok(tokio::select! {
        outcome = check(&settings, launcher) => outcome,
        () = stop.cancelled() => unformed("STOPPED", "was stopped".to_owned()),
    })
}

async fn check(settings: &Settings, launcher: &Launcher) -> CheckOutcome {
    let begun = Instant::now();
    let formed = begun + settings.form;
    let gang = match gang::wait(&settings.places, &settings.pod, formed).await {
        Ok(gang) => gang,
        Err(GangError::Missing(text)) => return unformed(GANG_TIMEOUT, text),
        Err(GangError::Wrong(text)) => return wrong(text),
        // The others have tested without this pod: no member is left to reduce with.
        Err(GangError::Full(text)) => return not_tested("NO_PLACE", text),
        Err(GangError::Started(text)) => return not_tested("STARTED", text),
        Err(GangError::Untestable(text)) => return not_tested("NO_SIZE", text),
    };
    let gang_wait = Some(GangWait {
        gang: gang.id.clone(),
        waited: begun.elapsed(),
    });
    CheckOutcome {
        gang_wait,
        ..reduce(settings, launcher, &gang, formed).await
    }
}

/// Takes part in the gang by NCCL, or by TCP if that is set.
async fn reduce(
    settings: &Settings,
    launcher: &Launcher,
    gang: &Gang,
    formed: Instant,
) -> CheckOutcome {
    if !settings.tcp {
        let (chosen, file) = settings.topology.choose(gang.topology.as_ref());
        let (launcher, libraries) = (launcher.clone(), settings.libraries.clone());
        let variables = (settings.variables.clone(), settings.pod.clone());
        let nccl = Nccl::new(launcher, libraries, file, variables);
        return take_part(settings, gang, nccl, chosen, formed).await;
    }
    let own = gang.members.get(gang.rank).map(|member| member.address);
    match Tcp::listen(own.unwrap_or(gang.master.ip())).await {
        Ok(tcp) => take_part(settings, gang, tcp, None, formed).await,
        Err(error) => wrong(format!("cannot listen at this pod's address: {error}")),
    }
}

/// Takes part in the gang, and coordinates it if this is rank 0.
async fn take_part(
    settings: &Settings,
    gang: &Gang,
    mut collective: impl Collective,
    topology: Option<Topology>,
    formed: Instant,
) -> CheckOutcome {
    let is_alone = gang.members.len() < 2;
    let (devices, gpus) = match collective.devices(Instant::now() + settings.timeout).await {
        Ok(seen) => seen,
        Err(failure) => {
            let outcome = verdict::outcome(CHECK, code(&failure), &failure, &[]);
            return if is_alone {
                of_one(outcome, Some(&failure), &[])
            } else {
                outcome
            };
        }
    };
    let alone = is_alone.then_some(gpus.as_slice());
    // Without a secret, the gang's id serves as the key.
    let secret = settings.secret.clone().or_else(|| gang.secret.clone());
    let secret = secret.unwrap_or_else(|| gang.id.clone().into_bytes());
    let key = GangKey::new(&secret);
    let coordinating = if gang.rank == 0 {
        match coordinate(settings, gang, &key, &gpus, formed).await {
            Ok(coordinating) => Some(coordinating),
            Err(outcome) => return *outcome,
        }
    } else {
        None
    };
    let hello = Hello {
        protocol: PROTOCOL,
        rank: gang.rank,
        pod: settings.pod.clone(),
        node: settings.node.clone(),
        devices,
        endpoint: collective.endpoint(),
        topology,
        inherited: settings.inherited.clone(),
    };
    let master = gang.members.first().map(|member| member.pod.as_str());
    let master = (master.unwrap_or_default(), gang.master);
    // Rank 0 has to wait for the others until then, and to report the missing ones.
    let formed = formed + Duration::from_secs(10);
    let until = || Instant::now() + settings.timeout;
    let verdict = member::take_part(&mut collective, hello, master, &key, formed, until);
    let end = formed + settings.timeout + BEYOND;
    let (outcome, suspects) = match tokio::time::timeout_at(end, verdict).await {
        Ok(Ok(verdict)) => (judge(&verdict, alone), verdict.suspects),
        Ok(Err(error)) => (unformed(GANG_TIMEOUT, error.to_string()), vec![0]),
        Err(_) => {
            let text = "rank 0 sends no verdict".to_owned();
            (unformed(TIMEOUT, text), vec![0])
        }
    };
    collective.over();
    drop(collective);
    let outcome = match gang.not_reached(&suspects).await {
        Some(text) => outcome.and(&text),
        None => outcome,
    };
    if let Some(coordinating) = coordinating
        && let Err(error) = coordinating.await
    {
        tracing::error!(%error, "the coordination of the gang ended");
    }
    outcome
}

/// Starts the coordination of the gang.
async fn coordinate(
    settings: &Settings,
    gang: &Gang,
    key: &GangKey,
    gpus: &[SeenGpu],
    formed: Instant,
) -> Result<tokio::task::JoinHandle<()>, Box<CheckOutcome>> {
    let port = gang.master.port();
    let listener = port::listen(gang.master, formed).await.map_err(|error| {
        let text = format!("cannot listen on master_port {port}, nor behind it: {error}");
        let outcome = wrong(text);
        Box::new(match error.kind() {
            // Another process uses the port, which is no fault of this pod.
            ErrorKind::AddrInUse => CheckOutcome {
                result: Meaning::NotTested,
                ..outcome
            },
            _ => outcome,
        })
    })?;
    let plan = ExaminationPlan {
        formed,
        timeout: settings.timeout,
        benchmark: settings.benchmark.clone(),
        threshold: settings.threshold.of(gpus),
    };
    let running = coordinator::run(listener, gang.members.clone(), key.clone(), plan);
    Ok(tokio::spawn(running))
}

/// Returns the code of a failure.
fn code(failure: &WorkerFailure) -> &'static str {
    match failure {
        WorkerFailure::Late { .. } => TIMEOUT,
        WorkerFailure::Nccl { text, .. } if text.contains("ncclCommInitRank") => INIT_FAILED,
        _ => FAILED,
    }
}

/// Returns the meaning of a verdict for this node. `alone` has the GPUs of a pod that is the
/// whole gang.
fn judge(verdict: &MemberVerdict, alone: Option<&[SeenGpu]>) -> CheckOutcome {
    let code = verdict.failure.as_ref().map_or(BANDWIDTH_DEGRADED, code);
    let outcome = match verdict.kind {
        VerdictKind::Passed => {
            let finding = Finding::healthy(CHECK, verdict.text.clone());
            CheckOutcome::passed(verdict.text.clone(), vec![finding])
        }
        VerdictKind::Culprit => match &verdict.failure {
            Some(failure) => {
                // In a larger gang, the GPU named by a failure may belong to another member.
                let gpus = alone.unwrap_or_default();
                let mut outcome = verdict::outcome(CHECK, code, failure, gpus);
                outcome.text.clone_from(&verdict.text);
                for finding in &mut outcome.findings {
                    finding.message.clone_from(&verdict.text);
                }
                outcome
            }
            None => CheckOutcome::failed(Finding {
                check: CHECK.to_owned(),
                fatal: true,
                action: RecommendedAction::ContactSupport,
                code: code.to_owned(),
                message: verdict.text.clone(),
                ..Finding::default()
            }),
        },
        VerdictKind::Pair | VerdictKind::Unclear => {
            CheckOutcome::failed(Finding::harmless(CHECK, code, verdict.text.clone()))
        }
        // The verdict found nothing about this node.
        VerdictKind::Innocent => CheckOutcome {
            findings: Vec::new(),
            ..unformed(code, verdict.text.clone())
        },
        VerdictKind::Missing => unformed(GANG_TIMEOUT, verdict.text.clone()),
        VerdictKind::Untested => CheckOutcome {
            result: Meaning::NotTested,
            findings: Vec::new(),
            ..unformed(NO_TOPOLOGY, verdict.text.clone())
        },
    };
    match alone {
        Some(gpus) => of_one(outcome, verdict.failure.as_ref(), gpus),
        None => outcome,
    }
}

/// Returns the outcome of a gang of one pod, which is a loopback: it concerns the GPUs of this
/// pod, so that a pass of others does not close it, and a lack in the container stops no pod.
fn of_one(
    mut outcome: CheckOutcome,
    failure: Option<&WorkerFailure>,
    gpus: &[SeenGpu],
) -> CheckOutcome {
    if failure.is_some_and(verdict::is_of_container) {
        outcome.result = Meaning::NotTested;
    }
    let findings = outcome.findings.into_iter().map(|finding| {
        if finding.entities.is_empty() {
            finding.about_gpus(gpus)
        } else {
            finding
        }
    });
    outcome.findings = findings.collect();
    outcome
}

/// Returns the outcome of a pod without others to test with, which does not stop the pod.
fn not_tested(code: &str, text: String) -> CheckOutcome {
    CheckOutcome {
        result: Meaning::NotTested,
        findings: Vec::new(),
        ..unformed(code, text)
    }
}

/// Returns the outcome of a gang that has not formed, which blames no member.
fn unformed(code: &str, text: String) -> CheckOutcome {
    CheckOutcome::failed(Finding::harmless(CHECK, code, text))
}

/// Returns the outcome of a gang with an invalid description.
fn wrong(text: String) -> CheckOutcome {
    CheckOutcome {
        result: Meaning::Misconfigured,
        ..unformed(GANG_CONFIG, text)
    }
}

// === impl Settings ===

impl Settings {
    fn read(environment: &Environment) -> Result<Self, BadVariable> {
        let iterations = environment.whole("BENCHMARK_ITERS", ITERATIONS, (1, MOST_ITERATIONS))?;
        let warmups = environment.whole("WARMUP_ITERS", WARMUPS, (0, MOST_ITERATIONS))?;
        let allowed = "one of sum, prod, min, max, avg";
        let operation = environment.parsed(&["NCCL_REDUCE_OP"], allowed, Operation::parse)?;
        let tcp = environment.parsed(
            &["GPUWARDEN_COLLECTIVE"],
            "nccl or tcp",
            |text| match text {
                "nccl" => Some(false),
                "tcp" => Some(true),
                _ => None,
            },
        )?;
        let names = ["BW_THRESHOLD_GBPS", "NCCL_ALLREDUCE_THRESHOLD_GBPS"];
        let timeout = environment.time(&["CHECK_TIMEOUT_SECONDS", "CHECK_TIMEOUT"])?;
        let form = environment.time(&["GANG_TIMEOUT_SECONDS", "GANG_TIMEOUT"])?;
        Ok(Self {
            pod: environment.required(&["POD_NAME", "MY_POD_NAME"], "the name of this pod")?,
            node: environment.required(&["NODE_NAME"], "the name of the node")?,
            places: GangSources {
                directory: PathBuf::from(
                    environment
                        .required(&["GANG_CONFIG_DIR"], "the directory of the gang's files")?,
                ),
                rendezvous: RendezvousAddress::read(environment)?,
            },
            form: form.unwrap_or(FORM),
            timeout: timeout.unwrap_or(loopback::TIMEOUT),
            benchmark: Benchmark {
                sizes: environment.sizes("MESSAGE_SIZES", &[SIZE])?,
                iterations: u32::try_from(iterations).unwrap_or(u32::MAX),
                warmups: u32::try_from(warmups).unwrap_or(u32::MAX),
                operation: operation.unwrap_or(Operation::Sum),
            },
            threshold: ThresholdSettings::read(environment, Scope::Gang, &names, THRESHOLD)?,
            libraries: Libraries::of(environment),
            secret: secret(environment)?,
            tcp: tcp.unwrap_or(false),
            topology: topology::Settings::read(environment)?,
            inherited: environment.inherited(),
            variables: Variables::of(environment),
        })
    }
}

/// Reads the gang's secret.
fn secret(environment: &Environment) -> Result<Option<Vec<u8>>, BadVariable> {
    let allowed = "a file that can be read and is not empty";
    let of_file = environment.parsed(&["GANG_SECRET_FILE"], allowed, |path| {
        let read = std::fs::read(path).ok()?;
        let read = read.trim_ascii().to_vec();
        (!read.is_empty()).then_some(read)
    })?;
    let of_variable = environment.first(&["GANG_SECRET"]);
    Ok(of_file.or_else(|| of_variable.map(|(_, secret)| secret.as_bytes().to_vec())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(more: &[(&str, &str)]) -> Settings {
        let needed = [("NODE_NAME", "n"), ("GANG_CONFIG_DIR", "/etc/preflight")];
        let all = needed.iter().chain(more);
        let environment: Environment = all
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        Settings::read(&environment).unwrap()
    }

    /// Defaults of the preflight configuration, and of the ADR's `checkTimeout` and
    /// `gangTimeout`.
    #[test]
    fn the_defaults_are_those_of_the_documents() {
        let settings = settings(&[("POD_NAME", "a")]);
        assert_eq!(settings.benchmark.sizes, [4 << 30]);
        assert_eq!(
            (settings.benchmark.iterations, settings.benchmark.warmups),
            (20, 5)
        );
        assert_eq!(settings.benchmark.operation, Operation::Sum);
        // The default is for eight GPUs in a pod; this pod has none.
        assert_eq!((THRESHOLD, settings.threshold.of(&[]).gb_s), (100.0, None));
        assert_eq!(settings.form, Duration::from_secs(600));
        assert_eq!(settings.timeout, Duration::from_secs(300));
        assert!(!settings.tcp && settings.secret.is_none());
    }

    #[test]
    fn the_adrs_names_are_taken_behind_those_of_the_configuration() {
        let adrs = [
            ("MY_POD_NAME", "a"),
            ("GANG_TIMEOUT", "700s"),
            ("CHECK_TIMEOUT", "200s"),
            ("NCCL_ALLREDUCE_THRESHOLD_GBPS", "5.0"),
        ];
        let read = settings(&adrs);
        assert_eq!(
            (
                read.pod.as_str(),
                read.form.as_secs(),
                read.timeout.as_secs()
            ),
            ("a", 700, 200)
        );
        assert_eq!(read.threshold.of(&[]).gb_s, Some(5.0));
        // The size is the default, and can be set as well.
        assert_eq!(read.benchmark.sizes, [4 << 30]);
        let sizes = settings(&[("POD_NAME", "a"), ("MESSAGE_SIZES", "4G")]);
        assert_eq!(sizes.benchmark.sizes, [4 << 30]);
        let newer = [
            ("POD_NAME", "b"),
            ("GANG_TIMEOUT_SECONDS", "1"),
            ("CHECK_TIMEOUT_SECONDS", "2"),
            ("BW_THRESHOLD_GBPS", "3"),
        ];
        let read = settings(&[adrs, newer].concat());
        assert_eq!(
            (
                read.pod.as_str(),
                read.form.as_secs(),
                read.timeout.as_secs()
            ),
            ("b", 1, 2)
        );
        assert_eq!(read.threshold.of(&[]).gb_s, Some(3.0));
        let skipped = settings(&[("POD_NAME", "b"), ("SKIP_BANDWIDTH_CHECK", "true")]);
        assert_eq!(skipped.threshold.of(&[]).gb_s, None);
    }
}
