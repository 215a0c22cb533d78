//! Maintenance requests as custom resources: what all four kinds have in common.
//!
//! The modules `janitor`, `gpu_reset` and `handover` decide what is done next for a resource,
//! and `validation_request` does so for tests of nodes.

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use model::node::{NodeChange, NodeView};
use model::ownership::Ownership;

mod expiry;
pub mod gpu_reset;
pub mod handover;
pub mod janitor;
mod status;
pub mod validation_request;

pub use expiry::{EXPIRY, Expiry};
pub use status::{Status, StatusCondition};

/// API group of all kinds except the hand-over.
pub const GROUP: &str = "janitor.dgxc.nvidia.com";

/// Time for a node to show the session that a resource was created for. The node is
/// patched before the resource is created, but the watches of both may arrive in either order.
pub(crate) const SESSION_OBSERVED_WITHIN: SignedDuration = SignedDuration::from_secs(10);
/// Reason of a resource that is cancelled because its session has ended.
pub(crate) const SESSION_ENDED: &str = "SessionEnded";
/// Message about a resource that waits until its node is out of service.
pub(crate) const NOT_OUT_OF_SERVICE: &str = "the node is not out of service although its session requires it: another party has undone that";
/// Message for the reason [`SESSION_ENDED`].
pub(crate) const SESSION_ENDED_MESSAGE: &str =
    "the session of the node for which it was made has ended";

/// Kind of a maintenance request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Maintenance {
    /// Reboot of a node.
    Reboot,
    /// Termination of a node.
    Terminate,
    /// Reset of GPUs of a node.
    Reset,
    /// Hand-over of a node to an external system.
    HandOver,
}

/// Kind and name of a resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceKey {
    /// Kind of the resource.
    pub kind: Maintenance,
    /// `metadata.name` of the resource.
    pub name: String,
}

/// A maintenance request, as read from the API server.
#[derive(Clone, Debug, PartialEq)]
pub struct MaintenanceResource {
    /// Kind of the request.
    pub kind: Maintenance,
    /// `metadata.name` of the object.
    pub name: String,
    /// `metadata.uid`. Also the id of the operation at the provider.
    pub uid: String,
    /// `metadata.resourceVersion`, a precondition of patches.
    pub version: String,
    /// `metadata.creationTimestamp` of the object.
    pub created: Timestamp,
    /// `metadata.deletionTimestamp`. `None` unless the object is being deleted.
    pub deleted_at: Option<Timestamp>,
    /// `metadata.finalizers` of the object.
    finalizers: Vec<String>,
    /// Name of the node.
    pub node: String,
    /// Key of the session's attempt that the resource was created for. `None` if another party
    /// created it.
    pub(crate) attempt: Option<String>,
    /// Annotations about the lifetime after the end.
    keep: expiry::Keep,
    /// `spec` of the object.
    pub(crate) spec: Value,
    /// Status of the request.
    pub status: Status,
}

/// An action for a GPU reset or a hand-over.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Adds the finalizer of the kind, or removes it.
    Finalizer(bool),
    /// Writes the status of the resource.
    Status(Box<Status>),
    /// Changes the node of the resource.
    Node(NodeChange),
    /// Creates the Job of the resource.
    Make(Value),
    /// Deletes the Job and its pods.
    Stop,
}

/// Error of an object that lacks a required field.
#[derive(Debug, thiserror::Error)]
#[error("it has no {0}")]
pub struct ResourceError(String);

// === impl Maintenance ===

impl Maintenance {
    /// All kinds of requests.
    pub const ALL: [Self; 4] = [Self::Reboot, Self::Terminate, Self::Reset, Self::HandOver];

    /// Returns the kind's name in objects.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reboot => "RebootNode",
            Self::Terminate => "TerminateNode",
            Self::Reset => "GPUReset",
            Self::HandOver => "ExternalRemediationRequest",
        }
    }

    /// Returns group, version and plural, as in API paths.
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

    /// Returns the kind with this group and plural.
    pub fn of_resource(group: &str, plural: &str) -> Option<Self> {
        let is_it = |kind: &Self| {
            let (its_group, _, its_plural) = kind.resource();
            (its_group, its_plural) == (group, plural)
        };
        Self::ALL.into_iter().find(is_it)
    }

    /// Returns the finalizer of the kind, which delays deletion until everything done for the
    /// resource is undone. `None` if nothing has to be undone.
    pub fn finalizer(self) -> Option<&'static str> {
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

// === impl ResourceKey ===

impl ResourceKey {
    /// Returns kind and name for people.
    pub fn title(&self) -> String {
        format!("{} {}", self.kind.name(), self.name)
    }
}

// === impl MaintenanceResource ===

impl MaintenanceResource {
    /// Reads an object of the given kind.
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
            // NVSentinel's janitor sets no generation in these.
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

    /// Returns the key of the resource.
    pub fn key(&self) -> ResourceKey {
        ResourceKey {
            kind: self.kind,
            name: self.name.clone(),
        }
    }

    /// Returns the id of the resource's operation, which lets a provider recognise repeated
    /// signals.
    pub fn operation(&self) -> &str {
        &self.uid
    }

    /// Returns whether the node permits the start: the resource was created by another party,
    /// or for an attempt of the current session.
    pub(crate) fn is_permitted(&self, node: &NodeView) -> bool {
        self.attempt.is_none() || Ownership::permit(node).attempt == self.attempt
    }

    /// Returns whether the start has to wait because the node is not out of service, as its
    /// session requires.
    pub(crate) fn waits_for_session(&self, node: &NodeView) -> bool {
        self.attempt.is_some() && Ownership::permit(node).waits
    }

    /// Returns whether the resource has ended or is being deleted.
    pub fn is_over(&self) -> bool {
        self.deleted_at.is_some() || self.status.has_ended()
    }

    /// Returns whether this is an older state than `than`. Versions that are not numbers are
    /// not comparable.
    pub(crate) fn is_older(&self, than: &Self) -> bool {
        is_older(&self.version, &than.version)
    }

    /// Returns whether anything may be left to do, apart from deleting the resource.
    pub(crate) fn is_open(&self) -> bool {
        match self.kind.finalizer() {
            Some(_) => self.has_finalizer() || self.status.completion.is_none(),
            None => !self.is_over(),
        }
    }

    /// Returns whether the resource has the finalizer of its kind.
    pub(crate) fn has_finalizer(&self) -> bool {
        let finalizer = self.kind.finalizer();
        self.finalizers
            .iter()
            .any(|one| finalizer == Some(one.as_str()))
    }

    /// Returns the merge patch that adds or removes the finalizer of the kind.
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

/// Returns whether a version is older than another. Versions that are not numbers are not
/// comparable.
pub fn is_older(version: &str, than: &str) -> bool {
    match (version.parse::<u64>(), than.parse::<u64>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}
