//! Tests of nodes that a `ValidationRequest` of NVSentinel's lifecycle manager asks for.
//!
//! ```text
//! around.rs   what is known around a request: nodes, objects, other requests
//! config.rs   the file: tests, who runs them, and when a node is ready for them
//! status.rs   the status of a request, as it is written
//! groups.rs   which tests run together on which nodes
//! gate.rs     what a node says of its requests, and how it is let in again
//! step.rs     what is done next for one request: pure, from what was seen
//! ```
//!
//! Each step is one thing, and the next one follows from what is there then. So a crash between any two
//! changes nothing: a test that was begun is found by its name, and a node says for whom it is held.

mod around;
mod config;
mod gate;
mod groups;
mod status;
mod step;

use jiff::Timestamp;
use serde_json::Value;

pub use around::{Around, NodeState, Readiness};
pub use config::{Provider, ValidationConfiguration};
pub use status::{Phase, Status};
pub use step::{Act, Step, refused, step};

/// The API group of the kind.
pub const GROUP: &str = "nvsentinel.nvidia.com";
/// Its version.
pub const VERSION: &str = "v1alpha1";
/// Its plural.
pub const PLURAL: &str = "validationrequests";
/// The kind.
pub const KIND: &str = "ValidationRequest";
/// What keeps a request until the nodes say nothing of it any more.
pub const FINALIZER: &str = "nvsentinel.nvidia.com/validation-request";

/// A request, as it is read.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.resourceVersion`, which a change of it names.
    pub version: String,
    /// The time when it was made: the oldest has its turn first.
    pub created: Timestamp,
    /// `metadata.finalizers`.
    pub finalizers: Vec<String>,
    /// The nodes to be tested, each once.
    pub nodes: Vec<String>,
    /// Its status.
    pub status: Status,
    /// True while it is being deleted.
    deleted: bool,
    /// The tests, each once; empty: those of the configuration.
    tests: Vec<String>,
}

// === impl Request ===

impl Request {
    /// Reads an object. The error says what is wrong with it.
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

    /// Returns whether nothing is left to be done for it, but to have its objects deleted.
    pub fn is_over(&self) -> bool {
        !self.deleted && self.status.phase.is_some_and(Phase::is_over)
    }

    /// Returns its runs that have not ended: the provider of each, and the name of its object.
    pub fn runs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.status.test_groups.iter().filter_map(|group| {
            let attempt = group.attempt()?;
            Some((group.provider.as_str(), attempt.object_name.as_str()))
        })
    }

    /// Returns it for people.
    pub fn title(&self) -> String {
        format!("{KIND} {}", self.name)
    }
}

#[cfg(test)]
mod tests;
