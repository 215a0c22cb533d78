//! Launches of the product that the benchmarks share, and requests to it.

use std::time::Duration;

use anyhow::Context as _;
use console::api::StatusView;
use testkit::{Launch, Product};

use crate::Args;

/// Longest time for a start.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Returns the launch of a `run` without a cluster for this node. It ignores old lines of the
/// kernel log, which are not part of the benchmark.
pub(crate) fn alone(node: &str) -> anyhow::Result<Launch> {
    Ok(Launch::new()?.node_name(node).option("--history", "0s"))
}

/// Returns the launch of a `run` that acts in the cluster, and accepts events for many nodes.
pub(crate) fn run(args: &Args, node: &str) -> anyhow::Result<Launch> {
    acting(alone(node)?.option("--accept-nodes", "any"), args)
}

/// Returns the launch of a controller that quarantines, drains and remediates in the cluster,
/// without agents. There is no election: no other controller acts there, and the cluster may
/// lack the namespace of the Lease.
pub(crate) fn controller(args: &Args) -> anyhow::Result<Launch> {
    let launch = Launch::controller()?
        .arg("--grpc-insecure")
        .option("--grpc-listen", "127.0.0.1:0")
        .option("--leader-elect", "false");
    let launch = launch.arg("--drain").arg("--remediate");
    acting(launch, args)
}

/// Returns the launch of a controller that observes the cluster.
pub(crate) fn observer(args: &Args) -> anyhow::Result<Launch> {
    let launch = Launch::controller()?
        .arg("--grpc-insecure")
        .option("--grpc-listen", "127.0.0.1:0")
        .option("--leader-elect", "false");
    in_cluster(launch, args)
}

fn acting(launch: Launch, args: &Args) -> anyhow::Result<Launch> {
    Ok(in_cluster(launch, args)?.quarantine())
}

fn in_cluster(launch: Launch, args: &Args) -> anyhow::Result<Launch> {
    let kubeconfig = args.kubeconfig.as_ref().context("no cluster is named")?;
    let launch = launch.kubeconfig(kubeconfig);
    Ok(match &args.context {
        Some(context) => launch.option("--context", context),
        None => launch,
    })
}

/// Starts the product and waits until it is ready.
pub(crate) async fn start(launch: Launch) -> anyhow::Result<Product> {
    let product = launch.start().await?;
    ready(&product).await?;
    Ok(product)
}

/// Waits until the product is ready.
pub(crate) async fn ready(product: &Product) -> anyhow::Result<()> {
    product
        .wait_for("readiness", START_LIMIT, || async {
            match status(product).await {
                Ok(status) if status.ready => Ok(()),
                Ok(status) => Err(status.not_ready.join("; ")),
                Err(error) => Err(format!("{error:#}")),
            }
        })
        .await
}

/// Requests the status of the product.
pub(crate) async fn status(product: &Product) -> anyhow::Result<StatusView> {
    Ok(serde_json::from_str(&product.get("/api/v1/status").await?)?)
}

/// Requests the value of a metric without labels.
pub(crate) async fn metric(product: &Product, name: &str) -> anyhow::Result<f64> {
    let metrics = product.get("/metrics").await?;
    let mut values = metrics
        .lines()
        .filter_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    values
        .next()
        .with_context(|| format!("the metrics lack {name}"))
}
