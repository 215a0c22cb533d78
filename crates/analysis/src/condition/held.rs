//! Items that a group holds as of a time, and the part of the condition that it lacks, for people.

use jiff::Timestamp;

use super::{Condition, Progress, State};
use crate::member::KnownGpus;
use crate::text::Text;

/// Items of a group that count as of a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Number of items: reports, different values, bursts, or steps in their order.
    pub count: u64,
    /// Ids of the events that the items began with, oldest first.
    pub evidence: Vec<Text>,
    /// Time of the latest report, whether it counts or not.
    pub last: Option<Timestamp>,
    /// Part of the condition that is not met, beside the number of items.
    pub lack: Option<Lack>,
}

/// Part of a condition that is not met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lack {
    /// No two neighbours are as close as the condition asks for.
    Close,
    /// Too few reports for this number of reports in the window before.
    Before(u64),
    /// Time until which no other report may come.
    Silence(Timestamp),
    /// Other faults of the group that have not recovered: check and code.
    Others(Vec<String>),
    /// Values that other groups have too.
    Elsewhere(Vec<String>),
    /// Too few siblings report: this number.
    Siblings(u64),
    /// Too few reports for this median of the siblings.
    Median(u64),
    /// Not one member is silent, but these.
    OneSilent(Vec<String>),
    /// Time until which reports of others may change the conclusion.
    Wait(Timestamp),
}

// === impl State ===

impl State {
    /// Returns what counts as of a time, where `known` has the GPUs of all nodes, and `is_elsewhere`
    /// tells which values other groups have.
    pub(crate) fn held(
        &self,
        condition: &Condition,
        now: Timestamp,
        known: &KnownGpus,
        is_elsewhere: &dyn Fn(&str, Timestamp, Timestamp) -> bool,
    ) -> Held {
        let held = match &self.progress {
            Progress::Tally(tally) => tally.held(condition, now),
            Progress::Chain(chain) => chain.held(condition, now),
            Progress::Solo(solo) => solo.held(condition),
            Progress::Trend(trend) => trend.held(condition, now),
            Progress::Exclusive(exclusive) => exclusive.held(condition, now, is_elsewhere),
            Progress::Outlier(outlier) => outlier.held(condition, now, known),
        };
        Held {
            last: self.last,
            ..held
        }
    }
}
