//! The state of a watch: lists that arrive in parts, and changes after them.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

/// Objects by key, as a watch delivers them. Known objects stay while a new list arrives; those
/// missing from the complete list are removed.
#[derive(Clone, Debug)]
pub struct Listing<K, V> {
    known: BTreeMap<K, V>,
    /// Keys of the list that is arriving. `None` between lists.
    arriving: Option<BTreeSet<K>>,
    complete: bool,
}

impl<K, V> Default for Listing<K, V> {
    fn default() -> Self {
        Self {
            known: BTreeMap::new(),
            arriving: None,
            complete: false,
        }
    }
}

impl<K: Clone + Ord, V> Listing<K, V> {
    /// Starts a new list.
    pub fn begin(&mut self) {
        self.arriving = Some(BTreeSet::new());
    }

    /// Sets an object that arrived in a list or as a change. Returns the previous one.
    pub fn set(&mut self, key: K, object: V) -> Option<V> {
        if let Some(arriving) = &mut self.arriving {
            arriving.insert(key.clone());
        }
        self.known.insert(key, object)
    }

    /// Removes a deleted object and returns it.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        // A deletion is newer than the arriving list.
        if let Some(arriving) = &mut self.arriving {
            arriving.remove(key);
        }
        self.known.remove(key)
    }

    /// Completes the list. Returns the objects that are gone.
    pub fn end(&mut self) -> Vec<(K, V)> {
        self.complete = true;
        let Some(arriving) = self.arriving.take() else {
            return Vec::new();
        };
        let lacks = |key: &&K| !arriving.contains(key);
        let gone: Vec<K> = self.known.keys().filter(lacks).cloned().collect();
        let gone = gone.into_iter();
        gone.filter_map(|key| self.known.remove_entry(&key))
            .collect()
    }

    /// Returns whether at least one list has been completed.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Returns whether a list is arriving.
    pub fn is_arriving(&self) -> bool {
        self.arriving.is_some()
    }

    /// Returns the object with this key.
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.known.get(key)
    }

    /// Returns all objects with their keys, ordered by key.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.known.iter()
    }

    /// Returns all objects, ordered by key.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.known.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(listing: &Listing<&'static str, u8>) -> Vec<(&'static str, u8)> {
        let known = listing.iter().map(|(key, object)| (*key, *object));
        known.collect()
    }

    #[test]
    fn what_a_complete_list_lacks_is_gone_and_not_before() {
        let mut listing = Listing::default();
        assert!(!listing.is_complete() && !listing.is_arriving());
        listing.begin();
        assert_eq!(listing.set("a", 1), None);
        assert_eq!(listing.set("b", 1), None);
        assert!(listing.is_arriving());
        assert_eq!(listing.end(), []);
        assert!(listing.is_complete() && !listing.is_arriving());
        // A change between two lists.
        assert_eq!(listing.set("c", 1), None);
        assert_eq!(listing.remove("a"), Some(1));
        listing.begin();
        assert_eq!(listing.set("b", 2), Some(1));
        assert_eq!(listing.set("d", 2), None);
        assert_eq!(known(&listing), [("b", 2), ("c", 1), ("d", 2)]);
        assert!(listing.is_complete(), "it was once");
        // An object that is deleted while the list arrives.
        assert_eq!(listing.remove("d"), Some(2));
        assert_eq!(listing.end(), [("c", 1)]);
        assert_eq!(known(&listing), [("b", 2)]);
        // The end of a list that was never started has no effect.
        assert_eq!(listing.end(), []);
        assert_eq!(listing.get("b"), Some(&2));
        // A list that is interrupted and starts again.
        listing.begin();
        listing.set("e", 3);
        listing.begin();
        listing.set("b", 3);
        assert_eq!(listing.end(), [("e", 3)]);
    }
}
