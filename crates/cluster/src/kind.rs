//! Kinds of objects that an operator names, or whose versions differ, and the paths of their
//! objects.
//!
//! Names come from outside: from pods that are not admitted yet, from requests, from callers. A
//! name such as `../../namespaces/kube-system/secrets/token` or `node?x` would address another
//! object that this client may read or change.

use kube::core::Request;

use crate::error::ApiError;

/// Longest name of an object (bytes), which is that of a DNS subdomain.
const LONGEST_NAME: usize = 253;

/// A kind of objects, by the parts of its path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKind {
    /// API group; empty for the core group.
    pub group: String,
    /// Version of the group, such as `v1`.
    pub version: String,
    /// Resource: the plural in lower case.
    pub resource: String,
}

// === impl ObjectKind ===

impl ObjectKind {
    /// Creates a kind from the parts of its path.
    pub fn new(group: &str, version: &str, resource: &str) -> Self {
        Self {
            group: group.to_owned(),
            version: version.to_owned(),
            resource: resource.to_owned(),
        }
    }

    /// Starts a request for all objects of the kind, or for those of a namespace. Fails if a
    /// part would change the path.
    pub(crate) fn request(&self, namespace: Option<&str>) -> Result<Request, ApiError> {
        let group = Some(self.group.as_str()).filter(|group| !group.is_empty());
        let parts = [group, Some(&self.version), Some(&self.resource), namespace];
        for part in parts.into_iter().flatten() {
            check_name(part)?;
        }
        Ok(Request::new(self.path(namespace)))
    }

    /// Like [`Self::request`], for the object of a name.
    pub(crate) fn request_for(
        &self,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Request, ApiError> {
        check_name(name)?;
        self.request(namespace)
    }

    /// Returns the path of all objects of the kind, or of those in a namespace.
    pub(crate) fn path(&self, namespace: Option<&str>) -> String {
        let Self {
            group,
            version,
            resource,
        } = self;
        let root = if group.is_empty() {
            format!("/api/{version}")
        } else {
            format!("/apis/{group}/{version}")
        };
        match namespace {
            Some(namespace) => format!("{root}/namespaces/{namespace}/{resource}"),
            None => format!("{root}/{resource}"),
        }
    }
}

/// Returns true if `text` can be the name of an object and does not change the path that it
/// becomes a part of.
pub(crate) fn is_name(text: &str) -> bool {
    let allowed = |one: u8| one.is_ascii_alphanumeric() || b"-._:".contains(&one);
    let dots = matches!(text, "." | "..");
    !text.is_empty() && text.len() <= LONGEST_NAME && !dots && text.bytes().all(allowed)
}

/// Fails for a text that cannot be the name of an object.
pub(crate) fn check_name(text: &str) -> Result<(), ApiError> {
    if is_name(text) {
        return Ok(());
    }
    let shown: String = text.chars().take(LONGEST_NAME).collect();
    Err(ApiError::Invalid {
        status: 400,
        message: format!("{shown:?} cannot be the name of an object"),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fake;

    const BAD: [&str; 12] = [
        "",
        ".",
        "..",
        "../secrets/token",
        "a/b",
        "a?b",
        "a#b",
        "a%2f..",
        "a\\b",
        "a b",
        "a\r\nb",
        "\u{e9}",
    ];

    #[test]
    fn a_name_is_one_part_of_a_path() {
        for good in ["n1", "node-1.example.com", "system:node", "a_b", "A"] {
            assert!(is_name(good), "{good}");
        }
        for bad in BAD {
            assert!(!is_name(bad), "{bad:?}");
        }
        assert!(is_name(&"x".repeat(253)) && !is_name(&"x".repeat(254)));
    }

    /// A name that would change the path is refused before a request is sent.
    #[tokio::test]
    async fn no_name_makes_another_path() {
        let (cluster, mut requests) = fake::serve(Vec::new()).await;
        let (kind, object) = (ObjectKind::new("", "v1", "pods"), json!({}));
        let within = Some("ns");
        for bad in BAD {
            assert!(matches!(cluster.object(&kind, within, bad).await, Ok(None)));
            assert!(matches!(
                cluster.object(&kind, Some(bad), "p").await,
                Ok(None)
            ));
            for odd in [
                ObjectKind::new(bad, "v1", "pods"),
                ObjectKind::new("apps", bad, "pods"),
                ObjectKind::new("apps", "v1", bad),
            ] {
                // An empty group is valid: the core group.
                if !odd.group.is_empty() {
                    assert!(matches!(cluster.object(&odd, within, "p").await, Ok(None)));
                }
            }
            let uid = "u";
            for refused in [
                cluster
                    .create_object(&kind, Some(bad), &object)
                    .await
                    .map(drop),
                cluster
                    .replace_object(&kind, within, bad, &object)
                    .await
                    .map(drop),
                cluster.replace_status(&kind, "ns", bad, &object).await,
                cluster.delete_object(&kind, within, bad, uid).await,
                cluster
                    .delete_after_dependents(&kind, within, bad, uid)
                    .await,
                cluster.merge_status(&kind, bad, &object).await.map(drop),
                cluster.merge_object(&kind, bad, &object).await.map(drop),
                cluster.some_objects(&kind, bad, "a=b").await.map(drop),
            ] {
                let error = refused.unwrap_err();
                assert!(
                    matches!(error, ApiError::Invalid { status: 400, .. }),
                    "{bad:?} {error}"
                );
            }
        }
        assert!(requests.try_recv().is_err());
    }
}
