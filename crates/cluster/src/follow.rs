//! A set of watches that start and stop one by one and send their events into one channel.

use std::future::Future;

use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::connect::{Cluster, ConnectError};
use crate::connections::Connections;
use crate::signals::forward;
use crate::watch::{Selection, Signal};

/// Watches by key, such as the node whose pods are watched.
#[derive(Debug)]
pub(crate) struct Follower<K, E> {
    connections: Connections<K>,
    events: mpsc::Sender<E>,
}

/// A running watch of a [`Follower`].
#[derive(Debug)]
pub(crate) struct Following<E> {
    pub(crate) connection: Cluster,
    events: mpsc::Sender<E>,
    cancel: CancellationToken,
}

// === impl Follower ===

impl<K: Ord, E: Send + 'static> Follower<K, E> {
    /// Creates a set without watches, and the receiver of its events. Up to `queue` events wait for
    /// the receiver; when it is slower than that, the watches wait.
    pub(crate) fn new(cluster: &Cluster, queue: usize) -> (Self, mpsc::Receiver<E>) {
        let (events, receiver) = mpsc::channel(queue);
        let connections = Connections::new(cluster);
        (
            Self {
                connections,
                events,
            },
            receiver,
        )
    }

    /// Starts watching `selection`, unless `key` is watched already. `read` turns each signal into
    /// an event, or passes over it. Takes the permissions `list` and `watch`. Must be called within
    /// a tokio runtime.
    pub(crate) fn follow<T: DeserializeOwned + Send + Sync + 'static>(
        &mut self,
        key: K,
        selection: Selection,
        read: impl FnMut(Signal<T>) -> Option<E> + Send + 'static,
        cancel: &CancellationToken,
    ) -> Result<(), ConnectError> {
        self.start(key, cancel, |following| following.watch(selection, read))
    }

    /// Runs `run`, unless `key` is watched already: for a watch that first has to find out what to
    /// select.
    pub(crate) fn start<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        key: K,
        cancel: &CancellationToken,
        run: impl FnOnce(Following<E>) -> F,
    ) -> Result<(), ConnectError> {
        if let Some((connection, cancel)) = self.connections.begin(key, cancel)? {
            let run = run(Following {
                connection,
                events: self.events.clone(),
                cancel: cancel.clone(),
            });
            tokio::spawn(cancel.run_until_cancelled_owned(run));
        }
        Ok(())
    }

    /// Stops the watch of `key`. Events already queued are still delivered.
    pub(crate) fn leave(&mut self, key: &K) {
        self.connections.end(key);
    }
}

// === impl Following ===

impl<E> Following<E> {
    /// Sends an event. Returns false if the receiver was dropped.
    pub(crate) async fn send(&self, event: E) -> bool {
        self.events.send(event).await.is_ok()
    }

    /// Watches `selection` until the watch is stopped or the receiver is dropped.
    pub(crate) async fn watch<T: DeserializeOwned + Send + Sync + 'static>(
        self,
        selection: Selection,
        read: impl FnMut(Signal<T>) -> Option<E>,
    ) {
        let signals = self.connection.watch(selection, self.cancel);
        forward(signals, &self.events, read).await;
    }
}
