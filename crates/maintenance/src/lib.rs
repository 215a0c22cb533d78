//! The custom resources by which maintenance of a node is asked for: what the four kinds have in common.
//!
//! ```text
//! status.rs    the status of one: conditions and times, read and written
//! expiry.rs    when one that has ended is deleted
//! listings.rs  which there are, while lists of them come in
//! ```
//!
//! What is done for one next is decided in `janitor`, `gpu_reset` and `handover`.

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use model::node::{NodeChange, NodeView};
use model::ownership::Ownership;

mod expiry;
pub mod gpu_reset;
pub mod handover;
pub mod janitor;
mod listings;
mod status;
pub mod validation_request;

pub use expiry::{EXPIRY, Expiry};
pub(crate) use listings::Listings;
pub use status::{Condition, Outcome, Status};

/// The API group of all kinds but the hand-over.
pub const GROUP: &str = "janitor.dgxc.nvidia.com";

/// How long a node may take to show the session that a resource was made for. The node is patched before the
/// resource is made, but the watches of both may arrive in either order.
pub(crate) const SESSION_SEEN_WITHIN: SignedDuration = SignedDuration::from_secs(10);
/// The reason of what is not done any more because the session for which it was to be has ended.
pub(crate) const SESSION_ENDED: &str = "SessionEnded";
/// Said of a resource that waits for the session for which it was made.
pub(crate) const NOT_OUT: &str =
    "the node is not out of service as its session says: something has undone that";
/// The same as [`SESSION_ENDED`] for people.
pub(crate) const ITS_SESSION_HAS_ENDED: &str =
    "the session of the node for which it was made has ended";

/// What can be asked for, each by a kind of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Maintenance {
    /// A node is to boot anew.
    Reboot,
    /// A node is to be taken away.
    Terminate,
    /// GPUs of a node are to be reset.
    Reset,
    /// A node is to be handed over to an external system.
    HandOver,
}

/// The name of a resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// What it asks for, which says the kind.
    pub kind: Maintenance,
    /// `metadata.name`.
    pub name: String,
}

