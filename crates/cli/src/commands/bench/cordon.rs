//! Time from a line of kernel log to a cordoned node, on a real cluster.
//!
//! The benchmark creates a node object and watches it. A round writes an XID line, waits until the
//! watch shows the node cordoned, sends the recovery, and waits until the node is returned. Then the
//! node is created anew, since only the first return of a node has no waiting time. Before each
//! round, as the baseline, the same client cordons the node with a bare PATCH, like `kubectl cordon`,
//! under the same watch.

mod load;
mod node;
mod story;

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{EVENT_VERSION, HealthEvent, HealthEvents, RecommendedAction};
use jiff::Timestamp;
use tonic::transport::{Channel, Endpoint};

use super::figures::{median, percentile};
use super::product::{Product, Setup};
use super::{Figure, progress};
use crate::args::BenchArgs;
use load::Load;
use story::Parts;

pub(super) use node::TestNode;
pub use node::client;

/// Rounds before the measured ones, which open connections and prepare statements.
const WARM_UP: u32 = 3;
/// Number of starts whose first cordon is measured.
const STARTS: u32 = 10;
/// Pause between an observed change and the next one.
const QUIET: Duration = Duration::from_millis(40);
/// Name of all baselines.
const BASELINE: &str = "bare PATCH";
/// Line of the fault, at a PCI address that no machine has a GPU at.
const FAULT: &str =
    "NVRM: Xid (PCI:0000:fe:1f): 79, pid=48213, name=python3, GPU has fallen off the bus.";

/// Times of a round (ms).
struct Round {
    /// From the line to the cordoned node.
    cordon: f64,
    /// From the recovery to the returned node.
    recovery: f64,
    /// Parts of `cordon`, from the product's own journal.
    parts: Parts,
}

