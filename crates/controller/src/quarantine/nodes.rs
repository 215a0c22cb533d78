//! Taking in what the node watch says.

use std::collections::BTreeSet;
use std::sync::Arc;

use cluster::NodeEvent;
use domain::node::NodeView;
use tokio::sync::mpsc;

use super::{Mode, Owns, Quarantine};

impl Quarantine {
    pub(super) fn node_event(&mut self, event: NodeEvent) {
        match event {
            NodeEvent::Restarted => self.relisted = Some(BTreeSet::new()),
            NodeEvent::Applied(view) => {
                if let Some(seen) = &mut self.relisted {
                    seen.insert(view.name.clone());
                }
                let name = view.name.clone();
                if self.see(view) {
                    self.touch(&name);
                }
            }
            NodeEvent::Deleted(name) => self.gone(&name),
            NodeEvent::Listed => {
                let seen = self.relisted.take().unwrap_or_default();
                let gone: Vec<String> = self
                    .nodes
                    .iter()
                    .filter(|(name, entry)| entry.view.is_some() && !seen.contains(*name))
                    .map(|(name, _)| name.clone())
                    .collect();
                for name in gone {
                    self.gone(&name);
                }
                self.listed = true;
                self.cluster_error = None;
                if self.mode == Mode::Act
                    && let Owns::Node(own) = &self.owns
                    && self.nodes.get(own).is_none_or(|entry| entry.view.is_none())
                {
                    tracing::warn!(
                        node = own,
                        "the cluster has no node of this name: its faults cannot be acted on until \
                         it appears; --node-name sets the name"
                    );
                }
                self.dirty.extend(self.nodes.keys().cloned());
                self.schedule_publish();
            }
            NodeEvent::Failing { error, .. } => {
                tracing::warn!(
                    err = error,
                    "the cluster's nodes cannot be watched; it is tried again"
                );
                self.cluster_error = Some(error);
                self.schedule_publish();
            }
            NodeEvent::Recovered => {
                tracing::info!("the cluster's nodes are watched again");
                self.cluster_error = None;
                self.schedule_publish();
            }
        }
    }

    /// Takes a view of a node in. Returns whether anything has changed that decisions
    /// look at.
    pub(super) fn see(&mut self, view: Arc<NodeView>) -> bool {
        let name = view.name.clone();
        let entry = self.entry(&name);
        let (was_out, since) = (!entry.in_service(), entry.out_since());
        let changed = entry.see(view);
        if changed && was_out && entry.in_service() {
            self.brake.back(&name, since);
        } else if changed {
            self.brake.changed();
        }
        changed
    }

    fn gone(&mut self, name: &str) {
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.gone();
        }
        self.brake.changed();
        self.touch(name);
    }
}

/// The next event; `None` where the watch has ended, which it does not by itself. Waits for
/// ever where there is no cluster.
pub(super) async fn receive<T>(events: &mut Option<mpsc::Receiver<T>>) -> Option<T> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}
