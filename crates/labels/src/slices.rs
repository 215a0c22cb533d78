//! The `ResourceSlice`s of each node. Of a slice only the fields are kept that expressions name:
//! a slice describes up to 128 devices, each with dozens of attributes.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// The slices of all nodes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slices {
    slices: BTreeMap<String, Slice>,
    /// Names of the slices of each node.
    of_node: BTreeMap<String, BTreeSet<String>>,
}

#[derive(Clone, Debug)]
struct Slice {
    node: String,
    driver: String,
    pool: String,
    generation: i64,
    /// Number of slices of the pool in this generation.
    slices: i64,
    /// Fields of the object that expressions name, as JSON.
    text: Box<str>,
}

/// Removes the fields whose names are not part of `text`.
fn prune(value: &mut Value, text: &str) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, _| text.contains(name.as_str()));
            fields.values_mut().for_each(|value| prune(value, text));
        }
        Value::Array(list) => list.iter_mut().for_each(|value| prune(value, text)),
        _ => {}
    }
}

// === impl Slices ===

impl Slices {
    /// Records the current state of a slice; `None` if it is gone. `text` names the fields that
    /// are kept. Returns the affected nodes.
    pub(crate) fn set(&mut self, name: &str, object: Option<&Value>, text: &str) -> Vec<String> {
        let before = self.slices.remove(name).map(|slice| slice.node);
        if let Some(node) = &before
            && let Some(names) = self.of_node.get_mut(node)
        {
            names.remove(name);
            if names.is_empty() {
                self.of_node.remove(node);
            }
        }
        let slice = object.and_then(|object| Slice::read(object, text));
        let after = slice.as_ref().map(|slice| slice.node.clone());
        if let Some(slice) = slice {
            let names = self.of_node.entry(slice.node.clone()).or_default();
            names.insert(name.to_owned());
            self.slices.insert(name.to_owned(), slice);
        }
        before.into_iter().chain(after).collect()
    }

    /// Returns the slices of a node, or those of one driver: of each pool those of the newest
    /// complete generation. `None` if there are none, or if a pool has no complete generation:
    /// a driver publishes its slices one by one.
    pub(crate) fn of_node(&self, node: &str, driver: Option<&str>) -> Option<Vec<Value>> {
        let names = self.of_node.get(node)?;
        let mut pools: BTreeMap<_, BTreeMap<i64, Vec<&Slice>>> = BTreeMap::new();
        for slice in names.iter().filter_map(|name| self.slices.get(name)) {
            if driver.is_none_or(|driver| slice.driver == driver) {
                let pool = pools.entry((&slice.driver, &slice.pool)).or_default();
                pool.entry(slice.generation).or_default().push(slice);
            }
        }
        let mut found = Vec::new();
        for generations in pools.values() {
            let is_whole = |slices: &&Vec<&Slice>| {
                let wanted = slices.first().map_or(1, |slice| slice.slices);
                usize::try_from(wanted).is_ok_and(|wanted| slices.len() >= wanted)
            };
            let newest = generations.values().rev().find(is_whole)?;
            // The text was written from a value, so it can be read.
            found.extend(
                newest
                    .iter()
                    .filter_map(|one| serde_json::from_str(&one.text).ok()),
            );
        }
        (!found.is_empty()).then_some(found)
    }
}

// === impl Slice ===

impl Slice {
    /// Reads an object; `None` for one that is not about one node.
    fn read(object: &Value, text: &str) -> Option<Self> {
        let spec = &object["spec"];
        let (node, pool) = (spec["nodeName"].as_str()?, &spec["pool"]);
        let mut kept = object.clone();
        prune(&mut kept, text);
        Some(Self {
            node: node.to_owned(),
            driver: spec["driver"].as_str()?.to_owned(),
            pool: pool["name"].as_str()?.to_owned(),
            generation: pool["generation"].as_i64()?,
            slices: pool["resourceSliceCount"].as_i64()?,
            text: kept.to_string().into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TEXT: &str = "resourceSlices.map(s, s.spec.devices.map(d, d.name))";

    fn slice(pool: &str, generation: i64, of: i64, device: &str) -> Value {
        json!({
            "metadata": {"name": "s", "uid": "u"},
            "spec": {
                "driver": "gpu.nvidia.com", "nodeName": "n",
                "pool": {"name": pool, "generation": generation, "resourceSliceCount": of},
                "devices": [{"name": device, "attributes": {"uuid": {"string": "GPU-1"}}}],
            },
        })
    }

    fn devices(slices: &Slices, driver: Option<&str>) -> Option<String> {
        let name = |slice: &Value| {
            slice["spec"]["devices"][0]["name"]
                .as_str()
                .map(str::to_owned)
        };
        let found = slices.of_node("n", driver)?;
        Some(found.iter().filter_map(name).collect())
    }

    #[test]
    fn the_newest_complete_generation_of_each_pool_counts() {
        let mut slices = Slices::default();
        let mut set = |name: &str, object: Option<Value>| {
            let nodes = slices.set(name, object.as_ref(), TEXT);
            (nodes.len(), devices(&slices, None))
        };
        let some = |devices: &str| Some(devices.to_owned());
        assert_eq!(
            set("a", Some(slice("p", 1, 2, "a"))),
            (1, None),
            "one of two"
        );
        assert_eq!(set("b", Some(slice("p", 1, 2, "b"))), (2 - 1, some("ab")));
        // The next generation arrives slice by slice, in objects of their own or the same ones.
        assert_eq!(set("c", Some(slice("p", 2, 2, "c"))).1, some("ab"));
        assert_eq!(set("d", Some(slice("p", 2, 2, "d"))).1, some("cd"));
        assert_eq!(set("c", Some(slice("p", 3, 1, "e"))), (2, some("e")));
        assert_eq!(set("c", None).1, some("ab"));
        assert_eq!(set("a", None).1, None, "neither generation is complete");
        assert_eq!(set("a", Some(slice("p", 1, 2, "a"))).1, some("ab"));
        // One pool that is not complete: the devices of the node are not known.
        assert_eq!(set("x", Some(slice("q", 1, 2, "x"))).1, None);
        assert_eq!(set("y", Some(slice("q", 1, 2, "y"))).1, some("abxy"));
        assert_eq!(devices(&slices, Some("gpu.nvidia.com")), some("abxy"));
        assert_eq!(devices(&slices, Some("other")), None);
        assert_eq!(slices.of_node("m", None), None);
    }

    #[test]
    fn fields_that_no_expression_names_are_not_kept() {
        let mut slices = Slices::default();
        slices.set("a", Some(&slice("p", 1, 1, "a")), TEXT);
        let kept = json!([{"spec": {"devices": [{"name": "a"}]}}]);
        assert_eq!(json!(slices.of_node("n", None)), kept);
        // A slice of a device that any node can use belongs to none.
        let mut object = slice("p", 1, 1, "b");
        object["spec"]["nodeName"] = Value::Null;
        assert_eq!(slices.set("a", Some(&object), TEXT), ["n"]);
        assert!(slices.slices.is_empty() && slices.of_node.is_empty());
    }
}
