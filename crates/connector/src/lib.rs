//! The platform connector: the one way in for health events.
//!
//! Events come over gRPC (`datamodels.PlatformConnector/HealthEventOccurredV1`, on a node
//! by a Unix socket) or from our own monitors through [`Connector::accept`]; both are
//! treated the same. Good events of a batch are stored even where others are refused;
//! sending the whole batch again doubles nothing.
//!
//! - [`Caller`], [`AcceptNodes`]: who sends, and for which nodes they may speak.
//! - [`ConnectorConfig`], [`Pipeline`]: what is done to events on their way.
//! - [`Sink`]: where accepted events go; [`outbox`]: the one of a node without a store.
//! - [`Direct`]: where they go straight to a controller, and nothing is kept here.
//! - [`Delivery`], [`Forwarding`]: what brings events on to a controller, or to another service.
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
use model::event::{self, MAX_EVENTS, Problem};
use model::reporter::Authority;
use runtime::logging::{Seldom, chain};
use runtime::metrics::Metrics;
use runtime::work_queue::{Work, WorkQueue};
use store::{Appended, Identity, NewEvent};
use tokio::sync::broadcast;

pub use caller::{AcceptNodes, Caller};
pub use config::{ConfigError, ConnectorConfig};
pub use deliver::{Delivery, DeliveryStatus, Header, token_header};
pub use direct::Direct;
pub use forward::{ForwardError, ForwardStatus, ForwardTarget, Forwarding, TargetTls};
pub use pipeline::{NodeLookup, Pipeline};
pub use refusal::{Reason, Refused};
pub use server::{
    Admission, Identify, MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES, MAX_REQUEST_BYTES, MAX_STREAMS,
    Service, serve, service,
};
pub use sink::{Sink, SinkError};

/// The one way in for events. Cheap to clone.
#[derive(Clone)]
pub struct Connector {
    sink: Arc<dyn Sink>,
    nodes: Arc<AcceptNodes>,
    users: Arc<pace::UsersPace>,
    pipeline: Option<Arc<Pipeline>>,
    metrics: metrics::ConnectorMetrics,
    checks: metrics::PreflightMetrics,
    passes: passes::Passes,
    /// Batches from the end of their checks until they are stored, or are known not to be.
    queue: WorkQueue,
    refusals: Arc<Seldom>,
    failures: Arc<Seldom>,
    clock: fn() -> Timestamp,
    recoveries: broadcast::Sender<Recovery>,
}

/// A stored healthy event with the authority of monitors, for those that hold something back
/// about its fault.
#[derive(Clone, Debug)]
pub struct Recovery {
    /// The event.
    pub event: HealthEvent,
    /// The time at which it was accepted.
    pub accepted_at: Timestamp,
}

/// The reason why a batch, or a part of it, was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// There are more events than one request may have. None was stored.
    #[error("the request has {found} events, at most {MAX_EVENTS} are taken at once; split it")]
    TooMany {
        /// Number of events in the request.
        found: usize,
    },
    /// Users report faster than they may. None was stored.
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
    #[error("{}{}", refusal::List(.refused), refusal::Others(*.stored))]
    Refused {
        /// The refused events; at least one.
        refused: Vec<Refused>,
        /// Number of the others, which are stored.
        stored: usize,
    },
    /// The sink did not take them. Sending the batch again is safe.
    #[error("the events were not taken")]
    Sink(#[source] SinkError),
}

