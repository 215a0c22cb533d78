//! Forms of a health event written by `NVSentinel`: in logs as Go writes it, with numbers for
//! enumerations and the time as `{seconds, nanos}`; in the store, where `MongoDB` has all keys
//! in lower case and may have numbers as objects, `{"$numberLong": "79"}`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::{EventJsonError, annotation, to_value};
use crate::{Entity, HealthEvent};

/// Keys of the event in a record of the store.
const KEYS: [&str; 2] = ["healthevent", "healthEvent"];

/// Removes the event from a record of the store and returns it; `None` if `record` is not such
/// a record.
pub fn take_event(record: &mut Value) -> Option<Value> {
    let key = KEYS
        .iter()
        .find(|key| record.get(key).is_some_and(Value::is_object))?;
    record.get_mut(key).map(Value::take)
}

/// Reads any of these forms, and the public form.
pub fn from_value(value: Value) -> Result<HealthEvent, EventJsonError> {
    let Value::Object(fields) = plain(value) else {
        return Err(EventJsonError::NoObject);
    };
    let names = names();
    let mut fields = renamed(fields, &names);
    if let Some(Value::Array(entities)) = fields.get_mut("entitiesImpacted") {
        for entity in entities.iter_mut().filter_map(Value::as_object_mut) {
            *entity = renamed(std::mem::take(entity), &names);
        }
    }
    let has_parts = fields
        .get("generatedTimestamp")
        .is_some_and(Value::is_object);
    let value = Value::Object(fields);
    if has_parts {
        annotation::from_value(value)
    } else {
        super::from_value(value)
    }
}

/// Returns the field names of an event and of its entities, by their lower-case form.
fn names() -> BTreeMap<String, String> {
    let event = to_value(&HealthEvent {
        entities_impacted: vec![Entity::default()],
        ..HealthEvent::default()
    });
    let entity = event.pointer("/entitiesImpacted/0").cloned();
    let objects = [Some(event), entity].into_iter().flatten();
    let keys = objects.filter_map(|object| match object {
        Value::Object(fields) => Some(fields.into_iter().map(|(name, _)| name)),
        _ => None,
    });
    keys.flatten()
        .map(|name| (name.to_lowercase(), name))
        .collect()
}

/// Returns fields under their proper names, if they were in lower case.
fn renamed(fields: Map<String, Value>, names: &BTreeMap<String, String>) -> Map<String, Value> {
    let name = |key: String| names.get(&key).cloned().unwrap_or(key);
    fields
        .into_iter()
        .map(|(key, value)| (name(key), value))
        .collect()
}

/// Returns a value with numbers in place of number objects.
fn plain(value: Value) -> Value {
    match value {
        Value::Array(list) => list.into_iter().map(plain).collect(),
        Value::Object(fields) => match number(&fields) {
            Some(number) => number.into(),
            None => fields
                .into_iter()
                .map(|(key, value)| (key, plain(value)))
                .collect(),
        },
        other => other,
    }
}

/// Reads a number object.
fn number(fields: &Map<String, Value>) -> Option<i64> {
    let key = |key: &&str| fields.len() == 1 && fields.contains_key(*key);
    let key = ["$numberLong", "$numberInt"]
        .into_iter()
        .find(|one| key(one))?;
    fields.get(key)?.as_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_nvsentinel_writes_is_the_event_that_it_was() {
        let event = HealthEvent {
            version: 1,
            agent: "syslog-health-monitor".to_owned(),
            component_class: "GPU".to_owned(),
            check_name: "SysLogsXIDError".to_owned(),
            is_fatal: true,
            recommended_action: 24,
            error_code: vec!["95".to_owned()],
            entities_impacted: vec![Entity {
                entity_type: "PCI".to_owned(),
                entity_value: "0000:b3:00".to_owned(),
            }],
            // Keys of metadata are the sender's and stay unchanged.
            metadata: [("nodename".to_owned(), "x".to_owned())].into(),
            generated_timestamp: Some(prost_types::Timestamp {
                seconds: 1_790_000_000,
                nanos: 5,
            }),
            node_name: "gpu-a".to_owned(),
            processing_strategy: 1,
            ..HealthEvent::default()
        };
        assert_eq!(from_value(annotation::to_value(&event)).unwrap(), event);
        assert_eq!(from_value(to_value(&event)).unwrap(), event);
        let long = |number: i64| json!({"$numberLong": number.to_string()});
        let mut record = json!({
            "_id": {"$oid": "66f0c0ffee0000000000abcd"},
            "healthevent": {
                "version": long(1), "agent": "syslog-health-monitor", "componentclass": "GPU",
                "checkname": "SysLogsXIDError", "isfatal": true, "ishealthy": false, "message": "",
                "recommendedaction": {"$numberInt": "24"}, "errorcode": ["95"],
                "entitiesimpacted": [{"entitytype": "PCI", "entityvalue": "0000:b3:00"}],
                "metadata": {"nodename": "x"}, "quarantineoverrides": null, "drainoverrides": null,
                "generatedtimestamp": {"seconds": long(1_790_000_000), "nanos": 5},
                "nodename": "gpu-a", "processingstrategy": 1, "id": "", "customrecommendedaction": "",
            },
            "healtheventstatus": {"nodequarantined": "Quarantined"},
        });
        let taken = take_event(&mut record).unwrap();
        assert_eq!(from_value(taken).unwrap(), event);
        assert!(take_event(&mut to_value(&event)).is_none());
        assert!(from_value(json!([])).is_err());
        assert!(from_value(json!({"nodename": "a", "generatedtimestamp": "soon"})).is_err());
    }
}
