//! Routes: which stages a node gets that is out of service, by the events for which it is.
//!
//! Of the routes of a policy the first that fits an event counts. They are asked whenever the node is looked
//! at, so at each stage.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{RuleSet, RuleSetAnswer};

/// The stages that an event gets which no route fits, as [`Routed::stages`] says it.
pub const ALL_STAGES: &str = "drain, repair";

/// A route of a policy.
#[derive(Clone, Debug)]
pub struct Route {
    /// Its name and its rules; it asks for nothing.
    pub rules: RuleSet,
    /// How pods leave for an event that it fits.
    pub drain: RouteDrain,
    /// True if an event that it fits is repaired.
    pub remediate: bool,
}

/// A way in which pods leave, or do not. Serialised as in the policy: `false`, `"graceful"`, `"forceful"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub enum RouteDrain {
    /// They stay.
    No,
    /// They leave as their namespaces wish.
    Graceful,
    /// They leave at once.
    Forceful,
}

/// A [`RouteDrain`] as it is written.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Written {
    Switch(bool),
    Text(String),
}

/// The route of an event. Displayed for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// The route's name; `None`: the routes were not asked.
    pub name: Option<String>,
    /// How pods leave for the event.
    pub drain: RouteDrain,
    /// True if it is repaired.
    pub remediate: bool,
}

// === impl Route ===

impl Route {
    /// Returns what becomes of an event that it fits, and that takes it.
    pub fn routed(&self) -> Routed {
        Routed {
            name: Some(self.rules.name.clone()),
            drain: self.drain,
            remediate: self.remediate,
        }
    }

    /// Returns which of `routes` an event takes, by their answers; `None`: none fits, and it gets all
    /// stages.
    pub(crate) fn taken(routes: &[Self], answers: &[(String, RuleSetAnswer)]) -> Option<Routed> {
        for (route, (_, answer)) in routes.iter().zip(answers) {
            match answer {
                RuleSetAnswer::Matched => return Some(route.routed()),
                // To do less is the safe side where nobody knows.
                RuleSetAnswer::NotAsked => {
                    return Some(Routed {
                        name: None,
                        drain: RouteDrain::No,
                        remediate: false,
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
    /// Returns it as it is written in a policy; `None` where that says something else.
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
    /// Returns its route for people: `policy route 'a'`.
    pub fn title(&self) -> String {
        match &self.name {
            Some(name) => format!("policy route '{name}'"),
            None => "the policy's routes, which are not asked: users report more of the node than \
                     a look at it takes time for"
                .to_owned(),
        }
    }

    /// Returns the stages that it gives, for people.
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
        format!("{drain}, {repair}")
    }
}

impl fmt::Display for Routed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.title(), self.stages())
    }
}
