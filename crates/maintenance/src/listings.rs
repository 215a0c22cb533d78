//! State of the lists of resources, which arrive one object at a time.

use std::collections::{BTreeMap, BTreeSet};

use super::{Maintenance, ResourceKey};

/// Completed lists, and lists that are arriving.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listings {
    /// Kinds whose resources have been listed completely.
    complete: BTreeSet<Maintenance>,
    /// Names received since the start of a list, by kind.
    coming: BTreeMap<Maintenance, BTreeSet<String>>,
}

// === impl Listings ===

impl Listings {
    /// Starts a list of a kind.
    pub(crate) fn begin(&mut self, kind: Maintenance) {
        self.coming.insert(kind, BTreeSet::new());
    }

    /// Records that a resource exists.
    pub(crate) fn record(&mut self, key: &ResourceKey) {
        if let Some(received) = self.coming.get_mut(&key.kind) {
            received.insert(key.name.clone());
        }
    }

    /// Completes a list. Returns the `known` resources of the kind that no longer exist.
    pub(crate) fn end<'a>(
        &mut self,
        kind: Maintenance,
        known: impl Iterator<Item = &'a ResourceKey>,
    ) -> Vec<ResourceKey> {
        self.complete.insert(kind);
        let Some(received) = self.coming.remove(&kind) else {
            return Vec::new();
        };
        let gone = known.filter(|key| key.kind == kind && !received.contains(&key.name));
        gone.cloned().collect()
    }

    /// Returns whether all resources of a kind have been listed.
    pub(crate) fn has(&self, kind: Maintenance) -> bool {
        self.complete.contains(&kind)
    }
}
