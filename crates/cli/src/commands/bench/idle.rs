//! What a process that has nothing to do needs: memory, processor time, threads.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::burst::Nodes;
use super::cordon::TestNode;
use super::product::{Product, Role};
use super::{Row, progress};
use crate::args::BenchArgs;

/// How long it is left alone first.
const SETTLE: Duration = Duration::from_secs(5);
/// Ticks a second in which Linux tells processor time, on all its architectures (`USER_HZ`).
const TICKS: f64 = 100.0;

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
        deleted?;
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

/// What `/proc/PID/status` says (proc(5)). Memory in MiB.
#[derive(Debug, PartialEq)]
pub(super) struct Usage {
    rss: f64,
    own: f64,
    /// The most so far.
    pub(super) peak: f64,
    threads: f64,
}

// === impl Usage ===

impl Usage {
    pub(super) fn read(pid: u32) -> anyhow::Result<Self> {
        let path = format!("/proc/{pid}/status");
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        Self::parse(&text).with_context(|| format!("{path} lacks a field"))
    }

    fn parse(text: &str) -> Option<Self> {
        let number = |name: &str| -> Option<f64> {
            let mut lines = text.lines();
            let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            value.split_whitespace().next()?.parse().ok()
        };
        Some(Self {
            rss: number("VmRSS")? / 1_024.0,
            own: number("RssAnon")? / 1_024.0,
            peak: number("VmHWM")? / 1_024.0,
            threads: number("Threads")?,
        })
    }
}

/// Processor time of a process so far.
pub(super) fn processor_time(pid: u32) -> anyhow::Result<Duration> {
    let ticks = u32::try_from(ticks(pid)?).unwrap_or(u32::MAX);
    Ok(Duration::from_secs_f64(f64::from(ticks) / TICKS))
}

/// The same in ticks.
fn ticks(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let ticks = parse_ticks(&text);
    ensure!(ticks.is_some(), "{path} lacks a field");
    Ok(ticks.unwrap_or_default())
}

/// User and system time. The name in parentheses may hold anything, so fields are counted
/// behind it.
fn parse_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11);
    let user: u64 = times.next()?.parse().ok()?;
    let system: u64 = times.next()?.parse().ok()?;
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_found_behind_any_name() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 100 0 3 0 21 13 0 0 20 0 5 0 100 1000 200";
        assert_eq!(parse_ticks(stat), Some(34));
        assert_eq!(parse_ticks("7 (a) S 1"), None);
        assert!(ticks(std::process::id()).is_ok());
    }

    #[test]
    fn memory_is_told_in_mib() {
        let text = "Name:\tx\nVmHWM:\t    4096 kB\nVmRSS:\t    2048 kB\nRssAnon:\t    1024 kB\nThreads:\t7\n";
        let expected = Usage {
            rss: 2.0,
            own: 1.0,
            peak: 4.0,
            threads: 7.0,
        };
        assert_eq!(Usage::parse(text), Some(expected));
        assert_eq!(Usage::parse("VmRSS:\t1 kB\n"), None);
        assert!(Usage::read(std::process::id()).unwrap().rss > 0.0);
    }
}
