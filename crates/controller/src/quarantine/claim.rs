//! Whose session is on a node: ours, lost and to be taken over, or another's.
//!
//! Every gpuwarden sees all nodes of its cluster, and several may run in one: one on each
//! machine. A quarantined node is ours if our store knows an event that the node lists.
//! What it knows from before another store was acted on counts again then (it is appended,
//! and moves to the end of the feed).
//! If it knows none, the node is another's and is left alone, unless nobody else speaks
//! for it ([`Owns`]): for our own node, and for every node where we are the controller of
//! the cluster. Then our store was lost or replaced, or the node was NVSentinel's until
//! today; what it lists is put into the store first, so that its faults are open, and it
//! is not given back because we have forgotten why.
//!
//! A session says what kind of gpuwarden made it, and each kind takes over its own only:
//! a controller that took over what a node's own gpuwarden has found would never hear of
//! the recovery, and quarantine the node again. A node's own gpuwarden also says with which
//! store it keeps the session: of two that run for one node, each leaves alone what the other
//! keeps ([`Ownership::kept_by_another`]), whatever events its own store knows.

use std::collections::BTreeSet;

use contract::{HealthEvent, json, keys};
use domain::event::{content_fingerprint, normalise};
use domain::journal::EntryKind;
use domain::node::NodeView;
use domain::session::another;
use domain::session::ownership::{Maker, Ownership};
use jiff::Timestamp;
use serde_json::Value;
use store::{MAX_APPEND, NewEvent, StoreError};

use super::{Owns, Quarantine};

/// What to do about a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// It carries no session, or ours: go on.
    Ours,
    /// Another gpuwarden's: leave it alone.
    Anothers,
    /// Not now; looked at again when the feed or the node brings something.
    Later,
}

// === impl Owns ===

impl Owns {
    /// What our sessions say of who made them.
    pub(super) fn maker(&self) -> Maker {
        match self {
            Self::Node(_) => Maker::Node,
            Self::All => Maker::Controller,
        }
    }

    /// Whether a session on `node` that our store does not know is ours all the same: nobody
    /// else speaks for the node, and nobody else says that they made it.
    fn adopts(&self, node: &str, maker: Option<&Maker>) -> bool {
        match (self, maker) {
            (Self::Node(_), Some(Maker::Controller)) | (Self::All, Some(Maker::Node)) => false,
            (Self::Node(own), _) => own == node,
            (Self::All, _) => true,
        }
    }
}

// === impl Quarantine ===

impl Quarantine {
    /// Whose session `view` carries. Takes over what is ours and was lost.
    pub(super) async fn claim(&mut self, view: &NodeView) -> Claim {
        let Some(own) = Ownership::read(view) else {
            return Claim::Ours;
        };
        if let Owns::Node(our_node) = &self.owns {
            let (store, ours) = (self.store.identity().id, *our_node == view.name);
            if own.kept_by_another(&store, self.saving.begun, ours, (self.clock)()) {
                return Claim::Anothers;
            }
        }
        let (mut unknown, mut history) = (Vec::new(), Vec::<NewEvent>::new());
        let listed = own.events.len();
        let since = self.store.identity().since;
        // Only what the node still lists is worth remembering.
        let known = &mut self.entry(&view.name).known;
        known.retain(|id| own.events.iter().any(|event| event.id == *id));
        for event in own.events {
            if self.entry(&view.name).known.contains(&event.id) {
                continue;
            }
            // What the book has came from the store.
            let faults = self.book.faults(&view.name);
            if faults.iter().any(|fault| fault.event.id == event.id) {
                self.entry(&view.name).known.push(event.id);
                continue;
            }
            match self.store.event(&event.id).await {
                Ok(Some(record)) if record.seq > since => {
                    self.entry(&view.name).known.push(event.id);
                }
                // Once, of however many parts of it are listed.
                Ok(Some(record)) if history.iter().any(|one| one.event.id == record.id) => {}
                Ok(Some(record)) => history.push(NewEvent {
                    received_at: record.created_at,
                    event: taken_over((self.clock)(), record.event),
                }),
                Ok(None) => unknown.push(event),
                Err(error) => return self.claim_later(&view.name, &error),
            }
        }
        // Also where the list cannot be read: then nothing says that it is ours.
        if unknown.len() == listed && !self.owns.adopts(&view.name, own.maker.as_ref()) {
            return Claim::Anothers;
        }
        if unknown.is_empty() && history.is_empty() {
            return Claim::Ours;
        }
        tracing::info!(
            node = view.name,
            events = unknown.len() + history.len(),
            "taking over the faults that the node lists and the store does not know, or no more"
        );
        // The rest at the next look.
        let more = history.len() + unknown.len() > MAX_APPEND;
        history.truncate(MAX_APPEND);
        unknown.truncate(MAX_APPEND - history.len());
        let listed: Vec<String> = unknown.iter().map(|event| event.id.clone()).collect();
        history.extend(as_received(unknown, (self.clock)()));
        match self.store.append(history).await {
            Ok(appended) => {
                // Stored now, or before, if under another id.
                self.entry(&view.name).known.extend(listed);
                if more {
                    self.dirty.insert(view.name.clone());
                }
                let new = appended.iter().any(|one| one.new);
                if new || more {
                    Claim::Later
                } else {
                    Claim::Ours
                }
            }
            Err(error) => self.claim_later(&view.name, &error),
        }
    }

