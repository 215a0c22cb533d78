//! Items within a window: reports, different values, or bursts.

use std::collections::VecDeque;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{Condition, ConditionKind, EntryKey, Held, Lack, Report, before};
use crate::text::Text;

/// Items that count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tally {
    /// Newest items, oldest first, no more than the threshold needs.
    items: VecDeque<Item>,
    /// Time of the latest report with a sticky code.
    last_sticky: Option<Timestamp>,
}

/// Reports that count as one item: of one event, with one value, of one burst, or of one job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Item {
    /// Time of its last report.
    at: Timestamp,
    /// Event that began it.
    id: Text,
    value: Text,
    /// Number that it adds to the count.
    weight: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<Text>,
}

// === impl Tally ===

impl Tally {
    /// Adds a report, where `last` is the time of the one before. Returns true if there are as many
    /// items as the threshold.
    pub(super) fn report(
        &mut self,
        condition: &Condition,
        last: Option<Timestamp>,
        key: &EntryKey,
        report: &Report,
    ) -> bool {
        self.count(condition, last, key, report);
        let begin = before(key.at, condition.window);
        while self.items.front().is_some_and(|item| item.at < begin) {
            self.items.pop_front();
        }
        let needed = u64::from(condition.threshold);
        let mut total: u64 = self.items.iter().map(|item| item.weight).sum();
        // Older items than the threshold needs can never matter again.
        while let Some(oldest) = self.items.front()
            && total - oldest.weight >= needed
        {
            total -= oldest.weight;
            self.items.pop_front();
        }
        total >= needed
            && condition
                .close
                .is_none_or(|close| has_close(self.items.iter(), close))
    }

    /// Returns the events that the items began with, oldest first.
    pub(super) fn evidence(&self) -> Vec<Text> {
        self.items.iter().map(|item| item.id.clone()).collect()
    }

    /// Returns the items of the window before a time.
    pub(super) fn held(&self, condition: &Condition, now: Timestamp) -> Held {
        let begin = before(now, condition.window);
        let counts = || self.items.iter().filter(|item| item.at >= begin);
        let count = counts().map(|item| item.weight).sum();
        let is_far = |close| count >= u64::from(condition.threshold) && !has_close(counts(), close);
        Held {
            count,
            evidence: counts().map(|item| item.id.clone()).collect(),
            lack: condition
                .close
                .filter(|close| is_far(*close))
                .map(|_| Lack::Close),
            ..Held::default()
        }
    }

    /// Adds a report to the items.
    fn count(
        &mut self,
        condition: &Condition,
        last: Option<Timestamp>,
        key: &EntryKey,
        report: &Report,
    ) {
        let most = u64::from(condition.threshold);
        let item = Item {
            at: key.at,
            id: key.id.clone(),
            value: report.value.clone(),
            weight: match condition.kind {
                // The sum of some items stays far below the largest number.
                ConditionKind::Count if report.job.is_none() => report.count.clamp(1, most),
                _ => 1,
            },
            job: report.job.clone(),
        };
        let same_job = |known: &Item| known.job.is_some() && known.job == item.job;
        match &condition.kind {
            ConditionKind::Distinct => {
                self.items.retain(|known| known.value != item.value);
                self.push(item);
            }
            ConditionKind::Burst(gaps) => {
                let sticky = gaps.sticky.contains(&*report.value);
                let goes_on = within(last, report.first, gaps.gap)
                    || (sticky && within(self.last_sticky, report.first, gaps.sticky_gap));
                if sticky {
                    self.last_sticky = Some(key.at);
                }
                let known = self.items.iter().position(same_job);
                match self.items.back_mut() {
                    Some(burst) if goes_on => burst.at = key.at,
                    _ => self.move_or_add(known, item),
                }
            }
            _ => {
                let known = self.items.iter().position(same_job);
                self.move_or_add(known, item);
            }
        }
    }

    /// Adds an item, or makes a known one of the same job the newest.
    fn move_or_add(&mut self, known: Option<usize>, item: Item) {
        match known.and_then(|index| self.items.remove(index)) {
            Some(known) => self.push(Item {
                at: item.at,
                ..known
            }),
            None => self.push(item),
        }
    }

    /// Adds the newest item. Memory for further ones would be most of a group.
    fn push(&mut self, item: Item) {
        self.items.reserve_exact(1);
        self.items.push_back(item);
    }
}

/// Returns true if no more than a time lies between two neighbours, or one stands for several
/// reports.
fn has_close<'a>(mut items: impl Iterator<Item = &'a Item>, close: SignedDuration) -> bool {
    let mut before: Option<Timestamp> = None;
    items.any(|item| {
        let is_close = item.weight > 1 || within(before, item.at, close);
        before = Some(item.at);
        is_close
    })
}

/// Returns true if no more than `gap` lies between two reports; reports that overlap have no gap.
fn within(last: Option<Timestamp>, next: Timestamp, gap: SignedDuration) -> bool {
    last.is_some_and(|last| next.duration_since(last) <= gap)
}
