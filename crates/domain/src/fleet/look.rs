//! A look at a node: asks the policy about its faults, steps its session, and plans what follows.

use std::ops::ControlFlow;
use std::sync::Arc;

use serde_json::json;

use super::claim::Claim;
use super::entry::NodeEntry;
use super::show::unknown_policy;
use super::stage::{Asks, Facts, Stages};
use super::{Effect, Fleet, Level, Mode, Owns, Planned, RuleSetOutcome};
use crate::assess::{Desired, FaultRuling};
use crate::brake::Hold;
use crate::fault::Fault;
use crate::journal::EntryKind;
use crate::node::{NodeChange, NodeView};
use crate::policy::Policy;
use crate::session::{self, Intent, Marks, Note, Observed, Patch, Phase, step};

/// Most faults whose rulings one journal entry tells: a story is read by people.
const MAX_RULINGS: usize = 50;

impl Fleet {
    /// Looks at all nodes that anything has happened to.
    pub(super) fn look(&mut self) {
        // Before all is known, nothing follows from what is known.
        if !self.caught_up || !self.listed || self.common.awaits_devices() {
            return;
        }
        let Some(policy) = self.common.policy.clone() else {
            return;
        };
        let mut looked_at = Vec::new();
        while let Some(name) = self.agenda.dirty.pop_first() {
            self.agenda.unshown.insert(name.clone());
            let applied = self.common.book.applied();
            let entry = self.nodes.get_mut(&name);
            if entry.is_some_and(|entry| entry.waits_for_an_answer(applied)) {
                continue; // Looked at again when the answer is there.
            }
            if !self.close_faults_of_gone_machine(&name) {
                continue;
            }
            self.forget_notices(&name);
            if self.common.settings.mode.decides() {
                self.look_at(&name, &policy);
                self.settle(&name);
                looked_at.push(name.clone());
            }
            let entry = self.nodes.get(&name);
            // Of one that the cluster lacks it is remembered when its faults are dropped.
            if !self.common.settings.cluster || entry.is_some_and(|entry| entry.view.is_some()) {
                self.set_wake(&name);
            }
            self.forget_if_gone(&name);
            self.agenda.effects.push(Effect::Decided(name));
        }
        self.step_waiting_nodes(&policy);
        for name in looked_at {
            // Not while a patch of it is under way: the API server works on both writes of one
            // object in turn, and the cordon would wait for what only tells of it. It is looked
            // at again when the answer is there.
            let entry = self.nodes.get(&name);
            if !entry.is_some_and(|entry| entry.patch.in_flight) && self.has_news(&name) {
                self.agenda.effects.push(Effect::Tell(name));
            }
        }
    }

    /// Drops the node's notices of more than a day ago, but for those for which it is out.
    fn forget_notices(&mut self, name: &str) {
        let now = self.common.now;
        let is_old = |fault: &Fault| fault.notice_until().is_some_and(|until| until <= now);
        if !self.common.book.faults(name).iter().any(is_old) {
            return;
        }
        let own = self.nodes.get(name).and_then(NodeEntry::ownership);
        let listed = own.map_or(&[][..], |own| &own.events);
        let holds = |id: &str| listed.iter().any(|event| event.id == id);
        if self.common.book.forget_notices(name, now, holds) {
            self.agenda.unsaved.nodes.insert(name.to_owned());
        }
    }

