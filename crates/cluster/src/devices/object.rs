//! Slices, rules and claims as the API server sends them, with the fields that are read.

use std::collections::BTreeMap;

use contract::keys;
use jiff::Timestamp;
use kube::core::ApiResource;
use model::device::{Claim, DeviceId, DeviceTaint, DeviceTaintRule, RuleSpec, Slice, SliceDevice};
use model::ownership::Maker;
use serde::Deserialize;
use serde_json::{Value, json};

/// Condition of a rule with the progress of evicting its pods.
const EVICTION: &str = "EvictionInProgress";

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    name: String,
    namespace: String,
    resource_version: String,
    creation_timestamp: Option<Timestamp>,
    annotations: BTreeMap<String, String>,
}

/// A `ResourceSlice`, which lists devices of a node.
#[derive(Debug, Deserialize)]
pub(super) struct SliceObject {
    metadata: Metadata,
    spec: SliceSpec,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SliceSpec {
    driver: String,
    pool: Pool,
    node_name: Option<String>,
    #[serde(default)]
    devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Pool {
    name: String,
    generation: i64,
    resource_slice_count: i64,
}

#[derive(Debug, Deserialize)]
struct Device {
    name: String,
    #[serde(default)]
    attributes: BTreeMap<String, Attribute>,
    #[serde(default)]
    taints: Vec<Taint>,
}

/// Value of an attribute; only strings are used here.
#[derive(Debug, Deserialize)]
struct Attribute {
    string: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Taint {
    key: String,
    #[serde(default)]
    value: String,
    effect: String,
}

/// A `DeviceTaintRule` that a gpuwarden has created.
#[derive(Debug, Deserialize)]
pub(super) struct RuleObject {
    metadata: Metadata,
    spec: RuleObjectSpec,
    #[serde(default)]
    status: RuleStatus,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RuleObjectSpec {
    #[serde(default)]
    device_selector: Selected,
    taint: Taint,
}

/// Parts of the name of a device. Each may be absent.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Selected {
    driver: String,
    pool: String,
    device: String,
}

#[derive(Debug, Default, Deserialize)]
struct RuleStatus {
    #[serde(default)]
    conditions: Vec<RuleCondition>,
}

#[derive(Debug, Deserialize)]
struct RuleCondition {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    message: String,
}

/// A `ResourceClaim`, which allocates devices to pods.
#[derive(Debug, Deserialize)]
pub(super) struct ClaimObject {
    metadata: Metadata,
    #[serde(default)]
    status: ClaimStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ClaimStatus {
    allocation: Allocation,
    reserved_for: Vec<Consumer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Allocation {
    devices: Allocated,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Allocated {
    results: Vec<Selected>,
}

#[derive(Debug, Deserialize)]
struct Consumer {
    resource: String,
    name: String,
}

// === impl SliceObject ===

impl SliceObject {
    pub(super) fn name(&self) -> String {
        self.metadata.name.clone()
    }

    pub(super) fn slice(&self) -> Slice {
        Slice {
            driver: self.spec.driver.clone(),
            pool: self.spec.pool.name.clone(),
            generation: self.spec.pool.generation,
            slices: self.spec.pool.resource_slice_count,
            node: self.spec.node_name.clone(),
            devices: self.spec.devices.iter().map(Device::device).collect(),
        }
    }
}

// === impl Device ===

impl Device {
    fn device(&self) -> SliceDevice {
        let (uuid, parent) = (self.attribute("uuid"), self.attribute("parentUUID"));
        let (gpu, mig) = match parent {
            Some(parent) => (Some(parent), uuid),
            None => (uuid, None),
        };
        SliceDevice {
            name: self.name.clone(),
            gpu,
            mig,
            pci: self.attribute("pciBusID"),
            taints: self.taints.iter().map(Taint::taint).collect(),
        }
    }

    /// Returns an attribute by its name without domain.
    fn attribute(&self, name: &str) -> Option<String> {
        let named = |key: &str| key.rsplit('/').next() == Some(name);
        let mut attributes = self.attributes.iter();
        let (_, found) = attributes.find(|(key, _)| named(key))?;
        found.string.clone()
    }
}

// === impl Taint ===

impl Taint {
    /// Converts the taint. An unknown effect becomes the default, which is no effect, as in the
    /// API.
    fn taint(&self) -> DeviceTaint {
        DeviceTaint {
            key: self.key.clone(),
            value: self.value.clone(),
            effect: self.effect.parse().unwrap_or_default(),
        }
    }
}

// === impl RuleObject ===

impl RuleObject {
    pub(super) fn name(&self) -> String {
        self.metadata.name.clone()
    }

    pub(super) fn rule(&self) -> DeviceTaintRule {
        let metadata = &self.metadata;
        let annotation = |key: &str| metadata.annotations.get(key).cloned();
        let mut conditions = self.status.conditions.iter();
        let eviction = conditions.find(|one| one.kind == EVICTION);
        DeviceTaintRule {
            name: metadata.name.clone(),
            resource_version: metadata.resource_version.clone(),
            created_at: metadata.creation_timestamp,
            spec: RuleSpec {
                device: self.spec.device_selector.id(),
                taint: self.spec.taint.taint(),
                node: annotation(keys::RULE_NODE).unwrap_or_default(),
                gpu: annotation(keys::RULE_GPU).unwrap_or_default(),
                by: Maker::from(annotation(keys::RULE_BY).unwrap_or_default()),
                store: annotation(keys::RULE_STORE),
            },
            eviction: eviction.map(|one| one.message.clone()),
        }
    }
}

// === impl Selected ===

impl Selected {
    fn id(&self) -> DeviceId {
        DeviceId {
            driver: self.driver.clone(),
            pool: self.pool.clone(),
            name: self.device.clone(),
        }
    }
}

// === impl ClaimObject ===

impl ClaimObject {
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    pub(super) fn claim(&self) -> Claim {
        let pods = self.status.reserved_for.iter();
        let pods = pods.filter(|one| one.resource == "pods");
        let namespace = &self.metadata.namespace;
        let results = &self.status.allocation.devices.results;
        Claim {
            devices: results.iter().map(Selected::id).collect(),
            pods: pods
                .map(|pod| format!("{namespace}/{}", pod.name))
                .collect(),
        }
    }
}

/// Returns the object of a new rule. It always has all three parts of the device's name: a rule
/// without them selects all devices of the cluster.
pub(super) fn rule(api: &ApiResource, name: &str, spec: &RuleSpec) -> Value {
    let DeviceId {
        driver,
        pool,
        name: device,
    } = &spec.device;
    let mut annotations = json!({
        keys::RULE_NODE: spec.node,
        keys::RULE_GPU: spec.gpu,
        keys::RULE_BY: String::from(spec.by.clone()),
    });
    if let Some(store) = &spec.store {
        annotations[keys::RULE_STORE] = json!(store);
    }
    let mut taint = json!({"key": spec.taint.key, "effect": spec.taint.effect.name()});
    if !spec.taint.value.is_empty() {
        taint["value"] = json!(spec.taint.value);
    }
    json!({
        "apiVersion": api.api_version,
        "kind": api.kind,
        "metadata": {
            "name": name,
            "labels": {keys::MANAGED_BY_LABEL: keys::MANAGED_BY},
            "annotations": annotations,
        },
        "spec": {
            "deviceSelector": {"driver": driver, "pool": pool, "device": device},
            "taint": taint,
        },
    })
}
