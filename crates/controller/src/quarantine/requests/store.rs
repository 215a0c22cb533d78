//! Requests to the store that decisions wait for.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::HealthEvent;
use fleet::{EventInStore, FleetInput, Purpose};
use jiff::Timestamp;
use model::event::MAX_EVENTS;
use store::{EventStore, MAX_APPEND, NewEvent, StoreError};

use super::RequestAnswer;
use crate::quarantine::metrics::QuarantineMetrics;

/// Looks up the events that the annotations of a node list.
pub(crate) async fn look_up(
    store: Arc<dyn EventStore>,
    metrics: QuarantineMetrics,
    node: String,
    ids: Vec<String>,
) -> RequestAnswer {
    let found = found(store.as_ref(), ids).await.inspect_err(|error| {
        tracing::error!(node, err = %error, "the store does not answer; the node stays as it is");
        metrics.error("claim_error");
    });
    let found = found.ok();
    FleetInput::EventsFound { node, found }.into()
}

/// Appends events about a node.
pub(crate) async fn append(
    store: Arc<dyn EventStore>,
    metrics: QuarantineMetrics,
    node: String,
    events: Vec<(HealthEvent, Timestamp)>,
    purpose: Purpose,
) -> RequestAnswer {
    const { assert!(MAX_EVENTS <= MAX_APPEND) };
    let events = events
        .into_iter()
        .map(|(event, received_at)| NewEvent { event, received_at });
    let result = store.append(events.collect()).await;
    let result = result.inspect_err(|error| {
        let (counted, what) = match purpose {
            Purpose::TakeOver => (
                "claim_error",
                "the store does not answer; the node stays as it is",
            ),
            Purpose::Close => (
                "departed_error",
                "the faults of a removed machine could not be closed; trying again",
            ),
            Purpose::Validate => (
                "validation_error",
                "the progress of a validation could not be stored; trying again",
            ),
            Purpose::Record => (
                "record_error",
                "a repair could not be recorded; trying again",
            ),
        };
        tracing::error!(node, err = %error, "{what}");
        metrics.error(counted);
    });
    let last_new = result.map(|appended| {
        let new = appended.iter().filter(|one| one.new);
        new.map(|one| one.seq).max()
    });
    let result = last_new.map_err(drop);
    FleetInput::EventsAppended { node, result }.into()
}

/// Returns the state of each event in the store.
async fn found(
    store: &dyn EventStore,
    ids: Vec<String>,
) -> Result<BTreeMap<String, EventInStore>, StoreError> {
    let since = store.identity().since;
    let mut found = BTreeMap::new();
    for id in ids {
        let record = match store.event(&id).await? {
            Some(record) if record.seq > since => EventInStore::Current,
            Some(record) => EventInStore::History(Box::new(record)),
            None => EventInStore::Missing,
        };
        found.insert(id, record);
    }
    Ok(found)
}
