//! Destination of accepted events: the event store if it is in the same process, a node's
//! outbox if the store is elsewhere.

use std::sync::Arc;

use async_trait::async_trait;
use store::{Appended, BoxError, EventLog, EventStore, Identity, NewEvent, StoreError};

/// Receiver of checked and named events, each stored once.
#[async_trait]
pub trait Sink: Send + Sync + 'static {
    /// Stores events; they are durable when this returns. The answers are in the order of
    /// `events`. Either all events are stored or none. At most
    /// [`MAX_EVENTS`](model::event::MAX_EVENTS) are passed at once.
    ///
    /// An event is identified by its id: a repeated one is not stored again, and the answer
    /// says so.
    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, SinkError>;

    /// Returns the store that holds the events once `append` has returned; `None` if they have
    /// yet to be delivered.
    fn store(&self) -> Option<Identity> {
        None
    }
}

/// Reason why a sink did not store events. Passing the same events again is always safe.
#[derive(Debug, thiserror::Error)]
pub enum SinkError {
    /// The sink is full. Passes when its events are delivered.
    #[error("no room for events: {what}")]
    Full {
        /// Limit that is reached, with its value.
        what: String,
    },
    /// The sink cannot store events at the moment.
    #[error("events cannot be stored at the moment")]
    Unavailable(#[source] BoxError),
    /// The sink will never store these events.
    #[error("the events cannot be stored")]
    Failed(#[source] BoxError),
}

// === impl SinkError ===

impl SinkError {
    /// Returns true if the same events may be stored later.
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
            // A damaged or closed store is not the events' fault: they wait until the store is
            // fixed.
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
