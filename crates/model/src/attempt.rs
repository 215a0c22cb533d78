//! Remediation attempts of a session, as stored in the session annotation of the node.

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Group of the attempts that validate a node before it returns to service.
pub const VALIDATION_GROUP: &str = "validation";
/// Group of the attempts that collect diagnostics.
pub const DIAGNOSTICS_GROUP: &str = "diagnostics";

/// Remediation state of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RemediationMark {
    /// Attempts of the session, oldest first. Only the last one can be running.
    pub attempts: Vec<Attempt>,
    /// Start times of recent attempts of earlier sessions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Timestamp>,
    /// Set while gpuwarden waits for a person.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub person: Option<PersonAsked>,
    /// End of the current wait, if it is not for the end of an attempt: either the delay before
    /// the next attempt, or the time that faults have to recover after a successful one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits_until: Option<Timestamp>,
}

/// A request to a person to remediate the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PersonAsked {
    /// Time of the request.
    pub since: Timestamp,
    /// Reason of the request, for people.
    pub why: String,
}

/// An attempt to remediate a node by creating a custom resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// Id of the attempt: the event's id, with a number appended from the second attempt for
    /// the same event on.
    pub id: String,
    /// Name of the action in the remediation configuration.
    pub action: String,
    /// Equivalence group of the action. Ends in the entity if only the entity is remediated.
    pub group: String,
    /// Id of the event that stands for the fault.
    pub event: String,
    /// Entity that is remediated, such as a GPU's UUID. Empty if the whole node is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub entity: String,
    /// Kind of the custom resource.
    pub resource: ResourceKind,
    /// Name of the custom resource.
    pub name: String,
    /// Time of the decision to make the attempt.
    pub since: Timestamp,
    /// Timeout of the attempt, in minutes.
    pub timeout_minutes: i64,
    /// Time of the resource's creation. `None` until it exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<Timestamp>,
    /// Result of the attempt. `None` while it is running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<AttemptEnd>,
}

/// Kind of a custom resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceKind {
    /// API group. Empty for the core group.
    pub group: String,
    /// API version within the group, such as `v1alpha1`.
    pub version: String,
    /// Kind as objects spell it, such as `RebootNode`.
    pub kind: String,
    /// Namespace of the resources. `None` for kinds that have no namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Type of the status condition that turns `True` when the work is done.
    pub condition: String,
}

/// End of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptEnd {
    /// Time when the controller observed the end.
    pub at: Timestamp,
    /// Outcome of the attempt.
    pub outcome: AttemptOutcome,
    /// Message of the program that carried out the attempt.
    pub why: String,
}

/// Outcome of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttemptOutcome {
    /// The action was carried out.
    Succeeded,
    /// The action failed for a reason that may pass.
    FailedForNow,
    /// The action failed for a permanent reason.
    Failed,
    /// The attempt ended without proof of success or failure.
    Unclear,
}

/// Remediation state of a node, for the records of its events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemediationProgress {
    /// `faultremediated`: true after a successful remediation, false while gpuwarden waits for
    /// a person.
    pub remediated: Option<bool>,
    /// `lastremediationtimestamp`: time of the last attempt. `None` before the first.
    pub attempted_at: Option<Timestamp>,
    /// Events accepted after this time are not covered by the remediation.
    pub up_to: Timestamp,
}

/// Most start times of attempts that are kept.
const MAX_TIMES: usize = 32;
/// Time until an attempt is forgotten, in hours: the longest window over which a configuration
/// can limit attempts.
pub const REMEMBERED_HOURS: i64 = 90 * 24;

// === impl RemediationMark ===

impl RemediationMark {
    /// Returns whether an attempt made at `at` still counts at `now`.
    pub fn remembers(at: Timestamp, now: Timestamp) -> bool {
        now.duration_since(at) < SignedDuration::from_hours(REMEMBERED_HOURS)
    }

    /// Returns the start times of the newest attempts, including those of earlier sessions.
    pub fn times(&self, now: Timestamp) -> Vec<Timestamp> {
        let ours = self.remediations().map(|one| one.since);
        let times = self.earlier.iter().copied().chain(ours);
        let mut times: Vec<Timestamp> = times.filter(|at| Self::remembers(*at, now)).collect();
        let surplus = times.len().saturating_sub(MAX_TIMES);
        times.split_off(surplus)
    }

