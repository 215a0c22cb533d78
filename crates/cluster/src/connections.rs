//! Connections that many watches share.

use std::collections::BTreeMap;

use tokio_util::sync::CancellationToken;

use crate::connect::{Cluster, ConnectError};

/// Watches on one connection: fewer than the streams that an API server gives it
/// (`--http2-max-streams-per-connection`, 100 where nobody sets it).
const WATCHES: usize = 64;

/// Connections, and the watches on them, each known by the node that it is about.
#[derive(Debug)]
pub(crate) struct Connections {
    cluster: Cluster,
    /// Connections, and how many watches each of them has.
    shared: Vec<(Cluster, usize)>,
    /// The nodes that are told of: their connection, and what ends the watch.
    nodes: BTreeMap<String, (usize, CancellationToken)>,
}

// === impl Connections ===

impl Connections {
    /// Returns none yet.
    pub(crate) fn new(cluster: &Cluster) -> Self {
        Self {
            cluster: cluster.clone(),
            shared: Vec::new(),
            nodes: BTreeMap::new(),
        }
    }

    /// Begins a watch about a node: returns its connection and what ends it; `None` where there is one
    /// already.
    pub(crate) fn begin(
        &mut self,
        node: &str,
        cancel: &CancellationToken,
    ) -> Result<Option<(Cluster, CancellationToken)>, ConnectError> {
        if self.nodes.contains_key(node) {
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
        self.nodes.insert(node.to_owned(), (place, cancel.clone()));
        Ok(Some((connection.clone(), cancel)))
    }

    /// Ends the watch about a node.
    pub(crate) fn end(&mut self, node: &str) {
        let Some((place, cancel)) = self.nodes.remove(node) else {
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
