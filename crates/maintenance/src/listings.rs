//! Which resources there are, while lists of them come in one by one.

use std::collections::{BTreeMap, BTreeSet};

use super::{Key, Maintenance};

/// The lists of resources that have come, and those that come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listings {
    /// The kinds whose resources were all seen.
    complete: BTreeSet<Maintenance>,
    /// Names that were seen since a list began.
    coming: BTreeMap<Maintenance, BTreeSet<String>>,
}

// === impl Listings ===

impl Listings {
    /// Takes in that a list of a kind begins.
    pub(crate) fn begin(&mut self, kind: Maintenance) {
        self.coming.insert(kind, BTreeSet::new());
    }

    /// Takes in that a resource is there.
    pub(crate) fn saw(&mut self, key: &Key) {
        if let Some(seen) = self.coming.get_mut(&key.kind) {
            seen.insert(key.name.clone());
        }
    }

    /// Takes in that a list has ended, and returns which of those that were `known` are gone.
    pub(crate) fn end<'a>(
        &mut self,
        kind: Maintenance,
        known: impl Iterator<Item = &'a Key>,
    ) -> Vec<Key> {
        self.complete.insert(kind);
        let Some(seen) = self.coming.remove(&kind) else {
            return Vec::new();
        };
        let gone = known.filter(|key| key.kind == kind && !seen.contains(&key.name));
        gone.cloned().collect()
    }

    /// Returns whether all resources of a kind were seen.
    pub(crate) fn has(&self, kind: Maintenance) -> bool {
        self.complete.contains(&kind)
    }
}
