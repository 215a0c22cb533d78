//! Takes in the events of the node watch.

use cluster::NodeEvent;
use fleet::FleetInput;
use tokio::sync::mpsc;

use super::{Quarantine, ROUND};

impl Quarantine {
    pub(super) fn node_event(&mut self, event: NodeEvent) {
        match event {
            NodeEvent::Restarted => self.take(FleetInput::ListBegun),
            NodeEvent::Applied(view) => self.take(FleetInput::Seen(view)),
            NodeEvent::Deleted(name) => self.take(FleetInput::Gone(name)),
            NodeEvent::Listed => {
                self.cluster_error = None;
                self.take(FleetInput::Listed);
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
}

/// Returns the next event; `None` where the watch has ended, which it does not by itself. Waits for
/// ever where there is no cluster.
pub(super) async fn receive<T>(events: &mut Option<mpsc::Receiver<T>>) -> Option<T> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}