    fn look_at(&mut self, name: &str, policy: &Policy) {
        let Some(entry) = self.nodes.get(name) else {
            return;
        };
        if entry.patch.in_flight {
            return; // Looked at again when the answer is there.
        }
        let Some(observed) = entry.observed.clone() else {
            self.begin_look(name);
            self.brake.forget(name);
            self.forget_reports(name);
            if self.common.settings.cluster {
                self.look_at_missing(name, policy);
                // Devices of a node that is gone are gone.
                self.act(name, &Desired::default());
            }
            return;
        };
        self.take_in_times(&observed);
        let own = observed.own.as_deref();
        let claim = self.claim(name, own);
        self.keep_claim(name, own, claim);
        if claim != Claim::Ours {
            self.brake.forget(name);
            if claim == Claim::Anothers {
                self.begin_look(name);
                self.forget_reports(name);
            }
            self.agenda.news = true;
            return;
        }
        self.begin_look(name);
        self.note_choice(&observed.view, policy);
        self.take_in_veto(name, &observed);
        let mut desired = self.judge(name);
        if self.plan(name, &mut desired).is_break() {
            return; // Looked at again when what it waits for is known.
        }
        self.look_at_reports(&observed, &desired);
        if desired.wanted() && self.entry(name).in_service() {
            // To be taken out: the brake has a say. It is asked about all at once.
            self.brake.wait(name, desired);
            return;
        }
        self.brake.forget(name);
        let entry = self.nodes.get(name);
        let undone = entry.is_some_and(|entry| entry.is_undone_by_person(&self.common));
        let is_out = own.is_some() && !undone;
        if is_out && !desired.wanted() && self.common.book.misses_monitors(name) {
            return; // Looked at again when they are read.
        }
        // A patch of which nobody knows may still be made: that goes on counting.
        self.entry(name).hold = None;
        self.step_session(name, &observed, policy, &desired, None);
    }

    /// Steps the session of a node, and does what follows.
    pub(super) fn step_session(
        &mut self,
        name: &str,
        observed: &Observed,
        policy: &Policy,
        desired: &Desired,
        hold: Option<&Hold>,
    ) {
        let effects = self.step(name, Some(observed), policy, desired, hold);
        let returns_wait = self.common.settings.returns_wait;
        let entry = self.entry(name);
        if !returns_wait {
            entry.session.returns.clear();
        }
        let session = entry.session.id.clone();
        if entry.noted.rulings != desired.rulings {
            entry.noted.rulings.clone_from(&desired.rulings);
            let rule_sets = policy.rule_sets_of(&observed.view).iter();
            let outcomes = rule_sets.map(|rule_set| RuleSetOutcome {
                rule_set: rule_set.name.clone(),
                passed: desired.rule_sets.contains(&rule_set.name),
            });
            self.agenda
                .effects
                .push(Effect::Evaluated(outcomes.collect()));
            let note = Note::new(EntryKind::Rules, rules_text(&desired.rulings));
            self.note(name, session.as_deref(), note, None);
        }
        for effect in effects {
            match effect {
                session::Effect::Note(note) => {
                    self.note(name, session.as_deref(), note, Some(Level::Info));
                }
                session::Effect::Patch(patch) => {
                    self.plan_patch(name, &observed.view, patch, desired);
                }
                session::Effect::Tell(message) => {
                    if self.common.settings.mode == Mode::Quarantine && self.common.settings.cluster
                    {
                        let node = name.to_owned();
                        self.agenda.effects.push(Effect::Undone { node, message });
                    }
                }
            }
        }
        self.act(name, desired);
        self.set_wake(name);
        self.agenda.news = true;
    }

    /// Begins a look at a node in every stage.
    fn begin_look(&mut self, name: &str) {
        self.in_stages(name, |stages, _, _| {
            for stage in stages.all_mut() {
                stage.begin();
            }
        });
    }

    /// Lets every stage of a node plan. `Break` where one of them waits for something to be known.
    fn plan(&mut self, name: &str, desired: &mut Desired) -> ControlFlow<()> {
        let planned = self.in_stages(name, |stages, facts, asks| {
            let mut stages = stages.all_mut().into_iter();
            stages.try_for_each(|stage| stage.plan(facts, desired, asks))
        });
        planned.unwrap_or(ControlFlow::Continue(()))
    }

    /// Lets every stage of a node act.
    fn act(&mut self, name: &str, desired: &Desired) {
        self.in_stages(name, |stages, facts, asks| {
            for stage in stages.all_mut() {
                stage.act(facts, desired, asks);
            }
        });
    }

