//! Single devices of a node, as dynamic resource allocation (DRA) names them, and the taints
//! that keep work off them.
//!
//! A driver publishes its devices in `ResourceSlice`s; [`Inventory`] assembles them. A
//! `DeviceTaintRule` puts one taint on one device; slices of a driver are never edited.
//! `policy::assess` decides on the taints of a device, and the device-taint stage of `fleet` on
//! changes of the rules.

mod inventory;
#[cfg(any(test, feature = "test-util"))]
pub mod test_util;

use std::fmt;
use std::str::FromStr;

use contract::keys;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::ownership::Maker;

pub use inventory::{Inventory, NodeDevices};

/// Driver whose devices are tainted, and domain of the taints' keys.
pub const GPU_DRIVER: &str = keys::GPU_DRIVER;
/// Most taints of one device that the API accepts.
pub const MAX_DEVICE_TAINTS: usize = 16;

// A device has at most one taint of each dimension.
const _: () = assert!(Dimension::ALL.len() <= MAX_DEVICE_TAINTS);

/// Identity of a device in the API.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceId {
    /// Driver that publishes the device.
    pub driver: String,
    /// Pool that contains the device.
    pub pool: String,
    /// Name of the device in its pool.
    pub name: String,
}

/// Effect of a device taint, weakest first.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum TaintEffect {
    /// Informational: keeps no work off the device.
    #[default]
    None,
    /// No new pod is placed on the device.
    NoSchedule,
    /// No new pod is placed on the device, and pods that use it are deleted.
    NoExecute,
}

/// A part of a device's health that has its own taint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dimension {
    /// The driver reported an XID.
    Xid,
    /// The GPU no longer answers.
    GpuLost,
    /// The health of the GPU cannot be determined.
    Unmonitored,
    /// The memory of the GPU is damaged.
    Memory,
    /// A link from the GPU to another GPU or to a switch is damaged.
    Nvlink,
    /// The GPU is too hot.
    Thermal,
}

/// Taint of a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceTaint {
    /// Key: in the form of a label's key.
    pub key: String,
    /// Value: in the form of a label's value, or empty.
    pub value: String,
    /// Effect of the taint on pods.
    pub effect: TaintEffect,
}

/// The parts of a `ResourceSlice` that gpuwarden uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slice {
    /// Driver that publishes the slice.
    pub driver: String,
    /// Pool that the slice is part of.
    pub pool: String,
    /// Generation of the pool.
    pub generation: i64,
    /// Number of slices of the pool in this generation.
    pub slices: i64,
    /// Node of the listed devices. `None` if the slice is not bound to one node.
    pub node: Option<String>,
    /// Devices listed in the slice.
    pub devices: Vec<SliceDevice>,
}

/// A device in a [`Slice`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SliceDevice {
    /// Name of the device in its pool.
    pub name: String,
    /// UUID of the GPU. For a MIG device, of its parent GPU.
    pub gpu: Option<String>,
    /// UUID of the MIG device. `None` for a whole GPU.
    pub mig: Option<String>,
    /// PCI address of the GPU.
    pub pci: Option<String>,
    /// Taints that the driver itself publishes.
    pub taints: Vec<DeviceTaint>,
}

/// A `DeviceTaintRule` made by a gpuwarden.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceTaintRule {
    /// Name of the object.
    pub name: String,
    /// `resourceVersion` of this state of the object.
    pub resource_version: String,
    /// Creation time of the object.
    pub created_at: Option<Timestamp>,
    /// Contents of the rule.
    pub spec: RuleSpec,
    /// Message of the cluster about the eviction of pods due to the rule. `None` if its status
    /// has none.
    pub eviction: Option<String>,
}

/// Contents of a rule: the taint, the device, and the gpuwarden that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSpec {
    /// Device that the rule taints.
    pub device: DeviceId,
    /// Taint on the device.
    pub taint: DeviceTaint,
    /// Node of the device.
    pub node: String,
    /// UUID or PCI address of the GPU. Identifies the GPU even if the driver stops publishing
    /// it.
    pub gpu: String,
    /// Kind of gpuwarden that made the rule.
    pub by: Maker,
    /// Id of the store of the gpuwarden that made the rule. Set only if a node's own gpuwarden
    /// made it.
    pub store: Option<String>,
}

/// A change of one `DeviceTaintRule`. Fails if the rule changed since it was last observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleChange {
    /// Creates a new rule.
    Create(RuleSpec),
    /// Replaces the taint of a rule.
    Update(Box<DeviceTaintRule>, DeviceTaint),
    /// Deletes an existing rule.
    Delete(Box<DeviceTaintRule>),
}

