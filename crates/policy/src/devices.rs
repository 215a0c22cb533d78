//! Device taints requested by a policy.

use std::collections::BTreeMap;

use model::device::{Dimension, TaintEffect};

/// Effects of device taints by dimension. They apply to faults that match a rule set; other
/// faults get the effect `None`, which is informational.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceTaints {
    /// Effects set in the file.
    pub effects: BTreeMap<Dimension, TaintEffect>,
}

// === impl DeviceTaints ===

impl DeviceTaints {
    /// Returns the effect of a fault in this dimension.
    ///
    /// The default is informational, since many such faults pass by themselves. A GPU that is
    /// lost is not allocated. Deleting its pods has to be configured explicitly: no disruption
    /// budget delays it.
    pub fn effect(&self, dimension: Dimension) -> TaintEffect {
        let named = self.effects.get(&dimension).copied();
        named.unwrap_or(match dimension {
            Dimension::GpuLost => TaintEffect::NoSchedule,
            _ => TaintEffect::None,
        })
    }
}
