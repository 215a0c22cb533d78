//! Tests that every backend passes.
//!
//! Each test takes `open`, which opens the same storage at every call; the storage is empty at
//! first. A backend runs the whole list by
//!
//! ```text
//! store::conformance_tests!(new_storage);
//! ```
//!
//! where `new_storage()` creates an empty storage and returns its `open`. Guarantees beyond the
//! interface are tested by the backend itself.

// This is test code: a failure is a panic.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

use std::sync::Arc;

use contract::{Entity, HealthEvent, json};
use jiff::{SignedDuration, Timestamp};
use model::event::{EventRecord, normalise};
use model::status::{EventStatus, NodeQuarantined, SessionEvent};

use crate::{Appended, EventQuery, EventStore, MAX_PAGE, NewEvent, Position};

mod bounds;
mod consumers;
mod events;
mod statuses;

pub use self::bounds::{
    answers_closed_after_close, deletes_passes_that_closed_nothing,
    deletes_the_oldest_where_there_is_too_much, deletes_what_is_old_and_finished,
    keeps_all_when_reopened, keeps_nothing_for_a_consumer_that_is_gone,
    refuses_what_is_over_a_limit,
};
pub use self::consumers::{
    begins_anew_behind_its_history, feeds_a_follower_every_event_once, keeps_the_journal_in_order,
    keeps_the_parts_that_are_not_named, loses_nothing_among_many_writers, never_moves_a_token_back,
};
pub use self::events::{
    appends_in_order, keeps_an_event_as_it_was, pages_and_filters,
    pages_stay_whole_while_rows_come_and_go, states_what_it_holds, stores_an_event_once,
    takes_a_repetition_without_a_time_for_a_retry,
};
pub use self::statuses::{
    changes_all_events_of_a_session, joins_an_event_to_its_session, keeps_statuses_by_their_rules,
    notes_conclusions_with_their_events,
};

/// Open store of any backend.
pub type Store = Arc<dyn EventStore>;

/// Generates a test for every function of this module. The argument names a function that
/// creates an empty storage and returns its opener: `fn() -> impl AsyncFn() -> Arc<dyn
/// EventStore>`.
#[macro_export]
macro_rules! conformance_tests {
    ($storage:ident) => {
        $crate::conformance_tests! { $storage:
            appends_in_order
            keeps_an_event_as_it_was
            stores_an_event_once
            takes_a_repetition_without_a_time_for_a_retry
            loses_nothing_among_many_writers
            feeds_a_follower_every_event_once
            pages_and_filters
            pages_stay_whole_while_rows_come_and_go
            never_moves_a_token_back
            begins_anew_behind_its_history
            keeps_the_parts_that_are_not_named
            keeps_the_journal_in_order
            joins_an_event_to_its_session
            changes_all_events_of_a_session
            keeps_statuses_by_their_rules
            notes_conclusions_with_their_events
            states_what_it_holds
            deletes_passes_that_closed_nothing
            deletes_what_is_old_and_finished
            keeps_nothing_for_a_consumer_that_is_gone
            deletes_the_oldest_where_there_is_too_much
            refuses_what_is_over_a_limit
            keeps_all_when_reopened
            answers_closed_after_close
        }
    };
    ($storage:ident: $($case:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                $crate::conformance::$case($storage()).await;
            }
        )*
    };
}

/// Returns a fault on `node`, distinguished by `n`, observed and received `n` seconds after the
/// beginning of 2026.
pub fn event(node: &str, n: i64) -> NewEvent {
    let received_at = time(n);
    let mut event = HealthEvent {
        generated_timestamp: Some(json::proto_timestamp(received_at)),
        ..report(node, &format!("fault {n}"))
    };
    normalise(&mut event, received_at);
    NewEvent { event, received_at }
}

/// Returns a fault without a time of its own.
pub fn event_without_time(node: &str, message: &str, received_at: Timestamp) -> NewEvent {
    let mut event = report(node, message);
    normalise(&mut event, received_at);
    NewEvent { event, received_at }
}

/// Returns all records, read in pages of `page`.
pub async fn read_feed(store: &dyn EventStore, page: usize) -> Vec<EventRecord> {
    let mut records: Vec<EventRecord> = Vec::new();
    loop {
        let after = records.last().map_or(Position::START, |record| record.seq);
        let more = store.feed(after, page).await.unwrap();
        assert!(more.len() <= page);
        if more.is_empty() {
            return records;
        }
        records.extend(more);
    }
}

/// Returns the positions assigned to appended events. Tests may only rely on their order.
fn positions(answers: &[Appended]) -> Vec<Position> {
    answers.iter().map(|answer| answer.seq).collect()
}

/// Returns the rank of each record's position among `known`, from 1.
fn numbers(records: &[EventRecord], known: &[Position]) -> Vec<usize> {
    let number = |record: &EventRecord| known.binary_search(&record.seq).unwrap() + 1;
    records.iter().map(number).collect()
}

/// Returns true if the positions are strictly increasing.
fn grow(positions: impl Iterator<Item = Position>) -> bool {
    positions.is_sorted_by(|before, next| before < next)
}

/// Returns an event that is `AlreadyQuarantined` in a session since `n` seconds after the
/// beginning of 2026.
fn joining(id: &str, session: &str, n: i64) -> SessionEvent {
    SessionEvent {
        id: id.to_owned(),
        session: session.to_owned(),
        status: NodeQuarantined::AlreadyQuarantined,
        at: time(n),
        eviction: None,
    }
}

/// Returns the status of an event.
async fn status(store: &dyn EventStore, id: &str) -> Option<EventStatus> {
    let found = store.statuses(vec![id.to_owned()]).await.unwrap();
    found.into_iter().next().unwrap()
}

fn report(node: &str, message: &str) -> HealthEvent {
    HealthEvent {
        version: 1,
        agent: "syslog-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "SysLogsXIDError".into(),
        is_fatal: true,
        message: message.into(),
        error_code: vec!["79".into()],
        entities_impacted: vec![Entity {
            entity_type: "PCI".into(),
            entity_value: "0000:b3:00".into(),
        }],
        node_name: node.into(),
        ..HealthEvent::default()
    }
}

fn all() -> EventQuery {
    EventQuery {
        limit: MAX_PAGE,
        ..EventQuery::default()
    }
}

/// Returns the time `seconds` after the beginning of 2026.
fn time(seconds: i64) -> Timestamp {
    Timestamp::constant(1_767_225_600, 0) + SignedDuration::from_secs(seconds)
}
