//! The device taints in a policy file: the table `[device-taints]`.

use contract::findings::Findings;
use model::device::{Dimension, TaintEffect};
use serde::Deserialize;

use crate::DeviceTaints;

/// The table `[device-taints]`. It is our own format, so misspelt keys are errors.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct DeviceTaintsEntry {
    xid: Option<String>,
    gpu_lost: Option<String>,
    unmonitored: Option<String>,
    memory: Option<String>,
    nvlink: Option<String>,
    thermal: Option<String>,
}

/// Returns the effects set in a file.
pub(super) fn device_taints(entry: DeviceTaintsEntry, findings: &mut Findings<'_>) -> DeviceTaints {
    let entries = [
        (Dimension::Xid, entry.xid),
        (Dimension::GpuLost, entry.gpu_lost),
        (Dimension::Unmonitored, entry.unmonitored),
        (Dimension::Memory, entry.memory),
        (Dimension::Nvlink, entry.nvlink),
        (Dimension::Thermal, entry.thermal),
    ];
    let effects = [
        TaintEffect::None,
        TaintEffect::NoSchedule,
        TaintEffect::NoExecute,
    ];
    let effects = effects.map(|effect| (effect.name(), effect));
    let mut taints = DeviceTaints::default();
    for (dimension, text) in entries {
        let Some(text) = text else {
            continue;
        };
        let path = format!("device-taints.{}", dimension.name());
        match findings.one_of(&path, &text, &effects) {
            Some(TaintEffect::NoExecute) if dimension != Dimension::GpuLost => findings.refuse(
                &path,
                "that would delete pods past their disruption budgets, which is only for a GPU that \
                 is gone (gpu-lost); write \"NoSchedule\"",
            ),
            Some(effect) => drop(taints.effects.insert(dimension, effect)),
            None => {}
        }
    }
    taints
}
