//! Watches of the janitor, translated to inputs of the board.

use std::time::Duration;

use cluster::{Cluster, ObjectKind, Selection, Signal};
use contract::keys;
use maintenance::janitor::Input;
use maintenance::{Maintenance, MaintenanceResource, ResourceKey};
use runtime::logging::{Seldom, chain};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::acts::{jobs, kind};

/// Interval for checking whether a missing CRD was installed.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Label of the Jobs that reset GPUs.
const JOB_LABEL: &str = "app=gpu-reset";

/// Watch that runs as long as the janitor.
pub(crate) enum JanitorWatch {
    /// Resources of one kind.
    Resources(Maintenance),
    /// Jobs that reset GPUs, in this namespace.
    Jobs(String),
    /// Nodes that a resource has marked, listed once: the resource may have been deleted
    /// meanwhile.
    Marks,
    /// Nodes with this label, by which their owner is asked: the patch that sets it may arrive
    /// after its resource has ended.
    Labelled(String),
}

// === impl JanitorWatch ===

impl JanitorWatch {
    /// Sends inputs until the receiver is dropped.
    pub(crate) async fn run(
        self,
        cluster: &Cluster,
        sender: &mpsc::Sender<Input>,
        cancel: CancellationToken,
    ) {
        // `None` means that the receiver was dropped.
        let _ = match self {
            Self::Resources(kind) => resources(cluster, kind, sender, cancel).await,
            Self::Jobs(namespace) => of_jobs(cluster, &namespace, sender, cancel).await,
            Self::Marks => marks(cluster, None, sender, cancel).await,
            Self::Labelled(key) => marks(cluster, Some(&key), sender, cancel).await,
        };
    }
}

/// Watches the resources of a kind, once the API server serves it.
async fn resources(
    cluster: &Cluster,
    of: Maintenance,
    sender: &mpsc::Sender<Input>,
    cancel: CancellationToken,
) -> Option<()> {
    let (group, version, _) = of.resource();
    // A kind that does not exist has no resources, so other watches need not wait for it.
    let none = async {
        sender.send(Input::ListBegun(of)).await.ok()?;
        sender.send(Input::Listed(of)).await.ok()
    };
    until_served(cluster, (group, version, of.name()), none).await?;
    let malformed = Seldom::default();
    let mut signals = cluster.watch::<Value>(Selection::of_kind(&kind(of), None), cancel);
    while let Some(signal) = signals.recv().await {
        let input = match signal {
            Signal::Restarted => Input::ListBegun(of),
            Signal::Listed => Input::Listed(of),
            Signal::Applied(object) => match MaintenanceResource::read(of, &object) {
                Ok(resource) => Input::Updated(Box::new(resource)),
                Err(error) => {
                    if let Some(not_logged_before) = malformed.now() {
                        let kind = of.name();
                        tracing::warn!(not_logged_before, "a {kind} cannot be read: {error}");
                    }
                    continue;
                }
            },
            Signal::Deleted(name) => Input::Deleted(ResourceKey { kind: of, name }),
            Signal::Failing { .. } | Signal::Recovered => continue,
        };
        sender.send(input).await.ok()?;
    }
    Some(())
}

/// Waits until the API server serves a kind, given by group, version and name. `missing` runs
/// once if the kind is missing, and ends the wait if it returns `None`.
pub(crate) async fn until_served(
    cluster: &Cluster,
    (group, version, name): (&str, &str, &str),
    missing: impl Future<Output = Option<()>>,
) -> Option<()> {
    let mut missing = Some(missing);
    loop {
        match cluster.resource_of(group, version, name).await {
            Ok(Some(_)) => return Some(()),
            Ok(None) => {
                if let Some(missing) = missing.take() {
                    tracing::warn!(
                        "the cluster has no kind {name} of {group}/{version}: install its CRD"
                    );
                    missing.await?;
                }
            }
            Err(error) => {
                tracing::warn!(
                    err = chain(&error),
                    "cannot list the kinds of the API server"
                );
            }
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

/// Watches the Jobs that reset GPUs. A failed Job is sent with the termination message of its
/// pods.
async fn of_jobs(
    cluster: &Cluster,
    namespace: &str,
    sender: &mpsc::Sender<Input>,
    cancel: CancellationToken,
) -> Option<()> {
    let jobs = Selection::of_kind(&jobs(), Some(namespace)).with_labels(JOB_LABEL);
    let mut signals = cluster.watch::<Value>(jobs, cancel);
    while let Some(signal) = signals.recv().await {
        let input = match signal {
            Signal::Restarted => Input::Jobs { listed: false },
            Signal::Listed => Input::Jobs { listed: true },
            Signal::Applied(job) => {
                let name = job["metadata"]["name"].as_str().unwrap_or_default();
                let name = name.to_owned();
                let message = if has_failed(&job) {
                    termination_message(cluster, namespace, &name).await
                } else {
                    None
                };
                Input::Job(name, Some(Box::new((job.as_ref().clone(), message))))
            }
            Signal::Deleted(title) => {
                let name = title.rsplit('/').next().unwrap_or_default();
                Input::Job(name.to_owned(), None)
            }
            Signal::Failing { .. } | Signal::Recovered => continue,
        };
        sender.send(input).await.ok()?;
    }
    Some(())
}

fn has_failed(job: &Value) -> bool {
    let conditions = job["status"]["conditions"].as_array().into_iter().flatten();
    let mut failed = conditions.filter(|one| one["type"] == "Failed" && one["status"] == "True");
    failed.next().is_some()
}

/// Returns the termination message of a Job's pods.
pub(crate) async fn termination_message(
    cluster: &Cluster,
    namespace: &str,
    job: &str,
) -> Option<String> {
    let pods = ObjectKind::new("", "v1", "pods");
    let selector = format!("batch.kubernetes.io/job-name={job}");
    // If the pods cannot be read, the Job's condition is enough.
    let pods = cluster
        .some_objects(&pods, namespace, &selector)
        .await
        .ok()?;
    let statuses = pods
        .iter()
        .filter_map(|pod| pod["status"]["containerStatuses"].as_array());
    let messages = statuses
        .flatten()
        .filter_map(|one| one["state"]["terminated"]["message"].as_str());
    let messages: Vec<&str> = messages
        .map(str::trim)
        .filter(|message| !message.is_empty())
        .collect();
    messages.last().map(|message| (*message).to_owned())
}

/// Reports nodes with a mark: all once, or those with a label as long as the janitor runs.
async fn marks(
    cluster: &Cluster,
    label: Option<&str>,
    sender: &mpsc::Sender<Input>,
    cancel: CancellationToken,
) -> Option<()> {
    let nodes = ObjectKind::new("", "v1", "nodes");
    let nodes = Selection::of_kind(&nodes, None);
    let nodes = match label {
        Some(key) => nodes.with_labels(key),
        None => nodes,
    };
    let mut signals = cluster.watch::<Value>(nodes, cancel);
    while let Some(signal) = signals.recv().await {
        match signal {
            Signal::Applied(node) => {
                let annotations = &node["metadata"]["annotations"];
                let marks = [keys::RESET_STOPPED, keys::HANDED_OVER, keys::LABEL_REQUEST];
                let marked = marks.iter().any(|key| annotations[key].is_string());
                if let Some(name) = node["metadata"]["name"].as_str().filter(|_| marked) {
                    let marked = Input::NodeMarked(name.to_owned());
                    sender.send(marked).await.ok()?;
                }
            }
            // Later marks are handled by the board itself.
            Signal::Listed if label.is_none() => return Some(()),
            _ => {}
        }
    }
    Some(())
}
