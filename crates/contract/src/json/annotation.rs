//! Form of an event in the node annotation `quarantineHealthEvent`.
//!
//! The form of Go's `encoding/json` for the generated struct: camelCase names, zero values
//! dropped, enumerations as integers, `generatedTimestamp` as `{seconds, nanos}`. NVSentinel's
//! drainer and remediation read it.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{EventJsonError, is_zero};
use crate::HealthEvent;

/// Form of `generatedTimestamp` in this annotation.
#[derive(Deserialize, Default)]
#[serde(default)]
struct TimeForm {
    seconds: i64,
    nanos: i32,
}

/// Returns the annotation form of `event`.
pub fn to_value(event: &HealthEvent) -> Value {
    let drop_zeros = |fields: &mut Map<String, Value>| fields.retain(|_, value| !is_zero(value));
    let mut fields = super::numbered(event);
    drop_zeros(&mut fields);
    for (name, value) in &mut fields {
        match value {
            // Entries of a map stay, even if their value is empty.
            Value::Object(inner) if name != "metadata" => drop_zeros(inner),
            Value::Array(list) => {
                (list.iter_mut().filter_map(Value::as_object_mut)).for_each(drop_zeros);
            }
            _ => {}
        }
    }
    Value::Object(fields)
}

/// Reads the annotation's text: an array of events, or a single event (an older form). Blank
/// text holds no event.
pub fn parse(text: &str) -> Result<Vec<HealthEvent>, EventJsonError> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let events = match serde_json::from_str(text)? {
        Value::Array(events) => events,
        event => vec![event],
    };
    events.into_iter().map(from_value).collect()
}

pub(super) fn from_value(mut value: Value) -> Result<HealthEvent, EventJsonError> {
    let time = value.get_mut("generatedTimestamp").map(Value::take);
    let time: Option<TimeForm> = serde_json::from_value(time.unwrap_or_default())?;
    let mut event = super::from_value(value)?;
    event.generated_timestamp = time.map(|time| prost_types::Timestamp {
        seconds: time.seconds,
        nanos: time.nanos,
    });
    Ok(event)
}
