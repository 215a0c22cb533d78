//! Taking in what the node watch says.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use cluster::NodeEvent;
use domain::brake::MOST_ALONE;
use domain::node::NodeView;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{Mode, Owns, Quarantine, ROUND};

/// How long a view may be on its way to us as part of a list: a page takes 30 s at most, and
/// may wait in the watch's queue.
pub(super) const LIST_TAKES: Duration = Duration::from_secs(60);

/// A list that is being delivered.
pub(super) struct Relisted {
    /// Nodes that it had so far.
    seen: BTreeSet<String>,
    began: Instant,
}

impl Quarantine {
    pub(super) fn node_event(&mut self, event: NodeEvent) {
        match event {
            NodeEvent::Restarted => {
                // What people did to the nodes meanwhile may be of any time.
                for entry in self.nodes.values_mut() {
                    entry.session.watched = false;
                }
                self.relisted = Some(Relisted {
                    seen: BTreeSet::new(),
                    began: Instant::now(),
                });
            }
            NodeEvent::Applied(view) => {
                if let Some(list) = &mut self.relisted {
                    list.seen.insert(view.name.clone());
                }
                let name = view.name.clone();
                if self.see(view) {
                    self.touch(&name);
                }
            }
            NodeEvent::Deleted(name) => self.gone(&name),
            NodeEvent::Listed => {
                let seen = self
                    .relisted
                    .take()
                    .map(|list| list.seen)
                    .unwrap_or_default();
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
                self.warn_of_many();
                self.touch_all();
                self.schedule_publish();
            }
            // Each failed try is told; for the same reason it is no news.
            NodeEvent::Failing { error, .. } if self.cluster_error.as_ref() == Some(&error) => {}
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

    /// Says, after a list, where too many nodes act for themselves.
    fn warn_of_many(&self) {
        let nodes = self
            .nodes
            .values()
            .filter(|entry| entry.view.is_some())
            .count();
        if self.mode == Mode::Act && matches!(self.owns, Owns::Node(_)) && nodes > MOST_ALONE {
            tracing::warn!(
                nodes,
                "each node acts for itself, and budgets do not hold what fails at the same \
                 moment: in a cluster of more than {MOST_ALONE} nodes run `gpuwarden agent` on \
                 them, and one `gpuwarden controller`"
            );
        }
    }

    /// Takes in what else the watch has said by now.
    pub(super) fn node_events(&mut self, events: Option<&mut mpsc::Receiver<NodeEvent>>) {
        let Some(events) = events else {
            return;
        };
        for _ in 1..ROUND {
            let Ok(event) = events.try_recv() else {
                return;
            };
            self.node_event(event);
        }
    }

    /// Takes a view of a node in, unless it is older than what is known: the watch may still
    /// deliver states from before our own last patch. Returns whether anything has changed
    /// that decisions look at.
    ///
    /// What a list has is taken all the same where no patch can be newer: after etcd was
    /// restored from a backup, nodes have lower versions than before.
    pub(super) fn see(&mut self, view: Arc<NodeView>) -> bool {
        let (name, now) = (view.name.clone(), (self.clock)());
        if self.entry(&name).knows_newer(&view) {
            if !self.restored(&name) {
                return false;
            }
            tracing::info!(
                node = name,
                "the API server went back to an older state of the node"
            );
            if let Some(board) = &self.board {
                board.restored(&name);
            }
        }
        let moved = self.moved(&view);
        let entry = self.entry(&name);
        let (was_out, since) = (!entry.in_service(), entry.out_since());
        let counted = entry.counted(now);
        let changed = entry.see(view);
        if was_out && entry.in_service() {
            self.brake.back(&name, since);
        } else if changed && moved || entry.counted(now) != counted {
            self.brake.changed();
        }
        changed
    }

    /// Whether an older view of a node is a state to which the API server went back.
    fn restored(&self, name: &str) -> bool {
        let patched_at = self.nodes.get(name).and_then(|entry| entry.patched_at);
        let patched_before =
            |list: &Relisted| patched_at.is_none_or(|at| at + LIST_TAKES < list.began);
        self.relisted.as_ref().is_some_and(patched_before)
    }

    /// Whether a node is new to the brake, or counts among others than before.
    fn moved(&self, view: &NodeView) -> bool {
        let Some(before) = (self.nodes.get(&view.name)).and_then(|entry| entry.view.as_ref())
        else {
            return true;
        };
        let policy = self.policy.as_ref();
        let budgets = policy.iter().flat_map(|policy| &policy.brake.budgets);
        std::iter::once(&self.brake.gpu_label.key)
            .chain(budgets.filter_map(|budget| budget.per.as_ref()))
            .any(|label| before.labels.get(label) != view.labels.get(label))
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