    /// Runs something in the stages of a node; `None` where nothing is known of the node.
    pub(super) fn in_stages<T>(
        &mut self,
        name: &str,
        run: impl FnOnce(&mut Stages, &Facts<'_>, &mut Asks<'_>) -> T,
    ) -> Option<T> {
        let entry = self.nodes.get_mut(name)?;
        let facts = Facts {
            name,
            common: &self.common,
            observed: entry.observed.as_ref(),
            session: &entry.session,
            veto: entry.veto.as_ref(),
            undone_by_person: entry.is_undone_by_person(&self.common),
            repairs_whole_node: (entry.stages.remediation)
                .repairs_whole_node(&self.common.settings),
            unsettled: entry.patch.in_flight && !entry.patch.updating,
        };
        let mut asks = Asks::new(
            &mut self.agenda,
            &mut entry.claim.awaits,
            (name, &entry.session),
            self.common.now,
        );
        Some(run(&mut entry.stages, &facts, &mut asks))
    }

    /// Steps the session of a node. Returns what the step asks for.
    fn step(
        &mut self,
        name: &str,
        observed: Option<&Observed>,
        policy: &Policy,
        desired: &Desired,
        hold: Option<&Hold>,
    ) -> Vec<session::Effect> {
        let (now, marks) = (self.common.now, self.marks(policy));
        let entry = self.nodes.get(name);
        let machines = entry.and_then(|entry| entry.machines(&self.common));
        let entry = self.entry(name);
        let session = &entry.session;
        let step = step(
            session,
            desired,
            observed,
            &marks,
            hold,
            machines.as_deref(),
            now,
        );
        if entry.session != step.session {
            entry.session = step.session;
            self.session_changed(name);
        }
        step.effects
    }

    /// Plans a patch; in a dry run goes on as if it had been made.
    fn plan_patch(&mut self, name: &str, view: &Arc<NodeView>, patch: Patch, desired: &Desired) {
        let session = self.entry(name).session.id.clone();
        let Patch { intent, change } = &patch;
        let text = format!("{}: {}", intent.name(), change.summary());
        let detail = json!({
            "intent": intent,
            "change": change,
            "ruleSets": desired.rule_sets,
            "events": desired.events.iter().map(|one| &one.event.id).collect::<Vec<_>>(),
        });
        if self.common.settings.mode == Mode::DryRun {
            self.log(Level::Info, Some(name), format!("dry run: {text}"));
            let kind = EntryKind::DryRun;
            let note = Note { kind, text, detail };
            self.note(name, session.as_deref(), note, None);
            self.pretend(name, patch.change);
            return;
        }
        if !self.common.settings.cluster {
            return;
        }
        let kind = EntryKind::Decision;
        let note = Note { kind, text, detail };
        self.note(name, session.as_deref(), note, Some(Level::Info));
        let entry = self.entry(name);
        entry.patch.in_flight = true;
        entry.patch.change = change.clone();
        // Whoever let it go has counted it.
        entry.patch.taking_out = *intent == Intent::Quarantine;
        entry.patch.updating = *intent == Intent::Update;
        self.agenda.effects.push(Effect::Patch(Box::new(Planned {
            node: name.to_owned(),
            view: Arc::clone(view),
            session,
            patch,
            first_seen: desired.events.iter().map(|one| one.first_seen).min(),
        })));
    }

    /// Goes on, in a dry run, as if the change had been made.
    fn pretend(&mut self, name: &str, change: NodeChange) {
        let entry = self.entry(name);
        entry.pretended = std::mem::take(&mut entry.pretended).then(change);
        entry.observe();
        let back = match (&entry.observed, &entry.view) {
            (Some(Observed { view, .. }), Some(real)) => {
                view.annotations == real.annotations && view.labels == real.labels
            }
            _ => false,
        };
        if back || entry.session.phase == Phase::Idle {
            entry.pretended = NodeChange::default();
            entry.observe();
        }
        self.brake.mark_stale();
        self.agenda.dirty.insert(name.to_owned());
    }