/// A resource, as it is read.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    /// What it asks for.
    pub kind: Maintenance,
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`: also the id of its operation at the provider.
    pub uid: String,
    /// `metadata.resourceVersion`, which a change of it names.
    pub version: String,
    /// The time when it was made.
    pub created: Timestamp,
    /// Since when it is being deleted.
    pub deleted_at: Option<Timestamp>,
    /// `metadata.finalizers`.
    finalizers: Vec<String>,
    /// The node.
    pub node: String,
    /// The attempt of a session of ours for which it was made; `None`: somebody else has made it.
    pub(crate) attempt: Option<String>,
    /// How long it is kept.
    keep: expiry::Keep,
    /// `spec`.
    pub(crate) spec: Value,
    /// Its status.
    pub status: Status,
}

/// Something to be done for a reset or a hand-over.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// The resource gets its finalizer, or loses it.
    Finalizer(bool),
    /// The status is written.
    Status(Box<Status>),
    /// The node is changed.
    Node(NodeChange),
    /// The Job is made.
    Make(Value),
    /// The Job is deleted, with its pods.
    Stop,
}

/// An object that is no resource of the kind.
#[derive(Debug, thiserror::Error)]
#[error("it has no {0}")]
pub struct ResourceError(String);

// === impl Maintenance ===

impl Maintenance {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Reboot, Self::Terminate, Self::Reset, Self::HandOver];

    /// Returns the name of the kind.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reboot => "RebootNode",
            Self::Terminate => "TerminateNode",
            Self::Reset => "GPUReset",
            Self::HandOver => "ExternalRemediationRequest",
        }
    }

    /// Returns group, version and plural, as they stand in paths.
    pub fn resource(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Reboot => (GROUP, "v1alpha1", "rebootnodes"),
            Self::Terminate => (GROUP, "v1alpha1", "terminatenodes"),
            Self::Reset => (GROUP, "v1alpha1", "gpuresets"),
            Self::HandOver => (
                "nvsentinel.dgxc.nvidia.com",
                "v1",
                "externalremediationrequests",
            ),
        }
    }

    /// Returns the kind whose resources stand in paths so.
    pub fn of_resource(group: &str, plural: &str) -> Option<Self> {
        let is_it = |kind: &Self| {
            let (its_group, _, its_plural) = kind.resource();
            (its_group, its_plural) == (group, plural)
        };
        Self::ALL.into_iter().find(is_it)
    }

    /// Returns the finalizer of its resources: before one goes, what was done for it is undone. `None`: nothing
    /// is left behind.
    pub(crate) fn finalizer(self) -> Option<&'static str> {
        match self {
            Self::Reboot | Self::Terminate => None,
            Self::Reset => Some("janitor.dgxc.nvidia.com/finalizer"),
            Self::HandOver => Some("nvsentinel.dgxc.nvidia.com/external-remediation-cleanup"),
        }
    }

    pub(crate) fn node_field(self) -> &'static str {
        match self {
            Self::HandOver => "/spec/healthEvent/nodeName",
            Self::Reboot | Self::Terminate | Self::Reset => "/spec/nodeName",
        }
    }
}

// === impl Key ===

impl Key {
    /// Returns it for people.
    pub fn title(&self) -> String {
        format!("{} {}", self.kind.name(), self.name)
    }
}

// === impl Resource ===

impl Resource {
    /// Reads an object of a kind.
    pub fn read(kind: Maintenance, object: &Value) -> Result<Self, ResourceError> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let needed = |pointer: &str| {
            let found = text(pointer).filter(|text| !text.is_empty());
            let lacks = || ResourceError(pointer.trim_start_matches('/').replace('/', "."));
            found.map(str::to_owned).ok_or_else(lacks)
        };
        let time = |text: &str| text.parse().unwrap_or(Timestamp::UNIX_EPOCH);
        let annotations = object.pointer("/metadata/annotations");
        let annotation = |key: &str| annotations?.get(key)?.as_str().map(str::to_owned);
        let finalizers = object.pointer("/metadata/finalizers");
        let finalizers = finalizers.and_then(Value::as_array).into_iter().flatten();
        let status = object.get("status").unwrap_or(&Value::Null);
        let generation = match kind {
            Maintenance::Reboot | Maintenance::Terminate => object.pointer("/metadata/generation"),
            // As NVSentinel's janitor writes theirs.
            Maintenance::Reset | Maintenance::HandOver => None,
        };
        let generation = generation.and_then(Value::as_i64);
        Ok(Self {
            kind,
            name: needed("/metadata/name")?,
            uid: needed("/metadata/uid")?,
            version: text("/metadata/resourceVersion")
                .unwrap_or_default()
                .to_owned(),
            created: time(text("/metadata/creationTimestamp").unwrap_or_default()),
            deleted_at: text("/metadata/deletionTimestamp").map(time),
            finalizers: finalizers
                .filter_map(|one| one.as_str().map(str::to_owned))
                .collect(),
            node: needed(kind.node_field())?,
            attempt: annotation(keys::ATTEMPT),
            keep: expiry::Keep::read(annotation),
            spec: object.get("spec").cloned().unwrap_or_default(),
            status: Status::read(status, generation.filter(|number| *number > 0)),
        })
    }

    /// Returns its name.
    pub fn key(&self) -> Key {
        Key {
            kind: self.kind,
            name: self.name.clone(),
        }
    }

    /// Returns the id of its operation, which the provider knows again.
    pub fn operation(&self) -> &str {
        &self.uid
    }

    /// Returns whether it may be begun, as far as its node says: it was made by somebody else, or for a session
    /// that still permits it.
    pub(crate) fn is_permitted(&self, node: &NodeView) -> bool {
        self.attempt.is_none() || Ownership::permit(node).attempt == self.attempt
    }

    /// Returns whether it is not begun yet, for its node is not out of service as the session says for which it was
    /// made.
    pub(crate) fn waits_for_session(&self, node: &NodeView) -> bool {
        self.attempt.is_some() && Ownership::permit(node).waits
    }

    /// Returns whether it has come to its end, or somebody has deleted it.
    pub fn is_over(&self) -> bool {
        self.deleted_at.is_some() || self.status.has_ended()
    }

    /// Returns whether this was seen before another state of the same resource. Versions are numbers; of
    /// others it is not known.
    pub(crate) fn is_older(&self, than: &Self) -> bool {
        is_older(&self.version, &than.version)
    }

    /// Returns whether anything may be left to be done for it but to delete it.
    pub(crate) fn is_open(&self) -> bool {
        match self.kind.finalizer() {
            Some(_) => self.has_finalizer() || self.status.completion.is_none(),
            None => !self.is_over(),
        }
    }

    /// Returns whether it has the finalizer of its kind.
    pub(crate) fn has_finalizer(&self) -> bool {
        let finalizer = self.kind.finalizer();
        self.finalizers
            .iter()
            .any(|one| finalizer == Some(one.as_str()))
    }

    /// Returns the merge patch that gives it the finalizer of its kind, or takes it away.
    pub(crate) fn finalizer(&self, on: bool) -> Value {
        let name = self.kind.finalizer().unwrap_or_default();
        let mut list = self.finalizers.clone();
        list.retain(|one| one != name);
        if on {
            list.push(name.to_owned());
        }
        json!({"metadata": {"resourceVersion": self.version, "finalizers": list}})
    }
}

/// Returns whether a version is older than another one. They are numbers; of others it is not known.
pub fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}
