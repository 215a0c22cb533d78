//! Conditions of rules: what the events of one group have to be like for a conclusion.
//!
//! A condition is a state machine over entries in the order of their time. The state is bounded,
//! whatever the number of events, and so is the work for one entry. [`crate::History`] brings
//! entries that arrive in another order into this one.

mod chain;
mod exclusive;
mod held;
mod outlier;
mod parts;
mod solo;
mod tally;
mod trend;

use std::borrow::Cow;
use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use chain::Chain;
use exclusive::Exclusive;
pub use held::{Held, Lack};
pub use outlier::MAX_MEMBERS;
use outlier::Outlier;
use solo::Solo;
use tally::Tally;
use trend::Trend;

use crate::member::{KnownGpus, Member};
use crate::text::Text;

/// Condition of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Kind, which decides what is counted.
    pub kind: ConditionKind,
    /// Number that has to be reached within the window, at least 1.
    pub threshold: u32,
    /// Time that is looked back from each event. Both ends belong to it.
    pub window: SignedDuration,
    /// Longest time between two neighbours among the newest reports that make up the threshold;
    /// `None` for any. Only for [`ConditionKind::Count`].
    pub close: Option<SignedDuration>,
    /// True if a conclusion lasts until a repair. Otherwise it ends once the window has passed
    /// without a report.
    pub until_repaired: bool,
}

/// Kind of a condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConditionKind {
    /// Counts reports; an event with a count of repeats stands for as many.
    Count,
    /// Counts different values, such as GPUs of a node.
    Distinct,
    /// Counts bursts: reports with no more than a gap between two of them are one.
    Burst(Gaps),
    /// Looks for reports of each step, in the order of the steps. The threshold is the number of
    /// steps.
    Sequence {
        /// Longest time between a step and the one after it.
        within: SignedDuration,
    },
    /// Looks for a report with no other within a gap before and after it, while no other fault of
    /// the group was reported within the window or the gap and has not recovered.
    Solo {
        /// Time without another report.
        gap: SignedDuration,
    },
    /// Compares the reports of a window with those of the window before: there have to be as many
    /// as the threshold, and the factor times as many as before.
    Trend {
        /// Factor, at least 1.
        factor: u32,
    },
    /// Counts different values that no other group of the rule has in that time.
    Exclusive {
        /// Time for which other groups may still report a value, before anything is concluded.
        gap: SignedDuration,
    },
    /// Looks for a member with as many reports as the threshold, and the factor times the median of
    /// its siblings that report too.
    Noisy {
        /// Factor, at least 1.
        factor: u32,
        /// Least number of siblings that report too.
        siblings: u32,
        /// Time for which the member has to be far from them, before anything is concluded.
        gap: SignedDuration,
    },
    /// Looks for the only member that does not report, on nodes of which another one does. The
    /// threshold is the least number of siblings that report.
    Silent {
        /// Time for which the member may still report after the last sibling has begun to.
        gap: SignedDuration,
    },
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
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EntryKey {
    /// Time of the last report that the entry stands for.
    pub at: Timestamp,
    /// Id of the event.
    pub id: Text,
}

/// Entry of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// An event that the rule is about.
    Report(Report),
    /// Another event about the group, for [`ConditionKind::Solo`].
    Other(OtherFault),
    /// A repair of the group. It ends an open conclusion, and reports before it then do not count.
    Repair,
    /// A repair of members of the group, or of their nodes, for [`ConditionKind::Noisy`] and
    /// [`ConditionKind::Silent`].
    RepairOf(Vec<Member>),
}

/// Reports of a fault, from one event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Time of the first report that the event stands for.
    pub first: Timestamp,
    /// Number of reports that the event stands for, at least 1.
    pub count: u64,
    /// Value that [`ConditionKind::Distinct`] counts, and code for [`ConditionKind::Burst`].
    pub value: Text,
    /// Job whose own crash the event is. Reports of one job count once.
    pub job: Option<Text>,
    /// Steps of a [`ConditionKind::Sequence`] that the event is part of, as bits.
    pub steps: u32,
    /// True if the event counts, and no conclusion is drawn because of it alone: it is older than
    /// the history that its monitor was to read.
    pub only_counts: bool,
    /// Node of the event, in a group of several nodes.
    pub node: Option<Text>,
    /// Members of the group that the event is about, for [`ConditionKind::Noisy`] and
    /// [`ConditionKind::Silent`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<Member>,
}

/// Another fault of a group, or its recovery.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherFault {
    /// Monitor and check.
    pub check: Text,
    /// Error codes. None in a recovery stands for all codes of the check.
    pub codes: Vec<Text>,
    /// True for a recovery.
    pub is_healthy: bool,
}

