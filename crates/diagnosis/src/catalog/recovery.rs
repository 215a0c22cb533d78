//! The driver's recovery action for a GPU. NVML returns it as a number, and an XID 154 line has
//! the same number with a name: one table serves both.

use std::collections::BTreeSet;

use contract::RecommendedAction;

use super::{Catalog, LineVerdict};

/// DCGM codes that report the actions, indexed by NVML's numbers
/// (`nvmlDeviceGpuRecoveryAction_t`). DCGM 4.6 has none for the actions of newer drivers, from
/// 5 on, so these use the code of an equivalent action.
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
/// Code of an action without a row.
const UNKNOWN: &str = "DCGM_FR_UNRECOGNIZED";
/// Number of a reset.
const RESET: u32 = 1;
/// Number of a recovery of the IMEX domain, within which machines share the memory of their
/// GPUs.
const IMEX: u32 = 5;
/// Names of actions with their numbers, for lines with an unknown number.
const NAMES: [(&str, u32); 5] = [
    ("gpu reset required", RESET),
    ("node reboot required", 2),
    ("os reboot", 2),
    ("drain p2p", 3),
    ("drain and reset", 4),
];

/// Returns the code that reports an action, by its number in NVML; `None` if the driver
/// requests no action.
pub fn recovery_code(number: u32) -> Option<&'static str> {
    let index = usize::try_from(number).ok();
    *index
        .and_then(|index| CODES.get(index))
        .unwrap_or(&Some(UNKNOWN))
}

/// Returns all codes that report actions, each once.
pub fn recovery_codes() -> impl Iterator<Item = &'static str> {
    let named: BTreeSet<&str> = CODES.into_iter().flatten().collect();
    named.into_iter().chain([UNKNOWN])
}

impl Catalog {
    /// Returns the verdict about the text of an XID 154; `of_row` is the verdict of its row.
    /// The row of the action's code decides; a text that cannot be parsed needs a person.
    pub(super) fn judge_advice(&self, text: &str, of_row: &LineVerdict) -> LineVerdict {
        let number = changed_to(text).map(|(number, name)| number_of(number, name));
        let verdict = |fatal, action| LineVerdict {
            fatal,
            action,
            ..of_row.clone()
        };
        match number.map_or(Some(UNKNOWN), recovery_code) {
            // The driver withdraws its request.
            None => LineVerdict {
                healthy: true,
                ..verdict(false, RecommendedAction::None)
            },
            // The line is about a domain of machines, not about this GPU, and does not show
            // whether a pod uses the domain. NVML's reading of the domain decides.
            Some(_) if number == Some(IMEX) => LineVerdict {
                basis: Some("it is about the IMEX domain and not about this GPU".into()),
                ..verdict(false, RecommendedAction::None)
            },
            Some(code) => {
                let of_code = self.judge_dcgm(code);
                LineVerdict {
                    basis: of_code.basis,
                    ..verdict(of_code.fatal, of_code.action)
                }
            }
        }
    }
}

/// Returns the NVML number of an action with this number and name in a line. The number
/// decides, except for PF FLR, the name since R610 for a reset of the GPU on the PCIe bus.
fn number_of(number: u32, name: &str) -> u32 {
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

/// Returns number and name of the new action in
/// `GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)`.
///
/// Only text in the driver's own position counts. Other text in the line, such as a process
/// name that follows, cannot withdraw an action.
fn changed_to(text: &str) -> Option<(u32, &str)> {
    /// Parses `0x1 (GPU Reset Required)`; returns number, name and the rest.
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
