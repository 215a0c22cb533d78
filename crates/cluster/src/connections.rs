//! Connections that many watches share.

use std::collections::BTreeMap;

use tokio_util::sync::CancellationToken;

use crate::connect::{Cluster, ConnectError};

/// Most watches on one connection: below the streams that an API server allows on it
/// (`--http2-max-streams-per-connection`, 100 by default).
const WATCHES: usize = 64;

/// Connections, and the watches on them by key, such as the node that a watch is about.
#[derive(Debug)]
pub(crate) struct Connections<K> {
    cluster: Cluster,
    /// The connections, each with the number of its watches.
    shared: Vec<(Cluster, usize)>,
    /// The watches: index of the connection, and the token that stops the watch.
    watches: BTreeMap<K, (usize, CancellationToken)>,
}

// === impl Connections ===

impl<K: Ord> Connections<K> {
    /// Creates a set without connections.
    pub(crate) fn new(cluster: &Cluster) -> Self {
        Self {
            cluster: cluster.clone(),
            shared: Vec::new(),
            watches: BTreeMap::new(),
        }
    }

    /// Registers a watch. Returns its connection and the token that stops it; `None` if `key` has a
    /// watch already.
    pub(crate) fn begin(
        &mut self,
        key: K,
        cancel: &CancellationToken,
    ) -> Result<Option<(Cluster, CancellationToken)>, ConnectError> {
        if self.watches.contains_key(&key) {
            return Ok(None);
        }
        let room = (self.shared.iter()).position(|(_, watches)| *watches < WATCHES);
        let place = room.unwrap_or(self.shared.len());
        if room.is_none() {
            let connection = self.cluster.with_own_connection()?;
            self.shared.push((connection, 0));
        }
        let Some((connection, watches)) = self.shared.get_mut(place) else {
            return Ok(None); // Not reached: the connection was found or pushed just now.
        };
        *watches += 1;
        let cancel = cancel.child_token();
        self.watches.insert(key, (place, cancel.clone()));
        Ok(Some((connection.clone(), cancel)))
    }

    /// Stops the watch of a key.
    pub(crate) fn end(&mut self, key: &K) {
        let Some((place, cancel)) = self.watches.remove(key) else {
            return;
        };
        cancel.cancel();
        if let Some((_, watches)) = self.shared.get_mut(place) {
            *watches -= 1;
        }
        // Unused connections at the end of the list are closed, so that a storm of watches does
        // not keep its connections open.
        while self.shared.last().is_some_and(|(_, watches)| *watches == 0) {
            self.shared.pop();
        }
    }
}
