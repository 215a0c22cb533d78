//! The variable `event`, as a CEL rule sees it.
//!
//! NVSentinel evaluates its rules on the event after a JSON round trip in which every
//! field is present: numbers have become doubles, absent overrides and empty lists are
//! `null`, the time is `{seconds, nanos}`. Rules written for it rely on that.

use serde_json::{Map, Value, json};

use crate::{BehaviourOverrides, HealthEvent};

/// Returns the `event` variable of `event`.
pub fn to_value(event: &HealthEvent) -> Value {
    let overrides = |from: Option<&BehaviourOverrides>| match from {
        None => Value::Null,
        Some(from) => json!({"force": from.force, "skip": from.skip}),
    };
    let list = |items: Vec<Value>| {
        if items.is_empty() {
            Value::Null
        } else {
            Value::Array(items)
        }
    };
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    set("version", json!(f64::from(event.version)));
    set("agent", json!(event.agent));
    set("componentClass", json!(event.component_class));
    set("checkName", json!(event.check_name));
    set("isFatal", json!(event.is_fatal));
    set("isHealthy", json!(event.is_healthy));
    set("message", json!(event.message));
    set(
        "recommendedAction",
        json!(f64::from(event.recommended_action)),
    );
    set(
        "errorCode",
        list(event.error_code.iter().map(|code| json!(code)).collect()),
    );
    set(
        "entitiesImpacted",
        list(
            event
                .entities_impacted
                .iter()
                .map(|entity| {
                    json!({"entityType": entity.entity_type, "entityValue": entity.entity_value})
                })
                .collect(),
        ),
    );
    set(
        "metadata",
        if event.metadata.is_empty() {
            Value::Null
        } else {
            json!(event.metadata)
        },
    );
    set(
        "generatedTimestamp",
        event.generated_timestamp.map_or(Value::Null, |time| {
            // Seconds since 1970 are exact in a double until the year 285 million.
            #[allow(clippy::cast_precision_loss)]
            let seconds = time.seconds as f64;
            json!({"seconds": seconds, "nanos": f64::from(time.nanos)})
        }),
    );
    set("nodeName", json!(event.node_name));
    set(
        "quarantineOverrides",
        overrides(event.quarantine_overrides.as_ref()),
    );
    set("drainOverrides", overrides(event.drain_overrides.as_ref()));
    set(
        "processingStrategy",
        json!(f64::from(event.processing_strategy)),
    );
    set("id", json!(event.id));
    set(
        "customRecommendedAction",
        json!(event.custom_recommended_action),
    );
    Value::Object(fields)
}
