//! Whose session is on a node: ours, lost and to be taken over, or another's.
//!
//! Every gpuwarden sees all nodes of its cluster, and several may run in one: one on each
//! machine. A quarantined node is ours if our store knows an event that the node lists.
//! If it knows none, the node is another's and is left alone, unless nobody else speaks
//! for it ([`Owns`]): for our own node, and for every node where we are the controller of
//! the cluster. Then our store was lost or replaced, or the node was NVSentinel's until
//! today; what it lists is put into the store first, so that its faults are open, and it
//! is not given back because we have forgotten why.
//!
//! A session says what kind of gpuwarden made it, and each kind takes over its own only:
//! a controller that took over what a node's own gpuwarden has found would never hear of
//! the recovery, and quarantine the node again.

use std::collections::BTreeSet;

use contract::{HealthEvent, ProcessingStrategy};
use domain::event::content_fingerprint;
use domain::journal::EntryKind;
use domain::node::NodeView;
use domain::session::ownership::{Maker, Ownership};
use serde_json::Value;
use store::{NewEvent, StoreError};

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
        let mut unknown = Vec::new();
        let listed = own.events.len();
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
                Ok(Some(_)) => self.entry(&view.name).known.push(event.id),
                Ok(None) => unknown.push(event),
                Err(error) => return self.claim_later(&view.name, &error),
            }
        }
        // Also where the list cannot be read: then nothing says that it is ours.
        if unknown.len() == listed && !self.owns.adopts(&view.name, own.maker.as_ref()) {
            return Claim::Anothers;
        }
        if unknown.is_empty() {
            return Claim::Ours;
        }
        tracing::info!(
            node = view.name,
            events = unknown.len(),
            "taking over the faults that the node lists and the store does not know"
        );
        match self.store.append(self.as_received(unknown)).await {
            Ok(_) => Claim::Later,
            Err(error) => self.claim_later(&view.name, &error),
        }
    }

    /// Keeps whether the node is left alone because its session is another's, and notes it
    /// once for each such session.
    pub(super) fn left_alone(&mut self, view: &NodeView, claim: Claim) {
        let session = match claim {
            Claim::Ours => None,
            Claim::Anothers => Some(
                Ownership::read(view)
                    .map(|own| own.session_id)
                    .unwrap_or_default(),
            ),
            Claim::Later => return,
        };
        let entry = self.entry(&view.name);
        if entry.anothers == session {
            return;
        }
        let text = match &session {
            Some(_) => {
                "the node carries the quarantine session of another gpuwarden: it is left alone"
            }
            None => "the session of another gpuwarden is no longer on the node",
        };
        let id = session.clone().or(entry.anothers.take());
        entry.anothers = session;
        tracing::info!(node = view.name, session = id, "{text}");
        let text = text.to_owned();
        self.note(
            &view.name,
            id.as_deref(),
            EntryKind::Session,
            text,
            Value::Null,
        );
    }

    fn as_received(&self, events: Vec<HealthEvent>) -> Vec<NewEvent> {
        let received_at = (self.clock)();
        let mut ids = BTreeSet::new();
        events
            .into_iter()
            .map(|mut event| {
                // Parts of one event are listed under its id; stored, each needs its own.
                if !ids.insert(event.id.clone()) {
                    event.id = content_fingerprint(&event);
                }
                if event.processing_strategy == ProcessingStrategy::Unspecified as i32 {
                    event.processing_strategy = ProcessingStrategy::ExecuteRemediation as i32;
                }
                NewEvent { event, received_at }
            })
            .collect()
    }

    fn claim_later(&mut self, node: &str, error: &StoreError) -> Claim {
        tracing::error!(node, err = %error, "the store does not answer; the node is left as it is");
        self.metrics.error("claim_error");
        let now = (self.clock)();
        let failure = domain::session::Failure::Error { retry_after: None };
        self.entry(node).session.failed(failure, now);
        self.remember_wake(node);
        Claim::Later
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
