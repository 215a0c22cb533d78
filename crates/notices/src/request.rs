//! `MaintenanceRequest` objects: while one exists its health event holds, and its deletion ends it.
//!
//! The contract is that of NVSentinel's lifecycle manager (group `nvsentinel.dgxc.nvidia.com`,
//! version `v1`, cluster-scoped): finalizer, condition `HealthEventEmitted`, agent, ids and metadata
//! of the events. There, a crash between the event and the condition leaves the fault open for ever;
//! here a deletion always ends what the object may have opened.

use contract::{BehaviourOverrides, EVENT_VERSION, HealthEvent, RecommendedAction, json};
use serde_json::{Value, json};

/// API group of the objects.
pub const GROUP: &str = "nvsentinel.dgxc.nvidia.com";
/// Version of the group.
pub const VERSION: &str = "v1";
/// Resource: the plural in lower case.
pub const PLURAL: &str = "maintenancerequests";
/// Agent of the events.
pub const AGENT: &str = "lifecycle-manager";
/// Finalizer by which a deletion waits until the fault is closed.
pub const FINALIZER: &str = "nvsentinel.dgxc.nvidia.com/maintenance-request-cleanup";
/// Condition of a request whose event is stored.
const EMITTED: &str = "HealthEventEmitted";
/// Reason of that condition where the event is refused.
const FAILED: &str = "EmitFailed";
const NAME: &str = "maintenanceRequestName";
const UID: &str = "maintenanceRequestUID";
/// Metadata with the agent that the request names.
const REQUESTER: &str = "maintenanceRequestRequesterAgent";

/// Next step for a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Nothing is to be done.
    Wait,
    /// Add the finalizer.
    Hold,
    /// Store the event, then write the condition [`emitted`].
    Open(Box<HealthEvent>),
    /// Write this condition: the request is refused, or waits for another one.
    Say(Value),
    /// Store the healthy event, if there is one, then remove the finalizer.
    Close(Option<Box<HealthEvent>>),
}

/// A `MaintenanceRequest`, as far as it is read.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the object.
    pub name: String,
    /// Resource version of the object.
    pub version: String,
    /// Finalizers of the object.
    pub finalizers: Vec<String>,
    uid: String,
    created: String,
    deleted: bool,
    /// The event; the error says what is wrong with it.
    event: Result<Box<HealthEvent>, String>,
    /// Condition [`EMITTED`]: status, reason and message.
    condition: (String, String, String),
}

// === impl Request ===

impl Request {
    /// Reads an object.
    pub fn read(object: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let metadata = &object["metadata"];
        let conditions = object["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let condition = conditions.find(|one| one["type"] == EMITTED);
        let condition = condition.unwrap_or(&Value::Null);
        let finalizers = metadata["finalizers"].as_array().into_iter().flatten();
        Self {
            name: text(&metadata["name"]),
            version: text(&metadata["resourceVersion"]),
            finalizers: finalizers.map(text).collect(),
            uid: text(&metadata["uid"]),
            created: text(&metadata["creationTimestamp"]),
            deleted: metadata["deletionTimestamp"].is_string(),
            event: event(&object["spec"]["healthEvent"]).map(Box::new),
            condition: ["status", "reason", "message"]
                .map(|key| text(&condition[key]))
                .into(),
        }
    }

    /// Returns the next step. `others` are the requests that exist beside it.
    pub fn step<'a>(&self, others: impl IntoIterator<Item = &'a Self>) -> Step {
        let before = others.into_iter().find(|other| other.is_before(self));
        let is_held = self.finalizers.iter().any(|one| one == FINALIZER);
        if self.deleted {
            // One that waits has opened nothing, and its event would close the other's fault.
            let waits = before.is_some_and(|other| !other.deleted);
            return if is_held {
                Step::Close(self.closing().filter(|_| !waits).map(Box::new))
            } else {
                Step::Wait
            };
        }
        let event = match &self.event {
            Ok(event) => event,
            Err(why) => return self.say("Invalid", why),
        };
        if !is_held {
            return Step::Hold;
        }
        // An event that was refused would be refused again.
        if self.is_open() || self.condition.1 == FAILED {
            return Step::Wait;
        }
        if let Some(other) = before {
            let (node, name) = (&event.node_name, &other.name);
            let why = format!("the node {node} has the MaintenanceRequest {name} already");
            return self.say("Blocked", &why);
        }
        Step::Open(Box::new(self.opening(event)))
    }

