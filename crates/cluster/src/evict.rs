//! The removal of a pod from its node: asked for a checkpoint, evicted, deleted.
//!
//! Each request names the uid of the pod that was decided about: where another pod has its name by now, perhaps
//! on a healthy node, nothing is done to that one.

use contract::keys;
use fleet::drain::PodView;
use fleet::{PlannedCheckpoint, PlannedRemoval};
use jiff::SignedDuration;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::{Value, json};

use crate::connect::Cluster;
use crate::error::{ApiError, found};
use crate::kind::Kind;
use crate::pace::Urgency;
use crate::request::ask;

// === impl Cluster ===

impl Cluster {
    /// Removes a pod from its node: evicts it, or deletes it without time to end. The error is
    /// [`ApiError::Held`] where a disruption budget keeps it, and [`ApiError::Conflict`] or
    /// [`ApiError::NotFound`] where the pod is gone, also where another has its name now. Takes the
    /// permission `create` on `pods/eviction`, or `delete` on pods. One request.
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

    /// Tells a pod, by an annotation, that it may write a checkpoint. The error is [`ApiError::Conflict`] or
    /// [`ApiError::NotFound`] where the pod is gone, also where another has its name now. Takes the
    /// permission `patch` on pods. One request.
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
            // So it says that the uid is another's.
            Err(ApiError::Invalid { status, message }) if message.contains("metadata.uid") => {
                Err(ApiError::Conflict { status })
            }
            answer => answer,
        }
    }

    /// Returns why a pod would not be evicted now; `None`: it would, or it is gone. Nothing is done. Takes the
    /// permission `create` on `pods/eviction`. One request.
    pub async fn refuses_eviction(&self, pod: &PodView) -> Result<Option<String>, ApiError> {
        let (namespace, name, uid) = (&pod.namespace, &pod.name, &pod.uid);
        let tried = self.evict(Urgency::Tell, namespace, name, uid, None).await;
        match tried {
            Ok(()) | Err(ApiError::NotFound { .. } | ApiError::Conflict { .. }) => Ok(None),
            Err(ApiError::Held { message, .. }) => Ok(Some(message)),
            Err(error) => Err(error),
        }
    }

    /// Evicts a pod that has this uid, with so much time to end; `None`: only tries whether it may be.
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

/// Returns the body of an eviction. kube's own calls its options `delete_options`, which the API server does
/// not know and leaves out: neither the uid nor the time to end would hold.
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

fn pods() -> Kind {
    Kind::new("", "v1", "pods")
}
