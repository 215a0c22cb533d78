//! Platform connector: the only entry point for health events.
//!
//! Events arrive over gRPC (`datamodels.PlatformConnector/HealthEventOccurredV1`, on a node by
//! a Unix socket) or from gpuwarden's own monitors through [`Connector::accept`]; both are
//! treated the same. Valid events of a batch are stored even if others are refused; sending the
//! whole batch again stores nothing twice.
//!
//! - [`Caller`], [`AcceptNodes`]: the sender, and the nodes that it may report on.
//! - [`ConnectorConfig`], [`Pipeline`]: transformations of events before they are stored.
//! - [`Sink`]: destination of accepted events; [`outbox`]: the sink of a node without a store.
//! - [`Direct`]: a sink that sends straight to a controller and keeps nothing.
//! - [`Delivery`], [`Forwarding`]: delivery of events to a controller, or to another service.
//! - [`serve`], [`service`]: the gRPC side.

mod addressee;
mod caller;
mod config;
mod deliver;
mod direct;
mod forward;
mod metrics;
pub mod outbox;
mod pace;
mod passes;
mod pipeline;
mod refusal;
mod server;
mod sink;
pub mod transform;

use std::sync::Arc;
use std::time::Instant;

use contract::preflight::{CheckResult, ReportCheckRequest};
use contract::{HealthEvent, HealthEvents};
use diagnosis::fold::Sightings;
use jiff::Timestamp;
use model::event::{self, FieldProblem, MAX_EVENTS};
use model::reporter::Authority;
use runtime::logging::{Seldom, chain};
use runtime::metrics::{Group, Metrics};
use runtime::work_queue::{Work, WorkQueue};
use store::{Appended, Identity, NewEvent};
use tokio::sync::broadcast;

pub use caller::{AcceptNodes, Caller};
pub use config::{ConfigError, ConnectorConfig};
use deliver::Receiver;

pub use deliver::{Delivery, DeliveryStatus, Header, token_header};
pub use direct::Direct;
pub use forward::{ForwardError, ForwardStatus, ForwardTarget, Forwarding, TargetTls};
pub use pipeline::{NodeLookup, Pipeline};
pub use refusal::{Reason, Refused};
pub use server::{
    Admission, ConnectorService, Identify, MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES, MAX_REQUEST_BYTES,
    MAX_STREAMS, serve, service,
};
pub use sink::{Sink, SinkError};

/// Entry point for events. Cheap to clone.
#[derive(Clone)]
pub struct Connector {
    sink: Arc<dyn Sink>,
    nodes: Arc<AcceptNodes>,
    users: Arc<pace::UsersPace>,
    pipeline: Option<Arc<Pipeline>>,
    metrics: metrics::ConnectorMetrics,
    checks: metrics::PreflightMetrics,
    passes: passes::Passes,
    /// Batches between the end of their checks and the answer of the sink.
    queue: WorkQueue,
    refusals: Arc<Seldom>,
    failures: Arc<Seldom>,
    clock: fn() -> Timestamp,
    recoveries: broadcast::Sender<Recovery>,
}

/// Stored healthy event with the authority of a monitor, for monitors that hold back reports
/// about the same fault.
#[derive(Clone, Debug)]
pub struct Recovery {
    /// Healthy event as stored.
    pub event: HealthEvent,
    /// Time when the event was accepted.
    pub accepted_at: Timestamp,
}

/// Reason why a batch, or a part of it, was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The request has too many events. None was stored.
    #[error("the request has {found} events, at most {MAX_EVENTS} are accepted at once; split it")]
    TooMany {
        /// Number of events in the request.
        found: usize,
    },
    /// Users report faster than allowed. None was stored.
    #[error(
        "users of this machine have reported {} events at once, or more than {} a second: send \
         these {found} again later",
        pace::BURST,
        pace::A_SECOND
    )]
    TooFast {
        /// Number of events in the request.
        found: usize,
    },
    /// Some events were refused. All others were stored.
    #[error("{}{}", refusal::RefusedList(.refused), refusal::Others(*.stored))]
    Refused {
        /// Refused events; at least one.
        refused: Vec<Refused>,
        /// Number of the other events, which are stored.
        stored: usize,
    },
    /// The sink did not accept the events. Sending the batch again is safe.
    #[error("the events were not accepted")]
    Sink(#[source] SinkError),
}

