//! A report that stands alone.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    Conclusion, Condition, ConditionKind, EntryKey, Held, Lack, OtherFault, Report, after, before,
};

/// Most other faults of a group that are known at the same time. Beyond it the oldest is
/// forgotten.
const MAX_OTHERS: usize = 16;

/// Report that may stand alone, and the other faults of its group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Solo {
    /// Report that nothing else has come near so far.
    alone: Option<EntryKey>,
    /// Other faults that have not recovered: check and code, and the time of the last report.
    others: BTreeMap<String, Timestamp>,
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
        self.others.values().max().copied()
    }

    /// Returns the report that may stand alone, or the other faults that it does not stand alone for.
    pub(super) fn held(&self, condition: &Condition) -> Held {
        let others: Vec<String> = self
            .others
            .keys()
            .map(|key| key.replace('\n', " "))
            .collect();
        let lack = match self.judged_after(condition) {
            Some(judged) => Some(Lack::Silence(judged)),
            None => (!others.is_empty()).then_some(Lack::Others(others)),
        };
        let evidence: Vec<String> = self.alone.iter().map(|alone| alone.id.clone()).collect();
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
        self.others.retain(|_, at| *at >= begin);
        let is_alone = !close && report.count == 1 && !report.only_counts && self.others.is_empty();
        self.alone = is_alone.then(|| key.clone());
    }

    /// Adds another fault of the group, or its recovery.
    pub(super) fn other(&mut self, at: Timestamp, other: &OtherFault) {
        let check = format!("{}\n", other.check);
        if other.is_healthy {
            let codes: Vec<String> = (other.codes.iter())
                .map(|code| format!("{check}{code}"))
                .collect();
            let all = codes.is_empty();
            self.others
                .retain(|known, _| !known.starts_with(&check) || (!all && !codes.contains(known)));
            return;
        }
        self.alone = None;
        let none = [String::new()];
        let codes = if other.codes.is_empty() {
            &none[..]
        } else {
            &other.codes
        };
        for code in codes {
            self.others.insert(format!("{check}{code}"), at);
        }
        while self.others.len() > MAX_OTHERS
            && let Some(oldest) = self.others.iter().min_by_key(|(_, at)| **at)
        {
            let oldest = oldest.0.clone();
            self.others.remove(&oldest);
        }
    }
}