    /// Returns the value of [`keys::STATE_LABEL`]. `None` before the first attempt, and for a
    /// node that no longer needs remediation and waits without having been remediated.
    /// `remediating` is reserved for states that end without a person: a running attempt, or a
    /// wait.
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

    /// Returns the time when the current [`Self::state`] began. `None` if there is no
    /// state.
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

    /// Returns the progress of the remediation, for the records of the node's events. `None` if
    /// no resource was created and no person was asked.
    pub fn progress(&self) -> Option<RemediationProgress> {
        let attempted_at = self.remediations().filter_map(|one| one.made).last();
        let succeeded = self.remediations().last().filter(|one| one.succeeded());
        let (remediated, up_to) = match (&self.person, succeeded.and_then(|one| one.end.as_ref())) {
            (Some(person), _) => (Some(false), person.since),
            (None, Some(end)) => (Some(true), end.at),
            (None, None) => (None, attempted_at?),
        };
        Some(RemediationProgress {
            remediated,
            attempted_at,
            up_to,
        })
    }

    /// Returns the last attempt that remediates or validates.
    fn last(&self) -> Option<&Attempt> {
        let mut attempts = self.attempts.iter();
        attempts.rfind(|one| one.group != DIAGNOSTICS_GROUP)
    }

    /// Returns the attempts that remediate.
    pub fn remediations(&self) -> impl Iterator<Item = &Attempt> {
        self.attempts.iter().filter(|one| one.remediates())
    }

    /// Returns the validations that followed the last remediation attempt.
    pub fn validations(&self) -> &[Attempt] {
        let last = self.attempts.iter().rposition(Attempt::remediates);
        let from = last.map_or(0, |last| last + 1);
        self.attempts.get(from..).unwrap_or_default()
    }

    /// Returns the running attempt.
    pub fn under_way(&self) -> Option<&Attempt> {
        self.attempts.last().filter(|one| one.end.is_none())
    }

    /// Returns the value of NVSentinel's annotation [`keys::REMEDIATION_STATE`]. `None` if no
    /// resource was created.
    pub fn state_annotation(&self) -> Option<String> {
        let mut groups = Map::new();
        for one in self.remediations() {
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
    /// Returns the attempt's resource for people: `RebootNode maintenance-n1-...`.
    pub fn title(&self) -> String {
        format!("{} {}", self.resource.kind, self.name)
    }

    /// Returns the value that marks the custom resource as made for this attempt. A resource of
    /// the same name without it belongs to an earlier attempt.
    pub fn key(&self) -> String {
        format!("{}/{}", self.id, self.since)
    }

    /// Returns whether the attempt remediates: it neither validates nor collects diagnostics.
    pub fn remediates(&self) -> bool {
        ![VALIDATION_GROUP, DIAGNOSTICS_GROUP].contains(&self.group.as_str())
    }

    /// Returns whether the attempt ended in success.
    pub fn succeeded(&self) -> bool {
        let end = self.end.as_ref();
        end.is_some_and(|end| end.outcome == AttemptOutcome::Succeeded)
    }

    /// Returns the timeout of the attempt, at least one minute.
    pub fn timeout(&self) -> SignedDuration {
        SignedDuration::from_mins(self.timeout_minutes.clamp(1, 1_000_000))
    }

    /// Returns a sentence about the attempt's result, for people.
    pub fn ending(&self) -> String {
        let title = self.title();
        match &self.end {
            None => format!("{title} is under way"),
            Some(end) => match end.outcome {
                AttemptOutcome::Succeeded => format!("{title} has succeeded"),
                AttemptOutcome::FailedForNow => format!("{title} has failed for now: {}", end.why),
                AttemptOutcome::Failed => format!("{title} has failed: {}", end.why),
                AttemptOutcome::Unclear => {
                    format!("{title} has ended with an unknown outcome: {}", end.why)
                }
            },
        }
    }
}

// === impl ResourceKind ===

impl ResourceKind {
    /// Returns the `apiVersion` that objects of the kind carry.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.clone()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// Checks that an object has this kind and namespace, and a name.
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
