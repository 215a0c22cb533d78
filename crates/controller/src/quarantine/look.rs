//! Looking at a node: what its faults ask for, what its session says, and what follows.

use domain::assess::{Verdict, assess};
use domain::journal::EntryKind;
use domain::node::NodeView;
use domain::session::{ownership, step};
use serde_json::Value;

use super::claim::Claim;
use super::{Mode, Quarantine};

/// Faults whose verdicts one journal entry tells.
const MAX_VERDICTS: usize = 50;

impl Quarantine {
    /// Looks at all nodes that anything has happened to.
    pub(super) async fn look(&mut self) {
        // Before all is known, nothing follows from what is known.
        if !self.caught_up || !self.listed {
            return;
        }
        while let Some(name) = self.dirty.pop_first() {
            if self.mode == Mode::Observe {
                continue;
            }
            self.look_at(&name).await;
        }
    }

    async fn look_at(&mut self, name: &str) {
        let Some(entry) = self.nodes.get(name) else {
            return;
        };
        if entry.in_flight {
            return; // Looked at again when the answer is there.
        }
        let Some(view) = entry.effective_view() else {
            if self.cluster.is_some() {
                self.look_at_missing(name);
            }
            return;
        };
        let claim = self.claim(&view).await;
        self.left_alone(&view, claim);
        if claim != Claim::Ours {
            self.schedule_publish();
            return;
        }
        let now = (self.clock)();
        let faults = self.book.faults(name);
        let desired = assess(faults, &self.policy, &view, ownership::released_at(&view));
        let marks = self.policy.marks();
        let entry = self.entry(name);
        let step = step(&entry.session, &desired, Some(&view), &marks, now);
        entry.session = step.session;
        let session = entry.session.id.clone();
        if entry.verdicts != desired.verdicts {
            entry.verdicts.clone_from(&desired.verdicts);
            self.metrics
                .evaluated(self.policy.rule_sets_of(&view), &desired);
            let text = rules_text(&desired.verdicts);
            self.note(
                name,
                session.as_deref(),
                EntryKind::Rules,
                text,
                Value::Null,
            );
        }
        for note in step.notes {
            tracing::info!(node = name, kind = note.kind.name(), "{}", note.text);
            self.note(name, session.as_deref(), note.kind, note.text, note.detail);
        }
        if let Some(patch) = step.patch {
            self.carry_out(name, &view, patch, &desired);
        }
        self.remember_wake(name);
        self.schedule_publish();
    }

    /// A node with faults that the cluster does not know.
    fn look_at_missing(&mut self, name: &str) {
        let now = (self.clock)();
        let unknown = NodeView::unknown(name);
        let desired = assess(self.book.faults(name), &self.policy, &unknown, None);
        let marks = self.policy.marks();
        let entry = self.entry(name);
        let step = step(&entry.session, &desired, None, &marks, now);
        entry.session = step.session;
        let say = desired.wanted() && !entry.missing_said;
        entry.missing_said = desired.wanted();
        if say {
            tracing::warn!(
                node = name,
                "a fault asks to quarantine a node that the cluster does not have; waiting for it"
            );
            let text =
                "the cluster has no node of this name; it is quarantined as soon as it appears";
            self.note(
                name,
                None,
                EntryKind::Attention,
                text.to_owned(),
                Value::Null,
            );
        }
        self.schedule_publish();
    }
}

/// What the rules said, for people. The gravest faults come first; a node with more than
/// a story can show is out of service anyway.
fn rules_text(verdicts: &[Verdict]) -> String {
    if verdicts.is_empty() {
        return "no open fault".to_owned();
    }
    let shown = verdicts.iter().take(MAX_VERDICTS).map(Verdict::to_string);
    let mut text = shown.collect::<Vec<_>>().join("; ");
    if let Some(more) = verdicts
        .len()
        .checked_sub(MAX_VERDICTS)
        .filter(|more| *more > 0)
    {
        text.push_str(&format!("; and {more} more faults"));
    }
    text
}
