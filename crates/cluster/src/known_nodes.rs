//! Cache of the nodes that the watch last delivered, for callers that only look one up.
//!
//! Decisions read the watch itself, which delivers every change. A look-up in this cache costs
//! no request and never waits.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use model::listing::Listing;
use model::node::NodeView;
use tokio::sync::Notify;

use crate::NodeEvent;
use crate::signals::apply_signal;

/// Nodes by name. Cheap to clone; all clones share the nodes.
///
/// Empty until the watch of nodes starts. While the watch fails, the last state stays.
#[derive(Clone, Debug, Default)]
pub struct KnownNodes {
    nodes: Arc<RwLock<Listing<String, Arc<NodeView>>>>,
    changes: Arc<Changes>,
}

/// Names of the nodes that have changed, for the one task that asks for them.
#[derive(Debug, Default)]
struct Changes {
    pending: Mutex<Pending>,
    posted: Notify,
}

/// Changes since the last question. A node is named once, however often it changes.
#[derive(Debug, Default)]
struct Pending {
    /// True once the task has asked.
    wanted: bool,
    names: BTreeSet<String>,
    /// True if there is anything new, such as a complete list.
    news: bool,
}

// === impl KnownNodes ===

impl KnownNodes {
    /// Returns the node of a name.
    pub fn get(&self, name: &str) -> Option<Arc<NodeView>> {
        let known = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
        known.get(name).cloned()
    }

    /// Returns all nodes.
    pub fn all(&self) -> Vec<Arc<NodeView>> {
        let known = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
        known.values().cloned().collect()
    }

    /// Returns whether all nodes were listed at least once.
    pub fn is_complete(&self) -> bool {
        let known = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
        known.is_complete()
    }

    /// Returns the names of the nodes that have changed, or are gone, since the last call; all
    /// nodes at the first call. Waits until there is one, or a list is complete. For one task.
    pub async fn changed(&self) -> BTreeSet<String> {
        loop {
            {
                let mut pending = self.changes.lock();
                if !pending.wanted {
                    pending.wanted = true;
                    drop(pending);
                    return self.all().iter().map(|node| node.name.clone()).collect();
                }
                if std::mem::take(&mut pending.news) {
                    return std::mem::take(&mut pending.names);
                }
            }
            self.changes.posted.notified().await;
        }
    }

    /// Applies an event of the watch.
    pub(crate) fn apply(&self, event: &NodeEvent) {
        let mut known = self.nodes.write().unwrap_or_else(PoisonError::into_inner);
        let changes = apply_signal(&mut known, event.clone(), |node| {
            Some((node.name.clone(), Arc::clone(node)))
        });
        drop(known);
        let mut pending = self.changes.lock();
        if !pending.wanted || changes.is_empty() && *event != NodeEvent::Listed {
            return;
        }
        let names = changes.into_iter().map(|change| change.into_parts().0);
        pending.names.extend(names);
        pending.news = true;
        self.changes.posted.notify_one();
    }
}

// === impl Changes ===

impl Changes {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_changed_node_is_named_once_also_one_that_a_new_list_lacks() {
        let known = KnownNodes::default();
        let applied = |name: &str| NodeEvent::Applied(Arc::new(NodeView::unknown(name)));
        let names = |names: BTreeSet<String>| names.into_iter().collect::<Vec<_>>().join(" ");
        known.apply(&applied("a"));
        assert_eq!(names(known.changed().await), "a", "all at first");
        for event in [
            applied("b"),
            applied("a"),
            applied("b"),
            NodeEvent::Recovered,
        ] {
            known.apply(&event);
        }
        assert_eq!(names(known.changed().await), "a b");
        known.apply(&NodeEvent::Deleted("a".into()));
        assert_eq!(names(known.changed().await), "a");
        known.apply(&NodeEvent::Restarted);
        known.apply(&NodeEvent::Listed);
        assert_eq!(names(known.changed().await), "b", "it is gone");
        known.apply(&NodeEvent::Restarted);
        known.apply(&NodeEvent::Listed);
        assert_eq!(names(known.changed().await), "", "a list is complete");
        let waits = tokio::time::timeout(std::time::Duration::ZERO, known.changed()).await;
        assert!(waits.is_err());
    }

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
            let all: String = known.all().iter().map(|node| node.name.clone()).collect();
            assert_eq!(all, expected, "{event:?}");
        }
    }
}
