//! From the open faults of a node to the taints of its single devices.
//!
//! A fault is attributed to the devices of the GPU that it names. If no slice lists that GPU,
//! the fault may concern any device: all devices of the node are then marked as unmonitored,
//! and no rule set keeps the node in service.

use std::collections::{BTreeMap, BTreeSet};

use contract::keys;
use jiff::Timestamp;
use model::device::{DeviceId, DeviceTaint, Dimension, NodeDevices, TaintEffect};
use model::fault::Fault;
use model::node::{NodeView, label_value};
use model::reporter::Authority;

use super::{FaultRuling, Ruling};
use crate::{DeviceTaints, RuleSet};

/// Checks that belong to one dimension each. XIDs are recognised by their code.
const CHECKS: [(&str, Dimension); 8] = [
    (keys::CHECK_GPU_FALLEN_OFF, Dimension::GpuLost),
    (keys::CHECK_GPU_INIT, Dimension::GpuLost),
    (keys::CHECK_DCGM_CONNECTIVITY, Dimension::Unmonitored),
    (keys::CHECK_GPU_MEMORY, Dimension::Memory),
    (keys::CHECK_GPU_NVLINK, Dimension::Nvlink),
    ("GpuNvswitchFatalWatch", Dimension::Nvlink),
    (keys::CHECK_GPU_THERMAL_MARGIN, Dimension::Thermal),
    (keys::CHECK_GPU_THERMAL, Dimension::Thermal),
];
/// Code for a GPU that is not monitored, from any check.
const UNMONITORED: &str = "GPU_UNMONITORED";
/// Codes for a lost GPU, from any check: of the XID, of the kernel's line without an XID, and
/// of DCGM.
const LOST: [&str; 3] = ["79", keys::CODE_GPU_FALLEN_OFF, "DCGM_FR_FALLEN_OFF_BUS"];

/// The open faults of a node with their decisions, and the devices of the node.
pub(super) struct DeviceFaults<'a> {
    policy: &'a DeviceTaints,
    rule_sets: &'a [RuleSet],
    devices: &'a NodeDevices,
    faults: Vec<(&'a Fault, &'a Ruling)>,
}

/// Devices that a fault concerns.
enum Place<'a> {
    /// Devices of the GPU that the fault names.
    Gpu(Vec<&'a DeviceId>),
    /// Possibly any device: the fault names no GPU, or one that no slice lists.
    Any,
}

/// Taint for one dimension of a device, merged from several faults.
#[derive(Default)]
struct MergedTaint<'a> {
    effect: TaintEffect,
    /// Code of the most recently observed fault, and the time of the observation.
    newest: Option<(Timestamp, &'a str)>,
}

// === impl DeviceFaults ===

impl<'a> DeviceFaults<'a> {
    /// Pairs `faults` with `rulings`, which have the same order.
    pub(super) fn of(
        faults: &[&'a Fault],
        rulings: &'a [FaultRuling],
        policy: &'a DeviceTaints,
        rule_sets: &'a [RuleSet],
        devices: &'a NodeDevices,
    ) -> Self {
        let rulings = rulings.iter().map(|one| &one.ruling);
        Self {
            policy,
            rule_sets,
            devices,
            faults: faults.iter().copied().zip(rulings).collect(),
        }
    }

    /// Returns whether the rule set at `index` leaves the node in service: its faults concern no
    /// more GPUs than allowed, and each of these GPUs gets a taint. A fault of a link between GPUs
    /// never concerns one GPU alone.
    pub(super) fn spare_node(&self, index: usize) -> bool {
        let rule_set = self.rule_sets.get(index);
        let Some(most) = rule_set.and_then(|rule_set| rule_set.taint_devices) else {
            return false;
        };
        let (mut gpus, mut tainted) = (BTreeSet::new(), BTreeSet::new());
        for (fault, _) in self
            .faults
            .iter()
            .filter(|(_, ruling)| ruling.matched(index))
        {
            let dimensions = dimensions(fault);
            let Place::Gpu(devices) = self.place(fault) else {
                return false;
            };
            if dimensions.contains(&Dimension::Nvlink) {
                return false;
            }
            gpus.extend(devices.first().copied());
            tainted.extend(devices.first().copied().filter(|_| !dimensions.is_empty()));
        }
        gpus == tainted && u32::try_from(gpus.len()).is_ok_and(|gpus| gpus <= most)
    }

    /// Returns the desired taints of the devices of `node`, ordered by key. Taints that the
    /// driver itself publishes with at least the same effect are left out.
    pub(super) fn taints(&self, node: &NodeView) -> BTreeMap<DeviceId, Vec<DeviceTaint>> {
        let mut merged: BTreeMap<&DeviceId, BTreeMap<Dimension, MergedTaint<'a>>> = BTreeMap::new();
        for (fault, ruling) in &self.faults {
            if !counts(fault, ruling, node) {
                continue;
            }
            for dimension in dimensions(fault) {
                let (devices, dimension, named) = self.concerned(fault, dimension);
                let effect = self.effect(fault, ruling, dimension, named);
                for device in devices {
                    let taint = merged.entry(device).or_default().entry(dimension);
                    taint.or_default().add(fault, effect);
                }
            }
        }
        let taints = merged.into_iter().map(|(device, taints)| {
            let taints = taints
                .into_iter()
                .map(|(dimension, taint)| taint.taint(dimension));
            let taints = taints.filter(|taint| !self.is_published(device, taint));
            (device.clone(), taints.collect::<Vec<_>>())
        });
        taints.filter(|(_, taints)| !taints.is_empty()).collect()
    }

    /// Returns for each fault, in order, why it deletes no pods although the policy requests
    /// that. `None` if the policy does not, or pods are deleted.
    pub(super) fn lowered(&self, node: &NodeView) -> Vec<Option<&'static str>> {
        let lowered = |(fault, ruling): &(&Fault, &Ruling)| {
            let asks = |dimension| self.policy.effect(dimension) == TaintEffect::NoExecute;
            let asks = dimensions(fault).into_iter().any(asks);
            let acts = asks && counts(fault, ruling, node) && ruling.asks();
            acts.then(|| self.not_proven(fault)).flatten()
        };
        self.faults.iter().map(lowered).collect()
    }