    /// Keeps whether the node is left alone because its session is another's, and notes it
    /// once for each such session.
    pub(super) fn left_alone(&mut self, view: &NodeView, claim: Claim) {
        let own = match claim {
            Claim::Ours => None,
            Claim::Anothers => Ownership::read(view),
            Claim::Later => return,
        };
        let ours = matches!(&self.owns, Owns::Node(our_node) if *our_node == view.name);
        let by_node = own
            .as_ref()
            .is_some_and(|own| own.maker == Some(Maker::Node));
        let session = own.map(|own| own.session_id);
        let entry = self.entry(&view.name);
        entry.on_our_node = ours && by_node;
        if entry.anothers == session {
            return;
        }
        let mut text = match &session {
            Some(_) => {
                "the node carries the quarantine session of another gpuwarden: it is left alone"
            }
            None => "the session of another gpuwarden is no longer on the node",
        }
        .to_owned();
        if entry.on_our_node {
            text = format!("{text}; {}", another::ON_OUR_NODE);
        }
        let id = session.clone().or(entry.anothers.take());
        entry.anothers = session;
        tracing::info!(node = view.name, session = id, "{text}");
        self.note(
            &view.name,
            id.as_deref(),
            EntryKind::Session,
            text,
            Value::Null,
        );
    }

    fn claim_later(&mut self, node: &str, error: &StoreError) -> Claim {
        tracing::error!(node, err = %error, "the store does not answer; the node is left as it is");
        self.metrics.error("claim_error");
        let now = (self.clock)();
        let failure = domain::session::Failure::Error { retry_after: None };
        self.entry(node).session.failed(failure, now);
        self.session_changed(node);
        self.remember_wake(node);
        Claim::Later
    }
}

/// What a node lists, as if it had been received now. Anybody who may annotate the node may
/// have written it: whatever it is, the store has to take it, or the node is never given back.
fn as_received(events: Vec<HealthEvent>, received_at: Timestamp) -> Vec<NewEvent> {
    let mut ids = BTreeSet::new();
    let received = events.into_iter().map(|mut event| {
        let time = event.generated_timestamp;
        if time.is_some_and(|time| json::timestamp(time).is_none()) {
            event.generated_timestamp = None;
        }
        let (listed, own) = (std::mem::take(&mut event.id), content_fingerprint(&event));
        normalise(&mut event, received_at);
        // Parts of one event are listed under its id; stored, each needs its own.
        let is_id = listed.len() == own.len() && listed.bytes().all(|c| c.is_ascii_hexdigit());
        event.id = if is_id && ids.insert(listed.clone()) {
            listed
        } else {
            own
        };
        NewEvent {
            event: taken_over(received_at, event),
            received_at,
        }
    });
    received.collect()
}

/// Marks an event as taken over.
fn taken_over(now: Timestamp, mut event: HealthEvent) -> HealthEvent {
    let mark = (keys::META_TAKEN_OVER.to_owned(), now.to_string());
    event.metadata.extend([mark]);
    event
}

#[cfg(test)]
mod tests {
    use contract::ProcessingStrategy;
    use jiff::SignedDuration;
    use serde_json::json;

    use super::super::look::tests::Bench;
    use super::*;