pub(super) async fn run(args: &BenchArgs) -> anyhow::Result<Vec<Figure>> {
    let mut node = TestNode::create(args).await?;
    let rows = tokio::select! {
        rows = measure(args, &mut node) => rows,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    let deleted = node.delete().await;
    let rows = rows?;
    deleted.map(|()| rows)
}

async fn measure(args: &BenchArgs, node: &mut TestNode) -> anyhow::Result<Vec<Figure>> {
    let mut rows = first(args, node).await?;
    rows.extend(warm(args, node).await?);

    progress("cordon, with other events ...");
    let product = Product::start(args, node.name(), Setup::Run).await?;
    let (product, _) = rounds(product, node, WARM_UP, None).await?;
    let load = Load::start(connect(&product).await?, node.name())?;
    let mut bare = Vec::new();
    let (product, busy) = rounds(product, node, args.rounds, Some(&mut bare)).await?;
    let rate = load.stop().await?;
    product.stop().await?;
    let busy = figures("cordon-busy", &busy, &bare);
    rows.extend(busy.into_iter().map(|row| {
        let note = format!("with {rate:.0} other events a second on the socket");
        if row.name == "cordon-busy.p50" {
            row.note(note)
        } else {
            row
        }
    }));
    Ok(rows)
}

/// Measures the first cordon after a start.
async fn first(args: &BenchArgs, node: &mut TestNode) -> anyhow::Result<Vec<Figure>> {
    progress("cordon, the first after a start ...");
    let (mut firsts, mut bare) = (Vec::new(), Vec::new());
    for _ in 0..STARTS {
        let product = Product::start(args, node.name(), Setup::Run).await?;
        node.connect_anew(args).await?;
        bare.push(node.bare_round().await?);
        let (product, round) = rounds(product, node, 1, None).await?;
        firsts.extend(round);
        product.stop().await?;
    }
    Ok(figures("cordon-first", &firsts, &bare))
}

/// Measures cordons of a warm process, and of a warm agent with its controller.
async fn warm(args: &BenchArgs, node: &mut TestNode) -> anyhow::Result<Vec<Figure>> {
    let mut rows = Vec::new();
    for (name, role) in [("cordon", Setup::Run), ("cordon-apart", Setup::Apart)] {
        progress(&format!("{name} ..."));
        let product = Product::start(args, node.name(), role).await?;
        let (product, _) = rounds(product, node, WARM_UP, None).await?;
        let mut bare = Vec::new();
        let (product, idle) = rounds(product, node, args.rounds, Some(&mut bare)).await?;
        product.stop().await?;
        rows.extend(figures(name, &idle, &bare));
    }
    Ok(rows)
}

/// Measures `count` rounds. With `bare`, a bare round precedes each, and `bare` gets its time. An
/// error quotes the product's log.
async fn rounds(
    mut product: Product,
    node: &mut TestNode,
    count: u32,
    mut bare: Option<&mut Vec<f64>>,
) -> anyhow::Result<(Product, Vec<Round>)> {
    let mut connector = connect(&product).await?;
    let mut rounds = Vec::new();
    for _ in 0..count {
        if let Some(bare) = &mut bare {
            bare.push(node.bare_round().await?);
            tokio::time::sleep(QUIET).await;
        }
        match round(&mut product, &mut connector, node).await {
            Ok(round) => rounds.push(round),
            Err(error) => return Err(product.blame(&error)),
        }
        node.renew().await?;
        tokio::time::sleep(QUIET).await;
    }
    Ok((product, rounds))
}

async fn round(
    product: &mut Product,
    connector: &mut PlatformConnectorClient<Channel>,
    node: &mut TestNode,
) -> anyhow::Result<Round> {
    let (written, began) = (Timestamp::now(), Instant::now());
    product.log.write(FAULT)?;
    let seen = node.wait(true).await?;
    let parts = story::read(&product.client, node.name(), written).await?;
    tokio::time::sleep(QUIET).await;
    let recovering = Instant::now();
    send(connector, recovery(node.name())?).await?;
    let given_back = node.wait(false).await?;
    Ok(Round {
        cordon: millis(seen.duration_since(began)),
        recovery: millis(given_back.duration_since(recovering)),
        parts,
    })
}

/// Returns the figures of the rounds, whose names begin with `name`.
fn figures(name: &str, rounds: &[Round], bare: &[f64]) -> Vec<Figure> {
    let unit = "ms";
    let of = |part: fn(&Round) -> f64| rounds.iter().map(part).collect::<Vec<f64>>();
    let cordon = of(|round| round.cordon);
    let mut rows = vec![
        Figure::new(format!("{name}.p50"), median(&cordon), unit).beside(BASELINE, median(bare)),
        Figure::new(format!("{name}.p99"), percentile(&cordon, 99), unit)
            .beside(BASELINE, percentile(bare, 99)),
        Figure::new(format!("{name}.max"), percentile(&cordon, 100), unit)
            .beside(BASELINE, percentile(bare, 100)),
    ];
    for (part, values) in [
        ("line-to-event", of(|round| round.parts.line_to_event)),
        ("event-to-call", of(|round| round.parts.event_to_call)),
        ("call-to-answer", of(|round| round.parts.call_to_answer)),
        ("recovery", of(|round| round.recovery)),
    ] {
        let name = format!("{name}.{part}");
        rows.push(Figure::new(format!("{name}.p50"), median(&values), unit));
        rows.push(Figure::new(
            format!("{name}.p99"),
            percentile(&values, 99),
            unit,
        ));
    }
    rows
}

async fn connect(product: &Product) -> anyhow::Result<PlatformConnectorClient<Channel>> {
    let socket = product.socket.display();
    let channel = Endpoint::try_from(format!("unix://{socket}"))?
        .connect()
        .await
        .with_context(|| format!("connect to {socket}"))?;
    Ok(PlatformConnectorClient::new(channel))
}

async fn send(
    connector: &mut PlatformConnectorClient<Channel>,
    event: HealthEvent,
) -> anyhow::Result<()> {
    let batch = HealthEvents {
        version: EVENT_VERSION,
        events: vec![event],
    };
    if let Err(status) = connector.health_event_occurred_v1(batch).await {
        bail!("an event was rejected: {}", status.message());
    }
    Ok(())
}

/// Returns the event that closes the fault of [`FAULT`].
fn recovery(node: &str) -> anyhow::Result<HealthEvent> {
    Ok(HealthEvent {
        is_healthy: true,
        is_fatal: false,
        recommended_action: RecommendedAction::None as i32,
        message: "the benchmark's round is over".to_owned(),
        ..event(FAULT, node)?
    })
}

fn event(line: &str, node: &str) -> anyhow::Result<HealthEvent> {
    agent::kernel_log::event_of_line(line, node, Timestamp::now())
        .context("our own decoder does not decode the line")
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_named_and_compared() {
        let round = |cordon| Round {
            cordon,
            recovery: 4.0,
            parts: Parts {
                line_to_event: 1.0,
                event_to_call: 2.0,
                call_to_answer: 3.0,
            },
        };
        let rows = figures("cordon", &[round(10.0), round(30.0), round(20.0)], &[5.0]);
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.name.as_str(), row.value, row.ratio))
            .collect();
        assert_eq!(
            found.get(..4).unwrap(),
            [
                ("cordon.p50", Some(20.0), Some(4.0)),
                ("cordon.p99", Some(30.0), Some(6.0)),
                ("cordon.max", Some(30.0), Some(6.0)),
                ("cordon.line-to-event.p50", Some(1.0), None),
            ]
        );
        assert_eq!(found.len(), 11);
    }

    #[test]
    fn the_recovery_is_of_the_same_fault() {
        let (fault, recovery) = (event(FAULT, "n").unwrap(), recovery("n").unwrap());
        assert!(fault.is_fatal && !fault.is_healthy);
        assert!(recovery.is_healthy && !recovery.is_fatal);
        assert_eq!(fault.check_name, recovery.check_name);
        assert_eq!(fault.error_code, recovery.error_code);
        assert_eq!(fault.entities_impacted, recovery.entities_impacted);
        assert!(model::event::validate(&recovery).is_ok());
    }
}
