//! JSON forms of a health event. There are three, because three readers rely on them:
//!
//! - [`to_value`] / [`from_value`]: the public form (command output, API, export,
//!   replay, our own store): proto field names, enumerations by name, RFC 3339 time,
//!   every field present, absent overrides `null`.
//! - [`annotation::to_value`]: the form inside the node annotation
//!   `quarantineHealthEvent`: as Go's `encoding/json` writes the generated struct:
//!   empty fields dropped, enumerations as numbers, time as `{seconds, nanos}`.
//! - [`rule::to_value`]: what a CEL rule sees as `event`: every field present,
//!   numbers as doubles, absent overrides and empty lists `null`.

pub mod annotation;
pub mod rule;

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    BehaviourOverrides, Entity, HealthEvent, action_name, parse_action, parse_strategy,
    strategy_name,
};

/// The reason why a JSON value is not a health event.
#[derive(Debug, thiserror::Error)]
pub enum EventJsonError {
    /// The value is not a JSON object.
    #[error("not a health event: a JSON object is expected")]
    NoObject,
    /// A field has the wrong type.
    #[error("not a health event")]
    Shape(#[source] serde_json::Error),
    /// An enumeration has a name that does not exist (numbers are always accepted).
    #[error(
        "field {field}: {value:?} is no known name; use one of the contract's names or a number"
    )]
    Name {
        /// The field's proto name.
        field: &'static str,
        /// The value of the field.
        value: String,
    },
    /// The timestamp is not RFC 3339, or outside the years 0001 to 9999.
    #[error(
        "field generatedTimestamp: {value:?} is not an RFC 3339 time such as 2026-01-31T10:15:30Z"
    )]
    Time {
        /// The value of the field.
        value: String,
    },
}

