//! Conclusions from many events: a rule concludes something about a group of events, such as those
//! of one GPU, when they meet its condition within a window of time.
//!
//! ```text
//! EventRecord -> Analyzer: matching rules, groups -> History: order -> Condition -> Change
//! ```
//!
//! A conclusion follows from the set of events alone: after any order of arrival, repetition and
//! restart it is the same. The work for one event and the state of a group are bounded.

mod analyzer;
mod condition;
mod group;
mod history;
pub mod ledger;
mod load;
mod rule;

pub use analyzer::{AGENT, Analyzer, Change, Finding, MAX_GROUPS, META_EVIDENCE};
pub use condition::{Conclusion, Condition, ConditionKind, Entry, EntryKey, Gaps, Report, State};
pub use group::{Group, GroupKey, GroupValue};
pub use history::{History, LATENESS, MAX_KEPT, Recorded};
pub use load::{BUILT_IN, MAX_THRESHOLD, MAX_WINDOW, parse};
pub use rule::{MAX_GROUPS_OF_EVENT, Matches, Rule};

#[cfg(test)]
mod tests;
