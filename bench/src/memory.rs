//! The memory that a process keeps: in a cluster of a thousand nodes, through bursts of faults
//! and recoveries, each begun with a kill that leaves the faults to the next process.

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
/// The number of times that it is killed.
const ROUNDS: usize = 10;
/// Requests at once while nodes are given back.
const WIDTH: usize = 32;
/// The time for which a process is left alone before it is measured.
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
    // The last process goes on living, through as many bursts.
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

/// Gives the nodes back by hand, for a recovery would wait: they have come back before.
async fn give_back(product: &Product, nodes: &mut Nodes) -> anyhow::Result<()> {
    nodes.uncordon(FAIL, WIDTH).await?;
    report(product, nodes.names(FAIL), false).await?;
    settled(product).await?;
    Ok(())
}

/// Measures the product when it has told all that it has to tell.
async fn usage(product: &Product) -> anyhow::Result<Usage> {
    settled(product).await?;
    tokio::time::sleep(SETTLE).await;
    Usage::read(product.pid())
}
