//! Many nodes fail at once, on a real cluster: until all are cordoned, and until all are
//! given back.
//!
//! The faults are sent to a `gpuwarden run` of our own in one batch, as a controller gets
//! them after the failure of a row. Beside it, in the same run, stand bare loops that patch
//! the same nodes and do nothing else, over 1, 8 and 32 connections. All are seen by the same
//! watch.

mod nodes;

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{EVENT_VERSION, HealthEvent, HealthEvents};
use tonic::transport::Endpoint;

use super::product::{Product, Role};
use super::{Row, progress};
use crate::args::BenchArgs;

pub(super) use nodes::Nodes;

/// Connections of the bare loops.
const WIDTHS: [usize; 3] = [1, 8, 32];
/// The loop that a row is compared with.
const BASELINE: &str = "bare loop of 32";
/// Pause between two bursts: what the first has left to do (conditions, the journal, the
/// controller manager's taints) is not the second one's.
const QUIET: Duration = Duration::from_secs(3);
/// Counter of requests in the product's metrics.
const REQUESTS: &str = "gpuwarden_api_server_requests_total";

pub(super) async fn run(args: &BenchArgs) -> anyhow::Result<Vec<Row>> {
    let most = args
        .nodes
        .iter()
        .copied()
        .map(usize::from)
        .max()
        .unwrap_or_default();
    progress(&format!("burst, making {most} nodes ..."));
    let mut nodes = Nodes::create(args, most).await?;
    let rows = tokio::select! {
        rows = measure(args, &mut nodes) => rows,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    let deleted = nodes.delete().await;
    let rows = rows?;
    deleted.map(|()| rows)
}

async fn measure(args: &BenchArgs, nodes: &mut Nodes) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for count in args.nodes.iter().copied().map(usize::from) {
        let mut bare = Vec::new();
        for width in WIDTHS {
            progress(&format!("burst of {count}, a bare loop of {width} ..."));
            let there = nodes.bare(count, width, true).await?;
            let back = nodes.bare(count, width, false).await?;
            bare.push((width, there, back));
            tokio::time::sleep(QUIET).await;
        }
        progress(&format!("burst of {count} ..."));
        let product = Product::start(args, nodes.first(), Role::Run).await?;
        let result = burst(&product, nodes, count).await;
        let ours = match result {
            Ok(ours) => ours,
            Err(error) => return Err(product.blame(&error)),
        };
        product.stop().await?;
        tokio::time::sleep(QUIET).await;
        rows.extend(figures(count, &ours, &bare));
    }
    Ok(rows)
}

/// What a burst took.
struct Burst {
    cordoned: Duration,
    given_back: Duration,
    /// Requests to the API server until all were cordoned and told of.
    requests: f64,
}

async fn burst(product: &Product, nodes: &mut Nodes, count: usize) -> anyhow::Result<Burst> {
    let names = nodes.names(count);
    let before = requests(product).await?;
    let cordoned = send(product, nodes, names.clone(), true).await?;
    tokio::time::sleep(QUIET).await;
    let after = requests(product).await?;
    let given_back = send(product, nodes, names, false).await?;
    Ok(Burst {
        cordoned,
        given_back,
        requests: after - before,
    })
}

/// Sends the faults, or their recoveries, and waits until all nodes are seen so.
async fn send(
    product: &Product,
    nodes: &mut Nodes,
    names: Vec<String>,
    broken: bool,
) -> anyhow::Result<Duration> {
    let socket = product.socket.display();
    let channel = Endpoint::try_from(format!("unix://{socket}"))?
        .connect()
        .await
        .with_context(|| format!("connect to {socket}"))?;
    let count = names.len();
    let batch = HealthEvents {
        version: EVENT_VERSION,
        events: names.into_iter().map(|name| event(name, broken)).collect(),
    };
    let began = Instant::now();
    if let Err(status) = PlatformConnectorClient::new(channel)
        .health_event_occurred_v1(batch)
        .await
    {
        bail!("the events were not taken: {}", status.message());
    }
    let seen = nodes.wait(if broken { count } else { 0 }).await?;
    Ok(seen.duration_since(began))
}

fn event(node: String, broken: bool) -> HealthEvent {
    HealthEvent {
        version: EVENT_VERSION,
        agent: "gpuwarden-bench".to_owned(),
        component_class: contract::keys::COMPONENT_GPU.to_owned(),
        check_name: "Burst".to_owned(),
        is_fatal: broken,
        is_healthy: !broken,
        message: "the power of a row has failed".to_owned(),
        node_name: node,
        ..HealthEvent::default()
    }
}

/// How many requests the product has made so far.
async fn requests(product: &Product) -> anyhow::Result<f64> {
    let metrics = product.client.get_bytes("/metrics").await?;
    let value = String::from_utf8_lossy(&metrics)
        .lines()
        .find_map(|line| line.strip_prefix(REQUESTS)?.trim().parse().ok());
    value.with_context(|| format!("the metrics lack {REQUESTS}"))
}

#[allow(clippy::cast_precision_loss)] // Thousands at most.
fn figures(count: usize, ours: &Burst, bare: &[(usize, Duration, Duration)]) -> Vec<Row> {
    let name = |figure: &str| format!("burst-{count}.{figure}");
    let (there, back) = bare
        .last()
        .map(|(_, there, back)| (there.as_secs_f64(), back.as_secs_f64()))
        .unwrap_or_default();
    let rate = |took: Duration| count as f64 / took.as_secs_f64();
    let loops: Vec<String> = bare
        .iter()
        .map(|(width, there, _)| format!("{width}: {:.0}/s", rate(*there)))
        .collect();
    vec![
        Row::new(name("cordoned"), ours.cordoned.as_secs_f64(), "s")
            .beside(BASELINE, there)
            .note(format!(
                "{:.0} nodes/s; bare loops of {}",
                rate(ours.cordoned),
                loops.join(", ")
            )),
        Row::new(name("given-back"), ours.given_back.as_secs_f64(), "s").beside(BASELINE, back),
        Row::new(name("requests"), ours.requests / count as f64, "/node")
            .beside(BASELINE, 1.0)
            .note("the cordon, and the conditions that tell of it"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stand_beside_the_widest_loop() {
        let second = Duration::from_secs;
        let ours = Burst {
            cordoned: second(3),
            given_back: second(6),
            requests: 60.0,
        };
        let bare = [(1, second(9), second(9)), (32, second(2), second(3))];
        let rows = figures(30, &ours, &bare);
        let told: Vec<_> = rows
            .iter()
            .map(|row| (row.name.as_str(), row.ratio))
            .collect();
        assert_eq!(
            told,
            [
                ("burst-30.cordoned", Some(1.5)),
                ("burst-30.given-back", Some(2.0)),
                ("burst-30.requests", Some(2.0)),
            ]
        );
        assert_eq!(rows[0].note, "10 nodes/s; bare loops of 1: 3/s, 32: 15/s");
    }
}
