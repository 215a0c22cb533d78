//! Tests of nodes, requested by a `ValidationRequest` of NVSentinel's lifecycle manager.
//!
//! ```text
//! cluster_view.rs  state of the cluster cluster a request: nodes, objects, other requests
//! config.rs        the configuration file: tests, providers, and criteria of readiness
//! status.rs        status of a request
//! groups.rs        grouping of tests on nodes
//! gate.rs          record of requests on a node, and its return to service
//! step.rs          next step of a request: pure
//! ```
//!
//! Each step is a single action, and the next one follows from the state after it. A crash
//! between two steps is therefore harmless: a started test is found by its name, and a node
//! lists the requests that hold it.

mod cluster_view;
mod config;
mod gate;
mod groups;
mod status;
mod step;

use jiff::Timestamp;
use serde_json::Value;

pub use cluster_view::{ClusterView, NodeState, Readiness};
pub use config::{Provider, ValidationConfiguration};
pub use gate::{ACTIVE, SESSION, STATE};
pub use status::{Phase, Status};
pub use step::{Act, ValidationStep, refused, step};

/// API group of the kind.
pub const GROUP: &str = "nvsentinel.nvidia.com";
/// API version of the kind.
pub const VERSION: &str = "v1alpha1";
/// Plural of the kind, as in API paths.
pub const PLURAL: &str = "validationrequests";
/// Name of the kind.
pub const KIND: &str = "ValidationRequest";
/// Finalizer that keeps a request until no node lists it.
pub const FINALIZER: &str = "nvsentinel.nvidia.com/validation-request";

/// A request, as read from the API server.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidationRequest {
    /// `metadata.name` of the object.
    pub name: String,
    /// `metadata.uid` of the object.
    pub uid: String,
    /// `metadata.resourceVersion`, a precondition of patches.
    pub version: String,
    /// `metadata.creationTimestamp`. The oldest request comes first.
    pub created: Timestamp,
    /// `metadata.finalizers` of the object.
    pub finalizers: Vec<String>,
    /// Names of the nodes to test, without duplicates.
    pub nodes: Vec<String>,
    /// Status of the request.
    pub status: Status,
    /// True while the object is being deleted.
    deleted: bool,
    /// Names of the tests, without duplicates. Empty for the default tests.
    tests: Vec<String>,
}

// === impl ValidationRequest ===

impl ValidationRequest {
    /// Reads an object. The error describes the malformed part.
    pub fn read(object: &Value) -> Result<Self, String> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let needed = |pointer: &str| text(pointer).ok_or_else(|| format!("it has no {pointer}"));
        let list = |pointer: &str| {
            let list = object.pointer(pointer).and_then(Value::as_array);
            list.into_iter().flatten()
        };
        let status = object.get("status").cloned().unwrap_or_default();
        let status = match status {
            Value::Null => Status::default(),
            status => serde_json::from_value(status).map_err(|error| format!("status: {error}"))?,
        };
        let names = |names: Vec<Option<&str>>| {
            let mut each: Vec<String> = Vec::new();
            for name in names.into_iter().flatten() {
                if !each.iter().any(|other| other == name) {
                    each.push(name.to_owned());
                }
            }
            each
        };
        let created = text("/metadata/creationTimestamp").and_then(|text| text.parse().ok());
        Ok(Self {
            name: needed("/metadata/name")?.to_owned(),
            uid: needed("/metadata/uid")?.to_owned(),
            version: text("/metadata/resourceVersion")
                .unwrap_or_default()
                .to_owned(),
            created: created.unwrap_or(Timestamp::UNIX_EPOCH),
            finalizers: names(list("/metadata/finalizers").map(Value::as_str).collect()),
            nodes: names(
                list("/spec/nodes")
                    .map(|one| one["name"].as_str())
                    .collect(),
            ),
            tests: names(list("/spec/tests").map(Value::as_str).collect()),
            deleted: text("/metadata/deletionTimestamp").is_some(),
            status,
        })
    }

    /// Returns whether nothing is left to do, apart from the deletion of its objects.
    pub fn is_over(&self) -> bool {
        !self.deleted && self.status.phase.is_some_and(Phase::is_over)
    }

    /// Returns the provider and object name of each running test.
    pub fn runs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.status.test_groups.iter().filter_map(|group| {
            let attempt = group.attempt()?;
            Some((group.provider.as_str(), attempt.object_name.as_str()))
        })
    }

    /// Returns kind and name for people.
    pub fn title(&self) -> String {
        format!("{KIND} {}", self.name)
    }
}

#[cfg(test)]
mod tests;
