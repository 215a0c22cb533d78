//! Views of the nodes and of the brake, for the status page, the API and the command line
//! ([`crate::view`]).

use std::collections::BTreeMap;

use contract::keys;
use jiff::Timestamp;
use model::actors;
use model::fault::{Fault, not_fully_seen};
use model::ownership::{CORDONED_BEFORE, Ownership};
use policy::assess::{Dismissal, DismissedBy, is_notice};

use super::{Fleet, Mode};
use crate::brake::LimitUse;
use crate::entry::NodeEntry;
use crate::look::unknown_policy;
use crate::session::{ObservedNode, Phase, foreign_session};
use crate::state::FleetState;
use crate::view::{BrakeView, FaultView, ForeignGpuwardenView, NodeState, NodeStatus, SessionView};

/// A node to be shown.
#[derive(Clone, Copy)]
pub(super) struct Shown<'a> {
    name: &'a str,
    entry: &'a NodeEntry,
    state: &'a FleetState,
}

// === impl Fleet ===

impl Fleet {
    /// Returns all nodes as shown: those of `before`, with the nodes renewed that have changed.
    /// A large cluster has thousands of nodes, and few of them change.
    pub fn show(&mut self, before: &[NodeStatus], now: Timestamp) -> Vec<NodeStatus> {
        self.set_time(now);
        let before = before.iter().cloned();
        let mut shown: BTreeMap<String, NodeStatus> =
            before.map(|status| (status.name.clone(), status)).collect();
        for name in std::mem::take(&mut self.agenda.unshown) {
            match self.status(&name) {
                Some(status) => drop(shown.insert(name, status)),
                None => drop(shown.remove(&name)),
            }
        }
        shown.into_values().collect()
    }

    /// Returns the number of nodes in the cluster.
    pub fn nodes_in_cluster(&self) -> usize {
        let entries = self.nodes.values();
        entries.filter(|entry| entry.view.is_some()).count()
    }

    /// Returns the view of a node; `None` where there is nothing to show.
    pub fn status(&self, name: &str) -> Option<NodeStatus> {
        Shown::of(self, name)?.status()
    }

    /// Returns the view of the brake, without the state of the circuit breaker, which is not
    /// known here; `None` without a cluster.
    pub fn show_brake(&mut self, now: Timestamp) -> Option<BrakeView> {
        if !self.state.settings.cluster {
            return None;
        }
        self.set_time(now);
        if self.brake.stale && self.brake.waiting.is_empty() {
            self.brake.plan = self.brake.make_plan(&self.nodes, &self.state);
        }
        let entries = self.nodes.values();
        let held = entries.filter(|entry| entry.hold.is_some()).count();
        Some(self.brake.show(held, &self.state))
    }

    /// Returns the utilisation of the fullest limit.
    pub fn brake_utilization(&self) -> f64 {
        let fullest = self.brake.plan.limits.first();
        fullest.map_or(0.0, LimitUse::utilization)
    }
}

// === impl Shown ===

impl<'a> Shown<'a> {
    /// Returns a node to be shown; `None` without an entry.
    pub(super) fn of(fleet: &'a Fleet, name: &'a str) -> Option<Self> {
        Some(Self {
            name,
            entry: fleet.nodes.get(name)?,
            state: &fleet.state,
        })
    }

