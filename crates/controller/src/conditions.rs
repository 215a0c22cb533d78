//! Telling on the nodes what their faults are: conditions, and Kubernetes Events.
//!
//! ```text
//! quarantine: faults, node --> Board: what is to be told, per node --> Reporter --> API server
//!        ^                                   ^                            |
//!        +---- node watch ----               +------- what became of it --+
//! ```
//!
//! The conditions are decided in `model::condition` at each look at a node, from
//! all its open faults and from what stands on it. The board keeps the newest answer, not a
//! queue: a condition that could not be written is tried again, with what is known by then,
//! until it stands on the node. Where nothing differs, nothing is written.
//!
//! Events are told once, with a count for repeats, within the rate of [`board`]: what is told
//! late has the right count all the same.

mod board;
mod metrics;
mod rate;

use std::sync::Arc;

use cluster::{ApiError, Cluster};
use jiff::{SignedDuration, Timestamp};
use model::condition::{ConditionChange, Options};
use model::fault::Fault;
use model::node::NodeView;
use runtime::logging::chain;
use runtime::metrics::Metrics;
use runtime::work_queue::WorkQueue;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use board::{Failed, Job, JobResult, Shared};
use metrics::ConditionMetrics;

/// Most nodes that are told of at once. What comes to be known of the others while they wait is told with the rest,
/// in one request.
const MOST_UNDER_WAY: usize = 8;

/// The settings of the board and its reporter.
pub struct ConditionsConfig {
    /// The cluster.
    pub cluster: Arc<Cluster>,
    /// Conditions of nodes; `None`: none are written.
    pub conditions: Option<Options>,
    /// Kubernetes Events of faults that are not fatal; `None`: none are made.
    pub events: Option<EventKind>,
    /// The clock.
    pub clock: fn() -> Timestamp,
}

/// The `type` of Events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// `Warning`, and `Normal` for a recovery, as Kubernetes has it.
    Kubernetes,
    /// The name of the check, as NVSentinel has it.
    Check,
}

/// The board on which the quarantine posts what it knows of a node. Cheap to clone.
#[derive(Clone)]
pub struct Board {
    shared: Arc<Shared>,
}

/// Brings what is on the board to the API server.
pub struct Reporter {
    shared: Arc<Shared>,
    cluster: Arc<Cluster>,
    clock: fn() -> Timestamp,
    metrics: ConditionMetrics,
}

/// Returns a board, and the task that works it off.
pub fn new(config: ConditionsConfig, metrics: &Metrics) -> (Board, Reporter) {
    let shared = Arc::new(Shared::new(
        config.conditions,
        config.events,
        WorkQueue::new(
            metrics,
            "kubernetes",
            "nodes on which something is to be told",
        ),
        (config.clock)(),
    ));
    let reporter = Reporter {
        shared: Arc::clone(&shared),
        cluster: config.cluster,
        clock: config.clock,
        metrics: ConditionMetrics::new(metrics),
    };
    (Board { shared }, reporter)
}

// === impl Board ===

impl Board {
    /// Takes in what is known of a node now: its open faults, the checks that were heard of,
    /// and how it stands in the cluster.
    pub(crate) fn post<'a>(
        &self,
        faults: &[Fault],
        heard: impl Iterator<Item = &'a str>,
        view: &Arc<NodeView>,
        now: Timestamp,
    ) {
        self.shared.post(faults, heard, view, now);
    }

    /// Takes in that the API server went back to an older state of the node.
    pub(crate) fn restored(&self, node: &str) {
        self.shared.restored(node);
    }

    /// Takes in that the cluster does not have the node (any more).
    pub(crate) fn gone(&self, node: &str) {
        self.shared.gone(node);
    }
}

// === impl Reporter ===

