//! `gpuwarden bench`: time from a fault to a cordon, and the cost of an idle process, on the
//! operator's machine. The benchmarks for developers are in `bench/` at the top of the repository.
//!
//! Each figure stands beside a baseline that the same run measures in turns with it, so that their
//! ratio is meaningful on a busy machine too. No figure passes or fails. `docs/benchmarks.md`
//! lists measured values.

mod cordon;
mod figures;
mod idle;
mod product;
mod usage;

use anyhow::bail;
use clap::ValueEnum as _;

use crate::args::{BenchArgs, Benchmark};
use crate::{EXIT_FAILED, EXIT_OK};

pub use cordon::client as cluster_client;
pub use figures::{Figure, median, percentile, progress, show};
pub use idle::watch;
pub use usage::{TICKS, Usage, ticks};

pub(super) async fn execute(args: &BenchArgs) -> anyhow::Result<u8> {
    let mut rows = Vec::new();
    let mut code = EXIT_OK;
    for &benchmark in Benchmark::value_variants() {
        if args.name.is_some_and(|only| only != benchmark) {
            continue;
        }
        let name = name(benchmark);
        if let Some(missing) = missing(benchmark, args) {
            if args.name.is_some() {
                bail!("{name} {missing}");
            }
            rows.push(Figure::absent(&name, format!("not run: {missing}")));
            continue;
        }
        progress(&format!("{name} ..."));
        match run(benchmark, args).await {
            Ok(figures) => rows.extend(figures),
            Err(error) if args.name.is_some() => return Err(error.context(name)),
            // The figures of the other benchmarks are kept.
            Err(error) => {
                rows.push(Figure::absent(&name, format!("failed: {error:#}")));
                code = EXIT_FAILED;
            }
        }
    }
    show(&rows, &args.output)?;
    Ok(code)
}

async fn run(benchmark: Benchmark, args: &BenchArgs) -> anyhow::Result<Vec<Figure>> {
    match benchmark {
        Benchmark::Cordon => cordon::run(args).await,
        Benchmark::Idle => idle::run(args).await,
    }
}

/// Returns what a benchmark needs and was not given.
fn missing(benchmark: Benchmark, args: &BenchArgs) -> Option<&'static str> {
    (benchmark == Benchmark::Cordon && args.kubeconfig.is_none())
        .then_some("needs a test cluster: name one with --kubeconfig FILE")
}

fn name(benchmark: Benchmark) -> String {
    let value = benchmark.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}
