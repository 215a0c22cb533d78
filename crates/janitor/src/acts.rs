//! Effects of the board as requests to the API server.

use cluster::{ApiError, Cluster, ObjectKind, Reason};
use maintenance::janitor::{CreateResult, Effect, Input, WriteResult};
use maintenance::{EXPIRY, Expiry, Maintenance, MaintenanceResource, ResourceKey};
use model::node::{NodeChange, NodeView};
use runtime::logging::chain;
use serde_json::{Value, json};

use crate::metrics::JanitorMetrics;

/// Returns the reason for the writes of an effect, for the audit log: the resource that it is
/// carried out for.
pub(crate) fn reason(effect: &Effect) -> Reason {
    match effect {
        Effect::Write { key, .. }
        | Effect::Merge(key, _)
        | Effect::Make(key, _)
        | Effect::Stop { key, .. }
        | Effect::Expire(key, _) => Reason::new(key.title()),
        Effect::DeleteNode { key, node, .. } => Reason::of_node(node, None, key.title()),
        Effect::Change(by, view, _) => {
            let title = by.as_ref().map(ResourceKey::title);
            let title = title.unwrap_or_else(|| "a deleted request".to_owned());
            Reason::of_node(&view.name, None, title)
        }
        Effect::WatchNode(_)
        | Effect::WatchPods(_)
        | Effect::StopWatching(_)
        | Effect::Ask { .. }
        | Effect::Notify(_) => Reason::default(),
    }
}

/// Carries out an effect and returns the answer for the board, if it expects one. `namespace`
/// is that of the Jobs that reset GPUs.
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
                    "the changes of a deleted request are undone: {what}"
                );
            }
            let after = change_node(cluster, &view, &change).await;
            Input::Changed(by, view.name.clone(), after.map(Box::new))
        }
        Effect::Make(key, job) => {
            let made = make(cluster, namespace, &key, &job).await;
            Input::Created(key, made)
        }
        Effect::Stop { key, name, uid } => {
            let jobs = jobs();
            let deleted = cluster.delete_object(&jobs, Some(namespace), &name, &uid);
            if let Err(error) = deleted.await {
                let title = key.title();
                tracing::warn!(err = chain(&error), "{title}: cannot delete its Job");
            }
            Input::Stopped(key)
        }
        Effect::DeleteNode { key, node, uid } => {
            let nodes = ObjectKind::new("", "v1", "nodes");
            if let Err(error) = cluster.delete_object(&nodes, None, &node, &uid).await {
                tracing::warn!(node, err = chain(&error), "cannot delete a terminated node");
            }
            Input::NodeTried(key)
        }
        Effect::Expire(key, expiry) => {
            if let Err(error) = expire(cluster, metrics, &key, expiry).await {
                let title = key.title();
                tracing::warn!(
                    err = chain(&error),
                    "{title}: cannot write its expiry or delete it"
                );
            }
            Input::ExpiryTried(key)
        }
        Effect::WatchNode(_)
        | Effect::WatchPods(_)
        | Effect::StopWatching(_)
        | Effect::Ask { .. }
        | Effect::Notify(_) => return None,
    })
}

pub(crate) fn kind(of: Maintenance) -> ObjectKind {
    let (group, version, plural) = of.resource();
    ObjectKind::new(group, version, plural)
}

pub(crate) fn jobs() -> ObjectKind {
    ObjectKind::new("batch", "v1", "jobs")
}

/// Maps the response to a conditional write of a resource.
fn written(key: &ResourceKey, merged: Result<Value, ApiError>) -> WriteResult {
    let title = key.title();
    match merged {
        Ok(object) => match MaintenanceResource::read(key.kind, &object) {
            Ok(resource) => WriteResult::Done(Box::new(resource)),
            Err(error) => {
                tracing::error!("{title}: cannot parse the response of the API server: {error}");
                WriteResult::Changed
            }
        },
        Err(ApiError::Conflict { .. } | ApiError::NotFound { .. }) => WriteResult::Changed,
        Err(error) => {
            tracing::warn!(err = chain(&error), "cannot write {title}");
            WriteResult::Failed
        }
    }
}

async fn change_node(cluster: &Cluster, view: &NodeView, change: &NodeChange) -> Option<NodeView> {
    match cluster.apply(view, change).await {
        Ok(view) => Some(view),
        Err(ApiError::Conflict { .. }) => None,
        Err(error) => {
            let node = &view.name;
            tracing::warn!(node, err = chain(&error), "cannot change a node");
            None
        }
    }
}

async fn make(cluster: &Cluster, namespace: &str, key: &ResourceKey, job: &Value) -> CreateResult {
    match cluster.create_object(&jobs(), Some(namespace), job).await {
        Ok(job) => CreateResult::Done(Box::new(job)),
        Err(ApiError::Conflict { .. }) => CreateResult::Exists,
        Err(ApiError::Invalid { message, .. } | ApiError::Forbidden { message, .. }) => {
            CreateResult::Refused(message)
        }
        Err(error) => {
            let title = key.title();
            tracing::warn!(err = chain(&error), "{title}: cannot create its Job");
            CreateResult::Failed
        }
    }
}

/// Writes the expiry of a resource, or deletes it.
async fn expire(
    cluster: &Cluster,
    metrics: &JanitorMetrics,
    key: &ResourceKey,
    expiry: Expiry,
) -> Result<(), ApiError> {
    let kind = kind(key.kind);
    match expiry {
        Expiry::Announce(when) => {
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