/// A `ResourceClaim` with allocated devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Devices allocated to the claim.
    pub devices: Vec<DeviceId>,
    /// Pods that use the devices, as `namespace/name`.
    pub pods: Vec<String>,
}

// === impl DeviceId ===

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.driver, self.pool, self.name)
    }
}

// === impl TaintEffect ===

impl TaintEffect {
    /// Returns the effect's name in Kubernetes.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

impl FromStr for TaintEffect {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let all = [Self::None, Self::NoSchedule, Self::NoExecute];
        all.into_iter().find(|one| one.name() == text).ok_or(())
    }
}

// === impl Dimension ===

impl Dimension {
    /// All dimensions, in the order of their declaration.
    pub const ALL: [Self; 6] = [
        Self::Xid,
        Self::GpuLost,
        Self::Unmonitored,
        Self::Memory,
        Self::Nvlink,
        Self::Thermal,
    ];

    /// Returns the name of the dimension: the part of the taint's key after the driver's
    /// domain.
    pub fn name(self) -> &'static str {
        match self {
            Self::Xid => "xid",
            Self::GpuLost => "gpu-lost",
            Self::Unmonitored => "unmonitored",
            Self::Memory => "memory",
            Self::Nvlink => "nvlink",
            Self::Thermal => "thermal",
        }
    }

    /// Returns the key of the dimension's taint.
    pub fn key(self) -> String {
        format!("{GPU_DRIVER}/{}", self.name())
    }

    /// Returns the value of the dimension's taint. Empty if the value depends on the fault.
    pub fn value(self) -> &'static str {
        match self {
            Self::Xid | Self::GpuLost | Self::Unmonitored => "",
            Self::Memory => "retired",
            Self::Nvlink => "degraded",
            Self::Thermal => "throttled",
        }
    }
}

// === impl DeviceTaint ===

impl fmt::Display for DeviceTaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let equals = if self.value.is_empty() { "" } else { "=" };
        let (key, value, effect) = (&self.key, &self.value, self.effect.name());
        write!(f, "{key}{equals}{value}:{effect}")
    }
}

// === impl DeviceTaintRule ===

impl DeviceTaintRule {
    /// Returns whether this is an older state of the rule than `other`. Versions are comparable
    /// numbers in every Kubernetes we know. If they are not, neither state is older.
    pub fn is_older_than(&self, other: &Self) -> bool {
        let versions = [self, other].map(|rule| rule.resource_version.parse::<u64>());
        matches!(versions, [Ok(this), Ok(other)] if this < other)
    }
}

// === impl RuleSpec ===

impl RuleSpec {
    /// Returns the name of the rule: the device's name, the last part of the taint's key, and a
    /// hash of both with the pool, whose name may be too long for an object. The same rule
    /// always gets the same name, so it cannot be created twice.
    pub fn rule_name(&self) -> String {
        let (device, key) = (&self.device, &self.taint.key);
        let digest = Sha256::digest(format!("{device} {key}"));
        let hash = digest.iter().take(5).map(|byte| format!("{byte:02x}"));
        let hash: String = hash.collect();
        let dimension = key.rsplit('/').next().unwrap_or_default();
        format!("gpuwarden-{}-{dimension}-{hash}", device.name)
    }
}

// === impl RuleChange ===

impl RuleChange {
    /// Returns the name of the changed rule.
    pub fn rule_name(&self) -> String {
        match self {
            Self::Create(spec) => spec.rule_name(),
            Self::Update(rule, _) | Self::Delete(rule) => rule.name.clone(),
        }
    }

    /// Returns the device of the changed rule.
    pub fn device(&self) -> &DeviceId {
        match self {
            Self::Create(spec) => &spec.device,
            Self::Update(rule, _) | Self::Delete(rule) => &rule.spec.device,
        }
    }

    /// Returns the rule after the change. `None` if it is deleted.
    pub fn after(&self) -> Option<DeviceTaintRule> {
        match self {
            Self::Create(spec) => Some(DeviceTaintRule {
                name: spec.rule_name(),
                resource_version: String::new(),
                created_at: None,
                spec: spec.clone(),
                eviction: None,
            }),
            Self::Update(rule, taint) => {
                let mut rule = DeviceTaintRule::clone(rule);
                rule.spec.taint = taint.clone();
                Some(rule)
            }
            Self::Delete(_) => None,
        }
    }
}

impl fmt::Display for RuleChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.device();
        match self {
            Self::Create(spec) => write!(f, "taint device {device} with {}", spec.taint),
            Self::Update(rule, taint) => {
                let before = &rule.spec.taint;
                write!(
                    f,
                    "taint device {device} with {taint} in the place of {before}"
                )
            }
            Self::Delete(rule) => write!(f, "take {} off device {device}", rule.spec.taint),
        }
    }
}
