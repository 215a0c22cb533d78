//! Interpretation of the signals of a watch: as changes of a listing, or as the state of one object.

use std::sync::Arc;

use model::listing::Listing;
use tokio::sync::mpsc;

use crate::watch::Signal;

/// A change of the objects of a watch.
#[derive(Debug, PartialEq)]
pub enum ObjectChange<T> {
    /// An object that is new or changed.
    Set(String, Arc<T>),
    /// The name of an object that is gone.
    Gone(String),
}

/// Applies a signal to `listing`, which holds what `read` returns for each object, by the object's
/// name (`NAMESPACE/NAME` where it has a namespace). Returns the changes.
///
/// Objects that `read` returns `None` for are passed over: an earlier state of such an object
/// stays in the listing until the next list.
pub fn apply_signal<T, V>(
    listing: &mut Listing<String, V>,
    signal: Signal<T>,
    read: impl Fn(&Arc<T>) -> Option<(String, V)>,
) -> Vec<ObjectChange<T>> {
    match signal {
        Signal::Restarted => listing.begin(),
        Signal::Listed => {
            let gone = listing.end().into_iter();
            return gone.map(|(key, _)| ObjectChange::Gone(key)).collect();
        }
        Signal::Applied(object) => {
            if let Some((key, value)) = read(&object) {
                listing.set(key.clone(), value);
                return vec![ObjectChange::Set(key, object)];
            }
        }
        Signal::Deleted(key) => {
            listing.remove(&key);
            return vec![ObjectChange::Gone(key)];
        }
        Signal::Failing { .. } | Signal::Recovered => {}
    }
    Vec::new()
}

/// The state of the one object that a watch selects.
#[derive(Debug)]
pub(crate) enum ObjectState<T> {
    Present(Arc<T>),
    /// There is no such object.
    Missing,
    /// The object cannot be watched; see [`Signal::Failing`].
    Failing {
        error: String,
        refused: bool,
    },
    /// The watch works again, and the object has not changed meanwhile.
    Recovered,
}

/// Follows the one object that a watch selects.
#[derive(Debug, Default)]
pub(crate) struct SingleObject {
    /// True once the current list has brought the object.
    listed: bool,
}

// === impl ObjectChange ===

impl<T> ObjectChange<T> {
    /// Returns the name and the object; `None` for an object that is gone.
    pub fn into_parts(self) -> (String, Option<Arc<T>>) {
        match self {
            Self::Set(key, object) => (key, Some(object)),
            Self::Gone(key) => (key, None),
        }
    }
}

// === impl SingleObject ===

impl SingleObject {
    /// Returns the state of the object after a signal; `None` if the signal does not change it.
    pub(crate) fn apply<T>(&mut self, signal: Signal<T>) -> Option<ObjectState<T>> {
        match signal {
            Signal::Restarted => {
                self.listed = false;
                None
            }
            Signal::Applied(object) => {
                self.listed = true;
                Some(ObjectState::Present(object))
            }
            Signal::Listed if self.listed => None,
            Signal::Listed | Signal::Deleted(_) => Some(ObjectState::Missing),
            Signal::Failing { error, refused } => Some(ObjectState::Failing { error, refused }),
            Signal::Recovered => Some(ObjectState::Recovered),
        }
    }
}

/// Sends the event that `read` returns for each signal, until the watch ends or the receiver of
/// the events is dropped.
pub(crate) async fn forward<T, E>(
    mut signals: mpsc::Receiver<Signal<T>>,
    events: &mpsc::Sender<E>,
    mut read: impl FnMut(Signal<T>) -> Option<E>,
) {
    while let Some(signal) = signals.recv().await {
        if let Some(event) = read(signal)
            && events.send(event).await.is_err()
        {
            return;
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
        let mut apply = |signal| {
            let changes = apply_signal(&mut listing, signal, read).into_iter();
            let parts = changes.map(ObjectChange::into_parts);
            let parts: Vec<_> = parts.map(|(key, object)| (key, object.is_some())).collect();
            let values: Vec<u8> = listing.values().copied().collect();
            (parts, values)
        };
        let applied = |name, value| Signal::Applied(Arc::new((name, value)));
        assert_eq!(apply(Signal::Restarted), (vec![], vec![]));
        assert_eq!(apply(applied("a", 1)), (vec![("a".into(), true)], vec![1]));
        assert_eq!(apply(applied("b", 0)), (vec![], vec![1]), "passed over");
        assert_eq!(
            apply(applied("b", 2)),
            (vec![("b".into(), true)], vec![1, 2])
        );
        assert_eq!(apply(Signal::Listed), (vec![], vec![1, 2]));
        assert_eq!(apply(Signal::Recovered), (vec![], vec![1, 2]));
        assert_eq!(apply(Signal::Restarted), (vec![], vec![1, 2]));
        assert_eq!(
            apply(applied("b", 3)),
            (vec![("b".into(), true)], vec![1, 3])
        );
        assert_eq!(apply(Signal::Listed), (vec![("a".into(), false)], vec![3]));
        let deleted = apply(Signal::Deleted("b".into()));
        assert_eq!(deleted, (vec![("b".into(), false)], vec![]));
    }

    #[test]
    fn the_one_object_of_a_watch_is_there_or_missing() {
        let mut object = SingleObject::default();
        let mut apply = |signal: Signal<u8>| match object.apply(signal) {
            Some(ObjectState::Present(value)) => format!("there {value}"),
            Some(ObjectState::Missing) => "missing".to_owned(),
            Some(ObjectState::Failing { error, refused }) => format!("{error} {refused}"),
            Some(ObjectState::Recovered) => "recovered".to_owned(),
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
            assert_eq!(apply(signal), expected);
        }
    }
}
