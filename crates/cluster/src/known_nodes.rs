//! The nodes as the watch last saw them, for those who only want to look one up.
//!
//! Whoever decides about nodes reads the watch itself and sees every change; this is what is
//! left behind by it, and asking it costs no request and never waits.

use std::sync::{Arc, PoisonError, RwLock};

use model::listing::Listing;
use model::node::NodeView;

use crate::NodeEvent;
use crate::signals::apply_signal;

/// The nodes that are known. Cheap to clone; all clones see the same.
///
/// Empty until somebody watches the nodes; while the watch fails, what was known stays.
#[derive(Clone, Debug, Default)]
pub struct KnownNodes(Arc<RwLock<Listing<String, Arc<NodeView>>>>);

// === impl KnownNodes ===

impl KnownNodes {
    /// Returns the node of this name.
    pub fn get(&self, name: &str) -> Option<Arc<NodeView>> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        known.get(name).cloned()
    }

    /// Takes in what the watch says.
    pub(crate) fn take_in(&self, event: &NodeEvent) {
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
            // A new list keeps what was known until it is complete.
            (NodeEvent::Restarted, "ac"),
            (applied("c"), "ac"),
            (NodeEvent::Listed, "c"),
        ];
        for (event, expected) in table {
            known.take_in(&event);
            let names = ["a", "b", "c"];
            let found: String = names
                .into_iter()
                .filter(|name| known.get(name).is_some())
                .collect();
            assert_eq!(found, expected, "{event:?}");
        }
    }
}
