//! The GPUs of a node: the cost of an agent and of its GPU probe, the time to the first list,
//! the job gate, and many watchers. The GPUs are fakes.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cli::bench::{Figure, median, percentile, progress};
use contract::device::gpu_service_client::GpuServiceClient;
use contract::device::provider_service_client::ProviderServiceClient;
use contract::device::{
    Condition, ConditionStatus, GetGpuRequest, Gpu, ListGpusRequest, RegisterGpuRequest,
    UpdateGpuConditionRequest, WatchEventType, WatchGpusRequest,
};
use contract::nvhcd::HealthCheckRequest;
use contract::nvhcd::health_check_service_client::HealthCheckServiceClient;
use testkit::{Launch, Product};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

use crate::{Args, processor_time};

mod confined;

/// Numbers of GPUs of the measured agents.
const GPUS: [u16; 2] = [8, 16];
/// Idle time of a process before it is measured.
const SETTLE: Duration = Duration::from_secs(10);
/// Longest time to the first list.
const LIMIT: Duration = Duration::from_secs(30);
/// Requests to the job gate, and to the baseline.
const ASKED: usize = 3_000;
/// Watchers, and the connections that they share.
const WATCHERS: usize = 1_000;
const CONNECTIONS: usize = 20;
/// Changes that are sent to all watchers.
const CHANGES: usize = 300;
/// Type of the condition that changes, and its provider.
const CONDITION: &str = "BenchReady";
const PROVIDER: &str = "gpuwarden-bench";
/// File name of the fake library, whose pages do not count as the product's.
const FAKE: &str = "libnvidia-ml.so";

pub(crate) async fn run(args: &Args) -> anyhow::Result<Vec<Figure>> {
    let mut rows = Vec::new();
    for count in GPUS {
        progress(&format!("agent of {count} GPUs ..."));
        rows.extend(needs(args, count).await?);
    }
    for limit in confined::LIMITS_MIB {
        progress(&format!("agent of 8 GPUs in a cgroup of {limit} MiB ..."));
        rows.push(match confined::run(args, limit).await {
            Ok(figure) => figure,
            Err(error) => Figure::absent(&format!("gpus-8.confined-{limit}"), format!("{error:#}")),
        });
    }
    progress("job gate ...");
    rows.extend(job_gate().await?);
    progress("watchers ...");
    rows.extend(watchers().await?);
    Ok(rows)
}

/// Sets the fake GPUs of a launch: a number, or the path of a scenario.
fn with_gpus(launch: Launch, gpus: impl AsRef<OsStr>) -> Launch {
    launch
        .node_name("gpuwarden-bench-gpus")
        .option("--history", "0s")
        .option("--fake-gpus", gpus)
}

fn api(product: &Product) -> PathBuf {
    product.data_dir().join("device-api.sock")
}

async fn connect(socket: &Path) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::try_from(format!("unix://{}", socket.display()))?;
    let channel = endpoint.connect().await;
    channel.with_context(|| format!("connect to {}", socket.display()))
}

