//! Different values of a group that no other group of the rule has in that time, such as jobs that
//! have failed on one GPU only.
//!
//! The reports of the group are not enough to tell: [`crate::elsewhere::Elsewhere`] knows the others.

use std::collections::VecDeque;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Conclusion, Condition, ConditionKind, EntryKey, Held, Lack, Pending, Report};
use super::{after, before};
use crate::text::Text;

/// Most values of a group that are kept: those reported last.
const MAX_VALUES: usize = 64;

/// Values of a group since its last repair, the one reported last at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Exclusive {
    values: VecDeque<Seen>,
}

/// Reports of a value with no longer pause between two of them than the window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Seen {
    value: Text,
    first: Timestamp,
    /// First event.
    id: Text,
    last: Timestamp,
    node: Option<Text>,
    /// True if no conclusion is drawn at the time of the first report.
    only_counts: bool,
}

// === impl Exclusive ===

impl Exclusive {
    /// Adds a report.
    pub(super) fn report(&mut self, condition: &Condition, key: &EntryKey, report: &Report) {
        let begin = before(key.at, condition.window);
        let is_same = |seen: &Seen| seen.value == report.value && seen.last >= begin;
        let known = self.values.iter().position(is_same);
        let mut seen = known
            .and_then(|known| self.values.remove(known))
            .unwrap_or_else(|| Seen {
                value: report.value.clone(),
                first: key.at,
                id: key.id.clone(),
                last: key.at,
                node: report.node.clone(),
                only_counts: report.only_counts,
            });
        seen.last = key.at;
        self.values.push_back(seen);
        if self.values.len() > MAX_VALUES {
            self.values.pop_front();
        }
    }

    /// Returns the conclusion as of the first report with which there are enough values that no other
    /// group has.
    pub(super) fn found(
        &self,
        condition: &Condition,
        is_elsewhere: &dyn Fn(&str, Timestamp, Timestamp) -> bool,
    ) -> Option<Pending> {
        let ConditionKind::Exclusive { gap } = condition.kind else {
            return None;
        };
        let threshold = usize::try_from(condition.threshold).unwrap_or(usize::MAX);
        if self.values.len() < threshold {
            return None;
        }
        let own = |it: &&Seen| !is_elsewhere(&it.value, it.first, it.last);
        let mut own: Vec<&Seen> = self.values.iter().filter(own).collect();
        own.sort_unstable_by_key(|it| (it.first, &it.id));
        let mut met = own.iter().enumerate().filter(|(_, it)| !it.only_counts);
        met.find_map(|(index, it)| {
            let counts = |seen: &&&Seen| before(it.first, condition.window) <= seen.last;
            let counted: Vec<_> = own.iter().take(index + 1).filter(counts).collect();
            (counted.len() >= threshold).then(|| Pending {
                judged: after(it.first, gap),
                conclusion: Conclusion {
                    since: it.first,
                    evidence: (counted.iter().take(threshold))
                        .map(|seen| seen.id.clone())
                        .collect(),
                    node: it.node.as_deref().map(str::to_owned),
                    member: None,
                },
            })
        })
    }

    /// Returns the values of the window before a time.
    pub(super) fn held(
        &self,
        condition: &Condition,
        now: Timestamp,
        is_elsewhere: &dyn Fn(&str, Timestamp, Timestamp) -> bool,
    ) -> Held {
        let begin = before(now, condition.window);
        let counts = self.values.iter().filter(|it| it.last >= begin);
        let (others, own): (Vec<&Seen>, _) =
            counts.partition(|it| is_elsewhere(&it.value, it.first, it.last));
        let others: Vec<String> = others.into_iter().map(|it| it.value.to_string()).collect();
        Held {
            count: own.len() as u64,
            evidence: own.into_iter().map(|it| it.id.clone()).collect(),
            lack: (!others.is_empty()).then_some(Lack::Elsewhere(others)),
            ..Held::default()
        }
    }
}