impl Reporter {
    /// Works until `cancel`; requests under way are brought to their end.
    pub async fn run(self, cancel: CancellationToken) {
        let mut under_way = JoinSet::new();
        loop {
            let posted = self.shared.posted.notified();
            let now = (self.clock)();
            let room = MOST_UNDER_WAY.saturating_sub(under_way.len());
            for job in self.shared.take(now, room) {
                let (cluster, metrics) = (Arc::clone(&self.cluster), self.metrics.clone());
                let clock = self.clock;
                under_way.spawn(async move { carry_out(job, &cluster, &metrics, clock).await });
            }
            let next = self.shared.next();
            let wait = next.map(|at| at.duration_since(now).max(SignedDuration::ZERO));
            tokio::select! {
                () = cancel.cancelled() => break,
                () = posted => {}
                Some(done) = under_way.join_next() => match done {
                    Ok(outcome) => self.shared.done(outcome, (self.clock)()),
                    // A bug. Which node it was is not known.
                    Err(error) => {
                        tracing::error!(err = %error, "telling a node's faults has failed");
                        self.shared.none_under_way();
                    }
                },
                () = sleep(wait) => {}
            }
        }
        while let Some(done) = under_way.join_next().await {
            if let Ok(outcome) = done {
                self.shared.done(outcome, (self.clock)());
            }
        }
    }
}

async fn sleep(wait: Option<SignedDuration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait.unsigned_abs()).await,
        None => std::future::pending().await,
    }
}

/// Makes the requests of a job, one after the other.
async fn carry_out(
    job: Job,
    cluster: &Cluster,
    metrics: &ConditionMetrics,
    clock: fn() -> Timestamp,
) -> JobResult {
    let mut outcome = JobResult {
        node: job.view.name.clone(),
        written: None,
        changes: Vec::new(),
        failed: None,
        told: Vec::new(),
    };
    if !job.changes.is_empty() {
        let began = std::time::Instant::now();
        let result = cluster
            .set_conditions(&job.view, &job.changes, clock())
            .await;
        metrics.condition(result.is_ok(), began.elapsed());
        match result {
            Ok(view) => {
                say(&job.view.name, &job.changes);
                outcome.written = Some(view.resource_version);
                outcome.changes = job.changes;
            }
            Err(error) => {
                outcome.failed = Some(failure(&job.view.name, "conditions", job.first, &error));
                return outcome;
            }
        }
    }
    for telling in job.events {
        let began = std::time::Instant::now();
        let event = &telling.event;
        let operation = if telling.repeat { "update" } else { "create" };
        let mut result = if telling.repeat {
            cluster.repeat_event(event).await
        } else {
            cluster.create_event(event).await
        };
        if matches!(result, Err(ApiError::NotFound { .. })) && telling.repeat {
            result = cluster.create_event(event).await;
        }
        metrics.event(operation, result.is_ok(), began.elapsed());
        match result {
            Ok(()) => outcome
                .told
                .push((telling.key, telling.recovered, event.count)),
            Err(error) => {
                outcome.failed = Some(failure(&job.view.name, "an Event", job.first, &error));
                return outcome;
            }
        }
    }
    outcome
}

fn say(node: &str, changes: &[ConditionChange]) {
    for change in changes {
        let one = &change.condition;
        let status = if one.status { "True" } else { "False" };
        tracing::info!(
            node,
            "the condition {} is {status} now, for the reason {}",
            one.kind,
            one.reason
        );
    }
}

/// Returns what a failure means for the next try. Only the first of several failures in a row is a
/// warning; the metrics count all.
fn failure(node: &str, what: &str, first: bool, error: &ApiError) -> Failed {
    let err = chain(error);
    if first {
        tracing::warn!(
            node,
            err,
            "{what} could not be written; it is tried again until it is"
        );
    } else {
        tracing::debug!(node, err, "{what} could not be written");
    }
    let retry_after = match error {
        ApiError::Throttled { retry_after } => *retry_after,
        _ => None,
    };
    Failed { retry_after }
}
