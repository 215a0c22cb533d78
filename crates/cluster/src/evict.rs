//! Removal of a pod from its node: request for a checkpoint, eviction, deletion.
//!
//! Each request names the UID of the pod that the decision was about. If another pod has the
//! name by now, perhaps on a healthy node, that pod stays.

use contract::keys;
use fleet::drain::PodView;
use fleet::{PlannedCheckpoint, PlannedRemoval};
use jiff::SignedDuration;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::{Value, json};

use crate::connect::Cluster;
use crate::error::{ApiError, found};
use crate::kind::ObjectKind;
use crate::pace::Urgency;
use crate::request::ask;

// === impl Cluster ===

impl Cluster {
    /// Removes a pod from its node: evicts it, or deletes it without a grace period. The error
    /// is [`ApiError::Held`] if a disruption budget forbids the eviction, and
    /// [`ApiError::Conflict`] or [`ApiError::NotFound`] if the pod is gone, also if another pod
    /// has its name now. Takes the permission `create` on `pods/eviction`, or `delete` on pods.
    /// One request.
    pub async fn remove_pod(&self, planned: &PlannedRemoval) -> Result<(), ApiError> {
        let (namespace, name, uid) = (&planned.namespace, &planned.name, &planned.uid);
        if let Some(grace) = planned.evict {
            return self
                .evict(Urgency::Act, namespace, name, uid, Some(grace))
                .await;
        }
        let params = DeleteParams::default().grace_period(0);
        let params = params.preconditions(Preconditions {
            uid: Some(uid.clone()),
            resource_version: None,
        });
        let request = pods().request_for(Some(namespace), name)?;
        let request = request.delete(name, &params);
        let gone: Option<Value> = found(ask(&self.client(Urgency::Act), request).await)?;
        drop(gone);
        Ok(())
    }

    /// Asks a pod to write a checkpoint, by an annotation. The error is [`ApiError::Conflict`]
    /// or [`ApiError::NotFound`] if the pod is gone, also if another pod has its name now. Takes
    /// the permission `patch` on pods. One request.
    pub async fn ask_for_checkpoint(&self, planned: &PlannedCheckpoint) -> Result<(), ApiError> {
        let patch = Patch::Merge(json!({"metadata": {
            "uid": planned.uid,
            "annotations": {keys::CHECKPOINT_REQUESTED: planned.at.to_string()},
        }}));
        let name = &planned.name;
        let request = pods().request_for(Some(&planned.namespace), name)?;
        let request = request.patch_metadata(name, &PatchParams::default(), &patch);
        let patched = ask::<Value>(&self.client(Urgency::Act), request).await;
        match patched.map(drop).map_err(ApiError::from) {
            // The API server reports a UID of another pod as a change of the UID.
            Err(ApiError::Invalid { status, message }) if message.contains("metadata.uid") => {
                Err(ApiError::Conflict { status })
            }
            answer => answer,
        }
    }

    /// Returns why the API server would refuse to evict a pod now; `None` if it would not, or if
    /// the pod is gone. A dry run, which changes nothing. Takes the permission `create` on
    /// `pods/eviction`. One request.
    pub async fn refuses_eviction(&self, pod: &PodView) -> Result<Option<String>, ApiError> {
        let (namespace, name, uid) = (&pod.namespace, &pod.name, &pod.uid);
        let tried = self
            .evict(Urgency::Report, namespace, name, uid, None)
            .await;
        match tried {
            Ok(()) | Err(ApiError::NotFound { .. } | ApiError::Conflict { .. }) => Ok(None),
            Err(ApiError::Held { message, .. }) => Ok(Some(message)),
            Err(error) => Err(error),
        }
    }

    /// Evicts the pod with this UID and grace period; without a grace period as a dry run.
    async fn evict(
        &self,
        urgency: Urgency,
        namespace: &str,
        name: &str,
        uid: &str,
        grace: Option<SignedDuration>,
    ) -> Result<(), ApiError> {
        let params = PostParams {
            dry_run: grace.is_none(),
            field_manager: None,
        };
        let body = eviction(namespace, name, uid, grace);
        let body = serde_json::to_vec(&body).map_err(ApiError::unavailable)?;
        let request = pods().request_for(Some(namespace), name)?;
        let request = request.create_subresource("eviction", name, &params, body);
        ask::<Value>(&self.client(urgency), request).await?;
        Ok(())
    }
}

/// Returns the body of an eviction. kube's own type calls the options `delete_options`, which
/// the API server does not know and drops: neither the UID nor the grace period would have an
/// effect.
fn eviction(namespace: &str, name: &str, uid: &str, grace: Option<SignedDuration>) -> Value {
    let mut options = json!({"preconditions": {"uid": uid}});
    match grace {
        Some(grace) => options["gracePeriodSeconds"] = json!(grace.as_secs().max(0)),
        None => options["dryRun"] = json!(["All"]),
    }
    json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"namespace": namespace, "name": name},
        "deleteOptions": options,
    })
}

fn pods() -> ObjectKind {
    ObjectKind::new("", "v1", "pods")
}
