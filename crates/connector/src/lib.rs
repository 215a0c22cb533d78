//! The platform connector: the one way in for health events.
//!
//! Events come over gRPC (`datamodels.PlatformConnector/HealthEventOccurredV1` on a Unix
//! socket) or from our own monitors through [`Connector::accept`]; both are treated the
//! same. Good events of a batch are stored even where others are bad; sending the whole
//! batch again doubles nothing.

mod metrics;
mod server;

use std::sync::Arc;

use contract::HealthEvents;
use domain::event::{self, MAX_EVENTS, Problem};
use jiff::Timestamp;
use runtime::metrics::Metrics;
use store::{Appended, EventStore, NewEvent, StoreError};

pub use server::{MAX_IN_FLIGHT, MAX_REQUEST_BYTES, serve};

/// Takes events in. Cheap to clone.
#[derive(Clone)]
pub struct Connector {
    store: Arc<dyn EventStore>,
    metrics: metrics::ConnectorMetrics,
    clock: fn() -> Timestamp,
}

/// Why a batch, or a part of it, was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// There are more events than one request may have. None was stored.
    #[error("the request has {found} events, at most {MAX_EVENTS} are taken at once; split it")]
    TooMany {
        /// How many there were.
        found: usize,
    },
    /// Some events are invalid. All others were stored.
    #[error("{}", Self::list(.invalid, *.stored))]
    Invalid {
        /// Index in the batch, and what is wrong.
        invalid: Vec<(usize, Problem)>,
        /// How many others are stored.
        stored: usize,
    },
    /// The store did not take them. Sending the batch again is safe.
    #[error("the event store did not take the events; send them again")]
    Store(#[source] StoreError),
}

/// Most invalid events that an error names one by one.
const NAMED_INVALID: usize = 20;

// === impl Connector ===

impl Connector {
    /// A connector in front of a store.
    pub fn new(store: Arc<dyn EventStore>, metrics: &Metrics, clock: fn() -> Timestamp) -> Self {
        Self {
            store,
            metrics: metrics::ConnectorMetrics::new(metrics),
            clock,
        }
    }

    /// Checks, names and stores a batch. When it returns `Ok`, all events are on disk.
    pub async fn accept(&self, batch: HealthEvents) -> Result<Vec<Appended>, AcceptError> {
        let found = batch.events.len();
        self.metrics.received.inc_by(found as u64);
        if found > MAX_EVENTS {
            self.metrics.refused(found as u64);
            return Err(AcceptError::TooMany { found });
        }
        let received_at = (self.clock)();
        let mut good = Vec::with_capacity(found);
        let mut invalid = Vec::new();
        for (index, mut event) in batch.events.into_iter().enumerate() {
            match event::validate(&event) {
                Ok(()) => {
                    event::normalise(&mut event, received_at);
                    good.push(NewEvent { event, received_at });
                }
                Err(problem) => invalid.push((index, problem)),
            }
        }
        let stored = good.len();
        let appended = if good.is_empty() {
            Vec::new()
        } else {
            self.store.append(good).await.map_err(AcceptError::Store)?
        };
        self.metrics
            .accepted
            .inc_by(appended.iter().filter(|one| one.new).count() as u64);
        self.metrics
            .repeated
            .inc_by(appended.iter().filter(|one| !one.new).count() as u64);
        if invalid.is_empty() {
            return Ok(appended);
        }
        self.metrics.refused(invalid.len() as u64);
        for (index, problem) in invalid.iter().take(NAMED_INVALID) {
            tracing::warn!(
                index,
                field = problem.field,
                what = problem.what,
                "invalid event refused"
            );
        }
        Err(AcceptError::Invalid { invalid, stored })
    }
}

// === impl AcceptError ===

impl AcceptError {
    /// Whether the same batch may be accepted when it is sent again.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_retryable())
    }

    fn list(invalid: &[(usize, Problem)], stored: usize) -> String {
        let mut text: Vec<String> = invalid
            .iter()
            .take(NAMED_INVALID)
            .map(|(index, problem)| format!("events[{index}].{problem}"))
            .collect();
        if invalid.len() > NAMED_INVALID {
            text.push(format!("and {} more", invalid.len() - NAMED_INVALID));
        }
        format!(
            "{}; the other {stored} events of the request are stored",
            text.join("; ")
        )
    }
}

#[cfg(test)]
mod tests;