    /// Takes in the times that others have written on a node, and says once which of them lie
    /// in the future.
    fn take_in_times(&mut self, observed: &Observed) {
        let (now, name) = (self.common.now, observed.view.name.as_str());
        let entry = self.entry(name);
        let before = entry.session.times.clone();
        entry.session.take_in_times(observed, now);
        if entry.session.times == before {
            return;
        }
        entry.observe();
        let notes: Vec<String> = entry.session.times.notes().collect();
        self.brake.mark_stale();
        self.session_changed(name);
        for text in notes {
            self.call_attention(name, text);
        }
    }

    /// Returns how our sessions mark a node.
    fn marks(&self, policy: &Policy) -> Marks {
        Marks {
            maker: Some(self.common.settings.owns.maker()),
            store: match self.common.settings.owns {
                Owns::Node(_) => Some(self.common.settings.store.clone()),
                Owns::All => None,
            },
            ..Marks::of(policy)
        }
    }

    /// Takes another policy in: all nodes are looked at.
    pub(super) fn policy_changed(&mut self, policy: Option<Arc<Policy>>) {
        let before = std::mem::replace(&mut self.common.policy, policy.clone());
        self.look_again_at_all();
        self.brake.mark_stale();
        self.agenda.news = true;
        let (Some(policy), Some(_)) = (policy, before) else {
            return; // The first one: it has changed nothing.
        };
        let names = policy.rule_sets.iter().map(|set| set.name.as_str());
        let names: Vec<&str> = names.collect();
        let text = format!(
            "the policy {} has changed; its rule sets are: {}",
            policy.source,
            names.join(", ")
        );
        let concerned: Vec<String> = self
            .nodes
            .iter()
            .filter(|(name, entry)| {
                entry.session.phase != Phase::Idle || !self.common.book.faults(name).is_empty()
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in concerned {
            let session = self.entry(&name).session.id.clone();
            let note = Note::new(EntryKind::Rules, text.clone());
            self.note(&name, session.as_deref(), note, None);
        }
    }

    /// Says once that a node names a policy that does not exist.
    fn note_choice(&mut self, view: &NodeView, policy: &Policy) {
        let unknown = policy.unknown_choice(view).map(str::to_owned);
        let entry = self.entry(&view.name);
        let news = entry.noted.unknown_policy != unknown;
        entry.noted.unknown_policy.clone_from(&unknown);
        if let Some(unknown) = unknown.filter(|_| news) {
            self.call_attention(&view.name, unknown_policy(&unknown));
        }
    }

    /// Asks people to look at a node.
    pub(super) fn call_attention(&mut self, name: &str, text: String) {
        let now = self.common.now;
        self.agenda.call_attention(now, name, text);
    }

    /// Looks at a node with faults that the cluster does not know.
    fn look_at_missing(&mut self, name: &str, policy: &Policy) {
        let desired = self.desired(name);
        self.step(name, None, policy, &desired, None);
        let wanted = desired.wanted();
        let noted = std::mem::replace(&mut self.entry(name).noted.missing, wanted);
        if wanted && !noted {
            let text = "a fault asks to quarantine a node that the cluster does not have; \
                        waiting for it";
            self.log(Level::Warn, Some(name), text.to_owned());
            let text = "the cluster has no node of this name; it is quarantined as soon as it \
                        appears";
            let note = Note::new(EntryKind::Attention, text);
            self.note(name, None, note, None);
        }
        self.agenda.news = true;
    }
}

/// Returns what the rules said, for people. The gravest faults come first; a node with more than a
/// story can show is out of service anyway.
fn rules_text(rulings: &[FaultRuling]) -> String {
    if rulings.is_empty() {
        return "no open fault".to_owned();
    }
    let shown = rulings.iter().take(MAX_RULINGS).map(FaultRuling::to_string);
    let mut parts: Vec<String> = shown.collect();
    if rulings.len() > MAX_RULINGS {
        parts.push(format!("and {} more faults", rulings.len() - MAX_RULINGS));
    }
    parts.join("; ")
}