    fn is_open(&self) -> bool {
        self.condition.0 == "True"
    }

    /// Returns whether this request is for the node of another one, and goes first.
    fn is_before(&self, other: &Self) -> bool {
        let node = |one: &Self| one.event.as_ref().map(|event| event.node_name.clone()).ok();
        let rank = |one: &Self| (!one.is_open(), one.created.clone(), one.name.clone());
        // A refused event holds no node.
        let may_hold = node(self).is_some() && self.condition.1 != FAILED;
        may_hold && node(self) == node(other) && rank(self) < rank(other)
    }

    fn say(&self, reason: &str, message: &str) -> Step {
        let (_, known, text) = &self.condition;
        if known == reason && text == message {
            return Step::Wait;
        }
        Step::Say(condition("False", reason, message))
    }

    /// Returns the event of the request, in the name of the lifecycle manager.
    fn opening(&self, event: &HealthEvent) -> HealthEvent {
        let mut opening = HealthEvent {
            version: EVENT_VERSION,
            agent: AGENT.to_owned(),
            id: format!("he-mr-{}", self.uid),
            ..event.clone()
        };
        if !event.agent.is_empty() && event.agent != AGENT {
            let requester = (REQUESTER.to_owned(), event.agent.clone());
            opening.metadata.extend([requester]);
        }
        opening.metadata.extend(self.trace());
        // Presence is active: no rule of the policy has to know the agent.
        let overrides = opening.quarantine_overrides.get_or_insert_default();
        if !overrides.skip {
            *overrides = BehaviourOverrides {
                force: true,
                skip: false,
            };
        }
        opening
    }

    /// Returns the event that closes what the request may have opened.
    fn closing(&self) -> Option<HealthEvent> {
        let event = self.event.as_ref().ok()?;
        Some(HealthEvent {
            version: EVENT_VERSION,
            agent: AGENT.to_owned(),
            id: format!("he-mr-clear-{}", self.uid),
            component_class: event.component_class.clone(),
            check_name: event.check_name.clone(),
            node_name: event.node_name.clone(),
            is_healthy: true,
            recommended_action: RecommendedAction::None.into(),
            message: format!("MaintenanceRequest {} cleared.", self.name),
            entities_impacted: event.entities_impacted.clone(),
            metadata: self.trace().into(),
            ..HealthEvent::default()
        })
    }

    fn trace(&self) -> [(String, String); 2] {
        [
            (NAME.to_owned(), self.name.clone()),
            (UID.to_owned(), self.uid.clone()),
        ]
    }
}

/// Returns the condition of a request whose event is stored.
pub fn emitted() -> Value {
    condition("True", "Emitted", "the health event is stored")
}

/// Returns the condition of a request whose event is refused.
pub fn failed(why: &str) -> Value {
    condition("False", FAILED, why)
}

fn condition(status: &str, reason: &str, message: &str) -> Value {
    json!({"type": EMITTED, "status": status, "reason": reason, "message": message})
}

/// Reads the event of a request. The error names the field.
fn event(value: &Value) -> Result<HealthEvent, String> {
    if value.is_null() {
        return Err("spec.healthEvent is missing".to_owned());
    }
    let event = json::from_value(value.clone());
    let event = event.map_err(|error| format!("spec.healthEvent: {error}"))?;
    if event.node_name.is_empty() {
        return Err("spec.healthEvent.nodeName is missing".to_owned());
    }
    if event.is_healthy {
        return Err("spec.healthEvent.isHealthy has to be false".to_owned());
    }
    Ok(event)
}

#[cfg(test)]
mod tests;