/// Reason why a check was not counted.
#[derive(Debug, thiserror::Error)]
pub enum Uncounted {
    /// The caller may not report on that node.
    #[error("{0}")]
    ForeignNode(String),
    /// A field has an invalid value.
    #[error("{0}")]
    Invalid(&'static str),
}

/// Name of NVSentinel's queue before its store. Here a call waits until its events are stored.
const QUEUE: &str = "databaseStore";
/// Term for its pieces of work.
const QUEUED: &str = "batches of events for the store";
/// Most recoveries queued for a monitor; the channel reports to a slow monitor that it missed
/// some.
const RECOVERIES: usize = 256;

/// Returns the descriptions of the metrics of this room.
pub fn described_metrics() -> Vec<Group> {
    let [events, preflight] = metrics::described();
    let [delivery, forward] =
        [Receiver::Controller, Receiver::SinkTarget].map(deliver::described_metrics);
    let missed = forward::ForwardMetrics::described();
    let outbox = outbox::described_metrics(outbox::PREFIX);
    let forward_outbox = outbox::described_metrics(forward::OUTBOX_PREFIX);
    vec![
        events,
        preflight,
        Group::new("queues", WorkQueue::described(QUEUE, QUEUED)),
        Group::new("delivery", delivery.into_iter().chain(outbox)),
        Group::new(
            "forward",
            forward.into_iter().chain(missed).chain(forward_outbox),
        ),
    ]
}

// === impl Connector ===

impl Connector {
    /// Creates a connector in front of `sink`. `nodes` are the nodes that processes on this
    /// machine may report on.
    pub fn new(
        sink: impl Sink,
        nodes: AcceptNodes,
        metrics: &Metrics,
        clock: fn() -> Timestamp,
    ) -> Self {
        Self {
            sink: Arc::new(sink),
            nodes: Arc::new(nodes),
            users: Arc::new(pace::UsersPace::new()),
            pipeline: None,
            metrics: metrics::ConnectorMetrics::new(metrics),
            checks: metrics::PreflightMetrics::registered(metrics),
            passes: passes::Passes::default(),
            queue: WorkQueue::new(metrics, QUEUE, QUEUED),
            refusals: Arc::default(),
            failures: Arc::default(),
            clock,
            recoveries: broadcast::channel(RECOVERIES).0,
        }
    }

    /// Returns the store behind the sink; `None` if the sink delivers to a store elsewhere.
    pub(crate) fn store(&self) -> Option<Identity> {
        self.sink.store()
    }

    /// Subscribes to healthy events accepted from now on from senders that may close faults
    /// opened by gpuwarden's monitors. Each event is received once.
    pub fn recoveries(&self) -> broadcast::Receiver<Recovery> {
        self.recoveries.subscribe()
    }

    /// Inserts transformers between check and sink.
    #[must_use]
    pub fn with_pipeline(self, pipeline: Pipeline) -> Self {
        Self {
            pipeline: Some(Arc::new(pipeline)),
            ..self
        }
    }

    /// Forwards stored events to another service as well.
    #[must_use]
    pub fn with_forwarding(self, forwarding: Forwarding) -> Self {
        let store = self.sink;
        Self {
            sink: Arc::new(forward::ForwardingSink { store, forwarding }),
            ..self
        }
    }

    /// Checks, names, transforms and stores a batch sent by `caller`. On `Ok` all events are
    /// durable, and the answers are in their order.
    pub async fn accept(
        &self,
        batch: HealthEvents,
        caller: &Caller,
    ) -> Result<Vec<Appended>, AcceptError> {
        let found = batch.events.len();
        self.metrics.received.inc_by(found as u64);
        if found > MAX_EVENTS {
            self.metrics.not_taken(found, "too_many");
            return Err(AcceptError::TooMany { found });
        }
        let is_user = match caller {
            Caller::Local(peer) => !peer.is_operator,
            Caller::Pod { .. } => true,
            _ => false,
        };
        if is_user && !self.users.take(found) {
            self.metrics.not_taken(found, "too_fast");
            return Err(AcceptError::TooFast { found });
        }
        let now = (self.clock)();
        let (good, refused) = self.checked(batch.events, caller, now);
        // Events stay refused, whether or not the others are stored.
        if !refused.is_empty() {
            self.metrics.refused(&refused);
            refusal::log(&self.refusals, caller, &refused);
        }
        for new in good.iter().filter(|new| !new.event.is_healthy) {
            self.passes.forget(&new.event);
        }
        let stored = good.len();
        let recovered = recoveries_in(&good);
        let appended = if good.is_empty() {
            Vec::new()
        } else {
            let taken = self.transform_and_append(good, now).await;
            taken.map_err(|error| {
                self.metrics.not_stored.inc_by(stored as u64);
                if error.is_retryable() {
                    self.queue.retry();
                }
                // Rate-limited, since any sender could otherwise fill the log while the disk is
                // full.
                if let Some(not_logged_before) = self.failures.now() {
                    let err = chain(&error);
                    tracing::error!(err, not_logged_before, "events were not accepted");
                }
                AcceptError::Sink(error)
            })?
        };
        self.metrics.appended(&appended);
        for (index, recovery) in recovered {
            // A repeated recovery closes nothing that came after the first. Sending fails if no
            // monitor runs.
            if appended.get(index).is_some_and(|one| one.new) {
                let _ = self.recoveries.send(recovery);
            }
        }
        if refused.is_empty() {
            return Ok(appended);
        }
        Err(AcceptError::Refused { refused, stored })
    }

