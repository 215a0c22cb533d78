//! Evaluates the state of the fabric that joins GPUs.

use crate::gpu::{Fabric, FabricState};

/// Status of a successful registration.
const SUCCESS: &str = "NVML_SUCCESS";

/// Ailments in the health mask, by their shift, with two bits each: 0 is unknown, 1 yes, 2 no.
const AILMENTS: [(u32, &str); 4] = [
    (0, "bandwidth is degraded"),
    (2, "a route recovery is in progress"),
    (4, "a route is unhealthy"),
    (6, "an access timeout recovery is in progress"),
];
/// Shift of the four bits about an incorrect configuration: 0 is unknown, 1 none.
const CONFIGURATION: u32 = 8;

/// Describes what is wrong with a GPU's registration; `None` if it succeeded.
pub(super) fn registration_trouble(fabric: &Fabric) -> Option<String> {
    let state = match fabric.state {
        FabricState::Completed if fabric.status != SUCCESS => {
            format!("ended with {}", fabric.status)
        }
        // Within one machine there is a fabric without a cluster, and so without a clique.
        FabricState::Completed if fabric.clique.is_none() && fabric.cluster.is_some() => {
            "ended without a clique".to_owned()
        }
        FabricState::NotSupported | FabricState::Completed => return None,
        FabricState::NotStarted => "has not begun".to_owned(),
        FabricState::InProgress => "does not end".to_owned(),
        FabricState::Other(number) => format!("is in the unknown state {number}"),
    };
    Some(format!("the registration with the fabric {state}"))
}

/// Returns the ailments in a health mask; `None` if the mask reports nothing.
pub(super) fn ailments(mask: u32) -> Option<Vec<String>> {
    let is_reported = |(shift, _): &(u32, &str)| mask >> shift & 3 != 0;
    let configuration = mask >> CONFIGURATION & 15;
    if configuration == 0 && !AILMENTS.iter().any(is_reported) {
        return None;
    }
    let ails = AILMENTS.iter().filter(|(shift, _)| mask >> shift & 3 == 1);
    let mut ailments: Vec<String> = ails.map(|(_, what)| (*what).to_owned()).collect();
    match configuration {
        0 | 1 => {}
        2 => ailments.push("the machine's GUID is wrong".to_owned()),
        3 => ailments.push("the chassis' serial number is wrong".to_owned()),
        4 => ailments.push("it is in no partition".to_owned()),
        5 => ailments.push("it has too few NVLinks".to_owned()),
        6 => ailments.push("its firmware is incompatible with the fabric's".to_owned()),
        7 => ailments.push("it is in the wrong place".to_owned()),
        8 => ailments.push("its state is not valid".to_owned()),
        other => ailments.push(format!("its configuration is wrong ({other})")),
    }
    Some(ailments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_health_mask_is_read_as_nvml_writes_it() {
        for (mask, expected) in [
            (0, None),
            // The mask of a healthy GPU: no to all, and no incorrect configuration.
            (0b0001_1010_1010, Some("")),
            (0b10, Some("")),
            (0b01, Some("bandwidth is degraded")),
            (
                0b0000_0101_0110,
                Some(
                    "a route recovery is in progress, a route is unhealthy, an access timeout recovery is in progress",
                ),
            ),
            (0x200, Some("the machine's GUID is wrong")),
            (0x300, Some("the chassis' serial number is wrong")),
            (0x400, Some("it is in no partition")),
            (0x500, Some("it has too few NVLinks")),
            (
                0x600,
                Some("its firmware is incompatible with the fabric's"),
            ),
            (0x800, Some("its state is not valid")),
            (0x900, Some("its configuration is wrong (9)")),
        ] {
            let found = ailments(mask).map(|ailments| ailments.join(", "));
            assert_eq!(found.as_deref(), expected, "{mask:#x}");
        }
    }
}
