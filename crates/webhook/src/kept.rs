//! Memory budget of cached objects, such as the `ConfigMap`s of gangs: a limit for all, and one
//! per namespace. The people with write access to a namespace decide how large its objects are.
//!
//! Every object can be fetched again, so the least recently used one is evicted when there is
//! no room.

use std::collections::BTreeMap;

/// Most bytes in total. The gangs of a cluster of ten thousand nodes need a tenth.
const MAX_BYTES: usize = 24 * 1024 * 1024;
/// Most bytes per namespace: a few objects of the largest size, or thousands of ordinary ones.
const MAX_NAMESPACE_BYTES: usize = 6 * 1024 * 1024;

/// Namespace and name of an object. The name may include the kind.
pub(crate) type ObjectKey = (String, String);

/// Sizes of the cached objects.
#[derive(Debug, Default)]
pub(crate) struct MemoryBudget {
    all: usize,
    by_namespace: BTreeMap<String, usize>,
    /// Size in bytes and last use, as a tick of `now`.
    objects: BTreeMap<ObjectKey, (usize, u64)>,
    now: u64,
}

// === impl MemoryBudget ===

impl MemoryBudget {
    /// Records the size of an object and returns the objects to evict for it. These include the
    /// object itself if it is larger than a limit.
    pub(crate) fn add(&mut self, key: &ObjectKey, bytes: usize) -> Vec<ObjectKey> {
        self.remove(key);
        self.now += 1;
        self.objects.insert(key.clone(), (bytes, self.now));
        *self.by_namespace.entry(key.0.clone()).or_default() += bytes;
        self.all += bytes;
        let mut gone = Vec::new();
        while let Some(key) = self.over_limit() {
            self.remove(&key);
            gone.push(key);
        }
        gone
    }

    /// Marks an object as used.
    pub(crate) fn touch(&mut self, key: &ObjectKey) {
        self.now += 1;
        if let Some((_, used)) = self.objects.get_mut(key) {
            *used = self.now;
        }
    }

    /// Removes an object from the budget.
    pub(crate) fn remove(&mut self, key: &ObjectKey) {
        let Some((bytes, _)) = self.objects.remove(key) else {
            return;
        };
        self.all -= bytes;
        if let Some(of_namespace) = self.by_namespace.get_mut(&key.0) {
            *of_namespace -= bytes;
            if *of_namespace == 0 {
                self.by_namespace.remove(&key.0);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.all
    }

    /// Returns the object to evict if a limit is exceeded: the least recently used one of the
    /// namespace with the most bytes.
    fn over_limit(&self) -> Option<ObjectKey> {
        let (namespace, bytes) = self.by_namespace.iter().max_by_key(|(_, bytes)| **bytes)?;
        if self.all <= MAX_BYTES && *bytes <= MAX_NAMESPACE_BYTES {
            return None;
        }
        let objects = self.objects.iter();
        let theirs = objects.filter(|((of, _), _)| of == namespace);
        let oldest = theirs.min_by_key(|(_, (_, used))| *used);
        oldest.map(|(key, _)| key.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1024 * 1024;

    fn key(namespace: &str, name: usize) -> ObjectKey {
        (namespace.to_owned(), name.to_string())
    }

    #[test]
    fn a_namespace_lets_go_of_its_own_and_of_no_others() {
        let mut budget = MemoryBudget::default();
        assert_eq!(budget.add(&key("other", 0), MIB), []);
        for number in 0..6 {
            assert_eq!(budget.add(&key("greedy", number), MIB), []);
        }
        // Object 0 was used last, so 1 is evicted.
        budget.touch(&key("greedy", 0));
        assert_eq!(budget.add(&key("greedy", 6), MIB), [key("greedy", 1)]);
        for number in 7..200 {
            let gone = budget.add(&key("greedy", number), MIB);
            assert!(gone.len() == 1 && gone[0].0 == "greedy", "{gone:?}");
        }
        assert!(budget.objects.contains_key(&key("other", 0)));
        // Recording the same size again changes nothing.
        assert_eq!(budget.add(&key("greedy", 199), MIB), []);
        assert_eq!(budget.all, 7 * MIB);
    }

    #[test]
    fn all_namespaces_together_have_so_much() {
        let mut budget = MemoryBudget::default();
        let namespaces: Vec<String> = (0..100).map(|at| format!("n{at}")).collect();
        for number in 0..3 {
            for namespace in &namespaces {
                budget.add(&key(namespace, number), MIB);
            }
        }
        assert!(budget.all <= MAX_BYTES);
        let counted: usize = budget.objects.values().map(|(bytes, _)| bytes).sum();
        assert_eq!(counted, budget.all);
        // An object above the limit is not cached at all.
        let huge = key("huge", 0);
        assert_eq!(budget.add(&huge, MAX_NAMESPACE_BYTES + 1), [huge]);
        let all: Vec<ObjectKey> = budget.objects.keys().cloned().collect();
        for key in all {
            budget.remove(&key);
        }
        assert!(budget.all == 0 && budget.by_namespace.is_empty());
    }
}
