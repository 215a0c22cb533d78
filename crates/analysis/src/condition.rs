//! Conditions of rules: what the events of one group have to be like for a conclusion.
//!
//! A condition is a state machine over entries in the order of their time. The state is bounded,
//! whatever the number of events, and so is the work for one entry. [`crate::History`] brings
//! entries that arrive in another order into this one.

use std::collections::{BTreeSet, VecDeque};

use jiff::{SignedDuration, Timestamp};

/// Condition of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Way of counting.
    pub kind: ConditionKind,
    /// Number that has to be reached within the window, at least 1.
    pub threshold: u32,
    /// Time that is looked back from each event. Both ends belong to it.
    pub window: SignedDuration,
    /// True if a conclusion lasts until a repair. Otherwise it ends once the window has passed
    /// without an event.
    pub until_repaired: bool,
}

/// Way of counting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionKind {
    /// Reports; an event with a count of repeats stands for as many.
    Count,
    /// Different values, such as GPUs of a node.
    Distinct,
    /// Bursts: reports with no more than a gap between two of them are one.
    Burst(Gaps),
}

/// Gaps that end a burst.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gaps {
    /// Longest time between two reports of one burst.
    pub gap: SignedDuration,
    /// Codes whose faults last: two reports with such codes are one burst for longer.
    pub sticky: BTreeSet<String>,
    /// Longest time between two reports with sticky codes of one burst.
    pub sticky_gap: SignedDuration,
}

/// Key that orders entries: time, then id. Two entries with the same key are one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EntryKey {
    /// Time of the last report that the entry stands for.
    pub at: Timestamp,
    /// Id of the event.
    pub id: String,
}

/// Entry of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// An event that the rule is about.
    Report(Report),
    /// A repair of the group, after which earlier reports do not count.
    Repair,
}

/// Reports of a fault, from one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Time of the first report that the event stands for.
    pub first: Timestamp,
    /// Number of reports that the event stands for, at least 1.
    pub count: u64,
    /// Value that [`ConditionKind::Distinct`] counts, and code for [`ConditionKind::Burst`].
    pub value: String,
}

/// Conclusion of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conclusion {
    /// Time of the event that met the condition.
    pub since: Timestamp,
    /// Ids of the events that met the condition, at most as many as the threshold, oldest first.
    pub evidence: Vec<String>,
}

/// State of a condition in one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Newest items that count, oldest first, no more than the threshold needs.
    items: VecDeque<Item>,
    /// Time of the latest report.
    last: Option<Timestamp>,
    /// Time of the latest report with a sticky code.
    last_sticky: Option<Timestamp>,
    conclusion: Option<Conclusion>,
}

/// Reports that count as one item: of one event, with one value, or of one burst.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Item {
    /// Time of its last report.
    at: Timestamp,
    /// Event that began it.
    id: String,
    value: String,
    /// Number that it adds to the count.
    weight: u64,
}

// === impl State ===

impl State {
    /// Returns the conclusion as of a time. `None` if there is none, or if it has ended by then.
    pub fn conclusion(&self, condition: &Condition, now: Timestamp) -> Option<&Conclusion> {
        let conclusion = self.conclusion.as_ref()?;
        (condition.until_repaired || !self.is_over(condition, now)).then_some(conclusion)
    }

    /// Returns the time at which a conclusion ends without a further event.
    pub fn ends_at(&self, condition: &Condition) -> Option<Timestamp> {
        self.conclusion.as_ref()?;
        let last = self.last.filter(|_| !condition.until_repaired)?;
        last.checked_add(condition.window).ok()
    }

    /// Adds an entry that is later than all before it.
    pub fn step(&mut self, condition: &Condition, key: &EntryKey, entry: &Entry) {
        match entry {
            Entry::Repair => *self = Self::default(),
            Entry::Report(report) => self.report(condition, key, report),
        }
    }

    fn report(&mut self, condition: &Condition, key: &EntryKey, report: &Report) {
        if !condition.until_repaired && self.is_over(condition, key.at) {
            self.conclusion = None;
        }
        self.count(condition, key, report);
        self.last = Some(key.at);
        let begin = key
            .at
            .checked_sub(condition.window)
            .unwrap_or(Timestamp::MIN);
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
        if total >= needed && self.conclusion.is_none() {
            self.conclusion = Some(Conclusion {
                since: key.at,
                evidence: self.items.iter().map(|item| item.id.clone()).collect(),
            });
        }
    }

    /// Adds a report to the items.
    fn count(&mut self, condition: &Condition, key: &EntryKey, report: &Report) {
        let item = Item {
            at: key.at,
            id: key.id.clone(),
            value: report.value.clone(),
            weight: 1,
        };
        match &condition.kind {
            ConditionKind::Count => self.items.push_back(Item {
                // The sum of some items stays far below the largest number.
                weight: report.count.clamp(1, u64::from(condition.threshold)),
                ..item
            }),
            ConditionKind::Distinct => {
                self.items.retain(|known| known.value != item.value);
                self.items.push_back(item);
            }
            ConditionKind::Burst(gaps) => {
                let sticky = gaps.sticky.contains(&report.value);
                let goes_on = within(self.last, report.first, gaps.gap)
                    || (sticky && within(self.last_sticky, report.first, gaps.sticky_gap));
                if sticky {
                    self.last_sticky = Some(key.at);
                }
                match self.items.back_mut() {
                    Some(burst) if goes_on => burst.at = key.at,
                    _ => self.items.push_back(item),
                }
            }
        }
    }

    /// Returns true if the window has passed without a report.
    fn is_over(&self, condition: &Condition, now: Timestamp) -> bool {
        let begin = now.checked_sub(condition.window).unwrap_or(Timestamp::MIN);
        self.last.is_some_and(|last| last < begin)
    }
}

/// Returns true if no more than `gap` lies between two reports; reports that overlap have no gap.
fn within(last: Option<Timestamp>, next: Timestamp, gap: SignedDuration) -> bool {
    last.is_some_and(|last| next.duration_since(last) <= gap)
}
