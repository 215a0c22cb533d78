//! A report that stands alone.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    Conclusion, Condition, ConditionKind, EntryKey, Held, Lack, OtherFault, Report, after, before,
};
use crate::text::Text;

/// Most other faults of a group that are known at the same time. Beyond it the oldest is
/// forgotten.
const MAX_OTHERS: usize = 16;

/// Report that may stand alone, and the other faults of its group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Solo {
    /// Report that nothing else has come near so far.
    alone: Option<EntryKey>,
    /// Other faults that have not recovered, in the order of their last reports.
    others: Vec<OpenFault>,
}

/// Another fault that has not recovered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct OpenFault {
    /// Monitor and check.
    check: Text,
    code: Text,
    /// Time of its last report.
    at: Timestamp,
}

// === impl Solo ===

impl Solo {
    /// Returns the time after which it is known whether a report stands alone.
    pub(super) fn judged_after(&self, condition: &Condition) -> Option<Timestamp> {
        let ConditionKind::Solo { gap } = condition.kind else {
            return None;
        };
        self.alone.as_ref().map(|alone| after(alone.at, gap))
    }

    /// Returns the conclusion of a report that has stood alone by a time.
    pub(super) fn matured(&self, condition: &Condition, now: Timestamp) -> Option<Conclusion> {
        let alone = self.alone.as_ref()?;
        (self.judged_after(condition)? < now).then(|| Conclusion {
            since: alone.at,
            evidence: vec![alone.id.clone()],
            node: None,
            member: None,
        })
    }

    /// Forgets a report that was judged before a time.
    pub(super) fn pass(&mut self, condition: &Condition, now: Timestamp) {
        if self
            .judged_after(condition)
            .is_some_and(|judged| judged < now)
        {
            self.alone = None;
        }
    }

    /// Returns the time of the latest report of another fault that has not recovered.
    pub(super) fn latest_other(&self) -> Option<Timestamp> {
        self.others.last().map(|other| other.at)
    }

    /// Returns the report that may stand alone, or the other faults that it does not stand alone for.
    pub(super) fn held(&self, condition: &Condition) -> Held {
        let others = self.others.iter();
        let mut others: Vec<String> = others
            .map(|other| format!("{} {}", &*other.check, &*other.code))
            .collect();
        others.sort();
        let lack = match self.judged_after(condition) {
            Some(judged) => Some(Lack::Silence(judged)),
            None => (!others.is_empty()).then_some(Lack::Others(others)),
        };
        let evidence: Vec<Text> = self.alone.iter().map(|alone| alone.id.clone()).collect();
        Held {
            count: evidence.len() as u64,
            evidence,
            lack,
            ..Held::default()
        }
    }

    /// Adds a report, where `last` is the time of the one before.
    pub(super) fn report(
        &mut self,
        condition: &Condition,
        last: Option<Timestamp>,
        key: &EntryKey,
        report: &Report,
    ) {
        let ConditionKind::Solo { gap } = condition.kind else {
            return;
        };
        let close = last.is_some_and(|last| report.first.duration_since(last) <= gap);
        let begin = before(key.at, condition.window);
        self.others.retain(|other| other.at >= begin);
        let is_alone = !close && report.count == 1 && !report.only_counts && self.others.is_empty();
        self.alone = is_alone.then(|| key.clone());
    }

    /// Adds another fault of the group, or its recovery.
    pub(super) fn other(&mut self, at: Timestamp, other: &OtherFault) {
        let check = &other.check;
        if other.is_healthy {
            let all = other.codes.is_empty();
            self.others.retain(|known| {
                known.check != *check || (!all && !other.codes.contains(&known.code))
            });
            return;
        }
        self.alone = None;
        let none = [Text::default()];
        let codes = if other.codes.is_empty() {
            &none[..]
        } else {
            &other.codes
        };
        for code in codes {
            self.others
                .retain(|known| known.code != *code || known.check != *check);
            self.others.reserve_exact(1);
            self.others.push(OpenFault {
                check: check.clone(),
                code: code.clone(),
                at,
            });
        }
        let excess = self.others.len().saturating_sub(MAX_OTHERS);
        self.others.drain(..excess);
    }
}
