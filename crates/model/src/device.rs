//! Single devices of a node, as dynamic resource allocation (DRA) knows them, and the taints that
//! keep work off them.
//!
//! A driver publishes its devices in `ResourceSlice`s, which [`inventory`] puts together. A
//! `DeviceTaintRule` puts one taint on one device; the driver's slices are never edited. Which
//! taints a device ought to have is decided in [`crate::assess`], what becomes of the rules in
//! [`crate::fleet`].

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

/// The driver whose devices are tainted, and the domain of the taints' keys.
pub const GPU_DRIVER: &str = keys::GPU_DRIVER;
/// Most taints of one device that the API takes.
pub const MAX_DEVICE_TAINTS: usize = 16;

// A device has one taint of each dimension at most.
const _: () = assert!(Dimension::ALL.len() <= MAX_DEVICE_TAINTS);

/// A device, by the names under which the API knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceId {
    /// The driver that publishes it.
    pub driver: String,
    /// The pool that it is in.
    pub pool: String,
    /// Its name in the pool.
    pub name: String,
}

/// An effect of a device taint, the weakest first.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum TaintEffect {
    /// It informs, and keeps nothing off.
    #[default]
    None,
    /// Nothing new is placed on the device.
    NoSchedule,
    /// Besides, pods that use the device are deleted.
    NoExecute,
}

/// A part of a device's health that has a taint of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dimension {
    /// The driver has reported an XID.
    Xid,
    /// The GPU does not answer any more.
    GpuLost,
    /// Nobody can say whether the GPU is well.
    Unmonitored,
    /// Its memory is damaged.
    Memory,
    /// A link of it to other GPUs or to a switch is damaged.
    Nvlink,
    /// It is too hot.
    Thermal,
}

/// A taint of a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DeviceTaint {
    /// The key: a label's name.
    pub key: String,
    /// The value: a label's value, or empty.
    pub value: String,
    /// The effect.
    pub effect: TaintEffect,
}

/// A `ResourceSlice`, as far as it is of use here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slice {
    /// The driver that publishes it.
    pub driver: String,
    /// The pool that it is a part of.
    pub pool: String,
    /// The generation of the pool.
    pub generation: i64,
    /// The number of slices that the pool has in this generation.
    pub slices: i64,
    /// The node whose devices it lists; `None`: they are not of one node.
    pub node: Option<String>,
    /// The devices that it lists.
    pub devices: Vec<SliceDevice>,
}

/// A device in a [`Slice`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SliceDevice {
    /// Its name in the pool.
    pub name: String,
    /// UUID of the GPU, which is the parent of a MIG device.
    pub gpu: Option<String>,
    /// Its own UUID, where it is a MIG device.
    pub mig: Option<String>,
    /// PCI address of the GPU.
    pub pci: Option<String>,
    /// The taints that the driver itself publishes.
    pub taints: Vec<DeviceTaint>,
}

/// A `DeviceTaintRule` that a gpuwarden has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its name.
    pub name: String,
    /// The version of the object that this is.
    pub resource_version: String,
    /// The time at which the rule was made.
    pub created_at: Option<Timestamp>,
    /// The contents of the rule.
    pub spec: RuleSpec,
    /// The cluster's words on pods that have to go because of the rule; `None` where it says
    /// nothing.
    pub eviction: Option<String>,
}

/// The contents of a rule of ours: the taint, its device, and the gpuwarden that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSpec {
    /// The device.
    pub device: DeviceId,
    /// Its taint.
    pub taint: DeviceTaint,
    /// The node that the device is of.
    pub node: String,
    /// UUID or PCI address of the GPU, by which it is known where the driver publishes it no more.
    pub gpu: String,
    /// The kind of gpuwarden that made the rule.
    pub by: Maker,
    /// Id of its store, where a node's own gpuwarden made the rule.
    pub store: Option<String>,
}

/// A change of one `DeviceTaintRule`. A rule that has changed since it was seen stays as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleChange {
    /// Make it.
    Create(RuleSpec),
    /// Give it another taint.
    Update(Box<Rule>, DeviceTaint),
    /// Delete it.
    Delete(Box<Rule>),
}

/// A `ResourceClaim` that was given devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The devices.
    pub devices: Vec<DeviceId>,
    /// The pods that use them, as `namespace/name`.
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
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Xid,
        Self::GpuLost,
        Self::Unmonitored,
        Self::Memory,
        Self::Nvlink,
        Self::Thermal,
    ];

    /// Returns its name: the part of a taint's key behind the driver's domain.
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

    /// Returns the key of its taint.
    pub fn key(self) -> String {
        format!("{GPU_DRIVER}/{}", self.name())
    }

    /// Returns the value of its taint, where all faults of it have the same.
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

// === impl Rule ===

impl Rule {
    /// Returns whether this is an older state of the rule than `other`. Versions are comparable
    /// numbers in every Kubernetes we know; where they are not, none is older.
    pub fn is_older_than(&self, other: &Self) -> bool {
        let versions = [self, other].map(|rule| rule.resource_version.parse::<u64>());
        matches!(versions, [Ok(this), Ok(other)] if this < other)
    }
}

// === impl RuleSpec ===

impl RuleSpec {
    /// Returns the name of the rule: that of the device and of the taint's key, and a hash of both
    /// with the pool, which may be longer than a name. The same rule always has the same name, so
    /// none is made twice.
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
    /// Returns the name of the rule.
    pub fn rule_name(&self) -> String {
        match self {
            Self::Create(spec) => spec.rule_name(),
            Self::Update(rule, _) | Self::Delete(rule) => rule.name.clone(),
        }
    }

    /// Returns the device.
    pub fn device(&self) -> &DeviceId {
        match self {
            Self::Create(spec) => &spec.device,
            Self::Update(rule, _) | Self::Delete(rule) => &rule.spec.device,
        }
    }

    /// Returns what `rule` is after the change; `None` where it is gone.
    pub fn after(&self) -> Option<Rule> {
        match self {
            Self::Create(spec) => Some(Rule {
                name: spec.rule_name(),
                resource_version: String::new(),
                created_at: None,
                spec: spec.clone(),
                eviction: None,
            }),
            Self::Update(rule, taint) => {
                let mut rule = Rule::clone(rule);
                rule.spec.taint = taint.clone();
                Some(rule)
            }
            Self::Delete(_) => None,
        }
    }
}

/// Displayed for people.
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
