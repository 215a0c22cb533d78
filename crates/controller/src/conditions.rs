//! Reports faults on the nodes, by conditions and Kubernetes Events.
//!
//! ```text
//! quarantine: faults, node --> Board: reports due, per node ---------> Reporter --> API server
//!        ^                                   ^                            |
//!        +---- node watch ----               +------- results ------------+
//! ```
//!
//! `model::condition` decides the conditions whenever a node is evaluated, from all its open
//! faults and its current conditions. The board keeps the newest decision per node, not a queue.
//! A condition that could not be written is retried, with the newest decision, until the node
//! has it. Nothing is written where nothing differs.
//!
//! Each fault gets one Event, whose count is raised by repeats, within the rate limits of
//! `board.rs`. A late Event still has the right count.

mod board;
mod metrics;
mod rate;

use std::sync::Arc;

use cluster::{ApiError, Cluster, Reason};
use jiff::{SignedDuration, Timestamp};
use model::condition::{ConditionChange, Options};
use model::fault::Fault;
use model::node::NodeView;
use runtime::logging::chain;
use runtime::metrics::{Description, Metrics};
use runtime::work_queue::WorkQueue;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use board::{Failed, Job, JobResult, Shared};
use metrics::ConditionMetrics;

/// Most nodes with requests in flight. Changes of the waiting nodes meanwhile are combined into
/// one request each.
const MOST_UNDER_WAY: usize = 8;

/// Settings of the board and its reporter.
pub struct ConditionsConfig {
    /// Cluster that the reports are written to.
    pub cluster: Arc<Cluster>,
    /// Settings of conditions; `None` to write none.
    pub conditions: Option<Options>,
    /// Type of Kubernetes Events of faults that are not fatal; `None` to emit none.
    pub events: Option<EventKind>,
    /// Source of the current time.
    pub clock: fn() -> Timestamp,
}

/// Value of an Event's `type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// `Warning`, and `Normal` for a recovery, as in Kubernetes.
    Kubernetes,
    /// Name of the check, as in NVSentinel.
    Check,
}

/// Name of NVSentinel's queue of nodes to write.
pub(crate) const QUEUE: &str = "kubernetes";
/// Term for its pieces of work.
pub(crate) const QUEUED: &str = "nodes whose conditions and Events are to be written";

/// Returns the descriptions of the metrics of conditions and Events.
pub(crate) fn described_metrics() -> Vec<Description> {
    ConditionMetrics::described()
}

/// Board that the quarantine posts the state of nodes on. Cheap to clone.
#[derive(Clone)]
pub struct Board {
    shared: Arc<Shared>,
}

/// Writes the posted reports to the API server.
pub struct Reporter {
    shared: Arc<Shared>,
    cluster: Arc<Cluster>,
    clock: fn() -> Timestamp,
    metrics: ConditionMetrics,
}

/// Creates a board, and the task that writes its reports.
pub fn new(config: ConditionsConfig, metrics: &Metrics) -> (Board, Reporter) {
    let shared = Arc::new(Shared::new(
        config.conditions,
        config.events,
        WorkQueue::new(metrics, QUEUE, QUEUED),
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
    /// Posts the current state of a node: its open faults, the checks that have reported, and
    /// its object in the cluster.
    pub(crate) fn post<'a>(
        &self,
        faults: &[Fault],
        checks: impl Iterator<Item = &'a str>,
        view: &Arc<NodeView>,
        now: Timestamp,
    ) {
        self.shared.post(faults, checks, view, now);
    }

    /// Handles the return of a node to an older state, after a restore of the API server.
    pub(crate) fn restored(&self, node: &str) {
        self.shared.restored(node);
    }

    /// Drops the reports of a node that the cluster does not have.
    pub(crate) fn gone(&self, node: &str) {
        self.shared.gone(node);
    }
}

// === impl Reporter ===

impl Reporter {
    /// Writes reports until `cancel`, then waits for the requests in flight.
    pub async fn run(self, cancel: CancellationToken) {
        let mut under_way = JoinSet::new();
        loop {
            let posted = self.shared.posted.notified();
            let now = (self.clock)();
            let room = MOST_UNDER_WAY.saturating_sub(under_way.len());
            for job in self.shared.take(now, room) {
                let (cluster, metrics) = (Arc::clone(&self.cluster), self.metrics.clone());
                let clock = self.clock;
                let why = Reason::of_node(&job.view.name, None, "report of faults");
                under_way.spawn(
                    why.scope(async move { carry_out(job, &cluster, &metrics, clock).await }),
                );
            }
            let next = self.shared.next();
            let wait = next.map(|at| at.duration_since(now).max(SignedDuration::ZERO));
            tokio::select! {
                () = cancel.cancelled() => break,
                () = posted => {}
                Some(done) = under_way.join_next() => match done {
                    Ok(outcome) => self.shared.done(outcome, (self.clock)()),
                    // A bug. The node of the job is unknown.
                    Err(error) => {
                        tracing::error!(err = %error, "the report of a node's faults panicked");
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

/// Sends the requests of a job, one after the other.
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
        reported: Vec::new(),
    };
    if !job.changes.is_empty() {
        let began = std::time::Instant::now();
        let result = cluster
            .set_conditions(&job.view, &job.changes, clock())
            .await;
        metrics.condition(result.is_ok(), began.elapsed());
        match result {
            Ok(view) => {
                log_changes(&job.view.name, &job.changes);
                outcome.written = Some(view.resource_version);
                outcome.changes = job.changes;
            }
            Err(error) => {
                outcome.failed = Some(failure(&job.view.name, "conditions", job.first, &error));
                return outcome;
            }
        }
    }
    for request in job.events {
        let began = std::time::Instant::now();
        let event = &request.event;
        let operation = if request.repeat { "update" } else { "create" };
        let mut result = if request.repeat {
            cluster.repeat_event(event).await
        } else {
            cluster.create_event(event).await
        };
        if matches!(result, Err(ApiError::NotFound { .. })) && request.repeat {
            result = cluster.create_event(event).await;
        }
        metrics.event(operation, result.is_ok(), began.elapsed());
        match result {
            Ok(()) => outcome
                .reported
                .push((request.key, request.recovered, event.count)),
            Err(error) => {
                outcome.failed = Some(failure(&job.view.name, "an Event", job.first, &error));
                return outcome;
            }
        }
    }
    outcome
}

fn log_changes(node: &str, changes: &[ConditionChange]) {
    for change in changes {
        let one = &change.condition;
        let status = if one.status { "True" } else { "False" };
        tracing::info!(
            node,
            "the condition {} is now {status}, with the reason {}",
            one.kind,
            one.reason
        );
    }
}

/// Logs a failure and returns the time of the next attempt. Only the first failure in a row is
/// logged as a warning; the metrics count all.
fn failure(node: &str, what: &str, first: bool, error: &ApiError) -> Failed {
    let err = chain(error);
    if first {
        tracing::warn!(
            node,
            err,
            "{what} could not be written; trying again until it succeeds"
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
