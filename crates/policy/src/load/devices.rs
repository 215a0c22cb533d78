//! The device taints in a policy file: the table `[device-taints]`.

use model::device::{Dimension, TaintEffect};
use serde::Deserialize;
use toml::Spanned;

use crate::DeviceTaints;

/// The table `[device-taints]`. It is our own format, so misspelt keys are errors.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct DeviceTaintsEntry {
    xid: Option<Spanned<String>>,
    gpu_lost: Option<Spanned<String>>,
    unmonitored: Option<Spanned<String>>,
    memory: Option<Spanned<String>>,
    nvlink: Option<Spanned<String>>,
    thermal: Option<Spanned<String>>,
}

/// Returns the effects set in a file.
pub(super) fn device_taints(
    entry: DeviceTaintsEntry,
    mut find: impl FnMut(usize, String),
) -> DeviceTaints {
    let entries = [
        (Dimension::Xid, entry.xid),
        (Dimension::GpuLost, entry.gpu_lost),
        (Dimension::Unmonitored, entry.unmonitored),
        (Dimension::Memory, entry.memory),
        (Dimension::Nvlink, entry.nvlink),
        (Dimension::Thermal, entry.thermal),
    ];
    let mut taints = DeviceTaints::default();
    for (dimension, text) in entries {
        let Some(text) = text else {
            continue;
        };
        let (start, name) = (text.span().start, dimension.name());
        match text.get_ref().parse() {
            Ok(TaintEffect::NoExecute) if dimension != Dimension::GpuLost => find(
                start,
                format!(
                    "device-taints: {name} = \"NoExecute\" would delete pods past their disruption \
                     budgets, which is only for a GPU that is gone (gpu-lost); write \"NoSchedule\""
                ),
            ),
            Ok(effect) => drop(taints.effects.insert(dimension, effect)),
            Err(()) => find(
                start,
                format!(
                    "device-taints: the effect '{}' of {name} is unknown; it is None, NoSchedule \
                     or NoExecute",
                    text.get_ref()
                ),
            ),
        }
    }
    taints
}
