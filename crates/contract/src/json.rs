//! JSON forms of a health event. Each has a reader that relies on it:
//!
//! - [`to_value`] / [`from_value`]: the public form (command output, API, export, replay, the
//!   store): proto field names, enumerations by name, RFC 3339 time, every field present,
//!   absent overrides `null`.
//! - [`annotation::to_value`]: the form inside the node annotation `quarantineHealthEvent`, as
//!   Go's `encoding/json` writes the generated struct: empty fields dropped, enumerations as
//!   numbers, time as `{seconds, nanos}`.
//! - [`stored::from_value`]: the forms of an event in `NVSentinel`'s logs and store. Read only.
//! - [`rule::to_value`]: the variable `event` of a CEL rule: every field present, numbers as
//!   doubles, absent overrides and empty lists `null`.
//!
//! The generated message carries serde's attributes for the public form, and the other forms
//! are derived from it, so that a new field of the contract is in all of them.

pub mod annotation;
pub mod rule;
pub mod stored;

use jiff::Timestamp;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serializer};
use serde_json::{Map, Value, json};

use crate::{HealthEvent, ProcessingStrategy, RecommendedAction, parse_action, parse_strategy};

/// Reason why a JSON value is not a health event.
#[derive(Debug, thiserror::Error)]
pub enum EventJsonError {
    /// The value is not a JSON object.
    #[error("not a health event: a JSON object is expected")]
    NoObject,
    /// A field has the wrong type, an unknown name, or an invalid time.
    #[error(transparent)]
    Field(#[from] serde_json::Error),
}

/// Returns the public JSON form of `event`. Unknown enumeration numbers stay numbers.
pub fn to_value(event: &HealthEvent) -> Value {
    serde_json::to_value(event).unwrap_or(Value::Null)
}

/// Returns the public JSON form of `event` as one line of text, with fields in the order of the
/// contract.
pub fn to_string(event: &HealthEvent) -> String {
    serde_json::to_string(event).unwrap_or_default()
}

/// Reads the public form. Missing fields get their zero value, unknown fields are ignored,
/// enumerations may be names or numbers.
pub fn from_value(value: Value) -> Result<HealthEvent, EventJsonError> {
    if !value.is_object() {
        return Err(EventJsonError::NoObject);
    }
    Ok(serde_json::from_value(value)?)
}

/// Reads the public form from text; see [`from_value`].
pub fn from_str(text: &str) -> Result<HealthEvent, EventJsonError> {
    // serde would also read a struct from an array.
    if !text.trim_start().starts_with('{') {
        return Err(EventJsonError::NoObject);
    }
    Ok(serde_json::from_str(text)?)
}

/// Returns a protobuf timestamp as `jiff` time; `None` outside the years 0001 to 9999.
pub fn timestamp(proto: prost_types::Timestamp) -> Option<Timestamp> {
    (0..1_000_000_000)
        .contains(&proto.nanos)
        .then(|| Timestamp::new(proto.seconds, proto.nanos).ok())
        .flatten()
}

/// Returns a `jiff` time as a protobuf timestamp.
pub fn proto_timestamp(time: Timestamp) -> prost_types::Timestamp {
    // Before 1970 jiff's fraction is negative; protobuf's never is.
    let (mut seconds, mut nanos) = (time.as_second(), time.subsec_nanosecond());
    if nanos < 0 {
        seconds -= 1;
        nanos += 1_000_000_000;
    }
    prost_types::Timestamp { seconds, nanos }
}

/// Returns the fields of the public form with enumerations as numbers and the time as
/// `{seconds, nanos}`, for the two derived forms.
fn numbered(event: &HealthEvent) -> Map<String, Value> {
    let Value::Object(mut fields) = to_value(event) else {
        return Map::new();
    };
    let time = event.generated_timestamp;
    let time = time.map(|time| json!({"seconds": time.seconds, "nanos": time.nanos}));
    for (field, value) in [
        ("recommendedAction", json!(event.recommended_action)),
        ("processingStrategy", json!(event.processing_strategy)),
        ("generatedTimestamp", json!(time)),
    ] {
        fields.insert(field.to_owned(), value);
    }
    fields
}

/// Returns true if Go treats the value as empty.
fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_i64() == Some(0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

/// Reads a field that may be `null` for its zero value.
pub(crate) fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

// The signatures of this module and the next two are required by serde's `with`.
#[allow(clippy::trivially_copy_pass_by_ref)]
pub(crate) mod action {
    use super::{
        Deserializer, RecommendedAction, Serializer, parse_action, read_number, write_name,
    };

    pub(crate) fn serialize<S: Serializer>(number: &i32, to: S) -> Result<S::Ok, S::Error> {
        let action = RecommendedAction::try_from(*number).ok();
        write_name(*number, action.map(|action| action.as_str_name()), to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
        read_number(from, "recommendedAction", parse_action)
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)]
pub(crate) mod strategy {
    use super::{
        Deserializer, ProcessingStrategy, Serializer, parse_strategy, read_number, write_name,
    };

    pub(crate) fn serialize<S: Serializer>(number: &i32, to: S) -> Result<S::Ok, S::Error> {
        let strategy = ProcessingStrategy::try_from(*number).ok();
        write_name(*number, strategy.map(|strategy| strategy.as_str_name()), to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
        read_number(from, "processingStrategy", parse_strategy)
    }
}

#[allow(clippy::ref_option)]
pub(crate) mod time {
    use super::{
        Deserialize as _, Deserializer, Serializer, Timestamp, proto_timestamp, timestamp,
    };
    use serde::de::Error as _;

    pub(crate) fn serialize<S: Serializer>(
        time: &Option<prost_types::Timestamp>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match time.and_then(timestamp) {
            Some(time) => to.collect_str(&time),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<prost_types::Timestamp>, D::Error> {
        let read = |text: String| match text.parse::<Timestamp>() {
            Ok(time) => Ok(proto_timestamp(time)),
            Err(_) => Err(D::Error::custom(format!(
                "field generatedTimestamp: {text:?} is not an RFC 3339 time such as \
                 2026-01-31T10:15:30Z"
            ))),
        };
        Option::<String>::deserialize(from)?.map(read).transpose()
    }
}

/// Writes the name of an open enumeration's number, or the number if it has none.
fn write_name<S: Serializer>(number: i32, name: Option<&str>, to: S) -> Result<S::Ok, S::Error> {
    match name {
        Some(name) => to.serialize_str(name),
        None => to.serialize_i32(number),
    }
}

/// Reads an open enumeration's number from its name or its digits.
fn read_number<'de, D: Deserializer<'de>>(
    from: D,
    field: &str,
    parse: impl Fn(&str) -> Option<i32>,
) -> Result<i32, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum NameOrNumber {
        Number(i32),
        Name(String),
    }
    match NameOrNumber::deserialize(from)? {
        NameOrNumber::Number(number) => Ok(number),
        NameOrNumber::Name(name) => parse(&name).ok_or_else(|| {
            D::Error::custom(format!(
                "field {field}: {name:?} is no known name; use one of the contract's names or a \
                 number"
            ))
        }),
    }
}

#[cfg(test)]
mod tests;
