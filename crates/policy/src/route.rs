//! Routes: rules that choose the stages of a node out of service by the events that took it
//! out.
//!
//! The first route that matches an event wins. Routes are evaluated again at every evaluation
//! of the node, so also between stages.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{RuleSet, RuleSetAnswer};

/// Stages of an event that matches no route, in the form of [`Routed::stages`].
pub const ALL_STAGES: &str = "drain, repair";

/// A route of a policy.
#[derive(Clone, Debug)]
pub struct Route {
    /// Name and rules of the route. The rule set requests no measures.
    pub rules: RuleSet,
    /// Drain mode for matching events.
    pub drain: RouteDrain,
    /// True if matching events are remediated.
    pub remediate: bool,
    /// True if both wait for a person's approval.
    pub approve: bool,
}

/// Drain mode of a route. Serialised as in the policy: `false`, `"graceful"` or `"forceful"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub enum RouteDrain {
    /// Pods stay on the node.
    No,
    /// Pods leave in the mode configured for their namespaces.
    Graceful,
    /// Pods are removed at once.
    Forceful,
}

/// Textual form of a [`RouteDrain`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Written {
    Switch(bool),
    Text(String),
}

/// The route chosen for an event. Formatted for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// Name of the route. `None` if the routes were not evaluated.
    pub name: Option<String>,
    /// Drain mode for the event.
    pub drain: RouteDrain,
    /// True if the event is remediated.
    pub remediate: bool,
    /// True if both wait for a person's approval.
    pub approve: bool,
}

// === impl Route ===

impl Route {
    /// Returns the result for an event that matches this route.
    pub fn routed(&self) -> Routed {
        Routed {
            name: Some(self.rules.name.clone()),
            drain: self.drain,
            remediate: self.remediate,
            approve: self.approve,
        }
    }

    /// Returns the route chosen by the answers of `routes` about an event. `None` if no route
    /// matches, so that the event gets all stages.
    pub(crate) fn taken(routes: &[Self], answers: &[(String, RuleSetAnswer)]) -> Option<Routed> {
        for (route, (_, answer)) in routes.iter().zip(answers) {
            match answer {
                RuleSetAnswer::Matched => return Some(route.routed()),
                // Fewer stages are the safe choice if the answer is unknown.
                RuleSetAnswer::NotAsked => {
                    return Some(Routed {
                        name: None,
                        drain: RouteDrain::No,
                        remediate: false,
                        approve: false,
                    });
                }
                RuleSetAnswer::NotMatched(_) | RuleSetAnswer::Failed(..) => {}
            }
        }
        None
    }
}

// === impl RouteDrain ===

impl RouteDrain {
    /// Parses the textual form. `None` if it is not a drain mode.
    pub(super) fn parse(written: &Written) -> Option<Self> {
        match written {
            Written::Switch(false) => Some(Self::No),
            Written::Switch(true) => Some(Self::Graceful),
            Written::Text(text) => match text.as_str() {
                "graceful" => Some(Self::Graceful),
                "forceful" => Some(Self::Forceful),
                _ => None,
            },
        }
    }
}

impl From<Written> for RouteDrain {
    fn from(written: Written) -> Self {
        Self::parse(&written).unwrap_or(Self::Graceful)
    }
}

impl From<RouteDrain> for Written {
    fn from(drain: RouteDrain) -> Self {
        match drain {
            RouteDrain::No => Self::Switch(false),
            RouteDrain::Graceful => Self::Text("graceful".to_owned()),
            RouteDrain::Forceful => Self::Text("forceful".to_owned()),
        }
    }
}

// === impl Routed ===

impl Routed {
    /// Returns the route for people: `policy route 'a'`.
    pub fn title(&self) -> String {
        match &self.name {
            Some(name) => format!("policy route '{name}'"),
            None => "the policy's routes, which are not evaluated: users report more about the node than \
                     one evaluation has time for"
                .to_owned(),
        }
    }

    /// Returns the stages of the route, for people.
    pub fn stages(&self) -> String {
        let drain = match self.drain {
            RouteDrain::No => "pods stay",
            RouteDrain::Graceful => "drain",
            RouteDrain::Forceful => "forceful drain",
        };
        let repair = if self.remediate {
            "repair"
        } else {
            "no repair"
        };
        let approval = if self.approve {
            ", once a person approves"
        } else {
            ""
        };
        format!("{drain}, {repair}{approval}")
    }
}

impl fmt::Display for Routed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.title(), self.stages())
    }
}
