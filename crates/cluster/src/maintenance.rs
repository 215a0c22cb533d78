//! Merge patches of the resources that the janitor handles, and short lists of objects.

use kube::api::{ListParams, Patch, PatchParams};
use serde::Deserialize;
use serde_json::Value;

use crate::connect::Cluster;
use crate::error::ApiError;
use crate::kind::ObjectKind;
use crate::pace::Urgency;
use crate::request::ask;

/// Most objects that [`Cluster::some_objects`] returns.
const SOME: u32 = 20;

#[derive(Deserialize)]
struct Items {
    items: Vec<Value>,
}

// === impl Cluster ===

impl Cluster {
    /// Merges `change` into the status of a cluster-scoped object and returns the object. If
    /// `change` names a version in its metadata and the object is in another one, the error is
    /// [`ApiError::Conflict`].
    pub async fn merge_status(
        &self,
        kind: &ObjectKind,
        name: &str,
        change: &Value,
    ) -> Result<Value, ApiError> {
        let patch = Patch::Merge(change);
        let request = kind.request_for(None, name)?;
        let request = request.patch_subresource("status", name, &PatchParams::default(), &patch);
        Ok(ask(&self.client(Urgency::Act), request).await?)
    }

    /// Like [`Self::merge_status`], for the object except its status.
    pub async fn merge_object(
        &self,
        kind: &ObjectKind,
        name: &str,
        change: &Value,
    ) -> Result<Value, ApiError> {
        let patch = Patch::Merge(change);
        let request = kind.request_for(None, name)?;
        let request = request.patch(name, &PatchParams::default(), &patch);
        Ok(ask(&self.client(Urgency::Act), request).await?)
    }

    /// Returns up to 20 objects of a namespace that match a label selector. Takes the permission
    /// `list`.
    pub async fn some_objects(
        &self,
        kind: &ObjectKind,
        namespace: &str,
        labels: &str,
    ) -> Result<Vec<Value>, ApiError> {
        let params = ListParams::default().labels(labels).limit(SOME);
        let request = kind.request(Some(namespace))?.list(&params);
        let found: Items = ask(&self.client(Urgency::Act), request).await?;
        Ok(found.items)
    }
}
