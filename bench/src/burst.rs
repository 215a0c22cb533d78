//! Faults on many nodes at once, on a real cluster: the time until all are cordoned, and until
//! all are returned to service.
//!
//! The faults are sent to a `gpuwarden run` in one batch, as a controller receives them when a
//! row of racks fails. The baselines, in the same run, are loops that only patch the same nodes,
//! over 1, 8 and 32 connections. One watch observes all of them. The loop with 32 connections
//! and gpuwarden take turns, because the throughput of an API server varies more from second to
//! second than the results differ.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cli::bench::{Figure, median, progress};
use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{EVENT_VERSION, HealthEvent, HealthEvents};
use testkit::Product;
use tonic::transport::Endpoint;

use crate::nodes::{Nodes, with_nodes};
use crate::product::{self, metric};
use crate::{Args, processor_time};

/// Connections of the loops that are measured once, for information.
const NARROW: [usize; 2] = [1, 8];
/// Connections of the loop that is the baseline of the rows.
const WIDE: usize = 32;
const BASELINE: &str = "bare loop of 32";
/// Number of turns of the widest loop and gpuwarden; the figures are medians.
const TURNS: usize = 3;
/// Pause between two bursts, so that the taints that the controller manager still sets after the
/// first do not slow down the second.
const QUIET: Duration = Duration::from_secs(3);
/// A product that makes no request for this long has completed its work.
const SETTLED: Duration = Duration::from_secs(1);
/// Longest time until the product is idle.
const SETTLE_LIMIT: Duration = Duration::from_secs(120);
/// Name of the counter of requests in the product's metrics.
const REQUESTS: &str = "gpuwarden_api_server_requests_total";

pub(crate) async fn run(args: &Args, rows: &mut Vec<Figure>) -> anyhow::Result<()> {
    let counts = args.nodes.iter().copied().map(usize::from);
    let most = counts.clone().max().unwrap_or_default();
    with_nodes(args, "burst", most, async |nodes| {
        for count in counts {
            let mut narrow = Vec::new();
            for width in NARROW {
                narrow.push((width, bare(nodes, count, width).await?.cordoned));
            }
            let (mut ours, mut wide) = (Vec::new(), Vec::new());
            for turn in 1..=TURNS {
                wide.push(bare(nodes, count, WIDE).await?);
                progress(&format!("burst of {count}, turn {turn} of {TURNS} ..."));
                let product = product::start(product::run(args, nodes.first())?).await?;
                let burst = burst(&product, nodes, count).await;
                ours.push(burst.map_err(|error| product.failure(&format!("{error:#}")))?);
                drop(product);
                tokio::time::sleep(QUIET).await;
            }
            rows.extend(figures(count, &ours, &wide, &narrow));
        }
        Ok(())
    })
    .await
}

/// Times from the first request until the watch has shown the change on all nodes.
struct Loop {
    cordoned: Duration,
    given_back: Duration,
}

struct Burst {
    took: Loop,
    /// Requests to the API server until all nodes are cordoned and reported.
    requests: f64,
    /// CPU time used until then.
    processor: Duration,
}

async fn bare(nodes: &mut Nodes, count: usize, width: usize) -> anyhow::Result<Loop> {
    progress(&format!("burst of {count}, a bare loop of {width} ..."));
    let cordoned = nodes.bare(count, width, true).await?;
    tokio::time::sleep(QUIET).await;
    let given_back = nodes.bare(count, width, false).await?;
    tokio::time::sleep(QUIET).await;
    Ok(Loop {
        cordoned,
        given_back,
    })
}

async fn burst(product: &Product, nodes: &mut Nodes, count: usize) -> anyhow::Result<Burst> {
    let names = nodes.names(count);
    let before = metric(product, REQUESTS).await?;
    let used = processor_time(product.pid())?;
    let cordoned = send(product, nodes, names.clone(), true).await?;
    let after = settled(product).await?;
    let processor = processor_time(product.pid())?.saturating_sub(used);
    tokio::time::sleep(QUIET).await;
    let given_back = send(product, nodes, names, false).await?;
    settled(product).await?;
    Ok(Burst {
        took: Loop {
            cordoned,
            given_back,
        },
        requests: after - before,
        processor,
    })
}

/// Waits until the product makes no requests. Returns how many it has made.
pub(crate) async fn settled(product: &Product) -> anyhow::Result<f64> {
    let began = Instant::now();
    let mut made = metric(product, REQUESTS).await?;
    while began.elapsed() < SETTLE_LIMIT {
        tokio::time::sleep(SETTLED).await;
        let now = metric(product, REQUESTS).await?;
        if now <= made {
            return Ok(now);
        }
        made = now;
    }
    bail!(
        "requests are still made {} s after the burst",
        SETTLE_LIMIT.as_secs()
    )
}

