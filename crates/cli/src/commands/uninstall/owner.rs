//! Last writer of a field of an object, from the API server's record
//! (`metadata.managedFields`).
//!
//! gpuwarden and NVSentinel write the same names, so a name does not identify the writer. The
//! record is incomplete: the API server merges the entries of all but ten programs.

use serde_json::Value;

/// Name of gpuwarden in the record: that of its user agent.
const OURS: &str = "gpuwarden";
/// Entry of the programs whose own entries were merged.
const MERGED: &str = "ancient-changes";

/// Last writer of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Ours,
    Other,
    /// No writer in the record.
    Unknown,
}

/// Returns the last writer of a field, by its path in the form of the record, such as
/// `["f:metadata", "f:labels", "f:a"]`.
pub(super) fn owner_of(object: &Value, path: &[&str]) -> Owner {
    let mut owner = Owner::Unknown;
    for entry in entries(object) {
        let mut fields = Some(&entry["fieldsV1"]);
        for part in path {
            fields = fields.and_then(|fields| fields.get(part));
        }
        match entry["manager"].as_str() {
            Some(OURS) if fields.is_some() => return Owner::Ours,
            Some(manager) if manager != MERGED && fields.is_some() => owner = Owner::Other,
            _ => {}
        }
    }
    owner
}

/// Returns the last writer of a label (`f:labels`) or annotation (`f:annotations`).
pub(super) fn owner_of_key(object: &Value, map: &str, key: &str) -> Owner {
    owner_of(object, &["f:metadata", map, &format!("f:{key}")])
}

/// Returns whether gpuwarden has written a field that is still on the object.
pub(super) fn is_written(object: &Value) -> bool {
    entries(object).any(|entry| entry["manager"] == OURS)
}

/// Returns whether a program other than gpuwarden and kubectl has written to the object.
pub(super) fn is_shared(object: &Value) -> bool {
    let by_hand = |manager: &str| manager.starts_with("kubectl");
    entries(object).any(|entry| {
        let manager = entry["manager"].as_str().unwrap_or_default();
        manager != OURS && !by_hand(manager)
    })
}

fn entries(object: &Value) -> impl Iterator<Item = &Value> {
    let list = object.pointer("/metadata/managedFields");
    list.and_then(Value::as_array).into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_writer_of_a_field_is_the_one_that_the_record_names() {
        let fields = |keys: &[&str]| {
            let keys = keys.iter().map(|key| (format!("f:{key}"), json!({})));
            json!({"f:metadata": {"f:labels": keys.collect::<serde_json::Map<_, _>>()}})
        };
        let object = json!({"metadata": {"managedFields": [
            {"manager": "kubectl-label", "fieldsV1": fields(&["theirs", "both"])},
            {"manager": "ancient-changes", "fieldsV1": fields(&["old"])},
            {"manager": "gpuwarden", "fieldsV1": fields(&["ours", "both"])},
        ]}});
        for (key, owner) in [
            ("theirs", Owner::Other),
            ("ours", Owner::Ours),
            ("both", Owner::Ours),
            ("old", Owner::Unknown),
            ("new", Owner::Unknown),
        ] {
            assert_eq!(owner_of_key(&object, "f:labels", key), owner, "{key}");
        }
        assert!(is_written(&object) && is_shared(&object));
        assert!(!is_written(&json!({})) && !is_shared(&json!({})));
        let by_hand = json!({"metadata": {"managedFields": [
            {"manager": "kubectl-edit"}, {"manager": "gpuwarden"},
        ]}});
        assert!(!is_shared(&by_hand));
    }
}
