//! Taking in what the node watch says.

use std::collections::BTreeSet;

use cluster::NodeEvent;
use tokio::sync::mpsc;

use super::{Mode, Owns, Quarantine};

impl Quarantine {
    pub(super) fn node_event(&mut self, event: Option<NodeEvent>) {
        match event {
            Some(NodeEvent::Restarted) => self.relisted = Some(BTreeSet::new()),
            Some(NodeEvent::Applied(view)) => {
                if let Some(seen) = &mut self.relisted {
                    seen.insert(view.name.clone());
                }
                let name = view.name.clone();
                let entry = self.entry(&name);
                if entry.see(view) {
                    self.touch(&name);
                }
            }
            Some(NodeEvent::Deleted(name)) => self.gone(&name),
            Some(NodeEvent::Listed) => {
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
            Some(NodeEvent::Failing { error }) => {
                tracing::warn!(
                    err = error,
                    "the cluster's nodes cannot be watched; it is tried again"
                );
                self.cluster_error = Some(error);
                self.schedule_publish();
            }
            Some(NodeEvent::Recovered) => {
                tracing::info!("the cluster's nodes are watched again");
                self.cluster_error = None;
                self.schedule_publish();
            }
            None => {}
        }
    }

    fn gone(&mut self, name: &str) {
        if let Some(entry) = self.nodes.get_mut(name) {
            entry.view = None;
        }
        self.touch(name);
    }
}

/// The next node event; waits for ever where there is no cluster, or its watch has ended.
pub(super) async fn receive(events: &mut Option<mpsc::Receiver<NodeEvent>>) -> Option<NodeEvent> {
    if let Some(receiver) = events {
        if let Some(event) = receiver.recv().await {
            return Some(event);
        }
        *events = None;
    }
    std::future::pending().await
}
