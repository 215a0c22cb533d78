//! Repairs: makes custom resources, has them told, and withdraws those that are not wanted any more.

use std::time::{Duration, Instant};

use cluster::{ApiError, ResourceEvent, ResourceKinds, ResourceWatches};
use fleet::{CreateAnswer, DRAIN_ACTION, FleetInput, PlannedResource, ResourceNews};
use jiff::SignedDuration;
use model::attempt::{Attempt, ResourceKind};
use model::journal::{Entry, EntryKind};
use runtime::backoff::Backoff;
use runtime::logging::chain;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Answered, Quarantine};

/// Pauses between tries to withdraw a custom resource: somebody may carry it out meanwhile.
const WITHDRAW_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Time for which that is tried.
const WITHDRAW_WITHIN: Duration = Duration::from_secs(15 * 60);

/// The custom resources of nodes that are repaired.
pub(super) struct Remediations {
    watches: ResourceWatches,
    kinds: ResourceKinds,
    cancel: CancellationToken,
}

/// A custom resource that was to be made, or withdrawn, and the answer.
pub(super) enum Made {
    Made {
        planned: Box<PlannedResource>,
        result: Result<Value, ApiError>,
        took: Duration,
    },
    Withdrawn {
        node: String,
        attempt: Box<Attempt>,
        result: Result<bool, ApiError>,
    },
}

// === impl Remediations ===

impl Remediations {
    /// Returns what tells of no node yet, and where its news come.
    pub(super) fn new(
        cluster: &cluster::Cluster,
        cancel: &CancellationToken,
    ) -> (Self, mpsc::Receiver<ResourceEvent>) {
        let kinds = ResourceKinds::default();
        let (watches, news) = ResourceWatches::new(cluster, kinds.clone());
        let cancel = cancel.clone();
        let remediations = Self {
            watches,
            kinds,
            cancel,
        };
        (remediations, news)
    }
}

impl Quarantine {
    /// Starts or stops to watch a custom resource of a node.
    pub(super) fn watch_resource(
        &mut self,
        node: String,
        kind: &ResourceKind,
        name: String,
        watch: bool,
    ) {
        let Some(remediations) = &mut self.remediations else {
            return; // Without a cluster nothing is repaired.
        };
        if !watch {
            return remediations.watches.leave(&node, &name);
        }
        let followed = (remediations.watches).follow(&node, kind, &name, &remediations.cancel);
        if let Err(error) = followed {
            let why = chain(&error);
            tracing::warn!(node, name, err = why, "a repair cannot be watched");
            let news = ResourceNews::Failing(why);
            self.take(FleetInput::Resource { node, name, news });
        }
    }

    /// Takes news of a custom resource in.
    pub(super) fn resource_event(&mut self, (node, name, news): ResourceEvent) {
        self.take(FleetInput::Resource { node, name, news });
    }

    /// Starts to make a custom resource.
    pub(super) fn make_resource(&mut self, planned: PlannedResource) {
        let (Some(cluster), Some(remediations)) = (self.cluster.clone(), &self.remediations) else {
            return; // Without them nothing is planned.
        };
        let kinds = remediations.kinds.clone();
        self.requests.spawn(async move {
            let began = Instant::now();
            let result = cluster.make_resource(&kinds, &planned).await;
            Answered::Resource(Made::Made {
                planned: Box::new(planned),
                result,
                took: began.elapsed(),
            })
        });
    }

    /// Starts to withdraw the custom resource of an attempt, with `begun` also one that has begun.
    pub(super) fn withdraw_resource(&mut self, node: String, attempt: Attempt, begun: bool) {
        let (Some(cluster), Some(remediations)) = (self.cluster.clone(), &self.remediations) else {
            return;
        };
        let (kinds, cancel) = (remediations.kinds.clone(), remediations.cancel.clone());
        self.requests.spawn(async move {
            let until = Instant::now() + WITHDRAW_WITHIN;
            let mut pauses = Backoff::new(WITHDRAW_AGAIN.0, WITHDRAW_AGAIN.1);
            let result = loop {
                let result = cluster.withdraw_resource(&kinds, &attempt, begun).await;
                let again = result.as_ref().is_err_and(ApiError::is_retryable);
                if !again || Instant::now() >= until {
                    break result;
                }
                tokio::select! {
                    () = tokio::time::sleep(pauses.pause()) => {}
                    () = cancel.cancelled() => break result,
                }
            };
            Answered::Resource(Made::Withdrawn {
                node,
                attempt: Box::new(attempt),
                result,
            })
        });
    }

    /// Takes the answer to a custom resource.
    pub(super) fn resource_made(&mut self, made: Made) {
        match made {
            Made::Made {
                planned,
                result,
                took,
            } => self.made(*planned, result, took),
            Made::Withdrawn {
                node,
                attempt,
                result,
            } => self.withdrawn(node, &attempt, result),
        }
    }

    fn made(&mut self, planned: PlannedResource, result: Result<Value, ApiError>, took: Duration) {
        if planned.action != DRAIN_ACTION {
            self.remediation_metrics.made(&planned, &result, took);
        }
        let PlannedResource {
            node,
            session,
            key,
            action,
            kind,
            name,
            ..
        } = planned;
        let kind = kind.kind;
        let (text, status) = match &result {
            Ok(_) => (format!("{kind} {name} is there"), json!(201)),
            Err(error) => {
                let err = chain(error);
                tracing::warn!(node, action, err, "{kind} {name} is not made");
                (format!("{kind} {name}: {err}"), json!(error.status()))
            }
        };
        self.put_entry(Entry {
            at: (self.clock)(),
            node: node.clone(),
            session,
            kind: EntryKind::Answer,
            text,
            detail: json!({"status": status}),
        });
        let answer = answer(result);
        self.take(FleetInput::ResourceCreated { node, key, answer });
    }

    fn withdrawn(&mut self, node: String, attempt: &Attempt, result: Result<bool, ApiError>) {
        let title = attempt.title();
        let text = match result {
            Ok(true) => format!("{title} was withdrawn"),
            Ok(false) => format!("{title} was not withdrawn: it has begun, or is not there"),
            Err(error) => {
                let err = chain(&error);
                tracing::warn!(
                    node,
                    err,
                    "{title} could not be withdrawn: delete it by hand"
                );
                format!("{title} could not be withdrawn: {err}; delete it by hand")
            }
        };
        self.put_entry(Entry {
            at: (self.clock)(),
            node,
            session: None,
            kind: EntryKind::Answer,
            text,
            detail: Value::Null,
        });
    }
}

fn answer(result: Result<Value, ApiError>) -> CreateAnswer {
    match result {
        Ok(object) => CreateAnswer::There(Box::new(object)),
        Err(ApiError::Invalid { message, .. }) => CreateAnswer::Refused(message),
        Err(error) => CreateAnswer::Failed {
            why: chain(&error),
            retry_after: match error {
                ApiError::Throttled { retry_after } => {
                    retry_after.and_then(|wait| SignedDuration::try_from(wait).ok())
                }
                _ => None,
            },
        },
    }
}
