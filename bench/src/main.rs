//! `cargo xtask bench`: throughput of the decoder and of the store, and the product under load, in
//! a test cluster or alone.
//!
//! `gpuwarden bench` measures the time to a cordon and the cost of an idle process.
//! The product is the release build, started as the tests start it. No figure passes or fails;
//! `docs/benchmarks.md` lists measured values.

mod analyzer;
mod burst;
mod decode;
mod drain;
mod file_system;
mod gpus;
mod labels;
mod memory;
mod nodes;
mod objects;
mod preflight;
mod product;
mod store;
mod storm;
mod taint;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use cli::bench::{Figure, OutputArgs, TICKS, median, progress, show, ticks, watch};
use nodes::with_nodes;
use testkit::Product;

/// Number of scrapes of the metrics in `fleet`.
const SCRAPES: usize = 50;
/// Note of a benchmark that was skipped.
const NO_CLUSTER: &str = "not run: needs a test cluster: name one with --kubeconfig FILE";

/// Measure the product under a load, each figure beside a baseline of the same run.
#[derive(Parser, Clone, Debug)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
#[command(after_help = "Examples:\n  cargo xtask bench\n  \
                  cargo xtask bench burst --kubeconfig \"$(cargo xtask env up)\" -o json")]
struct Args {
    /// Benchmark to run [default: all that can run here].
    #[arg(value_enum, value_name = "NAME")]
    name: Option<Benchmark>,
    /// Kubeconfig of a test cluster, for all but `decode`, `store`, `storm`, `gpus`, `binary` and
    /// the first figure of `preflight`. These create nodes or pods of their own, load the API
    /// server, and delete them.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Number of nodes that fail at once in `burst`, one burst after the other, and in `drain`.
    #[arg(long, default_value = "150,375,750", value_delimiter = ',', value_name = "NUMBER",
          value_parser = clap::value_parser!(u16).range(1..=10_000))]
    nodes: Vec<u16>,
    /// Number of nodes of the cluster in `fleet` and `labels`, one cluster after the other, and of pods
    /// in `objects`.
    #[arg(long, default_value = "1000,5000", value_delimiter = ',', value_name = "NUMBER",
          value_parser = clap::value_parser!(u16).range(1..=20_000))]
    fleet: Vec<u16>,
    /// Number of members of the gangs in `preflight`, one gang after the other.
    #[arg(long, default_value = "2,16,64", value_delimiter = ',', value_name = "NUMBER",
          value_parser = clap::value_parser!(u16).range(2..=8_192))]
    gangs: Vec<u16>,
    /// Length of the measurement of each process by `fleet`, `labels` and `gpus` (seconds).
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    seconds: u32,
    /// Only watch the pods of a namespace, and keep them whole: the baseline of `objects`.
    #[arg(long, hide = true, value_name = "NAMESPACE")]
    whole: Option<String>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Benchmark {
    /// Time to decode a line of kernel log.
    Decode,
    /// Rules of the analysis over a million events.
    Analyzer,
    /// Durable events per second, into the store and into an agent's outbox. TMPDIR names the disk.
    Store,
    /// Hundreds of thousands of lines of a few faults.
    Storm,
    /// Many nodes that fail at once: time until all are cordoned, and until all are returned.
    Burst,
    /// Many nodes with 15 pods each that fail at once, with the largest number of `--nodes`: time
    /// until the last pod is gone, and until a reboot is requested for each node; then one node whose
    /// maintenance is announced. Needs kwok.
    Drain,
    /// Memory and processor time of an idle controller in a cluster of many nodes, and a scrape of its
    /// metrics.
    Fleet,
    /// Memory of a process after bursts and kills in a cluster of 1,000 nodes.
    Memory,
    /// Nodes that are labelled per second, in clusters of `--fleet`, and the memory for it.
    Labels,
    /// Memory and processor time of a policy over as many pods as `--fleet` says.
    Objects,
    /// Time from an XID to the taint of its device.
    Taint,
    /// Cost of an agent with GPUs, of the job gate, and of many watchers of the Device API.
    Gpus,
    /// Start of a preflight check; 1,000 requests per second to the webhook; gangs from the last
    /// address on.
    Preflight,
    /// Size of the executable.
    Binary,
}

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    if let Some(namespace) = &args.whole {
        objects::watch_whole(&args, namespace).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = Vec::new();
    let mut code = ExitCode::SUCCESS;
    for benchmark in Benchmark::value_variants() {
        if args.name.is_some_and(|only| only != *benchmark) {
            continue;
        }
        let name = benchmark.to_possible_value().unwrap_or_default();
        let name = name.get_name();
        let needs_cluster = !matches!(
            benchmark,
            Benchmark::Decode
                | Benchmark::Analyzer
                | Benchmark::Store
                | Benchmark::Storm
                | Benchmark::Gpus
                | Benchmark::Binary
                | Benchmark::Preflight
        );
        if needs_cluster && args.kubeconfig.is_none() {
            rows.push(Figure::absent(name, NO_CLUSTER.to_owned()));
            if args.name.is_some() {
                code = ExitCode::FAILURE;
            }
            continue;
        }
        progress(&format!("{name} ..."));
        // A failure does not lose the figures before it.
        if let Err(error) = run(*benchmark, &args, &mut rows).await {
            rows.push(Figure::absent(name, format!("failed: {error:#}")));
            code = ExitCode::FAILURE;
        }
    }
    show(&rows, &args.output)?;
    Ok(code)
}