    fn event(id: &str, check: &str) -> HealthEvent {
        HealthEvent {
            id: id.into(),
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: check.into(),
            node_name: "n1".into(),
            is_fatal: true,
            ..HealthEvent::default()
        }
    }

    #[test]
    fn whatever_a_node_lists_the_store_can_take() {
        let at = Timestamp::UNIX_EPOCH;
        let id = "0123456789abcdef01234567";
        let mut listed = vec![
            event(id, "A"),
            event(id, "B"),
            event(&"x".repeat(300), "C"),
            event("", "D"),
            HealthEvent {
                generated_timestamp: Some(json::proto_timestamp(at)),
                ..event("e", "E")
            },
        ];
        if let Some(time) = &mut listed[4].generated_timestamp {
            time.nanos = -1;
        }
        let stored = as_received(listed.clone(), at);
        let checks: Vec<&str> = (stored.iter())
            .map(|one| one.event.check_name.as_str())
            .collect();
        assert_eq!(checks, ["A", "B", "C", "D", "E"]);
        let ids: BTreeSet<&str> = stored.iter().map(|one| one.event.id.as_str()).collect();
        assert!(ids.len() == 5 && ids.contains(id), "{ids:?}");
        for one in &stored {
            assert_eq!(one.event.id.len(), id.len());
            let time = one.event.generated_timestamp.unwrap();
            assert!(json::timestamp(time).is_some());
            let strategy = one.event.processing_strategy;
            assert_eq!(strategy, ProcessingStrategy::ExecuteRemediation as i32);
        }
        // The same, whenever it is read.
        let again = as_received(listed, at + SignedDuration::from_secs(99));
        let again: BTreeSet<&str> = again.iter().map(|one| one.event.id.as_str()).collect();
        assert_eq!(again, ids);
    }

    #[test]
    fn each_kind_takes_over_its_own_sessions_and_those_that_nobody_signed() {
        let (all, node) = (Owns::All, Owns::Node("n1".to_owned()));
        let other = Maker::Other("fleet".to_owned());
        let table = [
            (None, true, true),
            (Some(Maker::Controller), true, false),
            (Some(Maker::Node), false, true),
            (Some(other), true, true),
        ];
        for (maker, by_all, by_node) in table {
            let maker = maker.as_ref();
            assert_eq!(all.adopts("n1", maker), by_all, "{maker:?}");
            assert_eq!(node.adopts("n1", maker), by_node, "{maker:?}");
            assert!(!node.adopts("n2", maker), "{maker:?}");
        }
        // What each makes it takes over again after its store was lost.
        for owns in [all, node] {
            assert!(owns.adopts("n1", Some(&owns.maker())));
        }
    }
    #[tokio::test]
    async fn what_another_store_keeps_is_left_alone_whatever_is_known() {
        let mut bench = Bench::new().await;
        let quarantine = &mut bench.quarantine;
        let now = (quarantine.clock)();
        let hour = SignedDuration::from_hours(1);
        let known = quarantine.book.faults("n1")[0].event.id.clone();
        let ours = quarantine.store.identity().id;
        for (owns, store, begun, expected) in [
            ("n1", "other", now - hour, Claim::Anothers),
            ("n1", "other", now + hour, Claim::Ours),
            ("n2", "other", now + hour, Claim::Anothers),
            ("n1", ours.as_str(), now - hour, Claim::Ours),
        ] {
            quarantine.owns = Owns::Node(owns.to_owned());
            quarantine.saving.begun = begun;
            let session =
                json!({"id": "s", "since": now.to_string(), "by": "node", "store": store});
            let annotations = json!({
                keys::SESSION: session.to_string(),
                keys::QUARANTINE_HEALTH_EVENT: json!([{"id": known}]).to_string(),
            });
            let metadata = json!({"name": "n1", "annotations": annotations});
            let view = NodeView::from_object(json!({ "metadata": metadata })).unwrap();
            let claim = quarantine.claim(&view).await;
            assert_eq!(claim, expected, "{owns} {store}");
            quarantine.left_alone(&view, claim);
            let entry = &quarantine.nodes["n1"];
            assert_eq!(entry.anothers.is_some(), claim == Claim::Anothers);
            assert_eq!(entry.on_our_node, entry.anothers.is_some() && owns == "n1");
        }
    }
}