/// Conclusion of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conclusion {
    /// Time of the event that met the condition.
    pub since: Timestamp,
    /// Ids of the events that met the condition, at most as many as the threshold, oldest first.
    pub evidence: Vec<Text>,
    /// Node of the event that met the condition, in a group of several nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Member of the group that is far from its siblings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<Member>,
}

/// Conclusion that holds if nothing is reported until a time that disproves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pending {
    /// Time after which it is a conclusion.
    pub(crate) judged: Timestamp,
    pub(crate) conclusion: Conclusion,
}

/// State of a condition in one group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    progress: Progress,
    /// Time of the latest report.
    last: Option<Timestamp>,
    conclusion: Option<Box<Conclusion>>,
}

/// State of one kind of condition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Progress {
    Tally(Tally),
    Chain(Chain),
    Solo(Solo),
    Trend(Trend),
    Exclusive(Exclusive),
    Outlier(Outlier),
}

// === impl Progress ===

impl Progress {
    fn new(condition: &Condition) -> Self {
        match condition.kind {
            ConditionKind::Count | ConditionKind::Distinct | ConditionKind::Burst(_) => {
                Self::Tally(Tally::default())
            }
            ConditionKind::Sequence { .. } => Self::Chain(Chain::default()),
            ConditionKind::Solo { .. } => Self::Solo(Solo::default()),
            ConditionKind::Trend { .. } => Self::Trend(Trend::default()),
            ConditionKind::Exclusive { .. } => Self::Exclusive(Exclusive::default()),
            ConditionKind::Noisy { .. } | ConditionKind::Silent { .. } => {
                Self::Outlier(Outlier::default())
            }
        }
    }

    /// Adds a report. Returns the evidence if the condition is met now, and no conclusion is open that
    /// rests on an earlier one.
    fn report(
        &mut self,
        condition: &Condition,
        last: Option<Timestamp>,
        is_open: bool,
        key: &EntryKey,
        report: &Report,
    ) -> Option<Vec<Text>> {
        match self {
            Self::Tally(tally) => {
                let is_met = tally.report(condition, last, key, report);
                (is_met && !is_open).then(|| tally.evidence())
            }
            Self::Chain(chain) => chain.report(condition, key, report),
            Self::Solo(solo) => {
                solo.report(condition, last, key, report);
                None
            }
            Self::Trend(trend) => trend.report(condition, key, report),
            Self::Exclusive(exclusive) => {
                exclusive.report(condition, key, report);
                None
            }
            Self::Outlier(outlier) => {
                outlier.report(condition, key, report);
                None
            }
        }
    }
}

// === impl State ===

impl State {
    /// Creates the state without entries.
    pub fn new(condition: &Condition) -> Self {
        Self {
            progress: Progress::new(condition),
            last: None,
            conclusion: None,
        }
    }

