//! Objects reduced to the fields that policies read, as text: a parsed object of the same content
//! takes some ten times the memory.

use std::collections::BTreeMap;

use policy::{Fields, ObjectExpression, Root};
use serde_json::{Value, json};

use crate::policies::{Kind, ObjectPolicy, Watched};

/// Reduces the objects of a watch.
#[derive(Clone, Debug, PartialEq)]
pub struct Reducer {
    kind: Kind,
    fields: Fields,
}

/// An object as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// `NAMESPACE/NAME`, or the name of an object without a namespace.
    pub key: String,
    /// The reduced object, in JSON.
    pub text: Box<str>,
}

/// Returns what is watched for the policies, with the reducer of each. A kind that is looked up is
/// watched in all namespaces.
pub(crate) fn watches(policies: &[ObjectPolicy]) -> BTreeMap<Watched, Reducer> {
    let mut all: BTreeMap<Watched, Reducer> = BTreeMap::new();
    for policy in policies {
        reducer(&mut all, policy.watched.clone());
        let expressions = [Some(&policy.predicate), policy.association.as_ref()];
        let reads = expressions.into_iter().flatten();
        for (root, fields) in reads.flat_map(ObjectExpression::reads) {
            let watched = match root {
                Root::Resource => policy.watched.clone(),
                Root::Lookup { api_version, kind } => looked_up(api_version, kind),
            };
            reducer(&mut all, watched).fields.merge(fields);
        }
    }
    all
}

/// Returns the watch in which objects of a kind are looked up.
pub(crate) fn looked_up(api_version: &str, kind: &str) -> Watched {
    Watched {
        kind: Kind::new(api_version, kind),
        namespace: None,
    }
}

fn reducer(all: &mut BTreeMap<Watched, Reducer>, watched: Watched) -> &mut Reducer {
    let kind = watched.kind.clone();
    all.entry(watched).or_insert_with(|| Reducer {
        kind,
        fields: Fields::default(),
    })
}

// === impl Reducer ===

impl Reducer {
    /// Returns whether the metadata of the objects is enough.
    pub fn reads_only_metadata(&self) -> bool {
        self.fields.is_only("metadata")
    }

    /// Reduces an object. `None` if it has no name.
    pub fn reduce(&self, object: &str) -> Option<Kept> {
        let mut object: Value = serde_json::from_str(object).ok()?;
        let metadata = object.get_mut("metadata")?.as_object_mut()?;
        metadata.remove("managedFields");
        let name = metadata.get("name")?.as_str()?;
        let namespace = metadata.get("namespace").and_then(Value::as_str);
        let key = match namespace.filter(|namespace| !namespace.is_empty()) {
            Some(namespace) => format!("{namespace}/{name}"),
            None => name.to_owned(),
        };
        let uid = metadata.get("uid").cloned();
        // Objects of a list come without their kind.
        object["apiVersion"] = json!(self.kind.api_version());
        object["kind"] = json!(self.kind.kind);
        let mut kept = self.fields.keep(&object);
        if let Some(uid) = uid {
            kept["metadata"]["uid"] = uid;
        }
        let text = kept.to_string().into_boxed_str();
        Some(Kept { key, text })
    }
}