/// Sends the faults, or their recoveries, and waits until the watch shows the result on all
/// nodes.
async fn send(
    product: &Product,
    nodes: &mut Nodes,
    names: Vec<String>,
    broken: bool,
) -> anyhow::Result<Duration> {
    let count = names.len();
    let began = Instant::now();
    report(product, names, broken).await?;
    let seen = nodes.wait(if broken { count } else { 0 }).await?;
    Ok(seen.duration_since(began))
}

/// Sends the faults, or their recoveries.
pub(crate) async fn report(
    product: &Product,
    names: Vec<String>,
    broken: bool,
) -> anyhow::Result<()> {
    let socket = product.socket().display();
    let channel = Endpoint::try_from(format!("unix://{socket}"))?
        .connect()
        .await
        .with_context(|| format!("connect to {socket}"))?;
    let batch = HealthEvents {
        version: EVENT_VERSION,
        events: names.into_iter().map(|name| event(name, broken)).collect(),
    };
    if let Err(status) = PlatformConnectorClient::new(channel)
        .health_event_occurred_v1(batch)
        .await
    {
        bail!("the events were not taken: {}", status.message());
    }
    Ok(())
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
        recommended_action: contract::RecommendedAction::RestartBm as i32,
        node_name: node,
        ..HealthEvent::default()
    }
}

#[allow(clippy::cast_precision_loss)] // Thousands at most.
fn figures(
    count: usize,
    ours: &[Burst],
    wide: &[Loop],
    narrow: &[(usize, Duration)],
) -> Vec<Figure> {
    let name = |figure: &str| format!("burst-{count}.{figure}");
    let of_wide = |pick: fn(&Loop) -> Duration| middle(wide.iter().map(|it| seconds(pick(it))));
    let of_ours = |pick: fn(&Burst) -> f64| middle(ours.iter().map(pick));
    let rate = |took: f64| count as f64 / took;
    let cordoned = of_ours(|burst| seconds(burst.took.cordoned));
    let bare = of_wide(|bare| bare.cordoned);
    let loops: Vec<String> = narrow
        .iter()
        .map(|(width, took)| (*width, seconds(*took)))
        .chain([(WIDE, bare)])
        .map(|(width, took)| format!("{width}: {:.0}/s", rate(took)))
        .collect();
    vec![
        Figure::new(name("cordoned"), cordoned, "s")
            .beside(BASELINE, bare)
            .note(format!(
                "{:.0} nodes/s; bare loops of {}; {}",
                rate(cordoned),
                loops.join(", "),
                turns(ours, wide, |it| it.cordoned),
            )),
        Figure::new(
            name("given-back"),
            of_ours(|burst| seconds(burst.took.given_back)),
            "s",
        )
        .beside(BASELINE, of_wide(|bare| bare.given_back))
        .note(turns(ours, wide, |it| it.given_back)),
        Figure::new(
            name("requests"),
            of_ours(|burst| burst.requests) / count as f64,
            "/node",
        )
        .beside(BASELINE, 1.0)
        .note("the cordon, and the conditions that tell of it"),
        Figure::new(
            name("processor"),
            of_ours(|burst| seconds(burst.processor)) * 1_000.0 / count as f64,
            "ms/node",
        )
        .note("gpuwarden's own, until all were cordoned and told of"),
    ]
}

fn middle(values: impl Iterator<Item = f64>) -> f64 {
    median(&values.collect::<Vec<_>>())
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

/// Returns the times of ours and of the loop before it in each turn, in seconds: `turns
/// 3.10/2.90, 3.00/2.40`.
fn turns(ours: &[Burst], wide: &[Loop], pick: fn(&Loop) -> Duration) -> String {
    let pairs = ours.iter().zip(wide).map(|(ours, bare)| {
        let (ours, bare) = (seconds(pick(&ours.took)), seconds(pick(bare)));
        format!("{ours:.2}/{bare:.2}")
    });
    format!("turns {}", pairs.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stand_beside_the_widest_loop() {
        let second = Duration::from_secs;
        let took = |cordoned: u64, given_back: u64| Loop {
            cordoned: second(cordoned),
            given_back: second(given_back),
        };
        let burst = |cordoned: u64, given_back: u64| Burst {
            took: took(cordoned, given_back),
            requests: 60.0,
            processor: second(3),
        };
        let ours = [burst(3, 6), burst(2, 7), burst(9, 5)];
        let wide = [took(2, 3), took(1, 9), took(2, 2)];
        let rows = figures(30, &ours, &wide, &[(1, second(9))]);
        let told: Vec<_> = rows
            .iter()
            .map(|row| (row.name.as_str(), row.value, row.ratio))
            .collect();
        assert_eq!(
            told,
            [
                ("burst-30.cordoned", Some(3.0), Some(1.5)),
                ("burst-30.given-back", Some(6.0), Some(2.0)),
                ("burst-30.requests", Some(2.0), Some(2.0)),
                ("burst-30.processor", Some(100.0), None),
            ]
        );
        assert_eq!(
            rows[0].note,
            "10 nodes/s; bare loops of 1: 3/s, 32: 15/s; turns 3.00/2.00, 2.00/1.00, 9.00/2.00"
        );
    }
}
