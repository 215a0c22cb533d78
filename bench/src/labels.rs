//! Labels of all nodes of a cluster: nodes per second, beside bare patches of one label each, and
//! the memory of the controller, beside one that writes no labels.

use std::time::{Duration, Instant};

use cli::bench::{Figure, progress, watch};
use serde_json::json;

use crate::nodes::{Nodes, with_nodes};
use crate::{Args, product};

/// Requests at once, as the controller sends.
const WIDTH: usize = 16;
/// Label that every node gets.
const LABEL: &str = "nvsentinel.dgxc.nvidia.com/kata.enabled";

pub(crate) async fn run(args: &Args, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    for count in args.fleet.iter().map(|count| usize::from(*count)) {
        let measured = with_nodes(args, "labels", count, async |nodes| {
            measure(args, nodes, count).await
        });
        rows.extend(measured.await?);
    }
    Ok(())
}

async fn measure(args: &Args, nodes: &Nodes, count: usize) -> anyhow::Result<Vec<Figure>> {
    let name = format!("labels-{count}");
    progress(&format!("{name}, bare patches ..."));
    let patch = json!({"metadata": {"labels": {"nvidia.com/gpu.count": "8"}}});
    let began = Instant::now();
    let form = "application/merge-patch+json";
    nodes.send(count, WIDTH, form, &patch).await?;
    let bare = rate(count, began.elapsed());

    progress(&format!("{name}, observing ..."));
    let observer = product::start(product::observer(args)?).await?;
    let without = format!("{name}.observing");
    let mut rows = watch(&[&without], &[observer.pid()], args.seconds).await?;
    drop(observer);

    progress(&format!("{name}, labelling ..."));
    let began = Instant::now();
    let labeller = product::observer(args)?.arg("--label-nodes");
    let labeller = product::start(labeller).await?;
    let labelled = nodes.labelled(LABEL).await?.duration_since(began);
    let note = "from the start of the process";
    let speed = Figure::new(format!("{name}.speed"), rate(count, labelled), "nodes/s");
    rows.push(speed.beside("bare patches", bare).note(note));
    let with = format!("{name}.labelling");
    rows.extend(watch(&[&with], &[labeller.pid()], args.seconds).await?);
    Ok(rows)
}

#[allow(clippy::cast_precision_loss)] // Far below 2^53.
fn rate(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64()
}
