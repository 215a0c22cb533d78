//! What a process that has nothing to do needs: memory, processor time, threads.

use std::time::Duration;

use super::burst::Nodes;
use super::cordon::TestNode;
use super::product::{Product, Role};
use super::usage::{TICKS, Usage, ticks};
use super::{Row, progress};
use crate::args::BenchArgs;
use crate::output::warning;

/// How long it is left alone first.
const SETTLE: Duration = Duration::from_secs(5);

pub(super) async fn run(args: &BenchArgs) -> anyhow::Result<Vec<Row>> {
    let product = Product::start(args, "gpuwarden-bench-idle", Role::Alone).await?;
    let mut rows = observe(args, &["idle"], product).await?;
    if args.kubeconfig.is_some() {
        let node = TestNode::create(args).await?;
        let observed = with_a_cluster(args, node.name()).await;
        node.delete().await?;
        rows.extend(observed?);
    }
    Ok(rows)
}

async fn with_a_cluster(args: &BenchArgs, node: &str) -> anyhow::Result<Vec<Row>> {
    progress("idle, with a cluster ...");
    let product = Product::start(args, node, Role::Run).await?;
    let mut rows = observe(args, &["idle-cluster"], product).await?;
    progress("idle, agent and controller ...");
    let product = Product::start(args, node, Role::Apart).await?;
    rows.extend(observe(args, &["idle-agent", "idle-controller"], product).await?);
    Ok(rows)
}

/// A controller in clusters of many nodes.
pub(super) async fn fleet(args: &BenchArgs) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for count in args.fleet.iter().copied() {
        progress(&format!("fleet, making {count} nodes ..."));
        let nodes = Nodes::create(args, usize::from(count)).await?;
        progress(&format!("fleet of {count} ..."));
        let observed = tokio::select! {
            observed = controller(args, count) => observed,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        };
        let deleted = nodes.delete().await;
        rows.extend(observed?);
        if let Err(error) = deleted {
            // What was measured so far is not lost for it.
            warning(&format!("no larger fleet is made: {error:#}"));
            break;
        }
    }
    Ok(rows)
}

async fn controller(args: &BenchArgs, count: u16) -> anyhow::Result<Vec<Row>> {
    let product = Product::start(args, "", Role::Controller).await?;
    observe(args, &[&format!("fleet-{count}")], product).await
}

/// Watches the processes for a while; one name for each.
async fn observe(args: &BenchArgs, names: &[&str], product: Product) -> anyhow::Result<Vec<Row>> {
    let pids = product.pids()?;
    tokio::time::sleep(SETTLE).await;
    let mut before = Vec::new();
    for pid in &pids {
        before.push(ticks(*pid)?);
    }
    tokio::time::sleep(Duration::from_secs(u64::from(args.seconds))).await;
    let mut rows = Vec::new();
    for ((name, pid), before) in names.iter().zip(pids).zip(before) {
        let used = ticks(pid)?.saturating_sub(before);
        rows.extend(figures(name, args.seconds, used, &Usage::read(pid)?));
    }
    product.stop().await?;
    Ok(rows)
}

fn figures(name: &str, seconds: u32, used: u64, usage: &Usage) -> Vec<Row> {
    let resolution = 1_000.0 / TICKS / f64::from(seconds);
    let millicores = f64::from(u32::try_from(used).unwrap_or(u32::MAX)) * resolution;
    vec![
        Row::new(format!("{name}.rss"), usage.rss, "MiB").note(format!(
            "of this {:.1} MiB are its own, the rest pages of the executable; {:.1} MiB at most so far",
            usage.own, usage.peak
        )),
        Row::new(format!("{name}.cpu"), millicores, "m").note(format!(
            "thousandths of a core, over {seconds} s; told in steps of {resolution:.1}"
        )),
        Row::new(format!("{name}.threads"), usage.threads, "threads"),
    ]
}
