//! The part of the book about one node. Saving is done by parts: after a change of a few among
//! 5,000 nodes, only their parts are written.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::capacity::Missed;
use super::closed::Closed;
use super::{Fault, FaultBook};
use crate::reporter::Authority;

/// The part of the book about one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeShare<'a> {
    /// Open faults, in the order of their opening.
    faults: Cow<'a, [Fault]>,
    /// Checks that have reported about the node.
    #[serde(rename = "heard")]
    reported: Vec<Cow<'a, str>>,
    /// Reports that found no room.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    missed: BTreeMap<Authority, Missed>,
    /// Faults that were closed recently.
    closed: Cow<'a, [Closed]>,
}

// === impl NodeShare ===

impl NodeShare<'_> {
    /// Returns whether there is nothing to save.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
            && self.reported.is_empty()
            && self.missed.is_empty()
            && self.closed.is_empty()
    }
}

// === impl FaultBook ===

impl FaultBook {
    /// Returns the part of the book about `node`.
    pub fn share(&self, node: &str) -> NodeShare<'_> {
        NodeShare {
            faults: Cow::Borrowed(self.faults(node)),
            reported: self.reported_checks(node).map(Cow::Borrowed).collect(),
            missed: self.missed.get(node).cloned().unwrap_or_default(),
            closed: Cow::Borrowed(self.closed.of(node)),
        }
    }

    /// Replaces the part of the book about `node` with a saved one. [`Self::index`] follows once all
    /// parts are there.
    pub fn restore(&mut self, node: &str, share: NodeShare<'_>) {
        for check in &share.reported {
            // The check was within the limits when it was saved.
            self.reported.record(node, check, Authority::Trusted);
        }
        if share.missed.is_empty() {
            self.missed.remove(node);
        } else {
            self.missed.insert(node.to_owned(), share.missed);
        }
        self.closed.restore(node, share.closed.into_owned());
        if share.faults.is_empty() {
            self.nodes.remove(node);
        } else {
            self.nodes
                .insert(node.to_owned(), share.faults.into_owned());
        }
    }
}
