//! Memory that a process retains in a cluster of 1,000 nodes, after bursts of faults and
//! recoveries. Each burst begins with a kill, so that the next process handles the faults.

use std::time::Duration;

use anyhow::Context as _;
use cli::bench::{Figure, Usage, progress};
use testkit::Product;

use crate::Args;
use crate::burst::{report, settled};
use crate::nodes::{Nodes, with_nodes};
use crate::product;

/// Nodes of the cluster.
const NODES: usize = 1_000;
/// Nodes that fail at once.
const FAIL: usize = 750;
/// Number of kills, each followed by a burst.
const ROUNDS: usize = 10;
/// Concurrent requests while nodes are returned to service.
const WIDTH: usize = 32;
/// Idle time of a process before it is measured.
const SETTLE: Duration = Duration::from_secs(3);

pub(crate) async fn run(args: &Args, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    let figures = with_nodes(args, "memory", NODES, async |nodes| {
        measure(args, nodes).await
    });
    rows.extend(figures.await?);
    Ok(())
}

async fn measure(args: &Args, nodes: &mut Nodes) -> anyhow::Result<Vec<Figure>> {
    let mut product = product::start(product::run(args, nodes.first())?).await?;
    let names = nodes.names(FAIL);
    let idle = usage(&product).await?;
    report(&product, names.clone(), true).await?;
    nodes.wait(FAIL).await?;
    let burst = usage(&product).await?;
    report(&product, names.clone(), false).await?;
    nodes.wait(0).await?;
    let recovered = usage(&product).await?;
    let mut killed = Vec::new();
    for round in 1..=ROUNDS {
        progress(&format!("memory, kill {round} of {ROUNDS} ..."));
        report(&product, names.clone(), true).await?;
        product.restart().await?;
        product::ready(&product).await?;
        nodes.wait(FAIL).await?;
        give_back(&product, nodes).await?;
        killed.push(usage(&product).await?);
    }
    // The last process runs through as many bursts again.
    for round in 1..=ROUNDS {
        progress(&format!("memory, burst {round} of {ROUNDS} ..."));
        report(&product, names.clone(), true).await?;
        nodes.wait(FAIL).await?;
        give_back(&product, nodes).await?;
    }
    let last = usage(&product).await?;
    let of = |figure: &str, usage: &Usage| {
        let note = format!(
            "of this {:.1} MiB are its own; {:.1} MiB at most so far",
            usage.own, usage.peak
        );
        Figure::new(format!("memory-{NODES}.{figure}"), usage.rss, "MiB").note(note)
    };
    let first = killed.first().context("no rounds")?;
    let latest = killed.last().context("no rounds")?;
    Ok(vec![
        of("idle", &idle),
        of(&format!("burst-{FAIL}"), &burst),
        of("recovered", &recovered),
        of("killed-1", first),
        of(&format!("killed-{ROUNDS}"), latest).beside("killed once", first.rss),
        of(&format!("{ROUNDS}-bursts-later"), &last).beside("before them", latest.rss),
    ])
}

/// Uncordons the nodes as a person would. A recovery would be held back, because the nodes have
/// recovered before.
async fn give_back(product: &Product, nodes: &mut Nodes) -> anyhow::Result<()> {
    nodes.uncordon(FAIL, WIDTH).await?;
    report(product, nodes.names(FAIL), false).await?;
    settled(product).await?;
    Ok(())
}

/// Measures the product once it makes no requests.
async fn usage(product: &Product) -> anyhow::Result<Usage> {
    settled(product).await?;
    tokio::time::sleep(SETTLE).await;
    Usage::read(product.pid())
}
