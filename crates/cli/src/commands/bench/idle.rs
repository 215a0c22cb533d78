//! Memory, processor time and threads of an idle process.

use std::time::Duration;

use super::cordon::TestNode;
use super::product::{Product, Setup};
use super::usage::{TICKS, Usage, ticks};
use super::{Figure, progress};
use crate::args::BenchArgs;

/// Pause after the start before the measurement.
const SETTLE: Duration = Duration::from_secs(5);

pub(super) async fn run(args: &BenchArgs) -> anyhow::Result<Vec<Figure>> {
    let product = Product::start(args, "gpuwarden-bench-idle", Setup::Alone).await?;
    let mut rows = observe(args, &["idle"], product).await?;
    if args.kubeconfig.is_some() {
        let node = TestNode::create(args).await?;
        let observed = with_a_cluster(args, node.name()).await;
        node.delete().await?;
        rows.extend(observed?);
    }
    Ok(rows)
}

async fn with_a_cluster(args: &BenchArgs, node: &str) -> anyhow::Result<Vec<Figure>> {
    progress("idle, with a cluster ...");
    let product = Product::start(args, node, Setup::Run).await?;
    let mut rows = observe(args, &["idle-cluster"], product).await?;
    progress("idle, agent and controller ...");
    let product = Product::start(args, node, Setup::Apart).await?;
    rows.extend(observe(args, &["idle-agent", "idle-controller"], product).await?);
    Ok(rows)
}

async fn observe(
    args: &BenchArgs,
    names: &[&str],
    product: Product,
) -> anyhow::Result<Vec<Figure>> {
    let rows = watch(names, &product.pids()?, args.seconds).await?;
    product.stop().await?;
    Ok(rows)
}

/// Measures idle processes for some seconds; `names` has one for each.
pub async fn watch(names: &[&str], pids: &[u32], seconds: u32) -> anyhow::Result<Vec<Figure>> {
    tokio::time::sleep(SETTLE).await;
    let mut before = Vec::new();
    for pid in pids {
        before.push(ticks(*pid)?);
    }
    tokio::time::sleep(Duration::from_secs(u64::from(seconds))).await;
    let mut rows = Vec::new();
    for ((name, pid), before) in names.iter().zip(pids).zip(before) {
        let used = ticks(*pid)?.saturating_sub(before);
        rows.extend(figures(name, seconds, used, &Usage::read(*pid)?));
    }
    Ok(rows)
}

fn figures(name: &str, seconds: u32, used: u64, usage: &Usage) -> Vec<Figure> {
    let resolution = 1_000.0 / TICKS / f64::from(seconds);
    let millicores = f64::from(u32::try_from(used).unwrap_or(u32::MAX)) * resolution;
    vec![
        Figure::new(format!("{name}.rss"), usage.rss, "MiB").note(format!(
            "{:.1} MiB of this are its own, the rest are pages of the executable; peak {:.1} MiB",
            usage.own, usage.peak
        )),
        Figure::new(format!("{name}.cpu"), millicores, "m").note(format!(
            "thousandths of a core, over {seconds} s; resolution {resolution:.1}"
        )),
        Figure::new(format!("{name}.threads"), usage.threads, "threads"),
    ]
}
