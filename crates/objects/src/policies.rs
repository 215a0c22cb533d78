//! A policy: which objects are looked at, when one is a fault, of which node, and its event.

use std::fmt;

use contract::{BehaviourOverrides, ProcessingStrategy, RecommendedAction};
use jiff::SignedDuration;
use policy::ObjectExpression;

/// Policies of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObjectPolicies {
    /// Enabled policies in the order of the file.
    pub policies: Vec<ObjectPolicy>,
    /// Oddities for people, with file and line.
    pub notes: Vec<String>,
}

/// Kind of objects.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// API group; empty for the core group.
    pub group: String,
    /// Version of the group, such as `v1`.
    pub version: String,
    /// Kind, such as `Pod`.
    pub kind: String,
}

/// Objects of a kind that are watched together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Watched {
    /// Kind of the objects.
    pub kind: Kind,
    /// Namespace of the objects; `None` for all.
    pub namespace: Option<String>,
}

/// A policy.
#[derive(Clone, Debug, PartialEq)]
pub struct ObjectPolicy {
    /// Name, which is the check of the events.
    pub name: String,
    /// Objects that are looked at.
    pub watched: Watched,
    /// Expression that is true for an object that is a fault.
    pub predicate: ObjectExpression,
    /// Expression whose value is the object's node; `None` if that has the name of the object.
    pub association: Option<ObjectExpression>,
    /// Time for which an object has to be a fault before that is reported.
    pub open_after: SignedDuration,
    /// Time for which it has to be none before its end is reported.
    pub clear_after: SignedDuration,
    /// Event of the fault.
    pub event: EventForm,
}

/// Contents of an event that do not depend on the object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EventForm {
    /// Component class, such as `Node`.
    pub component_class: String,
    /// True for a fault that takes a node out of service by the built-in policy.
    pub is_fatal: bool,
    /// Text for people.
    pub message: String,
    /// Recommended action.
    pub action: RecommendedAction,
    /// Name of a custom action; empty for none.
    pub custom_action: String,
    /// Error codes.
    pub codes: Vec<String>,
    /// Overrides of the quarantine.
    pub quarantine: Option<BehaviourOverrides>,
    /// Overrides of the drain.
    pub drain: Option<BehaviourOverrides>,
    /// Processing strategy.
    pub strategy: ProcessingStrategy,
}

// === impl Kind ===

impl Kind {
    /// Creates a kind from an apiVersion, such as `v1` or `apps/v1`, and its name.
    pub fn new(api_version: &str, kind: &str) -> Self {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        Self {
            group: group.to_owned(),
            version: version.to_owned(),
            kind: kind.to_owned(),
        }
    }

    /// Returns the apiVersion: group and version.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.clone()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// Returns whether the kind is `Node`.
    pub fn is_node(&self) -> bool {
        self.group.is_empty() && self.kind == "Node"
    }
}

/// The form of NVSentinel's entities, such as `v1/Pod`.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.api_version(), self.kind)
    }
}

// === impl Watched ===

impl fmt::Display for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind)?;
        match &self.namespace {
            Some(namespace) => write!(f, " in {namespace}"),
            None => Ok(()),
        }
    }
}
