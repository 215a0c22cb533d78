//! Items that a group holds as of a time, and the part of the condition that it lacks, for people.

use jiff::Timestamp;

use super::{Condition, Progress, State};

/// Items of a group that count as of a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Number of items: reports, different values, bursts, or steps in their order.
    pub count: u64,
    /// Ids of the events that the items began with, oldest first.
    pub evidence: Vec<String>,
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
}

// === impl State ===

impl State {
    /// Returns what counts as of a time.
    pub(crate) fn held(&self, condition: &Condition, now: Timestamp) -> Held {
        let held = match &self.progress {
            Progress::Tally(tally) => tally.held(condition, now),
            Progress::Chain(chain) => chain.held(condition, now),
            Progress::Solo(solo) => solo.held(condition),
            Progress::Trend(trend) => trend.held(condition, now),
        };
        Held {
            last: self.last,
            ..held
        }
    }
}
