//! Ownership of the session on a node: it is ours, ours to be taken over after a loss, or
//! another gpuwarden's.
//!
//! Every gpuwarden sees all nodes of its cluster, and a cluster may have several, one on each
//! machine. The session on a node is ours if our store has an event that the node lists. An
//! event from before another store was acted on counts again (it is appended, and moves to the
//! end of the feed). If the store has none of the events, the session is another gpuwarden's and
//! is left alone, unless no other gpuwarden speaks for the node ([`Owns`]): for the node that
//! this process runs on, and for every node of a controller's cluster. Then the store was lost
//! or replaced, or the node was NVSentinel's until today; the events that it lists are stored
//! first, so that its faults are open, and the node is not given back because they were
//! forgotten.
//!
//! A session says what kind of gpuwarden made it, and each kind takes over only its own: a
//! controller that took over what a node's own gpuwarden has found would never receive the
//! recovery, and quarantine the node again. A node's own gpuwarden also records its store: of
//! two that run for one node, each leaves alone what the other keeps
//! ([`Ownership::kept_by_another`]), whatever events its own store has.

use std::collections::{BTreeMap, BTreeSet};

use contract::{HealthEvent, json, keys};
use jiff::Timestamp;
use model::event::{EventRecord, MAX_EVENTS, content_fingerprint, normalise};
use model::journal::EntryKind;
use model::ownership::{Maker, Ownership};

use super::agenda::StoreQuestion;
use super::entry::Claim;
use super::look::Look;
use super::{Effect, EventInStore, Level, Purpose};
use crate::session::{JournalNote, RequestFailure, foreign_session};

/// Nodes that no other gpuwarden speaks for: sessions on them that the store does not know are
/// taken over, unless another kind of gpuwarden made them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owns {
    /// The node that this process runs on; gpuwarden warns if the cluster lacks it.
    Node(String),
    /// Every node: a controller speaks for its cluster.
    All,
}

// === impl Owns ===

impl Owns {
    /// Returns the node that this process acts for, if it is a single one.
    pub(super) fn node(&self) -> Option<&str> {
        match self {
            Self::Node(own) => Some(own),
            Self::All => None,
        }
    }

    /// Returns the maker that our sessions record.
    pub(super) fn maker(&self) -> Maker {
        match self {
            Self::Node(_) => Maker::Node,
            Self::All => Maker::Controller,
        }
    }

    /// Returns whether a session on `node` that our store does not know is ours all the same: no
    /// other gpuwarden speaks for the node, and none has signed the session.
    fn adopts(&self, node: &str, maker: Option<&Maker>) -> bool {
        match (self, maker) {
            (Self::Node(_), Some(Maker::Controller)) | (Self::All, Some(Maker::Node)) => false,
            (Self::Node(own), _) => own == node,
            (Self::All, _) => true,
        }
    }
}

// === impl Look ===

