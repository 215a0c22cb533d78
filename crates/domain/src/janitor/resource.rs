//! A resource that asks for an action, as it is read.

use jiff::Timestamp;
use serde_json::Value;

use super::Action;
use super::status::Status;

/// The annotations that say how long a resource is kept.
const TTL: &str = "nvsentinel.nvidia.com/ttl";
pub(super) const EXPIRY: &str = "nvsentinel.nvidia.com/expiry";
const PRESERVE: &str = "nvsentinel.nvidia.com/preserve";

/// A resource that asks for an action on a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    /// The action.
    pub action: Action,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`: also the id of its operation at the provider.
    pub uid: String,
    /// `metadata.resourceVersion`, which a change of it names.
    pub version: String,
    /// `metadata.generation`.
    pub generation: i64,
    /// The time when it was made.
    pub created: Timestamp,
    /// True once somebody has deleted it.
    pub deleting: bool,
    /// The node.
    pub node: String,
    /// How long it is kept.
    pub(super) keep: Keep,
    /// Its status.
    pub status: Status,
}

/// The annotations about how long a resource is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Keep {
    pub(super) ttl: Option<String>,
    pub(super) expiry: Option<String>,
    pub(super) preserve: bool,
}

/// An object that is no resource of the kind.
#[derive(Debug, thiserror::Error)]
#[error("it has no {0}")]
pub struct ResourceError(&'static str);

// === impl Resource ===

impl Resource {
    /// Reads an object of the kind of an action.
    pub fn read(action: Action, object: &Value) -> Result<Self, ResourceError> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let needed = |pointer: &str, what| {
            let found = text(pointer).filter(|text| !text.is_empty());
            found.map(str::to_owned).ok_or(ResourceError(what))
        };
        let annotations = object.pointer("/metadata/annotations");
        let annotation = |key: &str| annotations?.get(key)?.as_str().map(str::to_owned);
        let created = text("/metadata/creationTimestamp");
        Ok(Self {
            action,
            name: needed("/metadata/name", "metadata.name")?,
            uid: needed("/metadata/uid", "metadata.uid")?,
            version: text("/metadata/resourceVersion")
                .unwrap_or_default()
                .to_owned(),
            generation: (object.pointer("/metadata/generation"))
                .and_then(Value::as_i64)
                .unwrap_or_default(),
            created: created
                .and_then(|time| time.parse().ok())
                .unwrap_or(Timestamp::UNIX_EPOCH),
            deleting: text("/metadata/deletionTimestamp").is_some(),
            node: needed("/spec/nodeName", "spec.nodeName")?,
            keep: Keep {
                ttl: annotation(TTL),
                expiry: annotation(EXPIRY),
                preserve: annotation(PRESERVE).as_deref() == Some("true"),
            },
            status: Status::read(object.get("status").unwrap_or(&Value::Null)),
        })
    }

    /// Returns the id of its operation, which the provider knows again.
    pub fn operation(&self) -> &str {
        &self.uid
    }

    /// Returns whether it has come to its end, or somebody has deleted it.
    pub fn is_over(&self) -> bool {
        self.deleting || self.status.has_ended()
    }
}
