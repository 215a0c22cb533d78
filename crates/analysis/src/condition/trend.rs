//! Reports of a window against those of the window before.
//!
//! Reports are counted in parts of a window. The parts begin at the same times for everybody, so
//! the result does not depend on when the first report came.

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{Condition, ConditionKind, EntryKey, Held, Lack, Report};

/// Parts of a window. A window consists of the part of the newest report and those before it.
const PARTS: i64 = 12;

/// Reports of two windows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Trend {
    /// Parts with reports, oldest first.
    parts: VecDeque<Part>,
}

/// Reports of a part of a window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Part {
    /// Number of the part since 1970.
    index: i64,
    reports: u64,
    /// First event of the part.
    id: String,
}

// === impl Trend ===

impl Trend {
    /// Adds a report. Returns the evidence if there are enough, and enough more than before.
    pub(super) fn report(
        &mut self,
        condition: &Condition,
        key: &EntryKey,
        report: &Report,
    ) -> Option<Vec<String>> {
        let ConditionKind::Trend { factor } = condition.kind else {
            return None;
        };
        let index = part_of(key.at, condition.window);
        let reports = if report.job.is_some() {
            1
        } else {
            report.count
        };
        match self.parts.back_mut() {
            Some(part) if part.index == index => {
                part.reports = part.reports.saturating_add(reports);
            }
            _ => self.parts.push_back(Part {
                index,
                reports,
                id: key.id.clone(),
            }),
        }
        self.parts.retain(|part| part.index > index - 2 * PARTS);
        let (now, before) = self.sums(index);
        let is_met = now >= u64::from(condition.threshold)
            && before > 0
            && now >= before.saturating_mul(u64::from(factor));
        is_met.then(|| self.evidence(index))
    }

    /// Returns the reports of the window before a time.
    pub(super) fn held(&self, condition: &Condition, now: Timestamp) -> Held {
        let index = part_of(now, condition.window);
        let (count, before) = self.sums(index);
        Held {
            count,
            evidence: self.evidence(index),
            lack: Some(Lack::Before(before)),
            ..Held::default()
        }
    }

    /// Returns the reports of the window that ends with a part, and of the window before.
    fn sums(&self, index: i64) -> (u64, u64) {
        let sum = |newest: i64| {
            let within = |part: &&Part| part.index > newest - PARTS && part.index <= newest;
            let parts = self.parts.iter().filter(within);
            parts.fold(0_u64, |total, part| total.saturating_add(part.reports))
        };
        (sum(index), sum(index - PARTS))
    }

    /// Returns the first event of each part of the window that ends with a part.
    fn evidence(&self, index: i64) -> Vec<String> {
        let parts = self.parts.iter().filter(|part| part.index > index - PARTS);
        parts.map(|part| part.id.clone()).collect()
    }
}

/// Returns the number of the part of a window that a time is in.
fn part_of(at: Timestamp, window: SignedDuration) -> i64 {
    let length = i64::try_from(window.as_millis() / i128::from(PARTS)).unwrap_or(i64::MAX);
    at.as_millisecond().div_euclid(length.max(1))
}
