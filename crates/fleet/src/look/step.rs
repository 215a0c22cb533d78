//! The session's step in a look at a node, and the patch that follows.

use std::sync::Arc;

use model::journal::EntryKind;
use model::mode::Mode;
use model::node::NodeView;
use policy::Policy;
use policy::assess::{Desired, FaultRuling};
use serde_json::json;

use super::Look;
use crate::brake::Hold;
use crate::session::{Intent, JournalNote, Marks, ObservedNode, Patch, SessionEffect, step};
use crate::state::FleetState;
use crate::{Effect, EventReason, Level, Owns, Planned, RuleSetOutcome};

/// Most rulings in one journal entry, which people read.
const MAX_RULINGS: usize = 50;

// === impl Look ===

impl Look<'_> {
    /// Steps the node's session and carries out what the step asks for.
    pub(super) fn step_session(
        &mut self,
        observed: &ObservedNode,
        policy: &Policy,
        desired: &Desired,
        hold: Option<&Hold>,
    ) {
        let effects = self.step(Some(observed), policy, desired, hold);
        if !self.state.settings.returns_wait {
            self.entry.session.returns.clear();
        }
        if self.entry.journaled.rulings != desired.rulings {
            self.entry.journaled.rulings.clone_from(&desired.rulings);
            let rule_sets = policy.rule_sets_of(&observed.view).iter();
            let outcomes = rule_sets.map(|rule_set| RuleSetOutcome {
                rule_set: rule_set.name.clone(),
                passed: desired.rule_sets.contains(&rule_set.name),
            });
            let outcomes = Effect::Evaluated(outcomes.collect());
            self.agenda.effects.push(outcomes);
            let note = JournalNote::new(EntryKind::Rules, rules_text(&desired.rulings));
            self.journal(note, None);
        }
        for effect in effects {
            match effect {
                SessionEffect::Journal(note) => self.journal(note, Some(Level::Info)),
                SessionEffect::Patch(patch) => self.plan_patch(&observed.view, patch, desired),
                SessionEffect::EmitEvent(message) => {
                    if self.state.acts() {
                        self.agenda.effects.push(Effect::EmitEvent {
                            node: self.name.to_owned(),
                            since: self.state.now,
                            reason: EventReason::QuarantineUndone,
                            message,
                        });
                    }
                }
            }
        }
        self.act(Some(observed), desired);
        self.set_wake();
        self.agenda.view_changed = true;
    }

    /// Steps the session of a waiting node: the brake lets it go, or holds it back.
    pub(crate) fn step_waiting(&mut self, policy: &Policy, hold: Option<&Hold>, looked_at: bool) {
        self.agenda.unshown.insert(self.name.to_owned());
        self.step_unless_held(policy, hold, looked_at);
        if self.entry.patch.in_flight {
            // The node is going out; the answer triggers another look.
            self.brake.waiting.remove(self.name);
        }
    }

    fn step_unless_held(&mut self, policy: &Policy, hold: Option<&Hold>, looked_at: bool) {
        if self.entry.patch.in_flight {
            return; // The answer triggers another look.
        }
        let before = std::mem::replace(&mut self.entry.hold, hold.cloned());
        if let (Some(before), Some(hold)) = (&before, hold) {
            if !before.same_cause(hold) {
                let note = JournalNote {
                    kind: EntryKind::Session,
                    text: format!("still held back: {hold}"),
                    detail: json!({"by": hold.name()}),
                };
                self.journal(note, Some(Level::Info));
            }
            if !looked_at {
                return; // No other input has changed.
            }
        }
        let Some(observed) = self.entry.observed.clone() else {
            return;
        };
        let Some(desired) = self.brake.waiting.remove(self.name) else {
            return;
        };
        self.step_session(&observed, policy, &desired, hold);
        self.brake.waiting.insert(self.name.to_owned(), desired);
    }

    /// Steps the session. Returns the effects of the step.
    pub(super) fn step(
        &mut self,
        observed: Option<&ObservedNode>,
        policy: &Policy,
        desired: &Desired,
        hold: Option<&Hold>,
    ) -> Vec<SessionEffect> {
        let marks = marks(self.state, policy);
        let machines = self.entry.machines(self.state);
        let step = step(
            &self.entry.session,
            desired,
            observed,
            &marks,
            hold,
            machines.as_deref(),
            self.state.now,
        );
        if self.entry.session != step.session {
            self.entry.session = step.session;
            self.save_session();
        }
        step.effects
    }

    /// Requests a patch; in a dry run pretends that it was made.
    fn plan_patch(&mut self, view: &Arc<NodeView>, patch: Patch, desired: &Desired) {
        let Patch { intent, change } = &patch;
        let text = format!("{}: {}", intent.name(), change.summary());
        let detail = json!({
            "intent": intent,
            "change": change,
            "ruleSets": desired.rule_sets,
            "events": desired.events.iter().map(|one| &one.event.id).collect::<Vec<_>>(),
        });
        if self.state.settings.mode == Mode::DryRun {
            let line = format!("dry run: {text}");
            self.agenda.log(Level::Info, Some(self.name), line);
            let kind = EntryKind::DryRun;
            self.journal(JournalNote { kind, text, detail }, None);
            self.entry.pretend(patch.change);
            self.brake.mark_stale();
            self.agenda.dirty.insert(self.name.to_owned());
            return;
        }
        if !self.state.settings.cluster {
            return;
        }
        let kind = EntryKind::Decision;
        self.journal(JournalNote { kind, text, detail }, Some(Level::Info));
        let state = &mut self.entry.patch;
        state.in_flight = true;
        state.change = change.clone();
        // The brake has counted the node when it let it go.
        state.taking_out = *intent == Intent::Quarantine;
        state.updating = *intent == Intent::Update;
        self.agenda
            .effects
            .push(Effect::PatchNode(Box::new(Planned {
                node: self.name.to_owned(),
                view: Arc::clone(view),
                session: self.entry.session.id.clone(),
                patch,
                first_seen: desired.events.iter().map(|one| one.first_seen).min(),
            })));
    }
}

/// Returns how sessions of this gpuwarden mark a node.
fn marks(fleet: &FleetState, policy: &Policy) -> Marks {
    Marks {
        maker: Some(fleet.settings.owns.maker()),
        store: match fleet.settings.owns {
            Owns::Node(_) => Some(fleet.settings.store.clone()),
            Owns::All => None,
        },
        ..Marks::of(policy)
    }
}

/// Returns the rulings as text for people. The gravest faults come first; beyond [`MAX_RULINGS`]
/// the rest is only counted.
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
