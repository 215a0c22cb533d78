//! The watches of the janitor: what they tell, as inputs of the board.

use std::time::Duration;

use cluster::{Cluster, Kind, Selection, Signal};
use contract::keys;
use maintenance::janitor::Input;
use maintenance::{Key, Maintenance, Resource};
use runtime::logging::{Seldom, chain};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::acts::{jobs, kind};

/// Pause before it is asked again where a CRD is installed.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Label of the Jobs that reset GPUs.
const JOB_LABEL: &str = "app=gpu-reset";

/// Something that is watched as long as the janitor runs.
pub(crate) enum Watch {
    /// The resources of a kind.
    Resources(Maintenance),
    /// The Jobs that reset GPUs, in this namespace.
    Jobs(String),
    /// The nodes that say that a resource has changed them: it may be gone. They are told once.
    Marks,
}

// === impl Watch ===

impl Watch {
    /// Tells all there is to tell, until the other end is gone.
    pub(crate) async fn run(
        self,
        cluster: &Cluster,
        sender: &mpsc::Sender<Input>,
        cancel: CancellationToken,
    ) {
        // None: nobody listens any more.
        let _ = match self {
            Self::Resources(kind) => resources(cluster, kind, sender, cancel).await,
            Self::Jobs(namespace) => of_jobs(cluster, &namespace, sender, cancel).await,
            Self::Marks => marks(cluster, sender, cancel).await,
        };
    }
}

/// Tells of the resources of a kind, once the API server serves it.
async fn resources(
    cluster: &Cluster,
    of: Maintenance,
    sender: &mpsc::Sender<Input>,
    cancel: CancellationToken,
) -> Option<()> {
    let (group, version, _) = of.resource();
    // Of a kind that does not exist there is none: the others need not wait.
    let none = async {
        sender.send(Input::ListBegun(of)).await.ok()?;
        sender.send(Input::Listed(of)).await.ok()
    };
    until_served(cluster, (group, version, of.name()), none).await?;
    let malformed = Seldom::default();
    let mut signals = cluster.watch_objects(&kind(of), None, |all| all, cancel);
    while let Some(signal) = signals.recv().await {
        let input = match signal {
            Signal::Restarted => Input::ListBegun(of),
            Signal::Listed => Input::Listed(of),
            Signal::Applied(object) => match Resource::read(of, &object) {
                Ok(resource) => Input::Seen(Box::new(resource)),
                Err(error) => {
                    if let Some(not_logged_before) = malformed.now() {
                        let kind = of.name();
                        tracing::warn!(not_logged_before, "a {kind} cannot be read: {error}");
                    }
                    continue;
                }
            },
            Signal::Deleted(name) => Input::Gone(Key { kind: of, name }),
            Signal::Failing { .. } | Signal::Recovered => continue,
        };
        sender.send(input).await.ok()?;
    }
    Some(())
}

/// Waits until the API server serves a kind, by group, version and name. `missing` is done once where it does
/// not, and may end the wait.
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
                tracing::warn!(err = chain(&error), "it is not known which kinds there are");
            }
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

/// Tells of the Jobs that reset GPUs; of one that has failed with what its pods said.
async fn of_jobs(
    cluster: &Cluster,
    namespace: &str,
    sender: &mpsc::Sender<Input>,
    cancel: CancellationToken,
) -> Option<()> {
    let select = |all: Selection| all.with_labels(JOB_LABEL);
    let mut signals = cluster.watch_objects(&jobs(), Some(namespace), select, cancel);
    while let Some(signal) = signals.recv().await {
        let input = match signal {
            Signal::Restarted => Input::Jobs { listed: false },
            Signal::Listed => Input::Jobs { listed: true },
            Signal::Applied(job) => {
                let name = job["metadata"]["name"].as_str().unwrap_or_default();
                let name = name.to_owned();
                let why = if has_failed(&job) {
                    why(cluster, namespace, &name).await
                } else {
                    None
                };
                Input::Job(name, Some(Box::new((job.as_ref().clone(), why))))
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

/// Returns what the pods of a Job said at their end.
pub(crate) async fn why(cluster: &Cluster, namespace: &str, job: &str) -> Option<String> {
    let pods = Kind::new("", "v1", "pods");
    let selector = format!("batch.kubernetes.io/job-name={job}");
    // What its condition says is enough where they cannot be read.
    let pods = cluster
        .some_objects(&pods, namespace, &selector)
        .await
        .ok()?;
    let statuses = pods
        .iter()
        .filter_map(|pod| pod["status"]["containerStatuses"].as_array());
    let said = statuses
        .flatten()
        .filter_map(|one| one["state"]["terminated"]["message"].as_str());
    let said: Vec<&str> = said
        .map(str::trim)
        .filter(|said| !said.is_empty())
        .collect();
    said.last().map(|said| (*said).to_owned())
}

async fn marks(
    cluster: &Cluster,
    sender: &mpsc::Sender<Input>,
    cancel: CancellationToken,
) -> Option<()> {
    let nodes = Kind::new("", "v1", "nodes");
    let mut signals = cluster.watch_objects(&nodes, None, |all| all, cancel);
    while let Some(signal) = signals.recv().await {
        match signal {
            Signal::Applied(node) => {
                let annotations = &node["metadata"]["annotations"];
                let marks = [keys::RESET_STOPPED, keys::HANDED_OVER];
                let marked = marks.iter().any(|key| annotations[key].is_string());
                if let Some(name) = node["metadata"]["name"].as_str().filter(|_| marked) {
                    let marked = Input::Marked(name.to_owned());
                    sender.send(marked).await.ok()?;
                }
            }
            // Later ones are seen as they happen.
            Signal::Listed => return Some(()),
            _ => {}
        }
    }
    Some(())
}
