//! The memory that objects take which were read, such as the `ConfigMap`s of gangs: so much for all, and for those of
//! one namespace. Whoever may write them there decides how large they are.
//!
//! An object can be read again at any time, so where there is no room the longest unused is let go of.

use std::collections::BTreeMap;

/// Most bytes for all: the gangs of a cluster of ten thousand nodes have a tenth of that.
const MAX_BYTES: usize = 24 * 1024 * 1024;
/// Most bytes for the objects of one namespace: a few of the largest size, and thousands of usual ones.
const MAX_NAMESPACE_BYTES: usize = 6 * 1024 * 1024;

/// An object, by its namespace and its name, which may say the kind as well.
pub(crate) type Key = (String, String);

/// The bytes that are kept of each object.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    all: usize,
    by_namespace: BTreeMap<String, usize>,
    /// Bytes, and when it was used last.
    objects: BTreeMap<Key, (usize, u64)>,
    now: u64,
}

// === impl Kept ===

impl Kept {
    /// Notes so many bytes for an object, and returns those that have to be let go of for it. It may be one of
    /// them, where it has more than all may have.
    pub(crate) fn keep(&mut self, key: &Key, bytes: usize) -> Vec<Key> {
        self.let_go(key);
        self.now += 1;
        self.objects.insert(key.clone(), (bytes, self.now));
        *self.by_namespace.entry(key.0.clone()).or_default() += bytes;
        self.all += bytes;
        let mut gone = Vec::new();
        while let Some(key) = self.too_many() {
            self.let_go(&key);
            gone.push(key);
        }
        gone
    }

    /// Notes that an object is used.
    pub(crate) fn uses(&mut self, key: &Key) {
        self.now += 1;
        if let Some((_, used)) = self.objects.get_mut(key) {
            *used = self.now;
        }
    }

    /// Notes that nothing is kept of an object.
    pub(crate) fn let_go(&mut self, key: &Key) {
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

    /// Returns how many bytes are kept.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.all
    }

    /// Returns the one to let go of, if there are too many bytes: of a namespace that has more than its part, else of
    /// the one that has most.
    fn too_many(&self) -> Option<Key> {
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

    fn key(namespace: &str, name: usize) -> Key {
        (namespace.to_owned(), name.to_string())
    }

    #[test]
    fn a_namespace_lets_go_of_its_own_and_of_no_others() {
        let mut kept = Kept::default();
        assert_eq!(kept.keep(&key("other", 0), MIB), []);
        for number in 0..6 {
            assert_eq!(kept.keep(&key("greedy", number), MIB), []);
        }
        // It is used, so another goes.
        kept.uses(&key("greedy", 0));
        assert_eq!(kept.keep(&key("greedy", 6), MIB), [key("greedy", 1)]);
        for number in 7..200 {
            let gone = kept.keep(&key("greedy", number), MIB);
            assert!(gone.len() == 1 && gone[0].0 == "greedy", "{gone:?}");
        }
        assert!(kept.objects.contains_key(&key("other", 0)));
        // The same once more takes no more.
        assert_eq!(kept.keep(&key("greedy", 199), MIB), []);
        assert_eq!(kept.all, 7 * MIB);
    }

    #[test]
    fn all_namespaces_together_have_so_much() {
        let mut kept = Kept::default();
        let namespaces: Vec<String> = (0..100).map(|at| format!("n{at}")).collect();
        for number in 0..3 {
            for namespace in &namespaces {
                kept.keep(&key(namespace, number), MIB);
            }
        }
        assert!(kept.all <= MAX_BYTES);
        let counted: usize = kept.objects.values().map(|(bytes, _)| bytes).sum();
        assert_eq!(counted, kept.all);
        // One that is too large by itself is not kept at all.
        let huge = key("huge", 0);
        assert_eq!(kept.keep(&huge, MAX_NAMESPACE_BYTES + 1), [huge]);
        let all: Vec<Key> = kept.objects.keys().cloned().collect();
        for key in all {
            kept.let_go(&key);
        }
        assert!(kept.all == 0 && kept.by_namespace.is_empty());
    }
}
