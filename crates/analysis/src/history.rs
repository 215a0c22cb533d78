//! Entries of a group as they arrive: in any order, late, and more than once.
//!
//! The result depends on the set of entries only, never on their order. Entries of the recent past
//! are kept, and those before them are summed up in one state. A late entry is put in its place,
//! and the state is computed again from there. One that is older than what is kept cannot be:
//! [`Recorded::TooOld`] asks for all entries of the group.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::condition::{Conclusion, Condition, ConditionKind, Entry, EntryKey, State};

/// Time for which entries are kept, so that late ones find their place.
pub const LATENESS: SignedDuration = SignedDuration::from_mins(10);
/// Most entries that a group keeps. Where more arrive within [`LATENESS`], the oldest are summed up
/// earlier.
pub const MAX_KEPT: usize = 64;
/// Most entries that a group with members keeps, who all report at once when their job dies.
const MAX_KEPT_OF_MEMBERS: usize = 256;

/// Entries of several histories, by their keys.
pub(crate) type KnownEntries = HashMap<EntryKey, Vec<Arc<Entry>>>;

/// Entries of one group, and what follows from them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    /// State before all entries that are kept.
    before: State,
    /// Last entry in `before`.
    summed_up: Option<EntryKey>,
    /// Entries behind it, in their order. Other groups keep the same ones.
    #[serde(with = "entries")]
    kept: Vec<(EntryKey, Arc<Entry>)>,
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
    /// Creates a history without entries. Those up to `unknown`, if it is given, are not known: such
    /// an entry is too old for it.
    pub fn new(condition: &Condition, unknown: Option<EntryKey>) -> Self {
        Self {
            before: State::new(condition),
            summed_up: unknown,
            kept: Vec::new(),
            state: State::new(condition),
        }
    }

    /// Records an entry.
    pub fn record(
        &mut self,
        condition: &Condition,
        key: EntryKey,
        entry: impl Into<Arc<Entry>>,
    ) -> Recorded {
        let entry = entry.into();
        let found = self.kept.binary_search_by(|(known, _)| known.cmp(&key));
        let Err(place) = found else {
            return Recorded::Known;
        };
        if self.summed_up.as_ref().is_some_and(|last| key <= *last) {
            return Recorded::TooOld;
        }
        let is_late = place < self.kept.len();
        if !is_late {
            self.state.step(condition, &key, &entry);
        }
        self.kept.reserve_exact(1);
        self.kept.insert(place, (key, entry));
        if is_late {
            self.state = self.before.clone();
            for (key, entry) in &self.kept {
                self.state.step(condition, key, entry);
            }
        }
        self.sum_up(condition);
        Recorded::Done
    }

    /// Returns the key of the latest entry.
    pub fn newest(&self) -> Option<&EntryKey> {
        self.kept.last().map(|(key, _)| key)
    }

    /// Returns the conclusion as of a time.
    pub fn conclusion(&self, condition: &Condition, now: Timestamp) -> Option<Cow<'_, Conclusion>> {
        self.state.conclusion(condition, now)
    }

    /// Returns the state after all entries.
    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// Returns the time after which the conclusion, as of `now`, changes without a further entry, or
    /// after which no entry counts.
    pub fn changes_after(&self, condition: &Condition, now: Timestamp) -> Option<Timestamp> {
        self.state.changes_after(condition, now)
    }

    /// Returns a copy without spare memory, whose entries are those that other histories have.
    pub(crate) fn compact(&self, known: &mut KnownEntries) -> Self {
        let mut copy = self.clone();
        for (key, entry) in &mut copy.kept {
            let equal = known.entry(key.clone()).or_default();
            match equal.iter().find(|other| *other == entry) {
                Some(other) => entry.clone_from(other),
                None => equal.push(entry.clone()),
            }
        }
        copy
    }

    /// Makes this the conclusion whose events are not known any longer.
    pub(crate) fn adopt(&mut self, condition: &Condition, key: EntryKey, conclusion: Conclusion) {
        *self = Self::new(condition, Some(key));
        self.before.adopt(conclusion);
        self.state = self.before.clone();
    }

    /// Moves old entries into the state before them.
    fn sum_up(&mut self, condition: &Condition) {
        let Some((newest, _)) = self.kept.last() else {
            return;
        };
        let since = newest.at.checked_sub(LATENESS).unwrap_or(Timestamp::MIN);
        let old = self.kept.iter().take_while(|(key, _)| key.at < since);
        let most = match condition.kind {
            ConditionKind::Noisy { .. } | ConditionKind::Silent { .. } => MAX_KEPT_OF_MEMBERS,
            _ => MAX_KEPT,
        };
        let old = old.count().max(self.kept.len().saturating_sub(most));
        for (key, entry) in self.kept.drain(..old) {
            self.before.step(condition, &key, &entry);
            self.summed_up = Some(key);
        }
    }
}

/// Form of entries in a saved state.
mod entries {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};

    use crate::condition::{Entry, EntryKey};

    pub(super) fn serialize<S: Serializer>(
        kept: &[(EntryKey, Arc<Entry>)],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(kept.iter().map(|(key, entry)| (key, &**entry)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<(EntryKey, Arc<Entry>)>, D::Error> {
        let kept = Vec::<(EntryKey, Entry)>::deserialize(deserializer)?;
        let kept = kept.into_iter();
        Ok(kept.map(|(key, entry)| (key, Arc::new(entry))).collect())
    }
}
