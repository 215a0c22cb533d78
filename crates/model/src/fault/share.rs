//! The part of the book about one node, as it is saved: where something has changed of a few of
//! 5,000 nodes, a few parts are written and not the whole book.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::closed::Closed;
use super::room::Missed;
use super::{Fault, FaultBook};
use crate::reporter::Authority;

/// The part of the book about one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeShare<'a> {
    /// Its open faults, in the order in which they opened.
    faults: Cow<'a, [Fault]>,
    /// The checks that have spoken of it.
    heard: Vec<Cow<'a, str>>,
    /// Reports that found no room.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    missed: BTreeMap<Authority, Missed>,
    /// The faults of it that were closed lately.
    closed: Cow<'a, [Closed]>,
}

// === impl NodeShare ===

impl NodeShare<'_> {
    /// Returns whether there is nothing to save.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
            && self.heard.is_empty()
            && self.missed.is_empty()
            && self.closed.is_empty()
    }
}

// === impl FaultBook ===

impl FaultBook {
    /// Returns the share of `node`.
    pub fn share(&self, node: &str) -> NodeShare<'_> {
        NodeShare {
            faults: Cow::Borrowed(self.faults(node)),
            heard: self.heard(node).map(Cow::Borrowed).collect(),
            missed: self.missed.get(node).cloned().unwrap_or_default(),
            closed: Cow::Borrowed(self.closed.of(node)),
        }
    }

    /// Takes the saved share of `node` back, in place of what is there.
    pub fn restore(&mut self, node: &str, share: NodeShare<'_>) {
        for check in &share.heard {
            // It had room before.
            self.heard.note(node, check, Authority::Trusted);
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
