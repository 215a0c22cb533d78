//! Findings of DCGM, NVIDIA's management service for GPUs: a [`DcgmLook`] is one poll of its
//! health watches.
//!
//! Numbers are those of `dcgm_structs.h` of DCGM 4. A number without a name here is kept
//! unchanged.

use contract::keys;
use serde::{Deserialize, Serialize};

/// Enabled watches of DCGM, by the bits of `dcgmHealthSystems_t`, with their checks: all of
/// DCGM 3 and 4 but for network cards (0x1000), which have monitors of their own. A version
/// ignores bits that it does not support.
const WATCHES: [(u32, &str); 13] = [
    (0x1, keys::CHECK_GPU_PCIE),
    (0x2, keys::CHECK_GPU_NVLINK),
    (0x4, keys::CHECK_GPU_PMU),
    (0x8, keys::CHECK_GPU_MCU),
    (0x10, keys::CHECK_GPU_MEMORY),
    (0x20, keys::CHECK_GPU_SM),
    (0x40, keys::CHECK_GPU_INFOROM),
    (0x80, keys::CHECK_GPU_THERMAL),
    (0x100, keys::CHECK_GPU_POWER),
    (0x200, keys::CHECK_GPU_DRIVER),
    (0x400, keys::CHECK_NVSWITCH_NON_FATAL),
    (0x800, keys::CHECK_NVSWITCH_FATAL),
    (0x2000, keys::CHECK_GPU_IMEX),
];
/// Code of a GPU at its power limit, `DCGM_FR_CLOCKS_EVENT_POWER`.
const AT_POWER_LIMIT: u32 = 12;
/// Code of the service that shares memory between machines, `DCGM_FR_IMEX_UNHEALTHY`. Versions
/// before 4.7 report it by the watch of NVLinks.
const IMEX_UNHEALTHY: u32 = 122;
/// Code without an error, `DCGM_FR_OK`.
const OK: u32 = 0;

/// Findings in one poll of DCGM's health watches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DcgmLook {
    /// Version of the host engine, such as `4.6.0`.
    pub version: Option<String>,
    /// Watched GPUs, with the names that DCGM knows.
    pub gpus: Vec<DcgmGpu>,
    /// Numbers of the watched switches.
    pub switches: Vec<u32>,
    /// Incidents, one for each problem.
    pub incidents: Vec<DcgmIncident>,
    /// True if all incidents fitted, so that a missing one is over.
    pub is_whole: bool,
}

/// A GPU as DCGM knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DcgmGpu {
    /// DCGM's number of the GPU.
    pub id: u32,
    /// NVML index, if DCGM reports it.
    pub index: Option<u32>,
    /// UUID, if DCGM reports it.
    pub uuid: Option<String>,
    /// PCI address in the form `dddd:bb:dd.f`, if DCGM reports it.
    pub pci: Option<String>,
}

/// A finding of one health watch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DcgmIncident {
    /// Watch, as a bit of `dcgmHealthSystems_t`.
    pub system: u32,
    /// DCGM's own severity: 10 is a warning, 20 a failure. Does not affect the verdict, which
    /// follows the code.
    pub health: u32,
    /// Error code, a number of `dcgmError_t`.
    pub code: u32,
    /// DCGM's description of the finding.
    pub message: String,
    /// Affected part of the machine.
    pub entity: DcgmEntity,
}

/// A part of the machine, in DCGM's numbering.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DcgmEntity {
    /// Kind of the part, a number of `dcgm_field_entity_group_t`.
    pub group: u32,
    /// Number within the kind.
    pub id: u32,
}

/// `ImexUse` tells whether pods rely on the IMEX service of this machine, the one that DCGM
/// queries (`nvidia-imex-ctl -q`, `DcgmImexManager.cpp` of DCGM 4.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImexUse {
    /// No answer is known yet.
    #[default]
    Unknown,
    /// No pod relies on it, so the service need not run.
    Unused,
    /// A pod relies on the service.
    Used,
}

/// Returns the bits of all enabled watches.
pub fn all_watches() -> u32 {
    WATCHES.iter().fold(0, |all, (bit, _)| all | bit)
}

// === impl DcgmIncident ===

impl DcgmIncident {
    /// Returns the check of the watch; `GpuAllWatch` for a watch without a name here. IMEX has
    /// its own check, whichever watch reports it.
    pub(super) fn check(&self) -> &'static str {
        if self.code == IMEX_UNHEALTHY {
            return keys::CHECK_GPU_IMEX;
        }
        let named = WATCHES.iter().find(|(bit, _)| *bit == self.system);
        named.map_or(keys::CHECK_GPU_ALL, |(_, check)| check)
    }

    /// Returns true if the incident counts. IMEX does while pods rely on it, since otherwise it
    /// need not run, and DCGM reports it as broken then. A GPU at its power limit does not: it
    /// is just busy, and DCGM does not distinguish that from a power brake, which the driver
    /// does.
    pub(super) fn is_judged(&self, imex: ImexUse) -> bool {
        let counts = self.check() != keys::CHECK_GPU_IMEX || imex == ImexUse::Used;
        counts && ![OK, AT_POWER_LIMIT].contains(&self.code)
    }
}

// === impl DcgmEntity ===

impl DcgmEntity {
    /// Kind of incidents about the whole machine (`DCGM_FE_NONE`).
    pub const NONE: u32 = 0;
    /// Kind of GPUs (`DCGM_FE_GPU`).
    pub const GPU: u32 = 1;
    /// Kind of switches (`DCGM_FE_SWITCH`).
    pub const SWITCH: u32 = 3;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_watches_are_asked_for_but_that_of_network_cards() {
        assert_eq!(all_watches(), 0x2fff);
        let check = |system| incident(system, 1).check();
        assert_eq!(check(0x40), "GpuInforomWatch");
        assert_eq!(check(0x400), "GpuNvswitchNonfatalWatch");
        assert_eq!(check(0x4000), "GpuAllWatch");
    }

    #[test]
    fn imex_is_judged_where_pods_rely_on_it_whichever_watch_tells_it() {
        for incident in [
            incident(0x2000, 122),
            incident(0x2, 122),
            incident(0x2000, 1),
        ] {
            assert_eq!(incident.check(), "GpuImexWatch");
            assert!(incident.is_judged(ImexUse::Used));
            assert!(!incident.is_judged(ImexUse::Unused) && !incident.is_judged(ImexUse::Unknown));
        }
        assert!(!incident(0x2, 0).is_judged(ImexUse::Used));
        assert!(!incident(0x200, 12).is_judged(ImexUse::Used));
        assert!(incident(0x2, 14).is_judged(ImexUse::Unknown));
    }

    fn incident(system: u32, code: u32) -> DcgmIncident {
        DcgmIncident {
            system,
            code,
            ..DcgmIncident::default()
        }
    }
}
