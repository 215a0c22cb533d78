//! Where the connector puts what it has accepted: the event store where both are one
//! process, a node's outbox where the store is elsewhere.

use std::sync::Arc;

use async_trait::async_trait;
use store::{Appended, BoxError, EventLog, EventStore, Identity, NewEvent, StoreError};

/// A place that takes checked and named events, once each.
#[async_trait]
pub trait Sink: Send + Sync + 'static {
    /// Takes events; they are durable when this returns. The answers are in the order of
    /// `events`, and all are taken, or none. At most
    /// [`MAX_EVENTS`](model::event::MAX_EVENTS) are offered at once.
    ///
    /// An event is known by its id: offered again it is not taken a second time, and the
    /// answer says so.
    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, SinkError>;

    /// Returns the store that events are in once they are taken; `None`: they are on their way.
    fn store(&self) -> Option<Identity> {
        None
    }
}

/// The reason why a sink did not take events. Offering the same events again is always safe.
#[derive(Debug, thiserror::Error)]
pub enum SinkError {
    /// The sink holds as much as it may. Passes when what it holds is delivered.
    #[error("no room for events: {what}")]
    Full {
        /// The thing that is full, and how full it may be.
        what: String,
    },
    /// The sink cannot take events at the moment.
    #[error("events cannot be stored at the moment")]
    Unavailable(#[source] BoxError),
    /// The sink does not take these events, now or later.
    #[error("the events cannot be stored")]
    Failed(#[source] BoxError),
}

// === impl SinkError ===

impl SinkError {
    /// Returns whether the same events may be taken later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Full { .. } | Self::Unavailable(_))
    }
}

// === impl EventStore ===

#[async_trait]
impl Sink for Arc<dyn EventStore> {
    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, SinkError> {
        let stored = EventLog::append(self.as_ref(), events).await;
        stored.map_err(|error| {
            // What is damaged or closed is not the events' fault: they wait for its mend.
            let passes = matches!(error, StoreError::Closed | StoreError::Corrupt { .. });
            if passes || error.is_retryable() {
                SinkError::Unavailable(error.into())
            } else {
                SinkError::Failed(error.into())
            }
        })
    }

    fn store(&self) -> Option<Identity> {
        Some(self.identity())
    }
}