    /// Returns the view of the node; `None` where there is nothing to show.
    fn status(self) -> Option<NodeStatus> {
        let Self {
            name,
            entry,
            state: fleet,
        } = self;
        let foreign = entry.foreign();
        // A gpuwarden that only observes still shows the session that an earlier run left on the
        // node.
        let not_ours = foreign.is_some() || !fleet.settings.mode.decides();
        let session = match entry.ownership().filter(|_| not_ours) {
            Some(own) => Some((Phase::Quarantined, Some(&own.session_id))),
            None => (entry.session.phase != Phase::Idle)
                .then_some((entry.session.phase, entry.session.id.as_ref())),
        };
        let faults = fleet.book.faults(name).iter();
        let (mut notices, mut open): (Vec<&Fault>, Vec<&Fault>) =
            faults.partition(|fault| is_notice(fault, &entry.journaled.rulings));
        notices.retain(|fault| fault.notice_until().is_some_and(|until| until > fleet.now));
        let devices = entry.stages.device_taints.show(name, fleet);
        let nothing_open = open.is_empty() && notices.is_empty() && devices.is_empty();
        if nothing_open && session.is_none() && fleet.book.missed(name) == 0 {
            return None;
        }
        notices.sort_by_key(|fault| std::cmp::Reverse(fault.accepted_at));
        open.sort_by(|a, b| Fault::by_gravity(a, b));
        let in_cluster = self.in_cluster();
        let phase = session.map(|(phase, _)| phase);
        let dismissal = entry.dismissal(fleet);
        let dismissed =
            |fault: &Fault| dismissal.is_some_and(|dismissal| fault.dismissed(dismissal.up_to));
        // A node that the cluster does not have cannot be on its way out of service.
        let state = NodeState::of(&open, phase.filter(|_| in_cluster != Some(false)));
        let own = entry.ownership().filter(|_| foreign.is_none());
        let only_devices = || own.is_some_and(|own| !own.takes_node_out());
        Some(NodeStatus {
            name: name.to_owned(),
            state: match state {
                NodeState::Session(Phase::Quarantined | Phase::Draining | Phase::Drained)
                    if only_devices() =>
                {
                    NodeState::PartlyQuarantined
                }
                state => state,
            },
            session: session.map(|(phase, id)| SessionView {
                id: id.cloned().unwrap_or_default(),
                phase,
                since: (foreign.as_ref())
                    .and_then(|(own, _)| own.since)
                    .unwrap_or(entry.session.since),
                failures: entry.session.failures,
                awaits: self.awaits(foreign.as_ref().map(|(_, another)| another)),
                cordoned: (entry.observed.as_ref())
                    .and_then(|observed| observed.own.as_ref())
                    .is_some_and(|own| own.cordoned),
                uncordon_releases: entry.machines(fleet).is_none(),
                another: foreign.as_ref().map(|(_, another)| another.clone()),
                proposal: own.and_then(|own| own.mark.proposal()).cloned(),
                drain: (entry.stages.drain.eviction().cloned())
                    .filter(|_| foreign.is_none() && entry.ownership().is_some()),
            }),
            in_cluster,
            unschedulable: entry.view.as_ref().map(|view| view.unschedulable),
            notes: self.notes(phase.is_some()),
            faults: (open.into_iter())
                .map(|fault| FaultView {
                    dismissed: dismissed(fault),
                    ..FaultView::of(fault)
                })
                .collect(),
            notices: notices.into_iter().map(FaultView::of).collect(),
            devices,
        })
    }

    /// Returns whether the cluster has the node; `None` while that is not known.
    fn in_cluster(self) -> Option<bool> {
        let Self {
            entry,
            state: fleet,
            ..
        } = self;
        let known = fleet.settings.cluster && (fleet.listed || entry.view.is_some());
        known.then(|| entry.view.is_some())
    }

    /// Returns what the session on the node awaits, for people.
    pub(super) fn awaits(self, another: Option<&ForeignGpuwardenView>) -> String {
        let Self {
            name,
            entry,
            state: fleet,
        } = self;
        if fleet.settings.mode == Mode::Observe {
            return "a gpuwarden that acts: this one only observes".to_owned();
        }
        if let Some(another) = another {
            return format!("{}, to give it back", another.who);
        }
        if let Some(hold) = &entry.hold {
            return hold.awaits();
        }
        if fleet.settings.cluster && self.in_cluster().is_none() {
            return "the cluster's nodes to be read".to_owned();
        }
        if !fleet.caught_up {
            return "the stored events to be read".to_owned();
        }
        if fleet.awaits_devices() {
            return "the cluster's devices to be read".to_owned();
        }
        if fleet.policy.is_none() {
            return "a policy to be loaded: nothing is decided before".to_owned();
        }
        if entry.claim.unanswered {
            return "the event store, which does not answer whose the session is".to_owned();
        }
        if entry.session.phase.is_out()
            && fleet.book.faults(name).is_empty()
            && fleet.book.misses_monitors(name)
        {
            return "reports of monitors that found no room, to be read again".to_owned();
        }
        if let Some(first) = entry.session.awaits_first() {
            return first;
        }
        let held = entry.session.phase == Phase::Quarantined && entry.stages.drain.is_vetoed();
        if let Some(veto) = entry.veto.current().filter(|_| held) {
            return format!("the end of {veto}");
        }
        let awaits = entry.stages.awaits();
        if let Some(awaits) = awaits.filter(|_| entry.session.phase.is_out()) {
            return awaits;
        }
        entry.session.awaits(entry.view.is_some())
    }

