//! Lists of objects of any kind, and removals of parts of an object, for the removal of gpuwarden:
//! an operator's templates may create objects of any kind.

use std::collections::BTreeSet;

use http::header::{ACCEPT, CONTENT_TYPE};
use json_patch::jsonptr::PointerBuf;
use json_patch::{Patch, PatchOperation, RemoveOperation, TestOperation};
use kube::api::ListParams;
use kube::core::request::Error as BuildError;
use serde_json::{Value, json};

use crate::apply::{PATCH_DOES_NOT_APPLY, as_go_writes_it};
use crate::connect::Cluster;
use crate::error::{ApiError, found};
use crate::kind::ObjectKind;
use crate::pace::Urgency;
use crate::request::ask;

/// Media type of a list of all kinds, which every supported version of Kubernetes serves.
const ALL_KINDS: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
/// Verbs of kinds whose objects clients create. Other kinds, such as metrics, are computed by
/// their server.
const VERBS_OF_OBJECTS: [&str; 3] = ["list", "patch", "delete"];

/// A kind of objects that the API server serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedKind {
    /// Parts of its paths, in the version that the API server prefers.
    pub kind: ObjectKind,
    /// Name in objects, such as `RebootNode`.
    pub name: String,
}

/// Page of a list.
#[derive(Debug, Default)]
pub struct Page {
    /// Objects of the page, with `metadata.managedFields`.
    pub objects: Vec<Value>,
    /// Token of the next page. `None` after the last one.
    pub next: Option<String>,
}

/// Parts of the objects in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// Complete objects, as stored by the API server.
    All,
    /// Metadata of the objects, without `spec` and `status`.
    Metadata,
}

/// Removal of parts of an object, each only if it still has the value that was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Removal {
    uid: String,
    parts: Vec<(Vec<String>, Value)>,
}

// === impl Cluster ===

impl Cluster {
    /// Returns the kinds whose objects clients create and delete. Two requests.
    pub async fn served_kinds(&self) -> Result<Vec<ServedKind>, ApiError> {
        let mut kinds = Vec::new();
        for path in ["/api", "/apis"] {
            let request = http::Request::get(path)
                .header(ACCEPT, ALL_KINDS)
                .body(Vec::new())
                .map_err(BuildError::BuildRequest);
            let answer: Value = ask(&self.client(Urgency::Act), request).await?;
            kinds.extend(kinds_in(&answer));
        }
        Ok(kinds)
    }

    /// Returns a page of the objects of a kind in all namespaces; an empty one if the API server
    /// does not serve the kind. Takes the permission `list`.
    pub async fn page(
        &self,
        kind: &ObjectKind,
        parts: Parts,
        limit: u32,
        token: Option<&str>,
    ) -> Result<Page, ApiError> {
        let mut params = ListParams::default().limit(limit);
        if let Some(token) = token {
            params = params.continue_token(token);
        }
        let request = kind.request(None)?;
        let request = match parts {
            Parts::All => request.list(&params),
            Parts::Metadata => request.list_metadata(&params),
        };
        let answer: Option<Value> = found(ask(&self.client(Urgency::Act), request).await)?;
        let mut answer = answer.unwrap_or_default();
        let next = answer.pointer("/metadata/continue").and_then(Value::as_str);
        let next = next.filter(|next| !next.is_empty()).map(str::to_owned);
        let objects = match answer.get_mut("items").map(Value::take) {
            Some(Value::Array(objects)) => objects,
            _ => Vec::new(),
        };
        Ok(Page { objects, next })
    }

    /// Removes parts of an object; with `subresource` parts of that, such as `status`. The error
    /// is [`ApiError::Conflict`] if one has changed, and [`ApiError::NotFound`] if the object is
    /// gone. One request, or none for an empty removal.
    pub async fn remove_parts(
        &self,
        kind: &ObjectKind,
        namespace: Option<&str>,
        name: &str,
        subresource: Option<&str>,
        removal: &Removal,
    ) -> Result<(), ApiError> {
        if removal.is_empty() {
            return Ok(());
        }
        kind.request_for(namespace, name)?; // Refuses names that would change the path.
        let mut path = format!("{}/{name}", kind.path(namespace));
        if let Some(subresource) = subresource {
            path = format!("{path}/{subresource}");
        }
        let body = as_go_writes_it(&removal.patch()).map_err(ApiError::unavailable)?;
        let request = http::Request::patch(path)
            .header(CONTENT_TYPE, "application/json-patch+json")
            .body(body.into_bytes())
            .map_err(BuildError::BuildRequest);
        let answer: Result<Value, _> = ask(&self.client(Urgency::Act), request).await;
        match answer {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(answer))
                if answer.code == 422 && answer.message == PATCH_DOES_NOT_APPLY =>
            {
                Err(ApiError::Conflict { status: 422 })
            }
            Err(error) => Err(error.into()),
        }
    }
}

// === impl Removal ===

impl Removal {
    /// Creates an empty removal from an object with this UID.
    pub fn from(uid: &str) -> Self {
        Self {
            uid: uid.to_owned(),
            parts: Vec::new(),
        }
    }

    /// Adds the part at this path, which has this value. The items of a list have to be added
    /// from the last to the first.
    #[must_use]
    pub fn with(mut self, path: &[&str], value: Value) -> Self {
        let path = path.iter().map(|&part| part.to_owned()).collect();
        self.parts.push((path, value));
        self
    }

