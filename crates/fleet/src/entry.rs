//! The state of one node: its last observed state, session, stages, patch, and claim.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use contract::keys;
use jiff::Timestamp;
use model::node::{NodeChange, NodeView};
use model::ownership::Ownership;
use model::position::Position;
use policy::assess::{Dismissal, FaultRuling};

use super::EventInStore;
use super::agenda::StoreQuestion;
use super::assessment::{Assessment, ConditionInputs};
use super::stage::Stages;
use super::state::FleetState;
use crate::brake::{DOUBT, Hold, OutOfService};
use crate::session::{ObservedNode, Phase, Session, dismissal};
use crate::status::Reports;
use crate::veto_state::VetoState;

/// State of one node.
#[derive(Debug, Default)]
pub(super) struct NodeEntry {
    /// The node as last observed; `None` where the cluster does not have it, or there is no
    /// cluster.
    pub(super) view: Option<Arc<NodeView>>,
    /// The node as decisions see it: in a dry run with the changes that were not made.
    pub(super) observed: Option<ObservedNode>,
    /// Change that a dry run pretends to have made on the node.
    pub(super) pretended: NodeChange,
    /// Time since which the node has been missing from the cluster, as observed by this process.
    pub(super) absent_since: Option<Timestamp>,
    /// Session of the node.
    pub(super) session: Session,
    /// Stages of the node's way out of service and back.
    pub(super) stages: Stages,
    /// A person's veto on the node.
    pub(super) veto: VetoState,
    /// Position of the last event of the node that this process has recorded.
    pub(super) reported: Position,
    /// Events of the node that wait for the status of their record.
    pub(super) reports: Reports,
    /// State of the node's patch.
    pub(super) patch: PatchState,
    /// Ownership of the session on the node.
    pub(super) claim: ClaimState,
    /// Facts already journaled, which are not journaled again.
    pub(super) journaled: Journaled,
    /// Result of the last assessment of the node's faults.
    pub(super) assessment: Option<Box<Assessment>>,
    /// Inputs of the conditions that were last written.
    pub(super) condition_inputs: Option<Box<ConditionInputs>>,
    /// Set while the node is out of service according to its annotations, or in a dry run would
    /// be.
    out_of_service: Option<OutOfService>,
    /// Hold that keeps the node in service, if any.
    pub(super) hold: Option<Hold>,
}

/// State of the patch of a node; at most one is in flight.
#[derive(Debug, Default)]
pub(super) struct PatchState {
    /// True while a patch is in flight.
    pub(super) in_flight: bool,
    /// Change of the last patch.
    pub(super) change: NodeChange,
    /// True while a patch is in flight that takes the node out of service.
    pub(super) taking_out: bool,
    /// True if the last patch kept an out-of-service node out: the session stays on the node
    /// whether or not the patch is made.
    pub(super) updating: bool,
    /// Time until which the node counts as out because the answer to a quarantine patch was
    /// lost.
    pub(super) in_doubt: Option<Timestamp>,
    /// Time of the answer to the last patch that was made.
    pub(super) answered_at: Option<Timestamp>,
}

/// Ownership of the session that a node carries.
#[derive(Debug, Default)]
pub(super) struct ClaimState {
    /// Ids of events listed on the node that the store has.
    pub(super) stored: Vec<String>,
    /// Question to the store without an answer: nothing is decided about the node before.
    pub(super) question: Option<StoreQuestion>,
    /// True if the store did not answer the last question; it is retried.
    pub(super) unanswered: bool,
    /// Answers of the store about events on the node, for the next look.
    pub(super) found: BTreeMap<String, EventInStore>,
    /// Id of the session of another gpuwarden on the node; empty where it cannot be read.
    pub(super) foreign: Option<String>,
    /// True if that gpuwarden runs for the node that this process runs on.
    pub(super) on_our_node: bool,
}

/// Facts about a node that are journaled only when they change.
#[derive(Debug, Default)]
pub(super) struct Journaled {
    /// Rulings about the node's faults.
    pub(super) rulings: Vec<FaultRuling>,
    /// Name of a policy that the node chooses and that does not exist.
    pub(super) unknown_policy: Option<String>,
    /// True once the journal says that the cluster does not have the node.
    pub(super) missing: bool,
    /// Ids of the incidents of several nodes that need no further Kubernetes Event.
    pub(super) incidents: BTreeSet<String>,
    /// Time when the next Event of an incident is due.
    pub(super) incident_due: Option<Timestamp>,
}

/// Owner of the session that a node carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// The node carries no session, or ours: decide about it.
    Ours,
    /// The node carries another gpuwarden's session: leave it alone.
    Foreign,
    /// Not known yet: the answer of the store, or a change of the feed or the node, triggers
    /// another look.
    Later,
}

// === impl NodeEntry ===

