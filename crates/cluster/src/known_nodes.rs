//! Cache of the nodes that the watch last delivered, for callers that only look one up.
//!
//! Decisions read the watch itself, which delivers every change. A look-up in this cache costs
//! no request and never waits.

use std::sync::{Arc, PoisonError, RwLock};

use model::listing::Listing;
use model::node::NodeView;

use crate::NodeEvent;
use crate::signals::apply_signal;

/// Nodes by name. Cheap to clone; all clones share the nodes.
///
/// Empty until the watch of nodes starts. While the watch fails, the last state stays.
#[derive(Clone, Debug, Default)]
pub struct KnownNodes(Arc<RwLock<Listing<String, Arc<NodeView>>>>);

// === impl KnownNodes ===

impl KnownNodes {
    /// Returns the node of a name.
    pub fn get(&self, name: &str) -> Option<Arc<NodeView>> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        known.get(name).cloned()
    }

    /// Returns whether all nodes were listed at least once.
    pub fn is_complete(&self) -> bool {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        known.is_complete()
    }

    /// Applies an event of the watch.
    pub(crate) fn apply(&self, event: &NodeEvent) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        apply_signal(&mut known, event.clone(), |node| {
            Some((node.name.clone(), Arc::clone(node)))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_watch_says_is_known() {
        let known = KnownNodes::default();
        let applied = |name: &str| NodeEvent::Applied(Arc::new(NodeView::unknown(name)));
        let failing = NodeEvent::Failing {
            error: "e".into(),
            refused: false,
        };
        let table = [
            (NodeEvent::Restarted, ""),
            (applied("a"), "a"),
            (applied("b"), "ab"),
            (applied("c"), "abc"),
            (NodeEvent::Listed, "abc"),
            (NodeEvent::Deleted("b".into()), "ac"),
            (failing, "ac"),
            // The previous nodes stay until the new list is complete.
            (NodeEvent::Restarted, "ac"),
            (applied("c"), "ac"),
            (NodeEvent::Listed, "c"),
        ];
        for (event, expected) in table {
            known.apply(&event);
            let names = ["a", "b", "c"];
            let found: String = names
                .into_iter()
                .filter(|name| known.get(name).is_some())
                .collect();
            assert_eq!(found, expected, "{event:?}");
        }
    }
}