    /// Returns the conclusion as of a time. `None` if there is none, or if it has ended by then.
    pub fn conclusion(&self, condition: &Condition, now: Timestamp) -> Option<Cow<'_, Conclusion>> {
        self.conclusion_with(condition, None, now)
    }

    /// Returns the conclusion as of a time, where `pending` follows from more than this group.
    pub(crate) fn conclusion_with(
        &self,
        condition: &Condition,
        pending: Option<&Pending>,
        now: Timestamp,
    ) -> Option<Cow<'_, Conclusion>> {
        let known = self.conclusion.as_deref().map(Cow::Borrowed);
        let matured = || {
            let pending = pending.filter(|pending| pending.judged < now);
            let pending = pending.map(|pending| pending.conclusion.clone());
            pending.or_else(|| self.matured(condition, now))
        };
        let conclusion = known.or_else(|| matured().map(Cow::Owned))?;
        (condition.until_repaired || !self.is_over(condition, now)).then_some(conclusion)
    }

    /// Returns the time after which the conclusion, as of `now`, changes without a further entry, or
    /// after which the state holds nothing that counts.
    pub fn changes_after(&self, condition: &Condition, now: Timestamp) -> Option<Timestamp> {
        self.changes_after_with(condition, None, now)
    }

    /// Returns that time, where `pending` follows from more than this group.
    pub(crate) fn changes_after_with(
        &self,
        condition: &Condition,
        pending: Option<&Pending>,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let mut last = self.last;
        let is_open = self.conclusion_with(condition, pending, now).is_some();
        let judged = match (&self.progress, &condition.kind) {
            (Progress::Solo(solo), _) => {
                // Other faults count for what is not concluded yet, and do not prolong a conclusion.
                if !is_open {
                    last = last.max(solo.latest_other());
                }
                solo.judged_after(condition)
            }
            (Progress::Outlier(outlier), ConditionKind::Noisy { gap, .. }) if !is_open => {
                outlier.judged_after(*gap)
            }
            _ => pending.map(|pending| pending.judged),
        };
        if judged.is_some_and(|judged| judged >= now) {
            return judged;
        }
        let last = last.filter(|_| !(is_open && condition.until_repaired))?;
        let span = match condition.kind {
            // Reports of the window before count too.
            ConditionKind::Trend { .. } if !is_open => condition.window + condition.window,
            _ => condition.window,
        };
        Some(after(last, span))
    }

    /// Returns the conclusion about a silent member, where `known` has all GPUs.
    pub(crate) fn silent(&self, condition: &Condition, known: &KnownGpus) -> Option<Pending> {
        match &self.progress {
            Progress::Outlier(outlier) => outlier.silent(condition, known),
            _ => None,
        }
    }

    /// Returns the conclusion of values that no other group has.
    pub(crate) fn exclusive(
        &self,
        condition: &Condition,
        is_elsewhere: &dyn Fn(&str, Timestamp, Timestamp) -> bool,
    ) -> Option<Pending> {
        match &self.progress {
            Progress::Exclusive(exclusive) => exclusive.found(condition, is_elsewhere),
            _ => None,
        }
    }

    /// Adds an entry that is later than all before it.
    pub fn step(&mut self, condition: &Condition, key: &EntryKey, entry: &Entry) {
        if self.conclusion.is_none() {
            self.conclusion = self.matured(condition, key.at).map(Box::new);
        }
        if !condition.until_repaired && self.is_over(condition, key.at) {
            self.conclusion = None;
            if let Progress::Exclusive(exclusive) = &mut self.progress {
                *exclusive = Exclusive::default();
            }
        }
        if let Progress::Solo(solo) = &mut self.progress {
            solo.pass(condition, key.at);
        }
        match entry {
            Entry::Repair => {
                // Whether something was concluded from exclusive values is not known here.
                let is_exclusive = matches!(self.progress, Progress::Exclusive(_));
                if is_exclusive || self.conclusion.is_some() {
                    *self = Self::new(condition);
                }
            }
            Entry::RepairOf(members) => {
                if let Progress::Outlier(outlier) = &mut self.progress {
                    outlier.repair(members);
                }
                self.conclusion.take_if(|open| {
                    let member = open.member.as_ref();
                    member.is_some_and(|it| members.iter().any(|repaired| repaired.includes(it)))
                });
            }
            Entry::Other(other) => {
                if let Progress::Solo(solo) = &mut self.progress {
                    solo.other(key.at, other);
                }
            }
            Entry::Report(report) => {
                let is_open = self.conclusion.is_some();
                let progress = &mut self.progress;
                let met = progress.report(condition, self.last, is_open, key, report);
                self.last = Some(key.at);
                if !is_open
                    && !report.only_counts
                    && let Some(evidence) = met
                {
                    self.conclusion = Some(Box::new(Conclusion {
                        since: key.at,
                        evidence,
                        node: report.node.as_deref().map(str::to_owned),
                        member: None,
                    }));
                }
                if let (Progress::Outlier(outlier), false) =
                    (&self.progress, condition.until_repaired)
                {
                    let is_far = |open: &Conclusion| {
                        let member = open.member.as_ref();
                        member.is_some_and(|member| outlier.is_far(member))
                    };
                    self.conclusion.take_if(|open| !is_far(open));
                }
            }
        }
    }

    /// Makes this the conclusion, of events that are not known.
    pub(crate) fn adopt(&mut self, conclusion: Conclusion) {
        self.last = Some(conclusion.since);
        self.conclusion = Some(Box::new(conclusion));
    }

    /// Returns the conclusion that follows from the time alone.
    fn matured(&self, condition: &Condition, now: Timestamp) -> Option<Conclusion> {
        match &self.progress {
            Progress::Solo(solo) => solo.matured(condition, now),
            Progress::Outlier(outlier) => outlier.matured(condition, now),
            _ => None,
        }
    }

    /// Returns true if the window has passed without a report.
    fn is_over(&self, condition: &Condition, now: Timestamp) -> bool {
        self.last
            .is_some_and(|last| last < before(now, condition.window))
    }
}

/// Returns the time a span before another, or the first time there is.
fn before(at: Timestamp, span: SignedDuration) -> Timestamp {
    at.checked_sub(span).unwrap_or(Timestamp::MIN)
}

/// Returns the time a span after another, or the last time there is.
fn after(at: Timestamp, span: SignedDuration) -> Timestamp {
    at.checked_add(span).unwrap_or(Timestamp::MAX)
}
