//! Deserialisation of a node from text, without the parts that [`NodeView`] drops.
//!
//! Managed fields and the image list make up most of a node's text. They are skipped here, so
//! that no JSON tree is built for them; of the managed fields only who cordoned the node is kept.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value, json};

use super::{NodeView, UNSCHEDULABLE};

/// Part of a node's object, which determines the skipped fields.
#[derive(Clone, Copy)]
enum Part {
    Whole,
    Metadata,
    Status,
}

/// Entry of the managed fields.
#[derive(Deserialize)]
struct Managed {
    #[serde(default)]
    manager: String,
    #[serde(default, rename = "fieldsV1")]
    fields: Fields,
}

#[derive(Default, Deserialize)]
struct Fields {
    #[serde(default, rename = "f:spec")]
    spec: Spec,
}

#[derive(Default, Deserialize)]
struct Spec {
    #[serde(rename = "f:unschedulable")]
    unschedulable: Option<IgnoredAny>,
}

impl<'de> Deserialize<'de> for NodeView {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let object = Part::Whole.deserialize(deserializer)?;
        Self::from_object(object).ok_or_else(|| D::Error::custom("a node without a name"))
    }
}

// === impl Part ===

impl<'de> DeserializeSeed<'de> for Part {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Part {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(field) = fields.next_key::<String>()? {
            let value = match (self, field.as_str()) {
                (Self::Metadata, "managedFields") => owner(&fields.next_value::<Vec<Managed>>()?),
                (Self::Status, "images") => {
                    fields.next_value::<IgnoredAny>()?;
                    continue;
                }
                (Self::Whole, "metadata") => fields.next_value_seed(Self::Metadata)?,
                (Self::Whole, "status") => fields.next_value_seed(Self::Status)?,
                _ => fields.next_value()?,
            };
            object.insert(field, value);
        }
        Ok(Value::Object(object))
    }
}

/// Returns the managed fields without all but the owner of `spec.unschedulable`.
fn owner(managed: &[Managed]) -> Value {
    let owners = (managed.iter()).filter(|one| one.fields.spec.unschedulable.is_some());
    let owners = owners
        .map(|one| json!({"manager": one.manager, "fieldsV1": {"f:spec": {UNSCHEDULABLE: {}}}}));
    owners.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_of_text_is_the_node_of_its_object() {
        let object = json!({
            "metadata": {"name": "n", "labels": {"a": "b"}, "managedFields": [
                {"x": [1, {}], "manager": "kubelet", "fieldsV1": {"f:status": {"f:images": {}}}},
                {"manager": "kubectl-cordon", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}},
            ]},
            "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}], "images": 1, "unschedulable": true},
            "status": {"images": [{"names": ["i"]}], "nodeInfo": {"bootID": "1"}},
        });
        let read: NodeView = serde_json::from_str(&object.to_string()).unwrap();
        assert_eq!(read.cordoned_by.as_deref(), Some("kubectl-cordon"));
        assert_eq!(Some(read), NodeView::from_object(object));
    }

    #[test]
    fn managed_fields_and_images_are_never_built() {
        let text = r#"{"metadata": {"name": "n", "managedFields": [{"a": 1}]},
            "status": {"images": [1], "phase": "x"}}"#;
        let mut deserializer = serde_json::Deserializer::from_str(text);
        let object = Part::Whole.deserialize(&mut deserializer).unwrap();
        let expected =
            json!({"metadata": {"name": "n", "managedFields": []}, "status": {"phase": "x"}});
        assert_eq!(object, expected);
    }

    #[test]
    fn what_is_no_node_is_an_error() {
        for text in [
            "5",
            "null",
            "[]",
            "\"n\"",
            "{}",
            r#"{"metadata": {"name": 7}}"#,
        ] {
            assert!(serde_json::from_str::<NodeView>(text).is_err(), "{text}");
        }
    }
}
