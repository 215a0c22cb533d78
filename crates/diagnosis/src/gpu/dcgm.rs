//! What DCGM, NVIDIA's management service for GPUs, tells of the GPUs of a machine: a [`DcgmLook`]
//! of its health watches.
//!
//! Numbers are those of `dcgm_structs.h` of DCGM 4. One that has no name here is kept as it is.

use contract::keys;
use serde::{Deserialize, Serialize};

/// The watches of DCGM that are asked for, by the bits of `dcgmHealthSystems_t`, with their checks:
/// all of DCGM 3 and 4 but for network cards (0x1000), which have monitors of their own. A version
/// that does not know a bit passes it over.
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
/// The code of a GPU at the limit of its power, `DCGM_FR_CLOCKS_EVENT_POWER`.
const AT_POWER_LIMIT: u32 = 12;
/// The code of the service that shares memory between machines, `DCGM_FR_IMEX_UNHEALTHY`. Versions
/// before 4.7 tell it by the watch of NVLinks.
const IMEX_UNHEALTHY: u32 = 122;
/// The code that tells of nothing, `DCGM_FR_OK`.
const OK: u32 = 0;

/// The findings of one look at DCGM's health watches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DcgmLook {
    /// The version of the host engine, such as `4.6.0`.
    pub version: Option<String>,
    /// The GPUs that are watched, as far as it knows them.
    pub gpus: Vec<DcgmGpu>,
    /// The numbers of the switches that are watched.
    pub switches: Vec<u32>,
    /// The incidents: all that is not well.
    pub incidents: Vec<DcgmIncident>,
    /// True if there was room for all incidents, so that one that is missing is over.
    pub is_whole: bool,
}

/// A GPU as DCGM knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DcgmGpu {
    /// DCGM's number of it.
    pub id: u32,
    /// Index of NVML, where it is told.
    pub index: Option<u32>,
    /// UUID, where it is told.
    pub uuid: Option<String>,
    /// PCI address in the form `dddd:bb:dd.f`, where it is told.
    pub pci: Option<String>,
}

/// Something that one of its watches has found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DcgmIncident {
    /// The watch, as a bit of `dcgmHealthSystems_t`.
    pub system: u32,
    /// DCGM's own word for its gravity: 10 is a warning, 20 a failure. It decides nothing: the code
    /// does.
    pub health: u32,
    /// The code, as a number of `dcgmError_t`.
    pub code: u32,
    /// The text of DCGM.
    pub message: String,
    /// The part of the machine that it is about.
    pub entity: DcgmEntity,
}

/// A part of the machine, as DCGM names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DcgmEntity {
    /// The kind, as a number of `dcgm_field_entity_group_t`.
    pub group: u32,
    /// The number within the kind.
    pub id: u32,
}

/// `ImexUse` says whether pods rely on the IMEX service of this machine, which is the one that DCGM
/// asks (`nvidia-imex-ctl -q`, `DcgmImexManager.cpp` of DCGM 4.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImexUse {
    /// Nobody has said it yet.
    #[default]
    Unknown,
    /// No pod does: the service need not run.
    Unused,
    /// A pod does.
    Used,
}

/// Returns the bits of all watches that are asked for.
pub fn all_watches() -> u32 {
    WATCHES.iter().fold(0, |all, (bit, _)| all | bit)
}

// === impl DcgmIncident ===

impl DcgmIncident {
    /// Returns the check of the watch; `GpuAllWatch` where it is one that has no name here. IMEX has
    /// its own, whichever watch tells of it.
    pub(super) fn check(&self) -> &'static str {
        if self.code == IMEX_UNHEALTHY {
            return keys::CHECK_GPU_IMEX;
        }
        let named = WATCHES.iter().find(|(bit, _)| *bit == self.system);
        named.map_or(keys::CHECK_GPU_ALL, |(_, check)| check)
    }

    /// Returns whether it is to be judged. IMEX is while pods rely on it, for it need not run
    /// otherwise, and counts as broken then. A GPU at the limit of its power is at work, and DCGM does
    /// not tell that from a brake, which the driver does.
    pub(super) fn is_judged(&self, imex: ImexUse) -> bool {
        let counts = self.check() != keys::CHECK_GPU_IMEX || imex == ImexUse::Used;
        counts && ![OK, AT_POWER_LIMIT].contains(&self.code)
    }
}

// === impl DcgmEntity ===

impl DcgmEntity {
    /// The kind of what is about no part of the machine (`DCGM_FE_NONE`), but about all of it.
    pub const NONE: u32 = 0;
    /// The kind of GPUs (`DCGM_FE_GPU`).
    pub const GPU: u32 = 1;
    /// The kind of switches (`DCGM_FE_SWITCH`).
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
        for told in [
            incident(0x2000, 122),
            incident(0x2, 122),
            incident(0x2000, 1),
        ] {
            assert_eq!(told.check(), "GpuImexWatch");
            assert!(told.is_judged(ImexUse::Used));
            assert!(!told.is_judged(ImexUse::Unused) && !told.is_judged(ImexUse::Unknown));
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
