//! Judges one object by one policy: a fault of a node, none, or undetermined.
//!
//! An error, a missing status and a status of `Unknown` determine nothing: what cannot be seen is
//! neither broken nor healthy again. A status of `Unknown` is tried as `True` and as `False`; if
//! both lead to the same answer, the answer does not depend on it. An expression that names
//! `Unknown` decides for itself.

use std::cell::Cell;
use std::collections::BTreeSet;

use jiff::Timestamp;
use policy::{Evaluated, LookedUp, ObjectExpression, ObjectName, Root};
use serde_json::{Value, json};

use crate::policies::ObjectPolicy;

/// Answer about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A fault of the node of this name.
    Fault(String),
    /// No fault.
    Fine,
    /// Not known, for this reason.
    Undetermined(String),
}

/// An answer, and what it rests on beside the object.
#[derive(Clone, Debug)]
pub(crate) struct Judged {
    pub(crate) verdict: Verdict,
    /// UID of the object.
    pub(crate) uid: String,
    /// True if the answer may change with time.
    pub(crate) reads_time: bool,
    /// Objects that were looked up.
    pub(crate) looked_up: BTreeSet<ObjectName>,
}

/// Returns other objects.
pub(crate) type Lookup<'a> = &'a dyn Fn(&ObjectName) -> LookedUp;

/// Judges an object in its reduced form, whose key is `key`.
pub(crate) fn judge(
    policy: &ObjectPolicy,
    key: &str,
    text: &str,
    now: Timestamp,
    lookup: Lookup<'_>,
) -> Judged {
    let object: Value = serde_json::from_str(text).unwrap_or_default();
    let uid = object.pointer("/metadata/uid").and_then(Value::as_str);
    let mut judged = Judged {
        verdict: Verdict::Fine,
        uid: uid.unwrap_or_default().to_owned(),
        reads_time: false,
        looked_up: BTreeSet::new(),
    };
    judged.verdict = if lacks_status(&policy.predicate, &object) {
        Verdict::Undetermined("it has no status".to_owned())
    } else {
        match judged.ask(&policy.predicate, &object, now, lookup) {
            Ok(Value::Bool(true)) => judged.node_of(policy, key, &object, now, lookup),
            Ok(_) => Verdict::Fine,
            Err(why) => Verdict::Undetermined(why),
        }
    };
    judged
}

// === impl Judged ===

impl Judged {
    /// Returns the reason why nothing is determined.
    pub(crate) fn undetermined(&self) -> Option<&str> {
        match &self.verdict {
            Verdict::Undetermined(why) => Some(why),
            _ => None,
        }
    }

    fn node_of(
        &mut self,
        policy: &ObjectPolicy,
        key: &str,
        object: &Value,
        now: Timestamp,
        lookup: Lookup<'_>,
    ) -> Verdict {
        let Some(association) = &policy.association else {
            let name = key.rsplit('/').next().unwrap_or(key);
            return Verdict::Fault(name.to_owned());
        };
        match self.ask(association, object, now, lookup) {
            Ok(Value::String(node)) if !node.is_empty() => Verdict::Fault(node),
            // An object that is on no node is the fault of none.
            Ok(_) => Verdict::Fine,
            Err(why) => Verdict::Undetermined(format!("its node is not known: {why}")),
        }
    }

    /// Evaluates an expression, also as if a status of `Unknown` were another one.
    fn ask(
        &mut self,
        expression: &ObjectExpression,
        object: &Value,
        now: Timestamp,
        lookup: Lookup<'_>,
    ) -> Result<Value, String> {
        let is_unknown = Cell::new(has_unknown(object));
        let noting = |name: &ObjectName| {
            let found = lookup(name);
            if let LookedUp::Found(other) = &found {
                is_unknown.set(is_unknown.get() || has_unknown(other));
            }
            found
        };
        let value = self.note(expression.evaluate(object, now, &noting));
        if !is_unknown.get() || expression.names_unknown() {
            return value;
        }
        let [one, other] = [("True", "Running"), ("False", "Failed")].map(|(status, phase)| {
            let taken = |name: &ObjectName| match lookup(name) {
                LookedUp::Found(other) => LookedUp::Found(taken_for(other, status, phase)),
                unseen => unseen,
            };
            let object = taken_for(object.clone(), status, phase);
            self.note(expression.evaluate(&object, now, &taken))
        });
        if one.is_ok() && one == other {
            return one;
        }
        Err("a status that it depends on is Unknown".to_owned())
    }

    fn note(&mut self, evaluated: Evaluated) -> Result<Value, String> {
        self.reads_time |= evaluated.read_time;
        self.looked_up.extend(evaluated.looked_up);
        evaluated.value
    }
}

/// Returns whether the predicate reads a status that is not there.
fn lacks_status(predicate: &ObjectExpression, object: &Value) -> bool {
    let reads = predicate.reads().get(&Root::Resource);
    let reads = reads.is_some_and(|fields| fields.names().any(|name| name == "status"));
    let status = object.get("status").and_then(Value::as_object);
    reads && status.is_none_or(serde_json::Map::is_empty)
}

fn conditions(object: &Value) -> impl Iterator<Item = &Value> {
    let conditions = object.pointer("/status/conditions");
    conditions.and_then(Value::as_array).into_iter().flatten()
}

fn has_unknown(object: &Value) -> bool {
    object.pointer("/status/phase") == Some(&json!("Unknown"))
        || conditions(object).any(|one| one["status"] == "Unknown")
}

/// Returns an object whose unknown statuses are replaced.
fn taken_for(mut object: Value, status: &str, phase: &str) -> Value {
    if let Some(at) = object.pointer_mut("/status/phase")
        && *at == "Unknown"
    {
        *at = json!(phase);
    }
    let all = object.pointer_mut("/status/conditions");
    for one in all.and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(at) = one.get_mut("status")
            && *at == "Unknown"
        {
            *at = json!(status);
        }
    }
    object
}
