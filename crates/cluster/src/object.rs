//! Requests for objects of any kind as plain JSON: for kinds that an operator names, or whose
//! versions differ.

use kube::api::{DeleteParams, GetParams, ListParams, PostParams, Preconditions};
use serde_json::Value;

use crate::connect::Cluster;
use crate::error::{ApiError, found};
use crate::kind::{ObjectKind, check_name};
use crate::pace::Urgency;
use crate::request::ask;

/// Objects in one answer to a list.
const LIST_PAGE: u32 = 500;

// === impl Cluster ===

impl Cluster {
    /// Returns the versions of an API group that the API server serves; none if it does not
    /// serve the group.
    pub async fn served_versions(&self, group: &str) -> Result<Vec<String>, ApiError> {
        check_name(group)?;
        let request = http::Request::get(format!("/apis/{group}")).body(Vec::new());
        let request = request.map_err(kube::core::request::Error::BuildRequest);
        let answer: Option<Value> = found(ask(&self.client(Urgency::Act), request).await)?;
        let versions = answer.and_then(|answer| answer.get("versions")?.as_array().cloned());
        let versions = versions.unwrap_or_default().into_iter();
        Ok(versions
            .filter_map(|version| Some(version.get("version")?.as_str()?.to_owned()))
            .collect())
    }

    /// Returns the resource of a kind, which is the plural in its paths; `None` if the API
    /// server does not serve the kind.
    pub async fn resource_of(
        &self,
        group: &str,
        version: &str,
        kind: &str,
    ) -> Result<Option<String>, ApiError> {
        for part in [group, version] {
            if !part.is_empty() {
                check_name(part)?;
            }
        }
        let path = ObjectKind::new(group, version, "").path(None);
        let request = http::Request::get(path.trim_end_matches('/')).body(Vec::new());
        let request = request.map_err(kube::core::request::Error::BuildRequest);
        let answer: Option<Value> = found(ask(&self.client(Urgency::Act), request).await)?;
        let resources = answer.and_then(|answer| answer.get("resources")?.as_array().cloned());
        let resources = resources.unwrap_or_default().into_iter();
        let text = |of: &Value, key: &str| Some(of.get(key)?.as_str()?.to_owned());
        Ok(resources
            .filter(|one| text(one, "kind").as_deref() == Some(kind))
            .filter_map(|one| text(&one, "name"))
            // `resource/status` is listed with the same kind.
            .find(|name| !name.contains('/')))
    }

    /// Reads an object; `None` if it does not exist, if its name is not valid, or if the API
    /// server does not serve its kind.
    pub async fn object(
        &self,
        kind: &ObjectKind,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Option<Value>, ApiError> {
        let Ok(request) = kind.request_for(namespace, name) else {
            return Ok(None);
        };
        let request = request.get(name, &GetParams::default());
        found(ask(&self.client(Urgency::Act), request).await)
    }

    /// Lists the objects of a kind, in one namespace or in all, page by page; none if the API
    /// server does not serve the kind. Takes the permission `list`.
    pub async fn list_objects(
        &self,
        kind: &ObjectKind,
        namespace: Option<&str>,
    ) -> Result<Vec<Value>, ApiError> {
        let mut page = ListParams::default().limit(LIST_PAGE);
        let mut all = Vec::new();
        loop {
            let request = kind.request(namespace)?.list(&page);
            let answer: Option<Value> = found(ask(&self.client(Urgency::Act), request).await)?;
            let mut answer = answer.unwrap_or_default();
            if let Some(Value::Array(items)) = answer.get_mut("items").map(Value::take) {
                all.extend(items);
            }
            let next = answer.pointer("/metadata/continue").and_then(Value::as_str);
            match next.filter(|next| !next.is_empty()) {
                Some(next) => page = page.continue_token(next),
                None => return Ok(all),
            }
        }
    }

    /// Creates an object and returns it. The error is [`ApiError::Conflict`] if it exists
    /// already.
    pub async fn create_object(
        &self,
        kind: &ObjectKind,
        namespace: Option<&str>,
        object: &Value,
    ) -> Result<Value, ApiError> {
        let body = serde_json::to_vec(object).map_err(ApiError::unavailable)?;
        let request = kind.request(namespace)?;
        let request = request.create(&PostParams::default(), body);
        Ok(ask(&self.client(Urgency::Act), request).await?)
    }

    /// Replaces an object and returns it. The error is [`ApiError::Conflict`] if it is no longer
    /// in the version that `object` names.
    pub async fn replace_object(
        &self,
        kind: &ObjectKind,
        namespace: Option<&str>,
        name: &str,
        object: &Value,
    ) -> Result<Value, ApiError> {
        let body = serde_json::to_vec(object).map_err(ApiError::unavailable)?;
        let request = kind.request_for(namespace, name)?;
        let request = request.replace(name, &PostParams::default(), body);
        Ok(ask(&self.client(Urgency::Act), request).await?)
    }

    /// Replaces the status of an object. The error is [`ApiError::Conflict`] if it is no longer
    /// in the version that `object` names.
    pub async fn replace_status(
        &self,
        kind: &ObjectKind,
        namespace: &str,
        name: &str,
        object: &Value,
    ) -> Result<(), ApiError> {
        let body = serde_json::to_vec(object).map_err(ApiError::unavailable)?;
        let request = kind.request_for(Some(namespace), name)?;
        let request = request.replace_subresource("status", name, &PostParams::default(), body);
        let replaced: Value = ask(&self.client(Urgency::Report), request).await?;
        drop(replaced);
        Ok(())
    }

    /// Deletes the object with this UID, and then its dependents, such as the pods of a Job. An
    /// object that is gone already is no error.
    pub async fn delete_object(
        &self,
        kind: &ObjectKind,
        namespace: Option<&str>,
        name: &str,
        uid: &str,
    ) -> Result<(), ApiError> {
        let params = DeleteParams::background();
        self.delete(params, kind, namespace, name, uid).await
    }

    /// Deletes the object with this UID once its dependents are gone, such as the pods of a Job.
    pub async fn delete_after_dependents(
        &self,
        kind: &ObjectKind,
        namespace: Option<&str>,
        name: &str,
        uid: &str,
    ) -> Result<(), ApiError> {
        let params = DeleteParams::foreground();
        self.delete(params, kind, namespace, name, uid).await
    }

    async fn delete(
        &self,
        params: DeleteParams,
        kind: &ObjectKind,
        namespace: Option<&str>,
        name: &str,
        uid: &str,
    ) -> Result<(), ApiError> {
        let params = params.preconditions(Preconditions {
            uid: Some(uid.to_owned()),
            resource_version: None,
        });
        let request = kind.request_for(namespace, name)?.delete(name, &params);
        let gone: Option<Value> = found(ask(&self.client(Urgency::Act), request).await)?;
        drop(gone);
        Ok(())
    }
}
