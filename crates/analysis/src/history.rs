//! Entries of a group as they arrive: in any order, late, and more than once.
//!
//! The result depends on the set of entries only, never on their order. Entries of the recent past
//! are kept, and those before them are summed up in one state. A late entry is put in its place,
//! and the state is computed again from there. One that is older than what is kept cannot be:
//! [`Recorded::TooOld`] asks for all entries of the group.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use crate::condition::{Conclusion, Condition, Entry, EntryKey, State};

/// Time for which entries are kept, so that late ones find their place.
pub const LATENESS: SignedDuration = SignedDuration::from_mins(10);
/// Most entries that a group keeps. Where more arrive within [`LATENESS`], the oldest are summed up
/// earlier.
pub const MAX_KEPT: usize = 64;

/// Entries of one group, and what follows from them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// State before all entries that are kept.
    before: State,
    /// Last entry in `before`.
    summed_up: Option<EntryKey>,
    kept: BTreeMap<EntryKey, Entry>,
    /// State after all entries.
    state: State,
}

/// Result of recording an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// The entry is part of the history.
    Done,
    /// The entry was there already.
    Known,
    /// The entry is older than what is kept, and is not part of the history: the history has to be
    /// built again from all entries of the group.
    TooOld,
}

// === impl History ===

impl History {
    /// Builds the history of these entries, in any order.
    pub fn of(condition: &Condition, entries: impl IntoIterator<Item = (EntryKey, Entry)>) -> Self {
        let sorted: BTreeMap<EntryKey, Entry> = entries.into_iter().collect();
        let mut history = Self::default();
        for (key, entry) in sorted {
            history.record(condition, key, entry);
        }
        history
    }

    /// Creates a history whose entries up to a time are not known: such an entry is too old for it.
    pub fn after(unknown: Timestamp) -> Self {
        let last = EntryKey {
            at: unknown,
            // After all ids.
            id: char::MAX.to_string(),
        };
        Self {
            summed_up: Some(last),
            ..Self::default()
        }
    }

    /// Records an entry.
    pub fn record(&mut self, condition: &Condition, key: EntryKey, entry: Entry) -> Recorded {
        if self.kept.contains_key(&key) {
            return Recorded::Known;
        }
        if self.summed_up.as_ref().is_some_and(|last| key <= *last) {
            return Recorded::TooOld;
        }
        let newest = self.kept.last_key_value().map(|(newest, _)| newest);
        let is_late = newest.is_some_and(|newest| key < *newest);
        if is_late {
            self.kept.insert(key, entry);
            self.state = self.before.clone();
            for (key, entry) in &self.kept {
                self.state.step(condition, key, entry);
            }
        } else {
            self.state.step(condition, &key, &entry);
            self.kept.insert(key, entry);
        }
        self.sum_up(condition);
        Recorded::Done
    }

    /// Returns the time of the latest entry.
    pub fn newest(&self) -> Option<Timestamp> {
        self.kept.last_key_value().map(|(key, _)| key.at)
    }

    /// Returns the conclusion as of a time.
    pub fn conclusion(&self, condition: &Condition, now: Timestamp) -> Option<&Conclusion> {
        self.state.conclusion(condition, now)
    }

    /// Returns the time at which the conclusion ends without a further event.
    pub fn ends_at(&self, condition: &Condition) -> Option<Timestamp> {
        self.state.ends_at(condition)
    }

    /// Returns the state after all entries.
    #[cfg(test)]
    pub(crate) fn state_after(&self) -> State {
        self.state.clone()
    }

    /// Moves old entries into the state before them.
    fn sum_up(&mut self, condition: &Condition) {
        let Some((newest, _)) = self.kept.last_key_value() else {
            return;
        };
        let since = newest.at.checked_sub(LATENESS).unwrap_or(Timestamp::MIN);
        while let Some(oldest) = self.kept.first_entry()
            && (oldest.key().at < since || self.kept.len() > MAX_KEPT)
        {
            let Some((key, entry)) = self.kept.pop_first() else {
                return;
            };
            self.before.step(condition, &key, &entry);
            self.summed_up = Some(key);
        }
    }
}
