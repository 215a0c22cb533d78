//! Conclusions from many events: a rule concludes something about a group of events, such as those
//! of one GPU, when they meet its condition within a window of time.
//!
//! ```text
//! EventRecord -> Analyzer: matching rules, groups -> History: order -> Condition -> Saying
//! ```
//!
//! A conclusion follows from the set of events alone: after any order of arrival, repetition and
//! restart it is the same. The work for one event and the state of a group are bounded.

mod analyzer;
mod condition;
mod context;
mod elsewhere;
mod finding;
mod group;
mod history;
mod index;
pub mod ledger;
mod load;
mod member;
mod place;
mod rule;
mod slots;
mod text;

pub use analyzer::{AGENT, APPLICATION_CODES, Analyzer, GroupView, MAX_GROUPS, Saved, Saying};
pub use condition::{
    Conclusion, Condition, ConditionKind, Entry, EntryKey, Gaps, Held, Lack, MAX_MEMBERS,
    OtherFault, Report, State,
};
pub use finding::Finding;
pub use group::{Group, GroupKey, GroupValue, Topology};
pub use history::{History, LATENESS, MAX_KEPT, Recorded};
pub use load::{BUILT_IN, MAX_STEPS, MAX_THRESHOLD, MAX_WINDOW, RulesText, built_in, parse};
pub use member::Member;
pub use place::{NamedNodes, NodePlaces};
pub use rule::{EventView, MAX_GROUPS_OF_EVENT, Matches, Rule};
pub use text::Text;

#[cfg(test)]
mod tests;
