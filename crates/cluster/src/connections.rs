//! Connections that many watches share.

use std::collections::BTreeMap;

use tokio_util::sync::CancellationToken;

use crate::connect::{Cluster, ConnectError};

/// Watches on one connection: fewer than the streams that an API server gives it
/// (`--http2-max-streams-per-connection`, 100 where nobody sets it).
const WATCHES: usize = 64;

/// Connections, and the watches on them, each known by a key, such as the node that it is about.
#[derive(Debug)]
pub(crate) struct Connections {
    cluster: Cluster,
    /// Connections, and how many watches each of them has.
    shared: Vec<(Cluster, usize)>,
    /// The watches by key: their connection, and what ends them.
    watches: BTreeMap<String, (usize, CancellationToken)>,
}

// === impl Connections ===

impl Connections {
    /// Returns none yet.
    pub(crate) fn new(cluster: &Cluster) -> Self {
        Self {
            cluster: cluster.clone(),
            shared: Vec::new(),
            watches: BTreeMap::new(),
        }
    }

    /// Begins the watch of a key: returns its connection and what ends it; `None` where there is one
    /// already.
    pub(crate) fn begin(
        &mut self,
        key: &str,
        cancel: &CancellationToken,
    ) -> Result<Option<(Cluster, CancellationToken)>, ConnectError> {
        if self.watches.contains_key(key) {
            return Ok(None);
        }
        let room = (self.shared.iter()).position(|(_, watches)| *watches < WATCHES);
        let place = room.unwrap_or(self.shared.len());
        if room.is_none() {
            let connection = self.cluster.with_own_connection()?;
            self.shared.push((connection, 0));
        }
        let Some((connection, watches)) = self.shared.get_mut(place) else {
            return Ok(None); // Not reached: it was found or made just now.
        };
        *watches += 1;
        let cancel = cancel.child_token();
        self.watches.insert(key.to_owned(), (place, cancel.clone()));
        Ok(Some((connection.clone(), cancel)))
    }

    /// Ends the watch of a key.
    pub(crate) fn end(&mut self, key: &str) {
        let Some((place, cancel)) = self.watches.remove(key) else {
            return;
        };
        cancel.cancel();
        if let Some((_, watches)) = self.shared.get_mut(place) {
            *watches -= 1;
        }
        // The connections of a storm are not kept.
        while self.shared.last().is_some_and(|(_, watches)| *watches == 0) {
            self.shared.pop();
        }
    }
}
