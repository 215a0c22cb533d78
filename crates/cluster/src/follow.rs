//! What the signals of a watch come to: all objects of a selection by key, or the one object of its name.

use std::sync::Arc;

use domain::listing::Listing;

use crate::watch::Signal;

/// A change of the objects of a watch.
#[derive(Debug, PartialEq)]
pub enum Change<T> {
    /// An object is there, new or changed.
    Set(String, Arc<T>),
    /// An object is gone.
    Gone(String),
}

/// Takes a signal into a listing whose objects are what `read` makes of them; `None`: an object is none of
/// those that are followed. Keys are the names of objects, with their namespace where they have one.
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
