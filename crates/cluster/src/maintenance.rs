//! Merge patches of the resources that the janitor carries out, and looks at some objects.

use kube::api::{ListParams, Patch, PatchParams};
use serde::Deserialize;
use serde_json::Value;

use crate::connect::Cluster;
use crate::error::ApiError;
use crate::kind::Kind;
use crate::pace::Urgency;
use crate::request::ask;

/// Most objects that a look at some returns.
const SOME: u32 = 20;

#[derive(Deserialize)]
struct Items {
    items: Vec<Value>,
}

// === impl Cluster ===

impl Cluster {
    /// Merges `change` into the status of an object without a namespace, and returns the object. Where
    /// `change` names a version in its metadata, the error is [`ApiError::Conflict`] for an object that is
    /// in another one.
    pub async fn merge_status(
        &self,
        kind: &Kind,
        name: &str,
        change: &Value,
    ) -> Result<Value, ApiError> {
        let patch = Patch::Merge(change);
        let request = kind.request_for(None, name)?;
        let request = request.patch_subresource("status", name, &PatchParams::default(), &patch);
        Ok(ask(&self.client(Urgency::Act), request).await?)
    }

    /// Does the same with the object but for its status.
    pub async fn merge_object(
        &self,
        kind: &Kind,
        name: &str,
        change: &Value,
    ) -> Result<Value, ApiError> {
        let patch = Patch::Merge(change);
        let request = kind.request_for(None, name)?;
        let request = request.patch(name, &PatchParams::default(), &patch);
        Ok(ask(&self.client(Urgency::Act), request).await?)
    }

    /// Returns some objects of a namespace that a label selector selects: 20 at most. Takes the permission
    /// `list`.
    pub async fn some_objects(
        &self,
        kind: &Kind,
        namespace: &str,
        labels: &str,
    ) -> Result<Vec<Value>, ApiError> {
        let params = ListParams::default().labels(labels).limit(SOME);
        let request = kind.request(Some(namespace))?.list(&params);
        let found: Items = ask(&self.client(Urgency::Act), request).await?;
        Ok(found.items)
    }
}