    /// Returns why a fault does not prove that this GPU is gone. `None` if it does.
    fn not_proven(&self, fault: &Fault) -> Option<&'static str> {
        match self.place(fault) {
            Place::Any if names_gpu(fault) => Some("no slice lists its GPU"),
            Place::Any => Some("it names no GPU"),
            Place::Gpu(_) if fault.authority != Authority::Trusted => {
                Some("it was reported by a user, not by a monitor or an administrator")
            }
            Place::Gpu(_) => None,
        }
    }

    /// Returns the devices that a fault of this dimension concerns, the dimension to taint, and
    /// whether the fault names their GPU.
    fn concerned(
        &self,
        fault: &Fault,
        dimension: Dimension,
    ) -> (Vec<&'a DeviceId>, Dimension, bool) {
        let all = || self.devices.iter().map(|(id, _)| id).collect();
        let of_node = matches!(dimension, Dimension::GpuLost | Dimension::Unmonitored);
        match self.place(fault) {
            Place::Gpu(devices) => (devices, dimension, true),
            // An unknown GPU is gone, or none is monitored.
            Place::Any if !names_gpu(fault) && of_node => (all(), dimension, false),
            Place::Any if names_gpu(fault) => (all(), Dimension::Unmonitored, false),
            Place::Any => (Vec::new(), dimension, false),
        }
    }

    /// Returns the effect of a fault. Pods are deleted only if a trusted reporter states that
    /// this GPU is gone.
    fn effect(
        &self,
        fault: &Fault,
        ruling: &Ruling,
        dimension: Dimension,
        named: bool,
    ) -> TaintEffect {
        if !ruling.asks() {
            return TaintEffect::None;
        }
        let effect = match self.policy.effect(dimension) {
            TaintEffect::NoExecute if self.not_proven(fault).is_some() => TaintEffect::NoSchedule,
            effect => effect,
        };
        let mut rule_sets = self.rule_sets.iter().enumerate();
        let by_rule_set = rule_sets
            .any(|(index, rule_set)| rule_set.taint_devices.is_some() && ruling.matched(index));
        if named && by_rule_set {
            effect.max(TaintEffect::NoSchedule)
        } else {
            effect
        }
    }

    fn place(&self, fault: &Fault) -> Place<'a> {
        let devices = self.devices.find(&fault.subject);
        if devices.is_empty() {
            Place::Any
        } else {
            Place::Gpu(devices)
        }
    }

    fn is_published(&self, device: &DeviceId, taint: &DeviceTaint) -> bool {
        let device = self.devices.get(device);
        let mut published = device.into_iter().flat_map(|device| &device.taints);
        published.any(|on| on.key == taint.key && on.effect >= taint.effect)
    }
}

// === impl MergedTaint ===

impl<'a> MergedTaint<'a> {
    fn add(&mut self, fault: &'a Fault, effect: TaintEffect) {
        self.effect = self.effect.max(effect);
        let observed = Some((fault.last_seen, fault.code.as_str()));
        self.newest = self.newest.max(observed);
    }

    fn taint(&self, dimension: Dimension) -> DeviceTaint {
        let value = match (dimension, self.newest) {
            (Dimension::Xid, Some((_, code))) => label_value(code),
            _ => dimension.value().to_owned(),
        };
        DeviceTaint {
            key: dimension.key(),
            value,
            effect: self.effect,
        }
    }
}

/// Returns the dimensions of a fault. A GPU that fell off the bus with an XID belongs to two.
fn dimensions(fault: &Fault) -> Vec<Dimension> {
    if fault.event.component_class != keys::COMPONENT_GPU {
        return Vec::new();
    }
    let code = fault.code.as_str();
    let is_number = !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_digit());
    let is_xid = is_number && fault.check.to_ascii_lowercase().contains("xid");
    let of_check = CHECKS.iter().find(|(check, _)| *check == fault.check);
    let found: BTreeSet<Dimension> = (is_xid.then_some(Dimension::Xid).into_iter())
        .chain(LOST.contains(&code).then_some(Dimension::GpuLost))
        .chain((code == UNMONITORED).then_some(Dimension::Unmonitored))
        .chain(of_check.map(|(_, dimension)| *dimension))
        .collect();
    found.into_iter().collect()
}

/// Returns whether a fault counts: it was not set aside by anybody, and it is not a notice that
/// the policy ignores.
fn counts(fault: &Fault, ruling: &Ruling, node: &NodeView) -> bool {
    match ruling {
        Ruling::Forced => true,
        Ruling::Judged { wanted, .. } => {
            *wanted || (fault.notice_until().is_none() && !ruling.opted_out(node))
        }
        Ruling::HandedOver
        | Ruling::Dismissed(_)
        | Ruling::Skipped
        | Ruling::Explained(_)
        | Ruling::AwaitsPrimary(_) => false,
    }
}

/// Returns whether a fault names a GPU.
fn names_gpu(fault: &Fault) -> bool {
    let kinds = [keys::ENTITY_GPU_UUID, keys::ENTITY_PCI, keys::ENTITY_GPU];
    kinds.iter().any(|kind| fault.subject.name(kind).is_some())
}

#[cfg(test)]
mod tests;
