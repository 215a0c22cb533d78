//! What the board has done in the cluster, each with its answer.

use cluster::{ApiError, Cluster, Kind};
use maintenance::janitor::{Effect, Input, Made, Written};
use maintenance::{EXPIRY, Expiry, Key, Maintenance, Resource};
use model::node::{NodeChange, NodeView};
use runtime::logging::chain;
use serde_json::{Value, json};

use crate::metrics::JanitorMetrics;

/// Carries an effect out, and returns the answer; `None` for those that have none. The Jobs that reset GPUs are in
/// `namespace`.
pub(crate) async fn carry_out(
    cluster: &Cluster,
    namespace: &str,
    metrics: &JanitorMetrics,
    effect: Effect,
) -> Option<Input> {
    Some(match effect {
        Effect::Write {
            key,
            version,
            status,
        } => {
            let change = json!({"metadata": {"resourceVersion": version}, "status": status});
            let kind = kind(key.kind);
            let merged = cluster.merge_status(&kind, &key.name, &change).await;
            let written = written(&key, merged);
            Input::Written(key, written)
        }
        Effect::Merge(key, change) => {
            let kind = kind(key.kind);
            let merged = cluster.merge_object(&kind, &key.name, &change).await;
            let written = written(&key, merged);
            Input::Written(key, written)
        }
        Effect::Change(by, view, change) => {
            if by.is_none() {
                let what = change.summary();
                tracing::info!(
                    node = view.name,
                    "a request is gone, and what it did is undone: {what}"
                );
            }
            let after = change_node(cluster, &view, &change).await;
            Input::Changed(by, view.name.clone(), after.map(Box::new))
        }
        Effect::Make(key, job) => {
            let made = make(cluster, namespace, &key, &job).await;
            Input::Made(key, made)
        }
        Effect::Stop { key, name, uid } => {
            let jobs = jobs();
            let deleted = cluster.delete_object(&jobs, Some(namespace), &name, &uid);
            if let Err(error) = deleted.await {
                let title = key.title();
                tracing::warn!(err = chain(&error), "{title}: its Job is not deleted");
            }
            Input::Stopped(key)
        }
        Effect::DeleteNode { key, node, uid } => {
            let nodes = Kind::new("", "v1", "nodes");
            if let Err(error) = cluster.delete_object(&nodes, None, &node, &uid).await {
                tracing::warn!(node, err = chain(&error), "a terminated node stays");
            }
            Input::NodeTried(key)
        }
        Effect::Expire(key, expiry) => {
            if let Err(error) = expire(cluster, metrics, &key, expiry).await {
                let title = key.title();
                tracing::warn!(
                    err = chain(&error),
                    "{title}: its expiry is not written, or it is not deleted"
                );
            }
            Input::Tried(key)
        }
        Effect::Follow(_)
        | Effect::FollowPods(_)
        | Effect::Leave(_)
        | Effect::Ask { .. }
        | Effect::Tell(_) => return None,
    })
}

pub(crate) fn kind(of: Maintenance) -> Kind {
    let (group, version, plural) = of.resource();
    Kind::new(group, version, plural)
}

pub(crate) fn jobs() -> Kind {
    Kind::new("batch", "v1", "jobs")
}

/// Returns what the answer to a write of a resource that still has its version means.
fn written(key: &Key, merged: Result<Value, ApiError>) -> Written {
    let title = key.title();
    match merged {
        Ok(object) => match Resource::read(key.kind, &object) {
            Ok(resource) => Written::Done(Box::new(resource)),
            Err(error) => {
                tracing::error!("{title}, as the API server answers, cannot be read: {error}");
                Written::Changed
            }
        },
        Err(ApiError::Conflict { .. } | ApiError::NotFound { .. }) => Written::Changed,
        Err(error) => {
            tracing::warn!(err = chain(&error), "{title} is not written");
            Written::Failed
        }
    }
}

async fn change_node(cluster: &Cluster, view: &NodeView, change: &NodeChange) -> Option<NodeView> {
    match cluster.apply(view, change).await {
        Ok(view) => Some(view),
        Err(ApiError::Conflict { .. }) => None,
        Err(error) => {
            let node = &view.name;
            tracing::warn!(node, err = chain(&error), "a node is not changed");
            None
        }
    }
}

async fn make(cluster: &Cluster, namespace: &str, key: &Key, job: &Value) -> Made {
    match cluster.create_object(&jobs(), Some(namespace), job).await {
        Ok(job) => Made::Done(Box::new(job)),
        Err(ApiError::Conflict { .. }) => Made::Exists,
        Err(ApiError::Invalid { message, .. } | ApiError::Forbidden { message, .. }) => {
            Made::Refused(message)
        }
        Err(error) => {
            let title = key.title();
            tracing::warn!(err = chain(&error), "{title}: its Job is not made");
            Made::Failed
        }
    }
}

/// Says when a resource is to be deleted, or deletes it.
async fn expire(
    cluster: &Cluster,
    metrics: &JanitorMetrics,
    key: &Key,
    expiry: Expiry,
) -> Result<(), ApiError> {
    let kind = kind(key.kind);
    match expiry {
        Expiry::Say(when) => {
            let change = json!({"metadata": {"annotations": {EXPIRY: when}}});
            cluster.merge_object(&kind, &key.name, &change).await?;
        }
        Expiry::Delete(uid) => {
            cluster.delete_object(&kind, None, &key.name, &uid).await?;
            metrics.deleted(key.kind);
        }
    }
    Ok(())
}
