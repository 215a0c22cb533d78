//! Questions to the store that decisions wait for. Each is a task of its own: a slow store delays
//! the nodes that it was asked about, and nothing else.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::HealthEvent;
use fleet::{FleetInput, InStore, Purpose};
use jiff::Timestamp;
use model::event::MAX_EVENTS;
use store::{EventStore, MAX_APPEND, NewEvent, StoreError};
use tokio::task::JoinError;

use super::Quarantine;

impl Quarantine {
    /// Starts looking up events that a node lists.
    pub(super) fn look_up(&mut self, node: String, ids: Vec<String>) {
        let store = Arc::clone(&self.store);
        let metrics = self.metrics.clone();
        self.asking.spawn(async move {
            let found = found(store.as_ref(), ids).await;
            let found = found.inspect_err(|error| {
                tracing::error!(node, err = %error, "the store does not answer; the node is left as it is");
                metrics.error("claim_error");
            });
            FleetInput::EventsFound {
                found: found.ok(),
                node,
            }
        });
    }

    /// Starts appending events about a node.
    pub(super) fn append(
        &mut self,
        node: String,
        events: Vec<(HealthEvent, Timestamp)>,
        purpose: Purpose,
    ) {
        const { assert!(MAX_EVENTS <= MAX_APPEND) };
        let store = Arc::clone(&self.store);
        let metrics = self.metrics.clone();
        let events = events
            .into_iter()
            .map(|(event, received_at)| NewEvent { event, received_at });
        let events = events.collect();
        self.asking.spawn(async move {
            let result = store.append(events).await;
            let result = result.inspect_err(|error| match purpose {
                Purpose::TakeOver => {
                    tracing::error!(node, err = %error, "the store does not answer; the node is left as it is");
                    metrics.error("claim_error");
                }
                Purpose::Close => {
                    tracing::error!(
                        node,
                        err = %error,
                        "faults of a machine that is gone could not be closed; it is tried again"
                    );
                    metrics.error("departed_error");
                }
                Purpose::Validate => {
                    tracing::error!(
                        node,
                        err = %error,
                        "how the validation of a node stands could not be stored; it is tried again"
                    );
                    metrics.error("validation_error");
                }
            });
            let last_new = result.map(|appended| {
                let new = appended.iter().filter(|one| one.new);
                new.map(|one| one.seq).max()
            });
            FleetInput::EventsAppended {
                node,
                result: last_new.map_err(drop),
            }
        });
    }

    /// Takes in what the store has answered.
    pub(super) fn asked(&mut self, done: Result<FleetInput, JoinError>) {
        match done {
            Ok(input) => self.take(input),
            // A bug. Which node it was is not known: all are looked at again.
            Err(error) => {
                tracing::error!(err = %error, "a question to the store ended without an answer");
                self.metrics.error("claim_error");
                self.take(FleetInput::AnswersLost);
            }
        }
    }
}

/// Returns what the store has of each id.
async fn found(
    store: &dyn EventStore,
    ids: Vec<String>,
) -> Result<BTreeMap<String, InStore>, StoreError> {
    let since = store.identity().since;
    let mut found = BTreeMap::new();
    for id in ids {
        let record = match store.event(&id).await? {
            Some(record) if record.seq > since => InStore::Current,
            Some(record) => InStore::History(Box::new(record)),
            None => InStore::Nothing,
        };
        found.insert(id, record);
    }
    Ok(found)
}
