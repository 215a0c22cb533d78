//! Looks at a node: assesses its faults, steps its session, and runs its stages.

use std::ops::ControlFlow;

use contract::keys;
use model::fault::Fault;
use model::journal::EntryKind;
use model::node::NodeView;
use policy::Policy;
use policy::assess::Desired;

use super::agenda::Agenda;
use super::entry::{Claim, NodeEntry};
use super::stage::{ApprovalState, Facts, StageRequests, Stages};
use super::state::FleetState;
use super::{Effect, Level};
use crate::session::{JournalNote, ObservedNode};
use crate::waiting::BrakeState;

mod departed;
mod incident;
mod step;

use departed::{close_dismissed_conclusions, close_explained_faults, close_faults_of_gone_machine};

/// A node, and the state shared by all nodes, during a look.
pub(super) struct Look<'a> {
    pub(super) name: &'a str,
    pub(super) entry: &'a mut NodeEntry,
    pub(super) state: &'a mut FleetState,
    pub(super) brake: &'a mut BrakeState,
    pub(super) agenda: &'a mut Agenda,
}

// === impl Look ===

impl Look<'_> {
    /// Looks at the node. Returns whether anything was decided; false while an answer is
    /// missing.
    pub(crate) fn run(&mut self, policy: &Policy) -> bool {
        let applied = self.state.book.applied();
        if self.entry.awaits_answer(applied)
            || !close_faults_of_gone_machine(self)
            || !close_dismissed_conclusions(self)
            || !close_explained_faults(self)
        {
            // The brake must not start the node on the basis of an outdated decision.
            self.brake.remove_waiting(self.name);
            return false; // The answer triggers another look.
        }
        self.forget_notices();
        if self.state.settings.mode.decides() {
            self.decide(policy);
            self.settle();
        }
        self.announce_incidents();
        // For a missing node, `departed` has set when its faults are dropped.
        if !self.state.settings.cluster || self.entry.view.is_some() {
            self.set_wake();
        }
        true
    }

    /// Drops notices of more than a day ago, except those that the session lists.
    fn forget_notices(&mut self) {
        let (name, now) = (self.name, self.state.now);
        let is_old = |fault: &Fault| fault.notice_until().is_some_and(|until| until <= now);
        if !self.state.book.faults(name).iter().any(is_old) {
            return;
        }
        let listed = self.entry.ownership().map_or(&[][..], |own| &own.events);
        let holds = |id: &str| listed.iter().any(|event| event.id == id);
        if self.state.book.forget_notices(name, now, holds) {
            self.save();
        }
    }

    /// Decides about the node, in this order: the owner of its session, what its faults ask for,
    /// what the stages plan, whether the brake must be asked, and the session's step. Each
    /// `return` leaves the rest to the next look.
    fn decide(&mut self, policy: &Policy) {
        if self.entry.patch.in_flight {
            return; // The answer triggers another look.
        }
        let Some(observed) = self.entry.observed.clone() else {
            self.begin();
            self.brake.remove_waiting(self.name);
            self.forget_reports();
            if self.state.settings.cluster {
                self.wait_for_missing(policy);
                // The stages remove what belongs to devices of the missing node.
                self.act(None, &Desired::default());
            }
            return;
        };
        self.update_times(&observed);
        let own = observed.own.as_deref();
        let claim = self.claim(own);
        self.record_claim(own, claim);
        if claim != Claim::Ours {
            self.brake.remove_waiting(self.name);
            if claim == Claim::Foreign {
                self.begin();
                self.forget_reports();
            }
            self.agenda.view_changed = true;
            return;
        }
        self.begin();
        self.journal_policy_choice(&observed.view, policy);
        let mut requests = StageRequests::new(
            self.agenda,
            &mut self.entry.claim.question,
            (self.name, &self.entry.session),
            self.state.now,
        );
        self.entry.veto.update(&observed, self.state, &mut requests);
        let mut desired = self.entry.cached_desired(self.name, self.state);
        if self.plan(&mut desired).is_break() {
            self.brake.remove_waiting(self.name);
            return; // The answer that the stage waits for triggers another look.
        }
        self.record_statuses(&observed, &desired);
        if desired.wanted() && self.entry.in_service() {
            // A new quarantine waits for the brake, which is asked about all nodes at once.
            self.brake.add_waiting(self.name, desired);
            return;
        }
        self.brake.remove_waiting(self.name);
        let is_out = own.is_some() && !self.entry.is_undone_by_person(self.state);
        if is_out && !desired.wanted() && self.state.book.misses_monitors(self.name) {
            return; // Reading those reports triggers another look.
        }
        // A patch in doubt may still be made, so it keeps counting as out.
        self.entry.hold = None;
        self.step_session(&observed, policy, &desired, None);
    }

    /// Resets every stage for a new look.
    fn begin(&mut self) {
        for stage in self.entry.stages.all_mut() {
            stage.begin();
        }
    }

    /// Holds back what has no approval, and runs the plan of every stage. Returns `Break` if one of
    /// them waits for an answer.
    fn plan(&mut self, desired: &mut Desired) -> ControlFlow<()> {
        self.in_stages(|stages, facts, requests| {
            ApprovalState::hold(facts, desired);
            let mut stages = stages.all_mut().into_iter();
            stages.try_for_each(|stage| stage.plan(facts, desired, requests))
        })
    }

    /// Runs the action of every stage, with the node as the session observed it. Changes that a
    /// dry run pretends to have made since are acted on in the next look, like any change of the
    /// node.
    fn act(&mut self, observed: Option<&ObservedNode>, desired: &Desired) {
        self.in_stages(|stages, facts, requests| {
            let facts = Facts { observed, ..*facts };
            for stage in stages.all_mut() {
                stage.act(&facts, desired, requests);
            }
        });
    }

    /// Starts or stops the watches of every stage.
    fn settle(&mut self) {
        self.in_stages(|stages, _, requests| {
            for stage in stages.all_mut() {
                stage.settle(requests);
            }
        });
    }

    /// Runs `run` with the stages, their facts and their requests.
    pub(super) fn in_stages<T>(
        &mut self,
        run: impl FnOnce(&mut Stages, &Facts<'_>, &mut StageRequests<'_>) -> T,
    ) -> T {
        let (fleet, entry) = (&*self.state, &mut *self.entry);
        let facts = Facts {
            name: self.name,
            state: fleet,
            observed: entry.observed.as_ref(),
            in_session: entry.ownership().is_some(),
            session: &entry.session,
            veto: entry.veto.current(),
            undone_by_person: entry.is_undone_by_person(fleet),
            remediates_whole_node: entry
                .stages
                .remediation
                .remediates_whole_node(&fleet.settings),
            unsettled: entry.patch.in_flight && !entry.patch.updating,
            analysed: fleet.has_analysed(entry.reported),
        };
        let mut requests = StageRequests::new(
            self.agenda,
            &mut entry.claim.question,
            (self.name, &entry.session),
            fleet.now,
        );
        run(&mut entry.stages, &facts, &mut requests)
    }

    /// Updates the times that others have written on the node, and journals once which of them
    /// lie in the future.
    fn update_times(&mut self, observed: &ObservedNode) {
        let session = &mut self.entry.session;
        let before = session.times.clone();
        session.update_times(observed, self.state.now);
        if session.times == before {
            return;
        }
        let notes: Vec<String> = session.times.notes().collect();
        self.entry.observe();
        self.brake.mark_stale();
        self.save_session();
        for text in notes {
            self.call_attention(text);
        }
    }

    /// Journals once that the node chooses a policy that does not exist.
    fn journal_policy_choice(&mut self, view: &NodeView, policy: &Policy) {
        let unknown = policy.unknown_choice(view).map(str::to_owned);
        let last = &mut self.entry.journaled.unknown_policy;
        let is_new = *last != unknown;
        last.clone_from(&unknown);
        if let Some(unknown) = unknown.filter(|_| is_new) {
            self.call_attention(unknown_policy(&unknown));
        }
    }

    /// Handles a node with faults that the cluster does not have.
    fn wait_for_missing(&mut self, policy: &Policy) {
        let desired = self.entry.desired(self.name, self.state);
        self.step(None, policy, &desired, None);
        let wanted = desired.wanted();
        let journaled = std::mem::replace(&mut self.entry.journaled.missing, wanted);
        if wanted && !journaled {
            let text = "a fault asks to quarantine a node that the cluster does not have; \
                        waiting for it";
            self.agenda
                .log(Level::Warn, Some(self.name), text.to_owned());
            let text = "the cluster has no node of this name; it is quarantined as soon as it \
                        appears";
            let note = JournalNote::new(EntryKind::Attention, text);
            self.agenda
                .journal(self.state.now, self.name, None, note, None);
        }
        self.agenda.view_changed = true;
    }

    /// Emits the status updates of the node's events.
    fn record_statuses(&mut self, observed: &ObservedNode, desired: &Desired) {
        // Only a gpuwarden that acts quarantines nodes.
        if !self.state.acts() {
            return;
        }
        let before = self.entry.reports.clone();
        let drain = self.entry.stages.drain.eviction().cloned();
        let reports = &mut self.entry.reports;
        let statuses = reports.update(observed, desired, drain, self.state.now);
        let statuses = statuses.into_iter().map(Effect::Status);
        self.agenda.effects.extend(statuses);
        if self.entry.reports != before {
            self.save();
        }
    }

    /// Drops the pending events of a node that is gone or belongs to another gpuwarden.
    fn forget_reports(&mut self) {
        if !self.entry.reports.is_blank() {
            self.save();
        }
        let ended = self.entry.reports.forget(self.name, self.state.now);
        if self.state.acts() {
            self.agenda.effects.extend(ended.map(Effect::Status));
        }
    }

    /// Sets when to look at the node if no input marks it before.
    pub(super) fn set_wake(&mut self) {
        let now = self.state.now;
        let faults = self.state.book.faults(self.name).iter();
        let awaits_primary = faults.clone().filter_map(Fault::awaits_primary_until);
        let times = [
            awaits_primary.filter(|at| *at > now).min(),
            self.entry.journaled.incident_due.filter(|at| *at > now),
            self.entry.session.wake_at(now),
            self.entry.stages.wake_at(now),
            self.entry.veto.ends_at(),
            // The notice is no longer shown from then on.
            faults
                .filter_map(Fault::notice_until)
                .filter(|at| *at > now)
                .min(),
        ];
        // Past times were handled in this look, or wait for an answer that triggers another one.
        let at = times.into_iter().flatten().filter(|at| *at > now).min();
        self.agenda.wakes.set(self.name, at);
    }

    /// Marks the node to be saved.
    pub(super) fn save(&mut self) {
        self.agenda.unsaved.nodes.insert(self.name.to_owned());
    }

    /// Marks the node's session to be saved.
    pub(super) fn save_session(&mut self) {
        if self.state.settings.mode.writes() {
            self.save();
        }
    }

    /// Adds an entry to the journal of the node; with a level, logs it too.
    pub(super) fn journal(&mut self, note: JournalNote, level: Option<Level>) {
        let session = self.entry.session.id.as_deref();
        let now = self.state.now;
        self.agenda.journal(now, self.name, session, note, level);
    }

    /// Journals and logs something that needs a person's attention.
    pub(super) fn call_attention(&mut self, text: String) {
        self.agenda.call_attention(self.state.now, self.name, text);
    }
}

/// Returns the warning about a node that chooses a policy which does not exist.
pub(super) fn unknown_policy(name: &str) -> String {
    format!(
        "the annotation {} names the policy {name:?}, which the cluster's policy does not have: \
         the cluster's holds",
        keys::POLICY
    )
}