/// Appends the figures of one benchmark to the rows.
async fn run(benchmark: Benchmark, args: &Args, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    match benchmark {
        Benchmark::Decode => rows.extend(decode::run()?),
        Benchmark::Analyzer => rows.extend(analyzer::run()?),
        Benchmark::Store => rows.extend(store::run().await?),
        Benchmark::Storm => rows.extend(storm::run().await?),
        Benchmark::Burst => burst::run(args, rows).await?,
        Benchmark::Drain => drain::run(args, rows).await?,
        Benchmark::Fleet => fleet(args, rows).await?,
        Benchmark::Memory => memory::run(args, rows).await?,
        Benchmark::Labels => labels::run(args, rows).await?,
        Benchmark::Objects => objects::run(args, rows).await?,
        Benchmark::Taint => taint::run(args, rows).await?,
        Benchmark::Gpus => rows.extend(gpus::run(args).await?),
        Benchmark::Preflight => preflight::run(args, rows).await?,
        Benchmark::Binary => rows.push(binary()?),
    }
    Ok(())
}

/// Measures a controller in clusters of many nodes.
async fn fleet(args: &Args, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    for count in args.fleet.iter().copied() {
        with_nodes(args, "fleet", usize::from(count), async |_| {
            progress(&format!("fleet of {count} ..."));
            let product = product::start(product::controller(args)?).await?;
            let name = format!("fleet-{count}");
            rows.extend(watch(&[&name], &[product.pid()], args.seconds).await?);
            rows.push(scrape(&name, &product).await?);
            Ok(())
        })
        .await?;
    }
    Ok(())
}

/// Measures a scrape of the metrics of a controller, beside a request that computes nothing.
async fn scrape(name: &str, product: &Product) -> anyhow::Result<Figure> {
    let mut size = 0;
    let mut times = Vec::new();
    let mut bare = Vec::new();
    for _ in 0..SCRAPES {
        let begin = Instant::now();
        size = product.get("/metrics").await?.len();
        times.push(begin.elapsed().as_secs_f64() * 1_000.0);
        let begin = Instant::now();
        product.get("/healthz").await?;
        bare.push(begin.elapsed().as_secs_f64() * 1_000.0);
    }
    Ok(Figure::new(format!("{name}.scrape"), median(&times), "ms")
        .beside("GET /healthz", median(&bare))
        .note(format!("{} kB", size / 1_000)))
}

/// Returns the CPU time that a process has used so far.
fn processor_time(pid: u32) -> anyhow::Result<Duration> {
    let ticks = u32::try_from(ticks(pid)?).unwrap_or(u32::MAX);
    Ok(Duration::from_secs_f64(f64::from(ticks) / TICKS))
}

/// Returns bytes in MiB.
#[allow(clippy::cast_precision_loss)] // Far below 2^53.
fn mib(bytes: u64) -> f64 {
    bytes as f64 / 1_048_576.0
}

fn binary() -> anyhow::Result<Figure> {
    let path = testkit::binary()?;
    let size = fs::metadata(&path)
        .with_context(|| format!("stat {}", path.display()))?
        .len();
    Ok(Figure::new("binary.size", mib(size), "MiB"))
}
