//! The state of one node: what is known of it, of its sessions, its patch and whose it is.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::keys;
use jiff::Timestamp;
use model::node::{NodeChange, NodeView};
use model::ownership::Ownership;
use model::position::Position;
use policy::assess::{Dismissal, FaultRuling};

use super::InStore;
use super::agenda::Awaits;
use super::remembered::{Judged, Told};
use super::stage::Stages;
use super::state::FleetState;
use crate::brake::{Hold, Out};
use crate::session::{Observed, Phase, Session, dismissal};
use crate::status::Reports;
use crate::veto_state::VetoState;

/// The state of one node.
#[derive(Debug, Default)]
pub(super) struct NodeEntry {
    /// The node as last seen; `None`: the cluster does not have it, or there is no cluster.
    pub(super) view: Option<Arc<NodeView>>,
    /// The node as decisions see it: in a dry run with the changes that were not made.
    pub(super) observed: Option<Observed>,
    /// The change that a dry run pretends to have made on the node.
    pub(super) pretended: NodeChange,
    /// The time at which we first saw that the cluster does not have the node.
    pub(super) absent_since: Option<Timestamp>,
    /// The session of the node as a whole.
    pub(super) session: Session,
    /// The stages of its way out of service and back.
    pub(super) stages: Stages,
    /// The veto of a person that holds for it.
    pub(super) veto: VetoState,
    /// Its events that wait for the status of their record.
    pub(super) reports: Reports,
    /// The patch that is made on it.
    pub(super) patch: PatchState,
    /// The state of whose session it carries.
    pub(super) claim: ClaimState,
    /// The things that were noted for its story.
    pub(super) noted: Noted,
    /// What was last wanted for it.
    pub(super) judged: Option<Box<Judged>>,
    /// What was last told of it.
    pub(super) told: Option<Box<Told>>,
    /// Set while the node is out of service, as the node itself says (in a dry run: would say).
    own: Option<Out>,
    /// The hold that keeps it in service, if there is one.
    pub(super) hold: Option<Hold>,
}

/// The state of the patch of a node: one is under way at a time.
#[derive(Debug, Default)]
pub(super) struct PatchState {
    /// True while a patch is under way.
    pub(super) in_flight: bool,
    /// The change of the last patch.
    pub(super) change: NodeChange,
    /// True while a patch is under way that takes the node out of service.
    pub(super) taking_out: bool,
    /// True if the last patch was one of a node that is out of service and stays so: its session
    /// stands on it whatever becomes of the patch.
    pub(super) updating: bool,
    /// Until when a patch counts that takes the node out and of which nobody knows whether it was
    /// made.
    pub(super) in_doubt: Option<Timestamp>,
    /// The time at which the last patch that was made was answered.
    pub(super) answered_at: Option<Timestamp>,
}

/// The state of whose session a node carries.
#[derive(Debug, Default)]
pub(super) struct ClaimState {
    /// Events on the node that are known to be in the store.
    pub(super) known: Vec<String>,
    /// The question to the store that is not answered: until then nothing is decided about the node.
    pub(super) awaits: Option<Awaits>,
    /// True if the store did not answer the last question; it is asked again.
    pub(super) unanswered: bool,
    /// The answers of the store about events on the node, for the next look.
    pub(super) found: BTreeMap<String, InStore>,
    /// Id of the session of another gpuwarden that it carries; empty where it cannot be read.
    pub(super) anothers: Option<String>,
    /// True if that gpuwarden runs for the node that this process runs on.
    pub(super) on_our_node: bool,
}

/// The things that were noted for the story of a node, and are not noted again.
#[derive(Debug, Default)]
pub(super) struct Noted {
    /// The rulings about its faults.
    pub(super) rulings: Vec<FaultRuling>,
    /// The policy that it names and that does not exist.
    pub(super) unknown_policy: Option<String>,
    /// True once it is noted that the cluster does not have the node.
    pub(super) missing: bool,
}

/// An answer to whose session a node carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// It carries no session, or ours: it is decided about.
    Ours,
    /// It carries another gpuwarden's: it is left alone.
    Anothers,
    /// That is not known yet: it is looked at again when the store has answered, or the feed or the node
    /// brings something.
    Later,
}

// === impl NodeEntry ===

