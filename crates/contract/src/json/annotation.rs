//! The form inside the node annotation `quarantineHealthEvent`.
//!
//! Go's `encoding/json` over the generated struct: camelCase names, zero values
//! dropped, enumerations as integers, `generatedTimestamp` as `{seconds, nanos}`.
//! NVSentinel's drainer and remediation read it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{BehaviourOverrides, Entity, HealthEvent};

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct AnnotationForm {
    #[serde(skip_serializing_if = "is_zero")]
    version: u32,
    #[serde(skip_serializing_if = "String::is_empty")]
    agent: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    component_class: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    check_name: String,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_fatal: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_healthy: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
    #[serde(skip_serializing_if = "is_zero")]
    recommended_action: i32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    error_code: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    entities_impacted: Vec<EntityForm>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    generated_timestamp: Option<TimeForm>,
    #[serde(skip_serializing_if = "String::is_empty")]
    node_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    quarantine_overrides: Option<OverridesForm>,
    #[serde(skip_serializing_if = "Option::is_none")]
    drain_overrides: Option<OverridesForm>,
    #[serde(skip_serializing_if = "is_zero")]
    processing_strategy: i32,
    #[serde(skip_serializing_if = "String::is_empty")]
    id: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    custom_recommended_action: String,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct EntityForm {
    #[serde(skip_serializing_if = "String::is_empty")]
    entity_type: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    entity_value: String,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(default)]
struct OverridesForm {
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    force: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    skip: bool,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(default)]
struct TimeForm {
    #[serde(skip_serializing_if = "is_zero")]
    seconds: i64,
    #[serde(skip_serializing_if = "is_zero")]
    nanos: i32,
}

/// Returns the annotation form of `event`.
pub fn to_value(event: &HealthEvent) -> Value {
    let overrides = |from: &BehaviourOverrides| OverridesForm {
        force: from.force,
        skip: from.skip,
    };
    serde_json::to_value(AnnotationForm {
        version: event.version,
        agent: event.agent.clone(),
        component_class: event.component_class.clone(),
        check_name: event.check_name.clone(),
        is_fatal: event.is_fatal,
        is_healthy: event.is_healthy,
        message: event.message.clone(),
        recommended_action: event.recommended_action,
        error_code: event.error_code.clone(),
        entities_impacted: event
            .entities_impacted
            .iter()
            .map(|entity| EntityForm {
                entity_type: entity.entity_type.clone(),
                entity_value: entity.entity_value.clone(),
            })
            .collect(),
        metadata: event.metadata.clone(),
        generated_timestamp: event.generated_timestamp.map(|time| TimeForm {
            seconds: time.seconds,
            nanos: time.nanos,
        }),
        node_name: event.node_name.clone(),
        quarantine_overrides: event.quarantine_overrides.as_ref().map(overrides),
        drain_overrides: event.drain_overrides.as_ref().map(overrides),
        processing_strategy: event.processing_strategy,
        id: event.id.clone(),
        custom_recommended_action: event.custom_recommended_action.clone(),
    })
    .unwrap_or(Value::Null)
}

/// Reads the annotation's text: an array of events, or a single one (an older form).
/// Blank text is no event.
pub fn parse(text: &str) -> Result<Vec<HealthEvent>, serde_json::Error> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let value: Value = serde_json::from_str(text)?;
    let forms: Vec<AnnotationForm> = match value {
        Value::Array(_) => serde_json::from_value(value)?,
        _ => vec![serde_json::from_value(value)?],
    };
    Ok(forms.into_iter().map(AnnotationForm::into_event).collect())
}

// The signature that serde's `skip_serializing_if` asks for.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

// === impl AnnotationForm ===

impl AnnotationForm {
    fn into_event(self) -> HealthEvent {
        let overrides = |form: OverridesForm| BehaviourOverrides {
            force: form.force,
            skip: form.skip,
        };
        HealthEvent {
            version: self.version,
            agent: self.agent,
            component_class: self.component_class,
            check_name: self.check_name,
            is_fatal: self.is_fatal,
            is_healthy: self.is_healthy,
            message: self.message,
            recommended_action: self.recommended_action,
            error_code: self.error_code,
            entities_impacted: self
                .entities_impacted
                .into_iter()
                .map(|form| Entity {
                    entity_type: form.entity_type,
                    entity_value: form.entity_value,
                })
                .collect(),
            metadata: self.metadata,
            generated_timestamp: self.generated_timestamp.map(|form| prost_types::Timestamp {
                seconds: form.seconds,
                nanos: form.nanos,
            }),
            node_name: self.node_name,
            quarantine_overrides: self.quarantine_overrides.map(overrides),
            drain_overrides: self.drain_overrides.map(overrides),
            processing_strategy: self.processing_strategy,
            id: self.id,
            custom_recommended_action: self.custom_recommended_action,
        }
    }
}
