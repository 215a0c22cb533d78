//! What is kept per node.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::keys;
use jiff::Timestamp;

use super::Found;
use crate::assess::Verdict;
use crate::brake::{Hold, Out};
use crate::node::{NodeChange, NodeView};
use crate::ownership::Ownership;
use crate::position::Position;
use crate::session::Session;

/// As what a node was last counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// The cluster has it.
    pub(super) in_cluster: bool,
    /// The brake or a pause holds it back.
    pub(super) held: bool,
}

/// What is kept per node.
#[derive(Debug)]
pub(super) struct NodeEntry {
    /// The node as last seen; `None`: the cluster does not have it, or there is no cluster.
    pub(super) view: Option<Arc<NodeView>>,
    /// Its session.
    pub(super) session: Session,
    /// A patch is under way.
    pub(super) in_flight: bool,
    /// In a dry run: what would have been changed since the node was last as it was.
    pub(super) pretended: NodeChange,
    /// Why its faults count or do not, as last noted.
    pub(super) verdicts: Vec<Verdict>,
    /// A policy that it names and that does not exist.
    pub(super) unknown_policy: Option<String>,
    /// Since when the cluster does not have it, as far as we have seen.
    pub(super) absent_since: Option<Timestamp>,
    /// It was said that the cluster does not have it.
    pub(super) missing_said: bool,
    /// Events on the node that are known to be in the store.
    pub(super) known: Vec<String>,
    /// It carries this session of another gpuwarden; empty where its id cannot be read.
    pub(super) anothers: Option<String>,
    /// That one runs for the node that this process runs on.
    pub(super) on_our_node: bool,
    /// What was asked of the store about it, and is not answered: nothing is decided about it.
    pub(super) awaits: Option<Awaits>,
    /// What the store has answered about events on the node; for the next look.
    pub(super) found: BTreeMap<String, Found>,
    /// What is ours, or another gpuwarden's, on the node as decisions see it.
    pub(super) ownership: Option<Arc<Ownership>>,
    /// That it is out of service, as the node itself says (in a dry run: would say).
    own: Option<Out>,
    /// When a patch was last answered with the node as it is then.
    pub(super) patched_at: Option<Timestamp>,
    /// A patch is under way that takes it out of service.
    pub(super) taking_out: bool,
    /// Such a patch was sent, and nobody knows whether it was made: until when that counts.
    pub(super) in_doubt: Option<Timestamp>,
    /// Why it is held back.
    pub(super) hold: Option<Hold>,
    /// As what it is counted in what was last published.
    pub(super) shown: Counted,
}

/// What was asked of the store about a node.
#[derive(Debug)]
pub(super) enum Awaits {
    /// Which of the events on the node it has.
    Found,
    /// To append these events that the node lists.
    TakenOver {
        /// Their ids as listed.
        listed: Vec<String>,
    },
    /// To append what closes faults of a machine that is gone.
    Closed {
        /// What to say of it then.
        text: String,
    },
    /// The feed to bring what was appended, up to this position.
    Feed(Position),
}

// === impl NodeEntry ===

impl NodeEntry {
    pub(super) fn new(session: Session) -> Self {
        Self {
            view: None,
            session,
            in_flight: false,
            pretended: NodeChange::default(),
            verdicts: Vec::new(),
            unknown_policy: None,
            absent_since: None,
            missing_said: false,
            known: Vec::new(),
            anothers: None,
            on_our_node: false,
            awaits: None,
            found: BTreeMap::new(),
            ownership: None,
            own: None,
            patched_at: None,
            taking_out: false,
            in_doubt: None,
            hold: None,
            shown: Counted::default(),
        }
    }

    /// Takes a view in. Returns whether anything that decisions look at has changed: a
    /// heartbeat changes nothing.
    pub(super) fn see(&mut self, view: Arc<NodeView>) -> bool {
        let Some(known) = &self.view else {
            self.view = Some(view);
            self.missing_said = false;
            self.absent_since = None;
            self.read_own();
            return true;
        };
        let changed = !known.same_but_for_heartbeat(&view);
        self.view = Some(view);
        if changed {
            self.read_own();
        }
        changed
    }

    /// Whether `view` is older than what is known. Versions are comparable numbers in every
    /// Kubernetes we know; where they are not, no view is, and a patch that rests on an old
    /// one fails its tests.
    pub(super) fn knows_newer(&self, view: &NodeView) -> bool {
        let Some(known) = self.view.as_ref().filter(|known| known.uid == view.uid) else {
            return false;
        };
        match (
            known.resource_version.parse::<u64>(),
            view.resource_version.parse::<u64>(),
        ) {
            (Ok(known), Ok(version)) => version < known,
            _ => false,
        }
    }

    /// Returns whether nothing can be decided about it now: an answer is to come first.
    pub(super) fn waits_for_an_answer(&mut self, applied: Position) -> bool {
        if matches!(self.awaits, Some(Awaits::Feed(up_to)) if up_to <= applied) {
            self.awaits = None;
        }
        self.awaits.is_some()
    }

    /// Takes in that the cluster does not have it any more.
    pub(super) fn gone(&mut self) {
        self.view = None;
        self.ownership = None;
        self.own = None;
        self.in_doubt = None;
        self.hold = None;
        // One that comes by this name later is another, and has never come back.
        self.session.returns.clear();
    }

    /// Reads from the node, as decisions see it, what is ours on it and whether it is out of
    /// service.
    pub(super) fn read_own(&mut self) {
        let view = self.effective_view();
        let own = view.and_then(|view| Ownership::read(&view));
        let times = &self.session.times;
        self.own = own.as_ref().map(|own| Out {
            since: times.counted(keys::SESSION, own.since),
            forced: own.forced(),
        });
        self.ownership = own.map(Arc::new);
        if self.own.is_some() {
            self.in_doubt = None;
        }
    }

    /// Whether nothing on the node says that it is out of service.
    pub(super) fn in_service(&self) -> bool {
        self.own.is_none()
    }

    /// Since when the node says that it is out of service, where that counts in the
    /// brake's window.
    pub(super) fn out_since(&self) -> Option<Timestamp> {
        self.own.filter(|out| !out.forced)?.since
    }

    /// Whether it counts as out of service: it is, or may be before we look again.
    pub(super) fn out(&self, now: Timestamp) -> Option<Out> {
        let on_the_way = Out {
            since: Some(now),
            forced: false,
        };
        let in_doubt = self.in_doubt.is_some_and(|until| now < until);
        (self.own).or((self.taking_out || in_doubt).then_some(on_the_way))
    }

    /// How the brake counts it: as out of service or not, and forced or not. A node on its
    /// way that then says itself that it is out counts as before.
    pub(super) fn counted(&self, now: Timestamp) -> Option<bool> {
        self.out(now).map(|out| out.forced)
    }

    /// The node as decisions see it: in a dry run with the changes that were not made.
    pub(super) fn effective_view(&self) -> Option<Arc<NodeView>> {
        let view = self.view.as_ref()?;
        if self.pretended.is_empty() {
            return Some(Arc::clone(view));
        }
        Some(Arc::new(view.after(&self.pretended)))
    }
}