impl NodeEntry {
    /// Returns the entry of a node of which nothing is known.
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            session: Session::idle(now),
            ..Self::default()
        }
    }

    /// Takes a view in. Returns whether anything that decisions look at has changed: a
    /// heartbeat changes nothing.
    pub(super) fn take_view(&mut self, view: Arc<NodeView>) -> bool {
        let Some(known) = &self.view else {
            self.view = Some(view);
            self.noted.missing = false;
            self.absent_since = None;
            self.observe();
            return true;
        };
        let changed = !known.same_but_for_heartbeat(&view);
        self.view = Some(view);
        if changed || !self.pretended.is_empty() {
            self.observe();
        } else if let (Some(observed), Some(view)) = (&mut self.observed, &self.view) {
            observed.view = Arc::clone(view);
        }
        changed
    }

    /// Returns whether `view` is older than what is known. Versions are comparable numbers in every
    /// Kubernetes we know; where they are not, no view is, and a patch that rests on an old one
    /// fails its tests.
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
        if matches!(self.claim.awaits, Some(Awaits::Feed(up_to)) if up_to <= applied) {
            self.claim.awaits = None;
        }
        self.claim.awaits.is_some()
    }

    /// Takes in that the cluster does not have it any more.
    pub(super) fn gone(&mut self) {
        self.view = None;
        self.observed = None;
        self.own = None;
        self.patch.in_doubt = None;
        self.hold = None;
        // One that comes by this name later is another, and has never come back.
        self.session.returns.clear();
        self.session.back_at = None;
    }

    /// Reads from the node, as decisions see it, what is ours on it and whether it is out of
    /// service.
    pub(super) fn observe(&mut self) {
        self.observed = self.view.as_ref().map(|view| {
            Observed::of(if self.pretended.is_empty() {
                Arc::clone(view)
            } else {
                Arc::new(view.after(&self.pretended))
            })
        });
        let times = &self.session.times;
        self.own = self.ownership().map(|own| Out {
            since: times.counted(keys::SESSION, own.since),
            forced: own.forced(),
        });
        if self.own.is_some() {
            self.patch.in_doubt = None;
        }
    }

    /// Goes on, in a dry run, as if a change had been made.
    pub(super) fn pretend(&mut self, change: NodeChange) {
        self.pretended = std::mem::take(&mut self.pretended).then(change);
        self.observe();
        let back = match (&self.observed, &self.view) {
            (Some(Observed { view, .. }), Some(real)) => {
                view.annotations == real.annotations && view.labels == real.labels
            }
            _ => false,
        };
        if back || self.session.phase == Phase::Idle {
            self.pretended = NodeChange::default();
            self.observe();
        }
    }

    /// Returns the faults of the node that a person has dismissed.
    pub(super) fn dismissal(&self, fleet: &FleetState) -> Option<Dismissal> {
        let dropped_at = fleet.switched.dropped_at;
        dismissal(self.observed.as_ref()?, dropped_at, &self.session.times)
    }

    /// Returns whether nothing on the node says that it is out of service.
    pub(super) fn in_service(&self) -> bool {
        self.own.is_none()
    }

    /// Returns since when the node says that it is out of service, where that counts in the brake's
    /// window.
    pub(super) fn out_since(&self) -> Option<Timestamp> {
        self.own.filter(|out| !out.forced)?.since
    }

    /// Returns whether it counts as out of service: it is, or may be before we look again.
    pub(super) fn out(&self, now: Timestamp) -> Option<Out> {
        let on_the_way = Out {
            since: Some(now),
            forced: false,
        };
        let in_doubt = self.patch.in_doubt.is_some_and(|until| now < until);
        (self.own).or((self.patch.taking_out || in_doubt).then_some(on_the_way))
    }

    /// Returns how the brake counts it: as out of service or not, and forced or not. A node on its
    /// way that then says itself that it is out counts as before.
    pub(super) fn counted(&self, now: Timestamp) -> Option<bool> {
        self.out(now).map(|out| out.forced)
    }

    /// Returns what is ours, or another gpuwarden's, on the node as decisions see it.
    pub(super) fn ownership(&self) -> Option<&Ownership> {
        self.observed.as_ref()?.own.as_deref()
    }
}
