//! Reports of a window against those of the window before.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::parts::Parts;
use super::{Condition, ConditionKind, EntryKey, Held, Lack, Report};
use crate::text::Text;

/// Reports of two windows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Trend {
    parts: Parts,
}

// === impl Trend ===

impl Trend {
    /// Adds a report. Returns the evidence if there are enough, and enough more than before.
    pub(super) fn report(
        &mut self,
        condition: &Condition,
        key: &EntryKey,
        report: &Report,
    ) -> Option<Vec<Text>> {
        let ConditionKind::Trend { factor } = condition.kind else {
            return None;
        };
        self.parts.add(condition.window, key, report);
        let (now, before) = self.parts.sums(condition.window, key.at);
        let is_met = now >= u64::from(condition.threshold)
            && before > 0
            && now >= before.saturating_mul(u64::from(factor));
        is_met.then(|| self.parts.evidence(condition.window, key.at))
    }

    /// Returns the reports of the window before a time.
    pub(super) fn held(&self, condition: &Condition, now: Timestamp) -> Held {
        let (count, before) = self.parts.sums(condition.window, now);
        Held {
            count,
            evidence: self.parts.evidence(condition.window, now),
            lack: Some(Lack::Before(before)),
            ..Held::default()
        }
    }
}
