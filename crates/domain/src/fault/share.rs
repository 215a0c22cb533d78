//! What the book has of one node, as it is saved: what has changed of 5,000 nodes is a few
//! shares, not the whole book.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::closed::Closed;
use super::{Fault, FaultBook};

/// What the book has of one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeShare<'a> {
    /// Its open faults, in the order in which they opened.
    #[serde(default)]
    faults: Cow<'a, [Fault]>,
    /// The checks that have spoken of it.
    #[serde(default)]
    heard: Vec<Cow<'a, str>>,
    /// What was closed of it lately.
    #[serde(default)]
    closed: Cow<'a, [Closed]>,
}

// === impl NodeShare ===

impl NodeShare<'_> {
    /// Whether there is nothing to save.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty() && self.heard.is_empty() && self.closed.is_empty()
    }
}

// === impl FaultBook ===

impl FaultBook {
    /// The share of `node`.
    pub fn share(&self, node: &str) -> NodeShare<'_> {
        NodeShare {
            faults: Cow::Borrowed(self.faults(node)),
            heard: self.heard(node).map(Cow::Borrowed).collect(),
            closed: Cow::Borrowed(self.closed.of(node)),
        }
    }

    /// Takes the saved share of `node` back, in place of what is there.
    pub fn restore(&mut self, node: &str, share: NodeShare<'_>) {
        for check in &share.heard {
            self.heard.note(node, check);
        }
        self.closed.restore(node, share.closed.into_owned());
        if share.faults.is_empty() {
            self.nodes.remove(node);
        } else {
            self.nodes
                .insert(node.to_owned(), share.faults.into_owned());
        }
    }

    /// The nodes that have a share.
    pub fn with_share(&self) -> impl Iterator<Item = &str> {
        let heard = self.nodes().chain(self.heard.nodes());
        heard.chain(self.closed.nodes())
    }
}