/// Waits until the Device API lists this number of GPUs.
async fn listed(product: &Product, count: usize) -> anyhow::Result<Vec<Gpu>> {
    let began = Instant::now();
    while began.elapsed() < LIMIT {
        if let Ok(channel) = connect(&api(product)).await {
            let mut client = GpuServiceClient::new(channel);
            let gpus = client
                .list_gpus(ListGpusRequest {})
                .await?
                .into_inner()
                .gpus;
            if gpus.len() == count {
                return Ok(gpus);
            }
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    bail!("{count} GPUs are not listed after {} s", LIMIT.as_secs())
}

/// Measures an idle agent and its GPU probe.
async fn needs(args: &Args, count: u16) -> anyhow::Result<Vec<Figure>> {
    // Without a controller there is nothing to deliver.
    let began = Instant::now();
    let launch = Launch::agent()?.option("--controller", "http://127.0.0.1:9");
    let agent = with_gpus(launch, count.to_string()).start().await?;
    listed(&agent, usize::from(count)).await?;
    let first = began.elapsed();
    tokio::time::sleep(SETTLE).await;
    let probe = *children(agent.pid())?
        .first()
        .context("nobody asks the driver")?;
    let pids = [agent.pid(), probe];
    let before = used(pids)?;
    tokio::time::sleep(Duration::from_secs(args.seconds.into())).await;
    let after = used(pids)?;
    let memory = [memory(agent.pid())?, memory(probe)?];
    let name = |figure: &str| format!("gpus-{count}.{figure}");
    let cores = |index: usize| {
        let busy = after[index].saturating_sub(before[index]);
        busy.as_secs_f64() * 1_000.0 / f64::from(args.seconds)
    };
    let all = memory[0].pss + memory[1].pss;
    Ok(vec![
        Figure::new(name("memory"), all, "MiB").note(format!(
            "PSS; agent {:.1} MiB, the process that asks the driver {:.1} MiB and its library {:.1} \
             more; {:.1} and {:.1} MiB are their own, the rest pages of the executable",
            memory[0].pss, memory[1].pss, memory[1].library, memory[0].own, memory[1].own
        )),
        Figure::new(name("processor"), cores(0) + cores(1), "m of a core")
            .note(format!("agent {:.1}, the other {:.1}", cores(0), cores(1))),
        Figure::new(name("first-list"), first.as_secs_f64() * 1_000.0, "ms")
            .note("from the start of the process"),
    ])
}

fn used(pids: [u32; 2]) -> anyhow::Result<[Duration; 2]> {
    Ok([processor_time(pids[0])?, processor_time(pids[1])?])
}

/// Memory of a process according to `/proc/PID/smaps` (proc(5)), in MiB.
#[derive(Debug, Default, PartialEq)]
struct Memory {
    /// Proportional set size (PSS) without the pages of the fake library.
    pss: f64,
    /// Proportional set size of the fake library's pages.
    library: f64,
    /// Pages without a file.
    own: f64,
}

fn memory(pid: u32) -> anyhow::Result<Memory> {
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    Ok(Memory::parse(&text))
}

impl Memory {
    fn parse(smaps: &str) -> Self {
        let mut memory = Self::default();
        let mut of_library = false;
        for line in smaps.lines() {
            let mut words = line.split_whitespace();
            let (first, second) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
            let mib = second.parse::<f64>().unwrap_or_default() / 1_024.0;
            match first {
                "Pss:" if of_library => memory.library += mib,
                "Pss:" => memory.pss += mib,
                "Anonymous:" if !of_library => memory.own += mib,
                // A mapping begins: "7f00-7f10 r--p 00000000 08:01 123 /path".
                _ if !first.ends_with(':') => of_library = line.contains(FAKE),
                _ => {}
            }
        }
        memory
    }
}

/// Returns the child processes of a process.
fn children(pid: u32) -> anyhow::Result<Vec<u32>> {
    let mut found = Vec::new();
    let tasks = format!("/proc/{pid}/task");
    for task in fs::read_dir(&tasks).with_context(|| format!("read {tasks}"))? {
        let path = task?.path().join("children");
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        found.extend(
            text.split_whitespace()
                .filter_map(|id| id.parse::<u32>().ok()),
        );
    }
    Ok(found)
}

/// Sends many requests to the job gate and, in turns, to the Device API for one GPU.
async fn job_gate() -> anyhow::Result<Vec<Figure>> {
    let launch = with_gpus(Launch::new()?, GPUS[0].to_string());
    let socket = launch.data_dir().join("gate.sock");
    let product = launch.option("--job-gate", &socket).start().await?;
    let gpus = listed(&product, usize::from(GPUS[0])).await?;
    let name = gpus.first().map(|gpu| gpu.name.clone());
    let mut gate = HealthCheckServiceClient::new(connect(&socket).await?);
    let mut device = GpuServiceClient::new(connect(&api(&product)).await?);
    let (mut asked, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..ASKED {
        let began = Instant::now();
        let answer = gate.run_health_check(HealthCheckRequest::default()).await?;
        asked.push(began.elapsed().as_secs_f64() * 1_000.0);
        if !answer.get_ref().success {
            bail!("the node is not fit: {}", answer.get_ref().error);
        }
        let request = GetGpuRequest {
            name: name.clone().unwrap_or_default(),
        };
        let began = Instant::now();
        device.get_gpu(request).await?;
        beside.push(began.elapsed().as_secs_f64() * 1_000.0);
    }
    let figure = |name: &str, of: fn(&[f64]) -> f64| {
        let name = format!("job-gate.{name}");
        Figure::new(name, of(&asked), "ms").beside("GetGpu", of(&beside))
    };
    Ok(vec![
        figure("p50", median),
        figure("p99", |values| percentile(values, 99)),
    ])
}

/// Updates a condition as fast as the responses arrive, while all watchers receive the changes.
async fn watchers() -> anyhow::Result<Vec<Figure>> {
    let product = with_gpus(Launch::new()?, GPUS[0].to_string())
        .start()
        .await?;
    let gpus = listed(&product, usize::from(GPUS[0])).await?;
    let name = &gpus.first().context("no GPU is listed")?.name;
    let mut provider = ProviderServiceClient::new(connect(&api(&product)).await?);
    let request = RegisterGpuRequest {
        name: name.clone(),
        provider_id: PROVIDER.to_owned(),
        ..RegisterGpuRequest::default()
    };
    provider.register_gpu(request).await?;
    let mut slow = GpuServiceClient::new(connect(&api(&product)).await?);
    let _unread = slow.watch_gpus(WatchGpusRequest::default()).await?;
    let mut watching = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let client = GpuServiceClient::new(connect(&api(&product)).await?);
        for _ in 0..WATCHERS / CONNECTIONS {
            watching.spawn(follow(client.clone()));
        }
    }
    // By now every watcher has received its snapshot.
    tokio::time::sleep(SETTLE).await;
    let began = Instant::now();
    let before = processor_time(product.pid())?;
    for change in 1..=CHANGES {
        change_condition(&mut provider, name, change).await?;
    }
    let written = began.elapsed();
    let (mut told, mut missed) = (0, 0);
    let count = watching.len();
    while let Some(followed) = watching.join_next().await {
        let seen = followed??;
        told += seen;
        missed += CHANGES.saturating_sub(seen);
    }
    let took = began.elapsed().as_secs_f64();
    let processor = processor_time(product.pid())?.saturating_sub(before);
    #[allow(clippy::cast_precision_loss)] // Hundreds of thousands.
    let rate = told as f64 / took;
    Ok(vec![Figure::new("watchers.rate", rate, "events/s").note(format!(
        "{CHANGES} changes to {count} watchers over {CONNECTIONS} connections beside one that reads \
         nothing: {missed} missed; the changes were taken in {:.1} s; {:.1} s of processor time",
        written.as_secs_f64(),
        processor.as_secs_f64()
    ))])
}

async fn change_condition(
    provider: &mut ProviderServiceClient<Channel>,
    name: &str,
    change: usize,
) -> anyhow::Result<()> {
    let status = if change.is_multiple_of(2) {
        ConditionStatus::True
    } else {
        ConditionStatus::Unknown
    };
    let condition = Condition {
        r#type: CONDITION.to_owned(),
        status: status.into(),
        reason: "Bench".to_owned(),
        message: change.to_string(),
        ..Condition::default()
    };
    let request = UpdateGpuConditionRequest {
        name: name.to_owned(),
        condition: Some(condition),
        provider_id: PROVIDER.to_owned(),
    };
    provider.update_gpu_condition(request).await?;
    Ok(())
}

/// Watches until the last change arrives. Returns the number of changes received.
async fn follow(mut client: GpuServiceClient<Channel>) -> anyhow::Result<usize> {
    let mut stream = client
        .watch_gpus(WatchGpusRequest::default())
        .await?
        .into_inner();
    let mut told = 0;
    while let Some(event) = stream.message().await? {
        if event.r#type() != WatchEventType::Modified {
            continue;
        }
        let conditions = event.gpu.and_then(|gpu| gpu.status);
        let conditions = conditions
            .map(|status| status.conditions)
            .unwrap_or_default();
        let Some(ours) = conditions.into_iter().find(|one| one.r#type == CONDITION) else {
            continue;
        };
        told += 1;
        if ours.message == CHANGES.to_string() {
            return Ok(told);
        }
    }
    bail!("a watch has ended")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_counts_the_fake_library_apart() {
        let smaps = "5500-5600 r-xp 00000000 08:01 7 /usr/bin/gpuwarden\n\
                     Rss:                3000 kB\nPss:                2048 kB\n\
                     Anonymous:             0 kB\n\
                     5600-5700 rw-p 00000000 00:00 0 \n\
                     Pss:                1024 kB\nAnonymous:          1024 kB\n\
                     7f00-7f10 rw-p 00000000 08:01 9 /data/fake-gpus/libnvidia-ml.so.1\n\
                     Pss:                 512 kB\nAnonymous:           512 kB\n";
        let expected = Memory {
            pss: 3.0,
            library: 0.5,
            own: 1.0,
        };
        assert_eq!(Memory::parse(smaps), expected);
    }
}