impl NodeEntry {
    /// Creates the entry of a new node.
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            session: Session::idle(now),
            ..Self::default()
        }
    }

    /// Sets the observed state of the node. Returns whether anything that decisions depend on
    /// has changed; a heartbeat changes nothing.
    pub(super) fn set_view(&mut self, view: Arc<NodeView>) -> bool {
        let Some(current) = &self.view else {
            self.view = Some(view);
            self.journaled.missing = false;
            self.absent_since = None;
            self.observe();
            return true;
        };
        let changed = !current.same_but_for_heartbeat(&view);
        self.view = Some(view);
        if changed || !self.pretended.is_empty() {
            self.observe();
        } else if let (Some(observed), Some(view)) = (&mut self.observed, &self.view) {
            observed.view = Arc::clone(view);
        }
        changed
    }

    /// Returns whether `view` is older than the current view. Versions are comparable numbers in
    /// every known Kubernetes; where they are not, no view counts as older, and a patch that
    /// rests on an old one fails its tests.
    pub(super) fn is_outdated(&self, view: &NodeView) -> bool {
        let Some(current) = self.view.as_ref().filter(|current| current.uid == view.uid) else {
            return false;
        };
        match (
            current.resource_version.parse::<u64>(),
            view.resource_version.parse::<u64>(),
        ) {
            (Ok(current), Ok(version)) => version < current,
            _ => false,
        }
    }

    /// Returns whether an answer of the store must arrive before anything is decided.
    pub(super) fn awaits_answer(&mut self, applied: Position) -> bool {
        if matches!(self.claim.question, Some(StoreQuestion::AwaitFeed(up_to)) if up_to <= applied)
        {
            self.claim.question = None;
        }
        self.claim.question.is_some()
    }

    /// Handles that the cluster no longer has the node.
    pub(super) fn remove_from_cluster(&mut self) {
        self.view = None;
        self.observed = None;
        self.out_of_service = None;
        self.patch.in_doubt = None;
        self.hold = None;
        // A later node of this name is another one, and has no returns.
        self.session.returns.clear();
        self.session.back_at = None;
    }

    /// Gives up all requests without an answer. A patch that takes the node out counts until `until`.
    pub(super) fn answers_lost(&mut self, until: Timestamp) {
        if self.patch.taking_out {
            self.patch.in_doubt = Some(until);
        }
        (self.patch.in_flight, self.patch.taking_out) = (false, false);
        for stage in self.stages.all_mut() {
            stage.answers_lost();
        }
        if !matches!(self.claim.question, Some(StoreQuestion::AwaitFeed(_))) {
            self.claim.question = None;
        }
    }

    /// Adjusts waits and times after the clock was put back to `now`.
    pub(super) fn clock_moved_back(&mut self, now: Timestamp) {
        self.session.clock_moved_back(now);
        for stage in self.stages.all_mut() {
            stage.clock_moved_back(now);
        }
        self.patch.in_doubt = self.patch.in_doubt.map(|_| now + DOUBT);
        self.patch.answered_at = self.patch.answered_at.map(|at| at.min(now));
    }

    /// Reads the session and its times from the node as decisions see it.
    pub(super) fn observe(&mut self) {
        self.observed = self.view.as_ref().map(|view| {
            ObservedNode::of(if self.pretended.is_empty() {
                Arc::clone(view)
            } else {
                Arc::new(view.after(&self.pretended))
            })
        });
        let times = &self.session.times;
        self.out_of_service = self.ownership().map(|own| OutOfService {
            since: times.counted(keys::SESSION, own.since),
            forced: own.forced(),
        });
        if self.out_of_service.is_some() {
            self.patch.in_doubt = None;
        }
    }

    /// Pretends, in a dry run, that a change was made.
    pub(super) fn pretend(&mut self, change: NodeChange) {
        self.pretended = std::mem::take(&mut self.pretended).then(change);
        self.observe();
        let back = match (&self.observed, &self.view) {
            (Some(ObservedNode { view, .. }), Some(real)) => {
                view.annotations == real.annotations && view.labels == real.labels
            }
            _ => false,
        };
        if back || self.session.phase == Phase::Idle {
            self.pretended = NodeChange::default();
            self.observe();
        }
    }

    /// Returns up to when the faults of the node are dismissed by a person.
    pub(super) fn dismissal(&self, fleet: &FleetState) -> Option<Dismissal> {
        let dropped_at = fleet.switches.dropped_at;
        dismissal(self.observed.as_ref()?, dropped_at, &self.session.times)
    }

    /// Returns whether the entry can be dropped once the node has no faults: the node is not in the
    /// cluster, has no session, and awaits no answer.
    pub(super) fn is_over(&self) -> bool {
        let awaits = self.patch.in_flight
            || self.stages.any_awaits_answer()
            || self.claim.question.is_some();
        self.view.is_none() && !awaits && self.session.phase == Phase::Idle
    }

    /// Returns whether the node's annotations say that it is in service.
    pub(super) fn in_service(&self) -> bool {
        self.out_of_service.is_none()
    }

    /// Returns since when the node has been out of service, if that counts in the brake's
    /// window.
    pub(super) fn out_since(&self) -> Option<Timestamp> {
        self.out_of_service.filter(|out| !out.forced)?.since
    }

    /// Returns the node's entry in the brake if it counts as out: it is out, or may be before
    /// the next look.
    pub(super) fn out(&self, now: Timestamp) -> Option<OutOfService> {
        let on_the_way = OutOfService {
            since: Some(now),
            forced: false,
        };
        let in_doubt = self.patch.in_doubt.is_some_and(|until| now < until);
        (self.out_of_service).or((self.patch.taking_out || in_doubt).then_some(on_the_way))
    }

    /// Returns how the brake counts the node: `None` if in service, else whether it was forced
    /// out. A node whose quarantine patch arrives counts as before.
    pub(super) fn counted(&self, now: Timestamp) -> Option<bool> {
        self.out(now).map(|out| out.forced)
    }

    /// Returns the session, ours or another gpuwarden's, on the node as decisions see it.
    pub(super) fn ownership(&self) -> Option<&Ownership> {
        self.observed.as_ref()?.own.as_deref()
    }
}