    /// Returns whether nothing is removed.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    fn patch(&self) -> Patch {
        let test =
            |path: PointerBuf, value: Value| PatchOperation::Test(TestOperation { path, value });
        let uid = PointerBuf::from_tokens(["metadata", "uid"]);
        let mut patch = vec![test(uid, json!(self.uid))];
        for (path, value) in &self.parts {
            patch.push(test(PointerBuf::from_tokens(path), value.clone()));
        }
        for (path, _) in &self.parts {
            let path = PointerBuf::from_tokens(path);
            patch.push(PatchOperation::Remove(RemoveOperation { path }));
        }
        Patch(patch)
    }
}

/// Returns the kinds in an answer to [`ALL_KINDS`], each in the first version that serves it.
fn kinds_in(answer: &Value) -> Vec<ServedKind> {
    let list = |of: &Value, key: &str| of[key].as_array().cloned().unwrap_or_default();
    let text = |of: &Value| of.as_str().unwrap_or_default().to_owned();
    let mut kinds = Vec::new();
    for group in list(answer, "items") {
        let group_name = text(&group["metadata"]["name"]);
        let mut known = BTreeSet::new();
        for version in list(&group, "versions") {
            let version_name = text(&version["version"]);
            for resource in list(&version, "resources") {
                let verbs = list(&resource, "verbs");
                let is_object = VERBS_OF_OBJECTS
                    .iter()
                    .all(|verb| verbs.iter().any(|one| one == verb));
                let plural = text(&resource["resource"]);
                if !is_object || !known.insert(plural.clone()) {
                    continue;
                }
                kinds.push(ServedKind {
                    kind: ObjectKind::new(&group_name, &version_name, &plural),
                    name: text(&resource["responseKind"]["kind"]),
                });
            }
        }
    }
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{self, FakeAnswer};

    #[tokio::test]
    async fn kinds_of_objects_are_found_in_the_first_version_that_serves_them() {
        let resource = |plural: &str, kind: &str, verbs: &[&str]| json!({"resource": plural, "responseKind": {"kind": kind}, "verbs": verbs});
        let all = ["create", "delete", "list", "patch"];
        let core = json!({"items": [{"metadata": {}, "versions": [{"version": "v1", "resources": [
            resource("pods", "Pod", &all), resource("bindings", "Binding", &["create"]),
        ]}]}]});
        let groups = json!({"items": [{"metadata": {"name": "a.b"}, "versions": [
            {"version": "v1", "resources": [resource("ones", "One", &all)]},
            {"version": "v1beta1", "resources": [
                resource("ones", "One", &all), resource("twos", "Two", &all),
                resource("metrics", "Metric", &["get", "list"]),
            ]},
        ]}]});
        let answers = vec![
            FakeAnswer::Now(200, core.to_string()),
            FakeAnswer::Now(200, groups.to_string()),
        ];
        let (cluster, _requests) = fake::serve(answers).await;
        let kinds = cluster.served_kinds().await.unwrap();
        let paths: Vec<String> = kinds.iter().map(|one| one.kind.path(None)).collect();
        assert_eq!(
            paths,
            [
                "/api/v1/pods",
                "/apis/a.b/v1/ones",
                "/apis/a.b/v1beta1/twos"
            ]
        );
        assert_eq!(kinds[2].name, "Two");
    }

    #[tokio::test]
    async fn a_page_names_the_next_and_a_kind_that_is_not_served_has_no_objects() {
        let page = json!({"items": [{"metadata": {"name": "p"}}], "metadata": {"continue": "t"}});
        let answers = vec![
            FakeAnswer::Now(200, page.to_string()),
            FakeAnswer::Now(404, String::new()),
        ];
        let (cluster, mut requests) = fake::serve(answers).await;
        let pods = ObjectKind::new("", "v1", "pods");
        let first = cluster.page(&pods, Parts::Metadata, 9, None).await.unwrap();
        assert_eq!((first.objects.len(), first.next.as_deref()), (1, Some("t")));
        let next = first.next.as_deref();
        let last = cluster.page(&pods, Parts::All, 9, next).await.unwrap();
        assert!(last.objects.is_empty() && last.next.is_none());
        assert_eq!(requests.recv().await.unwrap()[1], "/api/v1/pods?&limit=9");
        let second = &requests.recv().await.unwrap()[1];
        assert!(second.contains("continue=t"), "{second}");
    }

    #[tokio::test]
    async fn parts_are_removed_from_the_object_that_was_read_if_they_have_not_changed() {
        let refused = json!({"kind": "Status", "code": 422, "message": PATCH_DOES_NOT_APPLY});
        let (cluster, mut requests) =
            fake::serve(vec![FakeAnswer::Now(422, refused.to_string())]).await;
        let kind = ObjectKind::new("", "v1", "nodes");
        let removal = Removal::from("u").with(&["metadata", "annotations", "a/b"], json!("<c>"));
        assert_eq!(
            json!(removal.patch()),
            json!([
                {"op": "test", "path": "/metadata/uid", "value": "u"},
                {"op": "test", "path": "/metadata/annotations/a~1b", "value": "<c>"},
                {"op": "remove", "path": "/metadata/annotations/a~1b"},
            ])
        );
        let answer = cluster.remove_parts(&kind, None, "n", Some("status"), &removal);
        assert!(matches!(answer.await, Err(ApiError::Conflict { .. })));
        let asked = requests.recv().await.unwrap();
        assert_eq!(asked[..2], ["PATCH", "/api/v1/nodes/n/status"]);
        let answer = cluster.remove_parts(&kind, None, "../n", None, &removal);
        assert!(matches!(answer.await, Err(ApiError::Invalid { .. })));
        let nothing = Removal::from("u");
        let answer = cluster.remove_parts(&kind, None, "n", None, &nothing);
        assert!(answer.await.is_ok() && requests.try_recv().is_err());
    }
}