    /// Returns the notes about the node for people; `in_session` is true if the node has a
    /// session or is about to get one.
    fn notes(self, in_session: bool) -> Vec<String> {
        let Self {
            name,
            entry,
            state: fleet,
        } = self;
        let mode = fleet.settings.mode;
        let faults = fleet.book.faults(name);
        let mut notes = Vec::new();
        match self.in_cluster() {
            None if fleet.settings.cluster => notes.push(
                "the cluster's nodes could not be read yet: whether it has this node is not known"
                    .to_owned(),
            ),
            Some(false) => notes.push("the cluster has no node of this name".to_owned()),
            _ => {}
        }
        let foreign = entry.foreign();
        if let Some((own, another)) = &foreign {
            notes.push(format!(
                "quarantined by another gpuwarden{}: {}; it is left alone, and counts as out of \
                 service",
                foreign_session::since(own),
                another.who
            ));
            if entry.claim.on_our_node {
                notes.push(foreign_session::ON_OUR_NODE.to_owned());
            }
        } else if let Some(ObservedNode {
            view,
            own: Some(own),
        }) = &entry.observed
            && own.keeps_cordon(view)
        {
            notes.push(CORDONED_BEFORE.to_owned());
        }
        if let Some(ObservedNode { view, own }) = &entry.observed
            && let Some(manager) = Ownership::cordoned_by(view, own.as_deref())
        {
            notes.push(format!("cordoned by {manager}"));
        }
        let others = entry.view.iter().flat_map(|view| actors::at_work(view));
        notes.extend(others.map(|actor| format!("{actor}: {}", actor.advice)));
        notes.extend(entry.hold.as_ref().map(|hold| format!("held back: {hold}")));
        notes.extend(self.dismissed_note());
        notes.extend(entry.session.times.notes());
        if entry.opted_out() {
            notes.push(format!(
                "opted out by label {}=false: nothing is done about it",
                keys::MANAGED_LABEL
            ));
        }
        notes.extend(
            entry
                .journaled
                .unknown_policy
                .as_deref()
                .map(unknown_policy),
        );
        notes.extend(entry.veto.note());
        notes.extend(entry.stages.approval.notes());
        if mode == Mode::Observe && faults.iter().any(|fault| fault.event.is_fatal) {
            notes.push("observing only: nothing is done about it; --quarantine acts".to_owned());
        }
        if mode == Mode::DryRun && in_session && foreign.is_none() {
            notes.push("dry run: nothing is written in the cluster".to_owned());
        }
        match entry.session.failures {
            0 => {}
            failures => notes.push(format!("{failures} attempts in a row have failed")),
        }
        match fleet.book.missed(name) {
            0 => {}
            missed => notes.push(not_fully_seen(missed)),
        }
        notes
    }

    /// Returns the note about faults that a person has dismissed.
    fn dismissed_note(self) -> Option<String> {
        let Self {
            name,
            entry,
            state: fleet,
        } = self;
        let Dismissal { up_to, by } = entry.dismissal(fleet)?;
        let how = match by {
            DismissedBy::Released => "when the node was released by hand",
            DismissedBy::Dropped => "when what the circuit breaker held back was dropped,",
        };
        let mut faults = fleet.book.faults(name).iter();
        faults
            .any(|fault| fault.dismissed(up_to))
            .then(|| format!("dismissed {how} at {up_to:.0}: a newer report counts again"))
    }
}

// === impl NodeEntry ===

impl NodeEntry {
    /// Returns the session of another gpuwarden that the node carries.
    fn foreign(&self) -> Option<(&Ownership, ForeignGpuwardenView)> {
        self.claim.foreign.as_ref()?;
        let (observed, own) = (self.observed.as_ref()?, self.ownership()?);
        let shown = ForeignGpuwardenView {
            who: foreign_session::owner(own, &observed.view.name),
            end: foreign_session::end_command(own, &observed.view),
        };
        Some((own, shown))
    }

    /// Returns whether the operator's opt-out label keeps the node in service.
    fn opted_out(&self) -> bool {
        (self.view.as_ref()).is_some_and(|view| {
            let mut rulings = self.journaled.rulings.iter();
            rulings.any(|one| one.ruling.opted_out(view))
        })
    }
}
