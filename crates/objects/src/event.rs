//! Events of a policy: a fault, and its end.

use contract::{EVENT_VERSION, Entity, HealthEvent, RecommendedAction, json};
use jiff::Timestamp;

use crate::AGENT;
use crate::policies::EventForm;

/// Contents of an event beside those of its policy's form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About<'a> {
    /// Name of the policy.
    pub(crate) check: &'a str,
    /// Kind of the object, such as `v1/Pod`.
    pub(crate) kind: &'a str,
    /// Name of the object, with its namespace.
    pub(crate) key: &'a str,
    pub(crate) node: &'a str,
    pub(crate) now: Timestamp,
}

// === impl EventForm ===

impl EventForm {
    /// Returns the event of a fault.
    pub(crate) fn fault(&self, about: &About<'_>) -> HealthEvent {
        HealthEvent {
            is_fatal: self.is_fatal,
            message: self.message.clone(),
            recommended_action: self.action as i32,
            custom_recommended_action: self.custom_action.clone(),
            error_code: self.codes.clone(),
            quarantine_overrides: self.quarantine,
            drain_overrides: self.drain,
            ..self.of(about)
        }
    }

    /// Returns the event of the end of a fault, for this reason. Without codes, it also closes a
    /// fault whose code the policy has changed since.
    pub(crate) fn end(&self, about: &About<'_>, why: &str) -> HealthEvent {
        HealthEvent {
            is_healthy: true,
            message: why.to_owned(),
            recommended_action: RecommendedAction::None as i32,
            ..self.of(about)
        }
    }

    fn of(&self, about: &About<'_>) -> HealthEvent {
        HealthEvent {
            version: EVENT_VERSION,
            agent: AGENT.to_owned(),
            component_class: self.component_class.clone(),
            check_name: about.check.to_owned(),
            entities_impacted: vec![Entity {
                entity_type: about.kind.to_owned(),
                entity_value: about.key.to_owned(),
            }],
            generated_timestamp: Some(json::proto_timestamp(about.now)),
            node_name: about.node.to_owned(),
            processing_strategy: self.strategy as i32,
            ..HealthEvent::default()
        }
    }
}