impl Look<'_> {
    /// Returns who owns the session `own` on the node. Asks the store, and takes over lost
    /// sessions that are ours.
    pub(super) fn claim(&mut self, own: Option<&Ownership>) -> Claim {
        let Some(own) = own else {
            return Claim::Ours;
        };
        let (name, now) = (self.name, self.state.now);
        if let Owns::Node(our_node) = &self.state.settings.owns
            && own.kept_by_another(
                &self.state.settings.store,
                self.state.begun,
                our_node == name,
                now,
            )
        {
            return Claim::Foreign;
        }
        let entry = &mut *self.entry;
        let found = std::mem::take(&mut entry.claim.found);
        // Ids that the node no longer lists are dropped.
        let stored = &mut entry.claim.stored;
        stored.retain(|id| own.events.iter().any(|event| event.id == *id));
        let (mut unknown, mut asked) = (Vec::new(), Vec::new());
        let mut history = BTreeMap::new();
        // The fault book was built from the store.
        let faults = self.state.book.faults(name);
        for event in &own.events {
            let id = &event.id;
            if stored.contains(id) {
                continue;
            }
            if faults.iter().any(|fault| fault.event.id == *id) {
                stored.push(id.clone());
                continue;
            }
            match found.get(id) {
                None => asked.push(id.clone()),
                Some(EventInStore::Current) => stored.push(id.clone()),
                // A record is added once, even if several parts of it are listed.
                Some(EventInStore::History(record)) => {
                    history.insert(&record.id, record.as_ref());
                }
                Some(EventInStore::Missing) => unknown.push(event.clone()),
            }
        }
        if !asked.is_empty() {
            let (node, ids) = (name.to_owned(), asked);
            entry.claim.found = found;
            entry.claim.question = Some(StoreQuestion::LookUp);
            self.agenda.effects.push(Effect::LookUp { node, ids });
            return Claim::Later;
        }
        // Also if the list cannot be read: then nothing says that the session is ours.
        if unknown.len() == own.events.len()
            && !self.state.settings.owns.adopts(name, own.mark.by.as_ref())
        {
            return Claim::Foreign;
        }
        // The faults listed on a node that waits to be given back are over.
        if unknown.is_empty() && history.is_empty() || own.mark.back_at.is_some() {
            return Claim::Ours;
        }
        let history = history.into_values().cloned().collect();
        self.take_over(unknown, history);
        Claim::Later
    }

    /// Appends events of a node: those that it lists and the store does not have, and those that
    /// the store has from before another store was acted on.
    fn take_over(&mut self, mut unknown: Vec<HealthEvent>, history: Vec<EventRecord>) {
        let now = self.state.now;
        let count = unknown.len() + history.len();
        let again = history.into_iter().take(MAX_EVENTS); // The rest follows at the next look.
        let mut events: Vec<_> = again
            .map(|record| (taken_over(now, record.event), record.created_at))
            .collect();
        unknown.truncate(MAX_EVENTS - events.len());
        let listed = unknown.iter().map(|event| event.id.clone()).collect();
        events.extend(as_received(unknown, now));
        self.entry.claim.question = Some(StoreQuestion::TakeOver { listed });
        self.agenda.log(
            Level::Info,
            Some(self.name),
            format!(
                "taking over {count} faults that the node lists and the store does not have, or \
                 has as history"
            ),
        );
        self.agenda.effects.push(Effect::Append {
            node: self.name.to_owned(),
            events,
            purpose: Purpose::TakeOver,
        });
    }

    /// Handles the store's answer about events that a node lists.
    pub(super) fn events_found(&mut self, found: Option<BTreeMap<String, EventInStore>>) {
        let entry = &mut *self.entry;
        entry.claim.question = None;
        match found {
            Some(found) => {
                entry.claim.unanswered = false;
                entry.claim.found.extend(found);
                self.agenda.dirty.insert(self.name.to_owned());
            }
            None => self.retry_claim(),
        }
    }

    /// Records whether the node is left alone because of another gpuwarden's session, and
    /// journals it once per session.
    pub(super) fn record_claim(&mut self, own: Option<&Ownership>, claim: Claim) {
        let own = match claim {
            Claim::Ours => None,
            Claim::Foreign => own,
            Claim::Later => return,
        };
        let ours =
            matches!(&self.state.settings.owns, Owns::Node(our_node) if our_node == self.name);
        let by_node = own.is_some_and(|own| own.mark.by == Some(Maker::Node));
        let session = own.map(|own| own.session_id.clone());
        let entry = &mut *self.entry;
        // Also without a new question: the answer may have come from the fault book meanwhile.
        entry.claim.unanswered = false;
        entry.claim.on_our_node = ours && by_node;
        if entry.claim.foreign == session {
            return;
        }
        let mut text = match &session {
            Some(_) => {
                "the node carries the quarantine session of another gpuwarden: it is left alone"
            }
            None => "the session of another gpuwarden is no longer on the node",
        }
        .to_owned();
        if entry.claim.on_our_node {
            text = format!("{text}; {}", foreign_session::ON_OUR_NODE);
        }
        let id = session.clone().or(entry.claim.foreign.take());
        entry.claim.foreign = session;
        let note = JournalNote::new(EntryKind::Session, text);
        let now = self.state.now;
        (self.agenda).journal(now, self.name, id.as_deref(), note, Some(Level::Info));
    }

    /// Records that the store does not answer about a node; nothing is decided before a retry.
    pub(super) fn retry_claim(&mut self) {
        let failure = RequestFailure::Error { retry_after: None };
        self.entry.claim.unanswered = true;
        self.entry.session.failed(failure, self.state.now);
        self.save_session();
        self.set_wake();
    }
}

/// Returns the events that a node lists, as if received now. The input is untrusted: anyone who
/// may annotate the node may have written it, and the store must accept it, or the node is never
/// given back.
fn as_received(events: Vec<HealthEvent>, received_at: Timestamp) -> Vec<(HealthEvent, Timestamp)> {
    let mut ids = BTreeSet::new();
    let received = events.into_iter().map(|mut event| {
        let time = event.generated_timestamp;
        if time.is_some_and(|time| json::timestamp(time).is_none()) {
            event.generated_timestamp = None;
        }
        let (listed, own) = (std::mem::take(&mut event.id), content_fingerprint(&event));
        normalise(&mut event, received_at);
        // Parts of one event are listed under one id; stored, each needs its own.
        let is_id = listed.len() == own.len() && listed.bytes().all(|c| c.is_ascii_hexdigit());
        event.id = if is_id && ids.insert(listed.clone()) {
            listed
        } else {
            own
        };
        (taken_over(received_at, event), received_at)
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
            .map(|one| one.0.check_name.as_str())
            .collect();
        assert_eq!(checks, ["A", "B", "C", "D", "E"]);
        let ids: BTreeSet<&str> = stored.iter().map(|one| one.0.id.as_str()).collect();
        assert!(ids.len() == 5 && ids.contains(id), "{ids:?}");
        for one in &stored {
            assert_eq!(one.0.id.len(), id.len());
            let time = one.0.generated_timestamp.unwrap();
            assert!(json::timestamp(time).is_some());
            let strategy = one.0.processing_strategy;
            assert_eq!(strategy, ProcessingStrategy::ExecuteRemediation as i32);
        }
        // The ids do not depend on the time of reading.
        let again = as_received(listed, at + SignedDuration::from_secs(99));
        let again: BTreeSet<&str> = again.iter().map(|one| one.0.id.as_str()).collect();
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
        // Each kind takes over its own sessions after the loss of its store.
        for owns in [all, node] {
            assert!(owns.adopts("n1", Some(&owns.maker())));
        }
    }
}
