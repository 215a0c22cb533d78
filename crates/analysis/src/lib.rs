//! Conclusions from many events: a rule concludes something about a group of events, such as those
//! of one GPU, when they meet its condition within a window of time.
//!
//! A conclusion follows from the set of events alone: after any order of arrival, repetition and
//! restart it is the same. The work for one event and the state of a group are bounded.

mod condition;
mod history;

pub use condition::{Conclusion, Condition, ConditionKind, Entry, EntryKey, Gaps, Report, State};
pub use history::{History, LATENESS, MAX_KEPT, Recorded};

#[cfg(test)]
mod tests;