    /// Counts a finished check that `caller` reports. The error explains an invalid report.
    pub fn count_check(
        &self,
        report: &ReportCheckRequest,
        caller: &Caller,
    ) -> Result<(), Uncounted> {
        let node = self.nodes.meant(caller, &report.node);
        let node = node.map_err(Uncounted::ForeignNode)?;
        if let Some(problem) = server::problem(report) {
            return Err(Uncounted::Invalid(problem));
        }
        self.checks.count(report, node);
        if report.result() == CheckResult::Passed
            && let Some(tested) = passes::Tested::new(node, &report.check, &report.gpu_uuids)
        {
            self.passes.note(tested, Instant::now());
        }
        Ok(())
    }

    /// Returns the valid events, signed and named, and the problems of the others.
    fn checked(
        &self,
        events: Vec<HealthEvent>,
        caller: &Caller,
        now: Timestamp,
    ) -> (Vec<NewEvent>, Vec<Refused>) {
        let mut good = Vec::with_capacity(events.len());
        let mut refused = Vec::new();
        for (index, mut event) in events.into_iter().enumerate() {
            let received_at = received_at(&mut event, caller, now);
            let checked = event::validate(&event).map_err(|problem| (problem, Reason::Invalid));
            let checked = checked.and_then(|()| {
                let spoken = self.nodes.check(caller, &event.node_name);
                spoken.map_err(|what| (FieldProblem::new("nodeName", what), Reason::ForeignNode))
            });
            match checked {
                Ok(()) => {
                    let taken_off = caller.sign(&mut event);
                    self.metrics.metadata_taken_off.inc_by(taken_off as u64);
                    event::normalise(&mut event, received_at);
                    good.push(NewEvent { event, received_at });
                }
                Err((problem, reason)) => refused.push(Refused {
                    index,
                    problem,
                    reason,
                }),
            }
        }
        (good, refused)
    }

    /// Transforms events and passes them to the sink. Their ids are assigned before, so that a
    /// transformation does not turn a retry into another event.
    async fn transform_and_append(
        &self,
        mut events: Vec<NewEvent>,
        now: Timestamp,
    ) -> Result<Vec<Appended>, SinkError> {
        let mut work = self.queue.add();
        let Some(pipeline) = &self.pipeline else {
            return self.append(events, &mut work).await;
        };
        let passage = pipeline.apply(&mut events, now).await;
        let repeats = passage.repeats();
        let firsts = (repeats > 0).then(|| passage.firsts(&events));
        let mut taken = self.append(events, &mut work).await;
        // Under pressure, repeats of stored events can be left out.
        if let (Err(SinkError::Full { .. }), Some(firsts)) = (&taken, firsts) {
            let ids = firsts.iter().map(|one| one.event.id.clone()).collect();
            let stored = if firsts.is_empty() {
                Ok(Vec::new())
            } else {
                self.append(firsts, &mut work).await
            };
            taken = stored.map(|stored| passage.answers(ids, stored));
            if taken.is_ok() {
                pipeline.left_out(repeats);
            }
        }
        pipeline.done(passage, taken.as_deref().ok());
        taken
    }

    async fn append(
        &self,
        events: Vec<NewEvent>,
        work: &mut Work,
    ) -> Result<Vec<Appended>, SinkError> {
        work.begin();
        self.sink.append(events).await
    }
}

/// Returns the recoveries among events, each with its index.
fn recoveries_in(events: &[NewEvent]) -> Vec<(usize, Recovery)> {
    let all = events.iter().enumerate();
    all.filter(|(_, new)| new.event.is_healthy && Authority::of(&new.event) == Authority::Trusted)
        .map(|(index, new)| {
            let event = new.event.clone();
            let accepted_at = new.received_at;
            (index, Recovery { event, accepted_at })
        })
        .collect()
}

/// Returns the time of receipt of an event: at the first connector on its way if that connector
/// is trusted, so that an event does not become newer by waiting in an outbox. An event of
/// gpuwarden's own monitor counts from its last observation, which the monitor or the event
/// states.
fn received_at(event: &mut HealthEvent, caller: &Caller, now: Timestamp) -> Timestamp {
    let claimed = event::take_accepted(event);
    let claimed = match caller {
        Caller::Monitor => claimed.unwrap_or_else(|| Sightings::of(event, now).last),
        Caller::Node(_) | Caller::Central(_) | Caller::Anybody => claimed.unwrap_or(now),
        // A sender that could date its reports could have them dismissed in advance.
        Caller::Local(_) | Caller::Pod { .. } => now,
    };
    event::accepted_at(event, claimed, now)
}

// === impl AcceptError ===

impl AcceptError {
    /// Returns true if the events themselves are refused, as opposed to a failure of the store:
    /// sending them again is useless, and other events of the batch may have been stored.
    pub fn blames_events(&self) -> bool {
        match self {
            Self::TooMany { .. } | Self::Refused { .. } => true,
            Self::TooFast { .. } => false,
            Self::Sink(error) => !error.is_retryable(),
        }
    }

    /// Returns true if the same batch may be accepted later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::TooFast { .. } => true,
            Self::Sink(error) => error.is_retryable(),
            Self::TooMany { .. } | Self::Refused { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests;
