//! What the signals of a watch come to: all objects of a selection by key, or the one object of its name.

use std::sync::Arc;

use model::listing::Listing;

use crate::watch::Signal;

/// A change of the objects of a watch.
#[derive(Debug, PartialEq)]
pub enum Change<T> {
    /// An object is there, new or changed.
    Set(String, Arc<T>),
    /// An object is gone.
    Gone(String),
}

/// Takes a signal into a listing whose objects are what `read` makes of them. An object for which it returns
/// `None` is passed over: one that was known stays as it was until the next list. Keys are the names of objects,
/// with their namespace where they have one.
pub fn take<T, V>(
    listing: &mut Listing<String, V>,
    signal: Signal<T>,
    read: impl Fn(&Arc<T>) -> Option<(String, V)>,
) -> Vec<Change<T>> {
    match signal {
        Signal::Restarted => listing.begin(),
        Signal::Listed => {
            let gone = listing.end().into_iter();
            return gone.map(|(key, _)| Change::Gone(key)).collect();
        }
        Signal::Applied(object) => {
            if let Some((key, value)) = read(&object) {
                listing.set(key.clone(), value);
                return vec![Change::Set(key, object)];
            }
        }
        Signal::Deleted(key) => {
            listing.remove(&key);
            return vec![Change::Gone(key)];
        }
        Signal::Failing { .. } | Signal::Recovered => {}
    }
    Vec::new()
}

/// What a watch says of the one object that it is of.
#[derive(Debug)]
pub(crate) enum One<T> {
    /// The object is this.
    There(Arc<T>),
    /// There is none.
    Missing,
    /// It cannot be seen; see [`Signal::Failing`].
    Failing { error: String, refused: bool },
    /// It can be seen again, and was missed nothing of.
    Recovered,
}

/// Follows the one object of a watch.
#[derive(Debug, Default)]
pub(crate) struct FollowOne {
    /// True once the list that is coming in has brought the object.
    listed: bool,
}

// === impl Change ===

impl<T> Change<T> {
    /// Returns the key and the object; `None`: it is gone.
    pub fn into_parts(self) -> (String, Option<Arc<T>>) {
        match self {
            Self::Set(key, object) => (key, Some(object)),
            Self::Gone(key) => (key, None),
        }
    }
}

// === impl FollowOne ===

impl FollowOne {
    /// Takes a signal. Returns what it says of the object, if anything.
    pub(crate) fn take<T>(&mut self, signal: Signal<T>) -> Option<One<T>> {
        match signal {
            Signal::Restarted => {
                self.listed = false;
                None
            }
            Signal::Applied(object) => {
                self.listed = true;
                Some(One::There(object))
            }
            Signal::Listed if self.listed => None,
            Signal::Listed | Signal::Deleted(_) => Some(One::Missing),
            Signal::Failing { error, refused } => Some(One::Failing { error, refused }),
            Signal::Recovered => Some(One::Recovered),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_objects_of_a_watch_are_known_by_key() {
        let mut listing: Listing<String, u8> = Listing::default();
        let read = |object: &Arc<(&'static str, u8)>| {
            let (name, value) = **object;
            (value > 0).then(|| (name.to_owned(), value))
        };
        let mut told = |signal| {
            let changes = take(&mut listing, signal, read).into_iter();
            let parts = changes.map(Change::into_parts);
            let parts: Vec<_> = parts.map(|(key, object)| (key, object.is_some())).collect();
            let values: Vec<u8> = listing.values().copied().collect();
            (parts, values)
        };
        let applied = |name, value| Signal::Applied(Arc::new((name, value)));
        assert_eq!(told(Signal::Restarted), (vec![], vec![]));
        assert_eq!(told(applied("a", 1)), (vec![("a".into(), true)], vec![1]));
        assert_eq!(told(applied("b", 0)), (vec![], vec![1]), "passed over");
        assert_eq!(
            told(applied("b", 2)),
            (vec![("b".into(), true)], vec![1, 2])
        );
        assert_eq!(told(Signal::Listed), (vec![], vec![1, 2]));
        assert_eq!(told(Signal::Recovered), (vec![], vec![1, 2]));
        assert_eq!(told(Signal::Restarted), (vec![], vec![1, 2]));
        assert_eq!(
            told(applied("b", 3)),
            (vec![("b".into(), true)], vec![1, 3])
        );
        assert_eq!(told(Signal::Listed), (vec![("a".into(), false)], vec![3]));
        let deleted = told(Signal::Deleted("b".into()));
        assert_eq!(deleted, (vec![("b".into(), false)], vec![]));
    }

    #[test]
    fn the_one_object_of_a_watch_is_there_or_missing() {
        let mut follow = FollowOne::default();
        let mut told = |signal: Signal<u8>| match follow.take(signal) {
            Some(One::There(object)) => format!("there {object}"),
            Some(One::Missing) => "missing".to_owned(),
            Some(One::Failing { error, refused }) => format!("{error} {refused}"),
            Some(One::Recovered) => "recovered".to_owned(),
            None => String::new(),
        };
        let failing = || Signal::Failing {
            error: "e".to_owned(),
            refused: true,
        };
        for (signal, expected) in [
            (Signal::Restarted, ""),
            (Signal::Applied(Arc::new(1)), "there 1"),
            (Signal::Listed, ""),
            (failing(), "e true"),
            (Signal::Recovered, "recovered"),
            (Signal::Deleted("a".to_owned()), "missing"),
            (Signal::Restarted, ""),
            (Signal::Listed, "missing"),
            (Signal::Applied(Arc::new(2)), "there 2"),
        ] {
            assert_eq!(told(signal), expected);
        }
    }
}
