//! The driver's advice on how to mend a GPU. NVML tells it as a number, and the line of an XID 154 as
//! the same number with a name: one table judges both.

use std::collections::BTreeSet;

use contract::RecommendedAction;

use super::{Catalog, Verdict};

/// The codes of DCGM by which the actions are reported, by their numbers in NVML
/// (`nvmlDeviceGpuRecoveryAction_t`). DCGM 4.6 has none for those of newer drivers, from 5 on: they
/// have the code of what they come down to.
const CODES: [Option<&str>; 8] = [
    None,
    Some("DCGM_FR_GPU_RECOVERY_RESET"),
    Some("DCGM_FR_GPU_RECOVERY_REBOOT"),
    Some("DCGM_FR_GPU_RECOVERY_DRAIN_P2P"),
    Some("DCGM_FR_GPU_RECOVERY_DRAIN_RESET"),
    Some("DCGM_FR_IMEX_UNHEALTHY"),
    Some("DCGM_FR_GPU_RECOVERY_RESET"),
    Some("DCGM_FR_GPU_RECOVERY_REBOOT"),
];
/// The code of an action that has no row.
const UNKNOWN: &str = "DCGM_FR_UNRECOGNIZED";
/// The number of a reset.
const RESET: u32 = 1;
/// The number of a recovery of the IMEX domain, by which machines share the memory of their GPUs.
const IMEX: u32 = 5;
/// The names of actions whose number is not known, with the number of the same action.
const NAMES: [(&str, u32); 5] = [
    ("gpu reset required", RESET),
    ("node reboot required", 2),
    ("os reboot", 2),
    ("drain p2p", 3),
    ("drain and reset", 4),
];

/// Returns the code by which an action is reported, by its number in NVML; `None` where the driver
/// asks for nothing.
pub fn recovery_code(number: u32) -> Option<&'static str> {
    let index = usize::try_from(number).ok();
    *index
        .and_then(|index| CODES.get(index))
        .unwrap_or(&Some(UNKNOWN))
}

/// Returns all codes by which actions are reported, each once.
pub fn recovery_codes() -> impl Iterator<Item = &'static str> {
    let named: BTreeSet<&str> = CODES.into_iter().flatten().collect();
    named.into_iter().chain([UNKNOWN])
}

impl Catalog {
    /// Returns the verdict about the text of an XID 154, whose row has the verdict `of_row`. What the
    /// row of the action's code says decides; a text that cannot be read asks a person.
    pub(super) fn judge_advice(&self, text: &str, of_row: &Verdict) -> Verdict {
        let number = changed_to(text).map(|(number, name)| meant(number, name));
        let verdict = |fatal, action| Verdict {
            fatal,
            action,
            ..of_row.clone()
        };
        match number.map_or(Some(UNKNOWN), recovery_code) {
            // The driver takes its own advice back.
            None => Verdict {
                healthy: true,
                ..verdict(false, RecommendedAction::None)
            },
            // The line tells of a domain of machines, and nothing of this GPU. Whether a pod relies on
            // the domain is not known here; what NVML says of it is judged where one does.
            Some(_) if number == Some(IMEX) => Verdict {
                basis: Some("it is about the IMEX domain and not about this GPU".into()),
                ..verdict(false, RecommendedAction::None)
            },
            Some(code) => {
                let of_code = self.judge_dcgm(code);
                Verdict {
                    basis: of_code.basis,
                    ..verdict(of_code.fatal, of_code.action)
                }
            }
        }
    }
}

/// Returns the number in NVML of an action with this number and name in a line. The number decides,
/// but for PF FLR, the name of drivers from R610 on for a reset of the GPU on the PCIe bus.
fn meant(number: u32, name: &str) -> u32 {
    if name.eq_ignore_ascii_case("PF FLR") {
        return RESET;
    }
    let is_known = usize::try_from(number).is_ok_and(|index| index < CODES.len());
    let mut named = NAMES.iter();
    let named = named.find(|(known, _)| name.eq_ignore_ascii_case(known));
    named
        .filter(|_| !is_known)
        .map_or(number, |(_, same)| *same)
}

/// Returns number and name of the action at the end of `GPU recovery action changed from 0x0 (None) to
/// 0x1 (GPU Reset Required)`.
///
/// Only what stands where the driver puts it counts. Whatever else is in the line, such as the name of
/// a process behind it, cannot take advice back.
fn changed_to(text: &str) -> Option<(u32, &str)> {
    /// Reads `0x1 (GPU Reset Required)`, and returns it with the rest.
    fn action(text: &str) -> Option<(u32, &str, &str)> {
        let (number, rest) = text.strip_prefix("0x")?.split_once(" (")?;
        let (name, rest) = rest.split_once(')')?;
        Some((u32::from_str_radix(number, 16).ok()?, name.trim(), rest))
    }
    let text = text.strip_prefix("GPU recovery action ").unwrap_or(text);
    let (_, _, rest) = action(text.strip_prefix("changed from ")?)?;
    let (number, name, _) = action(rest.strip_prefix(" to ")?)?;
    Some((number, name))
}