/// The reason why a check was not counted.
#[derive(Debug, thiserror::Error)]
pub enum Uncounted {
    /// The caller does not speak for that node.
    #[error("{0}")]
    ForeignNode(String),
    /// A field has a value that it cannot have.
    #[error("{0}")]
    Invalid(&'static str),
}

/// NVSentinel's queue before its store. Here a call waits until its events are stored.
const QUEUE: &str = "databaseStore";
/// Most recoveries that wait for a monitor; one that falls behind is told so by the channel.
const RECOVERIES: usize = 256;

// === impl Connector ===

impl Connector {
    /// Returns a connector in front of `sink`. `nodes` says for whom processes on this machine may
    /// speak.
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
            queue: WorkQueue::new(metrics, QUEUE, "batches of events for the store"),
            refusals: Arc::default(),
            failures: Arc::default(),
            clock,
            recoveries: broadcast::channel(RECOVERIES).0,
        }
    }

    /// Returns the store behind the sink; `None`: there is none, what comes is brought to one.
    pub(crate) fn store(&self) -> Option<Identity> {
        self.sink.store()
    }

    /// Returns the healthy events that are accepted from now on from whoever may close what a
    /// monitor of ours has opened; each once.
    pub fn recoveries(&self) -> broadcast::Receiver<Recovery> {
        self.recoveries.subscribe()
    }

    /// Puts transformers between check and sink.
    #[must_use]
    pub fn with_pipeline(self, pipeline: Pipeline) -> Self {
        Self {
            pipeline: Some(Arc::new(pipeline)),
            ..self
        }
    }

    /// Hands what is stored on to another service, too.
    #[must_use]
    pub fn with_forwarding(self, forwarding: Forwarding) -> Self {
        let store = self.sink;
        Self {
            sink: Arc::new(forward::ForwardingSink { store, forwarding }),
            ..self
        }
    }

    /// Checks, names, transforms and stores a batch that `caller` sends. When it returns `Ok`, all
    /// events are durable; the answers are in their order.
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
        // What was refused stays so, whether or not the others are stored.
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
                // Whoever may report could fill the log while the disk is full.
                if let Some(not_logged_before) = self.failures.now() {
                    let err = chain(&error);
                    tracing::error!(err, not_logged_before, "events were not taken");
                }
                AcceptError::Sink(error)
            })?
        };
        self.metrics.appended(&appended);
        for (index, recovery) in recovered {
            // One that is sent again ends nothing that has come since. Nobody listens where no
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

    /// Counts a check that `caller` says has ended. The error says what is wrong with what it says.
    pub fn count_check(&self, told: &ReportCheckRequest, caller: &Caller) -> Result<(), Uncounted> {
        let node = self.nodes.meant(caller, &told.node);
        let node = node.map_err(Uncounted::ForeignNode)?;
        if let Some(problem) = server::problem(told) {
            return Err(Uncounted::Invalid(problem));
        }
        self.checks.count(told, node);
        if told.result() == CheckResult::Passed
            && let Some(tested) = passes::Tested::new(node, &told.check, &told.gpu_uuids)
        {
            self.passes.note(tested, Instant::now());
        }
        Ok(())
    }

    /// Returns the events that are good, signed and named, and what is wrong with the others.
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
                spoken.map_err(|what| (Problem::new("nodeName", what), Reason::ForeignNode))
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

    /// Transforms events and gives them to the sink. They have their ids by now: what is done to
    /// them here does not make another event of a retry.
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
        // Repeats of what is stored are what can be spared.
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

/// Returns when an event came in: at the first connector on its way, where that is trusted, so that
/// what waited in an outbox is not newer for it. What a monitor of ours reports came when the last
/// of it was seen, which the monitor says or the event tells.
fn received_at(event: &mut HealthEvent, caller: &Caller, now: Timestamp) -> Timestamp {
    let told = event::take_accepted(event);
    let told = match caller {
        Caller::Monitor => told.unwrap_or_else(|| Sightings::of(event, now).last),
        Caller::Node(_) | Caller::Central(_) | Caller::Anybody => told.unwrap_or(now),
        // Whoever could date what they report could have it dismissed in advance.
        Caller::Local(_) | Caller::Pod { .. } => now,
    };
    event::accepted_at(event, told, now)
}

// === impl AcceptError ===

impl AcceptError {
    /// Returns whether the events themselves are what is not taken, and not the state of the store:
    /// sending them again is of no use, and events beside them may have been stored.
    pub fn blames_events(&self) -> bool {
        match self {
            Self::TooMany { .. } | Self::Refused { .. } => true,
            Self::TooFast { .. } => false,
            Self::Sink(error) => !error.is_retryable(),
        }
    }

    /// Returns whether the same batch may be accepted when it is sent again.
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
