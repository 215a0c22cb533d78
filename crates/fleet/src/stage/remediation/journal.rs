//! Journal entries about the remediation of a node.

use contract::keys;
use model::attempt::{Attempt, DIAGNOSTICS_GROUP, VALIDATION_GROUP};
use model::journal::EntryKind;
use model::ownership::Ownership;
use serde_json::json;

use super::RemediationState;
use crate::session::JournalNote;
use crate::stage::{Facts, StageRequests};
use crate::{Effect, RemediationResult};

// === impl RemediationState ===

impl RemediationState {
    /// Journals the changes of the node's remediation since the last look.
    pub(super) fn journal_changes(
        &mut self,
        facts: &Facts<'_>,
        own: &Ownership,
        requests: &mut StageRequests<'_>,
    ) {
        let mark = own.mark.remediation.clone().unwrap_or_default();
        let before = self.last_mark.replace(mark.clone());
        if before.as_ref() == Some(&mark) {
            return;
        }
        // After a restart the marks on the node are old; only changes are journaled.
        let Some(before) = before else {
            return;
        };
        for (index, one) in mark.attempts.iter().enumerate() {
            let earlier = before.attempts.get(index);
            let earlier = earlier.filter(|earlier| earlier.key() == one.key());
            if earlier.is_none() {
                let what = match one.group.as_str() {
                    VALIDATION_GROUP => "validation".to_owned(),
                    DIAGNOSTICS_GROUP => "diagnostics".to_owned(),
                    _ => {
                        let so_far = mark.attempts.iter().take(index + 1);
                        let number = so_far.filter(|one| one.remediates()).count();
                        format!("repair {number}")
                    }
                };
                let text = format!("{what}: {} ({})", one.title(), one.action);
                requests.journal(attempt_note(one, text), None);
            }
            let Some(end) = &one.end else {
                continue;
            };
            if earlier.is_none_or(|earlier| earlier.end.is_none()) {
                requests.journal(attempt_note(one, one.ending()), None);
                requests.effect(Effect::Remediation(RemediationResult::Ended {
                    node: facts.name.to_owned(),
                    action: one.action.clone(),
                    outcome: end.outcome,
                }));
            }
        }
        let begun = [keys::STATE_REMEDIATING, keys::STATE_REMEDIATION_FAILED];
        let was = before.state();
        if mark.state().is_none() && was.is_some_and(|was| begun.contains(&was)) {
            let text = match &self.awaits {
                Some(awaits) => format!("no repair is under way; awaited: {awaits}"),
                None if facts.state.settings.remediation.is_none() => {
                    "no repair is under way: repairs are switched off".to_owned()
                }
                None => "no repair is under way: no open fault asks for one".to_owned(),
            };
            requests.journal(JournalNote::new(EntryKind::Session, text), None);
        }
        let asked = before.person.map(|one| one.why);
        if let Some(person) = mark.person.filter(|one| asked.as_ref() != Some(&one.why)) {
            requests.call_attention(format!(
                "the repair makes no progress: {}; repair the node by hand, and release it",
                person.why
            ));
        }
    }
}

/// Returns a journal entry about an attempt.
fn attempt_note(attempt: &Attempt, text: String) -> JournalNote {
    JournalNote {
        kind: EntryKind::Session,
        text,
        detail: json!({"attempt": attempt}),
    }
}
