//! The effects of device taints that a policy asks for.

use std::collections::BTreeMap;

use model::device::{Dimension, TaintEffect};

/// The effects of device taints by what they are about, for faults that a rule set asks to act on.
/// Other faults only inform.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceTaints {
    /// The effects that the file names.
    pub effects: BTreeMap<Dimension, TaintEffect>,
}

// === impl DeviceTaints ===

impl DeviceTaints {
    /// Returns the effect of a fault of this dimension.
    ///
    /// What is not named informs, for many such faults pass by themselves; but a GPU that is gone
    /// is given to nobody. That its pods are deleted has to be asked for: no disruption budget
    /// holds it up.
    pub fn effect(&self, dimension: Dimension) -> TaintEffect {
        let named = self.effects.get(&dimension).copied();
        named.unwrap_or(match dimension {
            Dimension::GpuLost => TaintEffect::NoSchedule,
            _ => TaintEffect::None,
        })
    }
}
