//! Variable `event` of a CEL rule.
//!
//! NVSentinel evaluates its rules on the event after a JSON round trip: every field is present,
//! numbers are doubles, absent overrides and empty lists are `null`, the time is `{seconds,
//! nanos}`. Rules written for NVSentinel rely on that.

use serde_json::{Value, json};

use crate::HealthEvent;

/// Returns the `event` variable of `event`.
pub fn to_value(event: &HealthEvent) -> Value {
    let mut fields = super::numbered(event);
    for value in fields.values_mut() {
        match value {
            Value::Array(list) if list.is_empty() => *value = Value::Null,
            Value::Object(inner) if inner.is_empty() => *value = Value::Null,
            // The time of the event.
            Value::Object(inner) => inner.values_mut().for_each(as_double),
            value => as_double(value),
        }
    }
    Value::Object(fields)
}

fn as_double(value: &mut Value) {
    if let Value::Number(number) = value {
        // Seconds since 1970 are exact in a double until the year 285 million.
        *value = json!(number.as_f64());
    }
}
