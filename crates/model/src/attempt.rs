//! The attempts to remediate a node, as the session annotation on the node holds them.

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Group of the attempts that validate a node before it comes back.
pub const VALIDATION_GROUP: &str = "validation";
/// Group of the attempts that collect diagnostics.
pub const DIAGNOSTICS_GROUP: &str = "diagnostics";

/// The remediation of a node, as its session says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RemediationMark {
    /// The attempts of the session, oldest first; only the last can be under way.
    pub attempts: Vec<Attempt>,
    /// The times of attempts of earlier sessions, of late.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Timestamp>,
    /// Set while a person is asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub person: Option<PersonAsked>,
    /// Until when something else than the end of an attempt is awaited: another try, or the recovery of the
    /// faults after one that has succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_until: Option<Timestamp>,
}

/// A person is asked to repair the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersonAsked {
    /// Since when.
    pub since: Timestamp,
    /// Why.
    pub why: String,
}

/// An attempt to repair a node: one custom resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// Its identity: the event's id, with a number from the second attempt for one event on.
    pub id: String,
    /// The action.
    pub action: String,
    /// The group of the action, with the entity where that alone is repaired.
    pub group: String,
    /// Id of the event that stands for the fault.
    pub event: String,
    /// The entity that alone is repaired; empty: the node is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub entity: String,
    /// The kind of the custom resource.
    pub resource: ResourceKind,
    /// Its name.
    pub name: String,
    /// Since when it is wanted.
    pub since: Timestamp,
    /// Minutes in which it is to come to its end.
    pub timeout_minutes: i64,
    /// The time at which it was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<Timestamp>,
    /// Its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<AttemptEnd>,
}

/// A kind of custom resources.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceKind {
    /// API group.
    pub group: String,
    /// Version.
    pub version: String,
    /// Kind.
    pub kind: String,
    /// Namespace of the resources; `None`: they have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The condition that is true once it is done.
    pub condition: String,
}

/// The end of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptEnd {
    /// The time at which it was seen.
    pub at: Timestamp,
    /// How it went.
    pub outcome: Outcome,
    /// The words of who carried it out.
    pub why: String,
}

/// The outcome of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It was done.
    Succeeded,
    /// It was not done, for a reason that may pass.
    FailedForNow,
    /// It was not done, for a reason that stays.
    Failed,
    /// Nobody knows whether it was done.
    Unclear,
}

/// The state of the repair of a node, for the records of its events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repair {
    /// `faultremediated`: true once a repair has succeeded, false while a person is asked.
    pub remediated: Option<bool>,
    /// `lastremediationtimestamp`: when the last attempt was made; `None` where none was.
    pub attempted_at: Option<Timestamp>,
    /// Events that were accepted later are none of its.
    pub up_to: Timestamp,
}

/// Most times of attempts that are remembered.
const MAX_TIMES: usize = 32;
/// Time for which an attempt is remembered, in hours: the longest in which attempts can be counted.
pub const REMEMBERED_HOURS: i64 = 90 * 24;

// === impl RemediationMark ===

impl RemediationMark {
    /// Returns whether an attempt at this time is still remembered.
    pub fn remembers(at: Timestamp, now: Timestamp) -> bool {
        now.duration_since(at) < SignedDuration::from_hours(REMEMBERED_HOURS)
    }

    /// Returns the times of all attempts, those of earlier sessions too, the newest of them.
    pub fn times(&self, now: Timestamp) -> Vec<Timestamp> {
        let ours = self.repairs().map(|one| one.since);
        let times = self.earlier.iter().copied().chain(ours);
        let mut times: Vec<Timestamp> = times.filter(|at| Self::remembers(*at, now)).collect();
        let surplus = times.len().saturating_sub(MAX_TIMES);
        times.split_off(surplus)
    }

