//! Kinds of objects that are named by an operator, or whose versions differ in what matters.

/// A kind of objects, as it stands in the API server's paths.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kind {
    /// The API group; empty for the core.
    pub group: String,
    /// The version.
    pub version: String,
    /// The resource: the plural in small letters.
    pub resource: String,
}

// === impl Kind ===

impl Kind {
    /// Returns a kind.
    pub fn new(group: &str, version: &str, resource: &str) -> Self {
        Self {
            group: group.to_owned(),
            version: version.to_owned(),
            resource: resource.to_owned(),
        }
    }

    /// Returns the path of its objects: all, or those of a namespace.
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