/// The public form, field order as in the contract.
#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct PublicForm {
    version: u32,
    agent: String,
    component_class: String,
    check_name: String,
    is_fatal: bool,
    is_healthy: bool,
    message: String,
    recommended_action: NameOrNumber,
    #[serde(deserialize_with = "null_as_default")]
    error_code: Vec<String>,
    #[serde(deserialize_with = "null_as_default")]
    entities_impacted: Vec<EntityForm>,
    #[serde(deserialize_with = "null_as_default")]
    metadata: BTreeMap<String, String>,
    generated_timestamp: Option<String>,
    node_name: String,
    quarantine_overrides: Option<OverridesForm>,
    drain_overrides: Option<OverridesForm>,
    processing_strategy: NameOrNumber,
    id: String,
    custom_recommended_action: String,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum NameOrNumber {
    Number(i32),
    Name(String),
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct EntityForm {
    entity_type: String,
    entity_value: String,
}

#[derive(Serialize, Deserialize, Default, Clone, Copy)]
#[serde(default)]
struct OverridesForm {
    force: bool,
    skip: bool,
}

/// Returns the public JSON form of `event`. Unknown enumeration numbers are written as numbers.
pub fn to_value(event: &HealthEvent) -> Value {
    serde_json::to_value(PublicForm::of(event)).unwrap_or(Value::Null)
}

/// Returns the public JSON form of `event` as one line of text.
pub fn to_string(event: &HealthEvent) -> String {
    serde_json::to_string(&PublicForm::of(event)).unwrap_or_default()
}

/// Reads the public form. Missing fields take their zero value, unknown fields are
/// ignored, enumerations may be names or numbers.
pub fn from_value(value: Value) -> Result<HealthEvent, EventJsonError> {
    if !value.is_object() {
        return Err(EventJsonError::NoObject);
    }
    serde_json::from_value::<PublicForm>(value)
        .map_err(EventJsonError::Shape)?
        .into_event()
}

/// Reads the public form from text; see [`from_value`].
pub fn from_str(text: &str) -> Result<HealthEvent, EventJsonError> {
    // serde would also read a struct from an array.
    if !text.trim_start().starts_with('{') {
        return Err(EventJsonError::NoObject);
    }
    serde_json::from_str::<PublicForm>(text)
        .map_err(EventJsonError::Shape)?
        .into_event()
}

/// Returns a protobuf timestamp as `jiff` time; `None` outside the years 0001 to 9999.
pub fn timestamp(proto: prost_types::Timestamp) -> Option<Timestamp> {
    (0..1_000_000_000)
        .contains(&proto.nanos)
        .then(|| Timestamp::new(proto.seconds, proto.nanos).ok())
        .flatten()
}

/// Returns a `jiff` time as protobuf timestamp.
pub fn proto_timestamp(time: Timestamp) -> prost_types::Timestamp {
    // Before 1970 jiff's fraction is negative; protobuf's never is.
    let (mut seconds, mut nanos) = (time.as_second(), time.subsec_nanosecond());
    if nanos < 0 {
        seconds -= 1;
        nanos += 1_000_000_000;
    }
    prost_types::Timestamp { seconds, nanos }
}

fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

// === impl PublicForm ===

impl PublicForm {
    fn of(event: &HealthEvent) -> Self {
        Self {
            version: event.version,
            agent: event.agent.clone(),
            component_class: event.component_class.clone(),
            check_name: event.check_name.clone(),
            is_fatal: event.is_fatal,
            is_healthy: event.is_healthy,
            message: event.message.clone(),
            recommended_action: NameOrNumber::of(
                event.recommended_action,
                &action_name(event.recommended_action),
            ),
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
            generated_timestamp: event
                .generated_timestamp
                .and_then(timestamp)
                .map(|time| time.to_string()),
            node_name: event.node_name.clone(),
            quarantine_overrides: event.quarantine_overrides.map(OverridesForm::of),
            drain_overrides: event.drain_overrides.map(OverridesForm::of),
            processing_strategy: NameOrNumber::of(
                event.processing_strategy,
                &strategy_name(event.processing_strategy),
            ),
            id: event.id.clone(),
            custom_recommended_action: event.custom_recommended_action.clone(),
        }
    }

    fn into_event(self) -> Result<HealthEvent, EventJsonError> {
        let generated_timestamp = match self.generated_timestamp {
            None => None,
            Some(text) => match text.parse::<Timestamp>() {
                Ok(time) => Some(proto_timestamp(time)),
                Err(_) => return Err(EventJsonError::Time { value: text }),
            },
        };
        Ok(HealthEvent {
            version: self.version,
            agent: self.agent,
            component_class: self.component_class,
            check_name: self.check_name,
            is_fatal: self.is_fatal,
            is_healthy: self.is_healthy,
            message: self.message,
            recommended_action: self
                .recommended_action
                .number("recommendedAction", parse_action)?,
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
            generated_timestamp,
            node_name: self.node_name,
            quarantine_overrides: self.quarantine_overrides.map(OverridesForm::into_overrides),
            drain_overrides: self.drain_overrides.map(OverridesForm::into_overrides),
            processing_strategy: self
                .processing_strategy
                .number("processingStrategy", parse_strategy)?,
            id: self.id,
            custom_recommended_action: self.custom_recommended_action,
        })
    }
}

// === impl NameOrNumber ===

impl Default for NameOrNumber {
    fn default() -> Self {
        Self::Number(0)
    }
}

impl NameOrNumber {
    fn of(number: i32, name: &str) -> Self {
        if name.starts_with(|first: char| first.is_ascii_alphabetic()) {
            Self::Name(name.to_owned())
        } else {
            Self::Number(number)
        }
    }

    fn number(
        self,
        field: &'static str,
        parse: impl Fn(&str) -> Option<i32>,
    ) -> Result<i32, EventJsonError> {
        match self {
            Self::Number(number) => Ok(number),
            Self::Name(value) => parse(&value).ok_or(EventJsonError::Name { field, value }),
        }
    }
}

// === impl OverridesForm ===

impl OverridesForm {
    fn of(overrides: BehaviourOverrides) -> Self {
        Self {
            force: overrides.force,
            skip: overrides.skip,
        }
    }

    fn into_overrides(self) -> BehaviourOverrides {
        BehaviourOverrides {
            force: self.force,
            skip: self.skip,
        }
    }
}

/// The public JSON form of an event inside something else, for `#[serde(with)]`.
pub mod public_form {
    use super::{HealthEvent, from_value, to_value};
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer, de::Error as _};

    /// Writes the public form.
    pub fn serialize<S: Serializer>(event: &HealthEvent, to: S) -> Result<S::Ok, S::Error> {
        to_value(event).serialize(to)
    }

    /// Reads the public form.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<HealthEvent, D::Error> {
        from_value(serde_json::Value::deserialize(from)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests;