    /// Returns the value of [`keys::STATE_LABEL`]; `None` where no attempt was begun, or no repair is needed
    /// any more and the node waits as one that was not repaired. Only what has a way out is called
    /// `remediating`: an attempt that is under way, or a wait.
    pub fn state(&self) -> Option<&'static str> {
        if self.person.is_some() {
            return Some(keys::STATE_REMEDIATION_FAILED);
        }
        let last = self.last()?;
        if last.succeeded() {
            return Some(keys::STATE_REMEDIATED);
        }
        let goes_on = last.end.is_none() || self.waits_until.is_some();
        goes_on.then_some(keys::STATE_REMEDIATING)
    }

    /// Returns since when it is in its state; `None` where it has none.
    pub(crate) fn since(&self) -> Option<Timestamp> {
        if let Some(person) = &self.person {
            return Some(person.since);
        }
        let last = self.last().filter(|_| self.state().is_some())?;
        Some(match &last.end {
            Some(end) if last.succeeded() => end.at,
            _ => last.since,
        })
    }

    /// Returns how far it is, for the records of the events; `None` where nothing was made, and nobody
    /// asked.
    pub fn repair(&self) -> Option<Repair> {
        let attempted_at = self.repairs().filter_map(|one| one.made).last();
        let succeeded = self.repairs().last().filter(|one| one.succeeded());
        let (remediated, up_to) = match (&self.person, succeeded.and_then(|one| one.end.as_ref())) {
            (Some(person), _) => (Some(false), person.since),
            (None, Some(end)) => (Some(true), end.at),
            (None, None) => (None, attempted_at?),
        };
        Some(Repair {
            remediated,
            attempted_at,
            up_to,
        })
    }

    /// Returns the last attempt that repairs or validates.
    fn last(&self) -> Option<&Attempt> {
        let mut attempts = self.attempts.iter();
        attempts.rfind(|one| one.group != DIAGNOSTICS_GROUP)
    }

    /// Returns the attempts that repair.
    pub fn repairs(&self) -> impl Iterator<Item = &Attempt> {
        self.attempts.iter().filter(|one| one.repairs())
    }

    /// Returns the attempts that validate what the last repair has left.
    pub fn validations(&self) -> &[Attempt] {
        let last = self.attempts.iter().rposition(Attempt::repairs);
        let from = last.map_or(0, |last| last + 1);
        self.attempts.get(from..).unwrap_or_default()
    }

    /// Returns the attempt that is under way.
    pub fn under_way(&self) -> Option<&Attempt> {
        self.attempts.last().filter(|one| one.end.is_none())
    }

    /// Returns NVSentinel's annotation [`keys::REMEDIATION_STATE`]; `None` where nothing was made.
    pub fn state_annotation(&self) -> Option<String> {
        let mut groups = Map::new();
        for one in self.repairs() {
            if let Some(made) = one.made {
                let group = json!({
                    "maintenanceCR": one.name,
                    "createdAt": made.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
                    "actionName": one.action,
                });
                groups.insert(one.group.clone(), group);
            }
        }
        let groups = (!groups.is_empty()).then_some(Value::Object(groups))?;
        Some(json!({"equivalenceGroups": groups}).to_string())
    }
}

// === impl Attempt ===

impl Attempt {
    /// Returns it for people: `RebootNode maintenance-n1-...`.
    pub fn title(&self) -> String {
        format!("{} {}", self.resource.kind, self.name)
    }

    /// Returns what its custom resource says for whom it was made: an older one of the same name is
    /// another's.
    pub fn key(&self) -> String {
        format!("{}/{}", self.id, self.since)
    }

    /// Returns whether it repairs, and neither validates nor collects diagnostics.
    pub fn repairs(&self) -> bool {
        ![VALIDATION_GROUP, DIAGNOSTICS_GROUP].contains(&self.group.as_str())
    }

    /// Returns whether it was done.
    pub fn succeeded(&self) -> bool {
        let end = self.end.as_ref();
        end.is_some_and(|end| end.outcome == Outcome::Succeeded)
    }

    /// Returns the time within which the attempt has to end: a minute at least.
    pub fn timeout(&self) -> SignedDuration {
        SignedDuration::from_mins(self.timeout_minutes.clamp(1, 1_000_000))
    }

    /// Returns how it ended, for people.
    pub fn ending(&self) -> String {
        let title = self.title();
        match &self.end {
            None => format!("{title} is under way"),
            Some(end) => match end.outcome {
                Outcome::Succeeded => format!("{title} has succeeded"),
                Outcome::FailedForNow => format!("{title} has failed for now: {}", end.why),
                Outcome::Failed => format!("{title} has failed: {}", end.why),
                Outcome::Unclear => {
                    format!("{title} has ended, and nobody knows how: {}", end.why)
                }
            },
        }
    }
}

// === impl ResourceKind ===

impl ResourceKind {
    /// Returns its API version, as objects name it.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.clone()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// Checks that an object is of the kind, and has a name.
    pub fn check(&self, object: &Value) -> Result<(), String> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let api_version = self.api_version();
        for (pointer, wanted) in [("/apiVersion", &api_version), ("/kind", &self.kind)] {
            if text(pointer) != Some(wanted.as_str()) {
                let key = pointer.trim_start_matches('/');
                let found = text(pointer).unwrap_or_default();
                return Err(format!("its {key} is {found:?} and not {wanted:?}"));
            }
        }
        if text("/metadata/name").is_none_or(str::is_empty) {
            return Err("it has no metadata.name".to_owned());
        }
        let namespace = text("/metadata/namespace");
        if namespace.is_some() && namespace != self.namespace.as_deref() {
            let found = namespace.unwrap_or_default();
            return Err(format!("its namespace {found:?} is not that of the action"));
        }
        Ok(())
    }
}
