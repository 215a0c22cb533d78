//! Drains: has the pods of nodes told, and removes those that are to leave.

use std::time::Instant;

use cluster::{ApiError, Event, PodWatches};
use fleet::{EventReason, FleetInput, PlannedCheckpoint, PlannedRemoval, PodNews, RemovalAnswer};
use jiff::{SignedDuration, Timestamp};
use model::reporter::OWN_AGENT;
use runtime::logging::chain;
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Answered, Quarantine, ROUND};

/// Type and source of Events about drains, as NVSentinel has them.
const EVENT_TYPE: &str = "NodeDraining";
const EVENT_SOURCE: &str = "nvsentinel-node-drainer";
/// Type of Events of our own.
const WARNING: &str = "Warning";

/// The pods of nodes that are drained.
pub(super) struct Drains {
    watches: PodWatches,
    cancel: CancellationToken,
}

/// What was asked of a pod, and answered.
pub(super) struct Removed {
    asked: Asked,
    result: Result<(), ApiError>,
    took: std::time::Duration,
}

/// What was asked of a pod.
enum Asked {
    /// To leave.
    Removal(PlannedRemoval),
    /// To write a checkpoint.
    Checkpoint(PlannedCheckpoint),
}

/// The news of pods, each with the name of its node.
pub(super) type PodEvents = mpsc::Receiver<(String, PodNews)>;

// === impl Drains ===

impl Drains {
    /// Returns what tells of no node yet, and where its news come.
    pub(super) fn new(cluster: &cluster::Cluster, cancel: &CancellationToken) -> (Self, PodEvents) {
        let (watches, news) = PodWatches::new(cluster);
        let cancel = cancel.clone();
        (Self { watches, cancel }, news)
    }
}

impl Quarantine {
    /// Starts or stops to watch the pods of a node.
    pub(super) fn watch_pods(&mut self, node: String, watch: bool) {
        let Some(drains) = &mut self.drains else {
            return; // Without a cluster nothing is drained.
        };
        if !watch {
            drains.watches.leave(&node);
            return;
        }
        if let Err(error) = drains.watches.follow(&node, &drains.cancel) {
            let why = chain(&error);
            tracing::warn!(
                node,
                err = why,
                "the pods of a node that is drained cannot be watched"
            );
            self.take(FleetInput::Pods {
                node,
                news: PodNews::Failing(why),
            });
        }
    }

    /// Takes news of pods in, and what else has been told by now.
    pub(super) fn pod_events(&mut self, first: (String, PodNews), events: &mut Option<PodEvents>) {
        let mut next = Some(first);
        for _ in 0..ROUND {
            let Some((node, news)) = next else {
                return;
            };
            self.take(FleetInput::Pods { node, news });
            next = events.as_mut().and_then(|events| events.try_recv().ok());
        }
        if let Some((node, news)) = next {
            self.take(FleetInput::Pods { node, news });
        }
    }

    /// Starts the removal of a pod.
    pub(super) fn remove_pod(&mut self, planned: PlannedRemoval) {
        let Some(cluster) = self.cluster.clone() else {
            return; // Without one nothing is planned.
        };
        self.requests.spawn(async move {
            let began = Instant::now();
            let result = cluster.remove_pod(&planned).await;
            let took = began.elapsed();
            Answered::Pod(Removed {
                asked: Asked::Removal(planned),
                result,
                took,
            })
        });
    }

    /// Starts to tell a pod that it may write a checkpoint.
    pub(super) fn ask_for_checkpoint(&mut self, planned: PlannedCheckpoint) {
        let Some(cluster) = self.cluster.clone() else {
            return; // Without one nothing is planned.
        };
        self.requests.spawn(async move {
            let began = Instant::now();
            let result = cluster.ask_for_checkpoint(&planned).await;
            let took = began.elapsed();
            Answered::Pod(Removed {
                asked: Asked::Checkpoint(planned),
                result,
                took,
            })
        });
    }

    /// Emits an Event of a node. One of the same words and time is emitted once, also by a later process.
    pub(super) fn emit_event(
        &self,
        node: &str,
        since: Timestamp,
        reason: EventReason,
        message: String,
    ) {
        let Some(cluster) = self.cluster.clone().filter(|_| self.events) else {
            return;
        };
        let (kind, source) = match reason {
            EventReason::QuarantineUndone => (WARNING, OWN_AGENT),
            EventReason::AwaitingPodCompletion | EventReason::WaitingBeforeForceDelete => {
                (EVENT_TYPE, EVENT_SOURCE)
            }
        };
        let reason = reason.name();
        let now = (self.clock)();
        let event = Event {
            name: event_name(node, since, reason, &message),
            node: node.to_owned(),
            pod: None,
            kind: kind.to_owned(),
            reason: reason.to_owned(),
            message,
            agent: source.to_owned(),
            count: 1,
            first_seen: now,
            last_seen: now,
        };
        tokio::spawn(async move {
            // Best effort: a lost Event changes no decision.
            if let Err(error) = cluster.create_event(&event).await {
                tracing::debug!(err = chain(&error), "an Event was not made");
            }
        });
    }

    /// Takes the answer of a pod's API server in.
    pub(super) fn pod_removed(&mut self, removed: Removed) {
        let Removed {
            asked,
            result,
            took,
        } = removed;
        let (node, uid) = match asked {
            Asked::Removal(planned) => {
                let PlannedRemoval {
                    node,
                    namespace,
                    name,
                    uid,
                    evict,
                    ..
                } = planned;
                self.drain_metrics
                    .removed(&node, &namespace, evict.is_some(), &result, took);
                if let Err(error) = &result {
                    let err = chain(error);
                    tracing::debug!(node, namespace, pod = name, err = %err, "a pod is not removed");
                }
                (node, uid)
            }
            Asked::Checkpoint(planned) => (planned.node, planned.uid),
        };
        let answer = answer(result);
        self.take(FleetInput::PodAnswered { node, uid, answer });
    }
}

/// Returns the name of the Event that tells who is waited for: that of another drain has another one, also where
/// it waits for pods of the same names.
fn event_name(node: &str, since: Timestamp, reason: &str, message: &str) -> String {
    let hash = format!(
        "{:x}",
        Sha256::digest(format!("{reason} {message} {since}"))
    );
    let hash: String = hash.chars().take(16).collect();
    format!("{node}-{hash}")
}

fn answer(result: Result<(), ApiError>) -> RemovalAnswer {
    let signed = |wait| SignedDuration::try_from(wait).ok();
    match result {
        Ok(()) => RemovalAnswer::Taken,
        // Also where another pod has its name now.
        Err(ApiError::NotFound { .. } | ApiError::Conflict { .. }) => RemovalAnswer::Gone,
        Err(ApiError::Held {
            message,
            retry_after,
        }) => RemovalAnswer::Held {
            why: message,
            retry_after: retry_after.and_then(signed),
        },
        Err(error) => RemovalAnswer::Failed {
            why: chain(&error),
            retry_after: match error {
                ApiError::Throttled { retry_after } => retry_after.and_then(signed),
                _ => None,
            },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_drain_tells_who_is_waited_for_and_tells_it_once() {
        let name = |since, message| {
            let since = Timestamp::from_second(since).unwrap();
            event_name("n1", since, "AwaitingPodCompletion", message)
        };
        let first = name(1_800_000_000, "[jobs/a]");
        assert_eq!(first, name(1_800_000_000, "[jobs/a]"));
        assert_ne!(first, name(1_800_000_000, "[jobs/b]"));
        assert_ne!(first, name(1_800_009_000, "[jobs/a]"));
        assert!(first.starts_with("n1-"), "{first}");
    }
}
