//! What a GPU tells of the fabric that joins it to others.

use crate::gpu::{Fabric, FabricState};

/// The status of a registration that has succeeded.
const SUCCESS: &str = "NVML_SUCCESS";

/// The ailments in the health mask, each by its shift, in two bits: 0 is nothing told, 1 yes, 2 no.
const AILMENTS: [(u32, &str); 4] = [
    (0, "bandwidth is degraded"),
    (2, "a route is being mended"),
    (4, "a route is not well"),
    (6, "an access that timed out is being mended"),
];
/// Shift of the four bits of what is wrong with the configuration: 0 is nothing told, 1 none.
const CONFIGURATION: u32 = 8;

/// Returns what is wrong with a GPU's registration.
pub(super) fn registration_trouble(fabric: &Fabric) -> Option<String> {
    let state = match fabric.state {
        FabricState::Completed if fabric.status != SUCCESS => {
            format!("ended with {}", fabric.status)
        }
        // Within one machine there is a fabric without a cluster, and no clique of one.
        FabricState::Completed if fabric.clique.is_none() && fabric.cluster.is_some() => {
            "ended without a clique".to_owned()
        }
        FabricState::NotSupported | FabricState::Completed => return None,
        FabricState::NotStarted => "has not begun".to_owned(),
        FabricState::InProgress => "does not end".to_owned(),
        FabricState::Other(number) => format!("is in state {number}, which is not known"),
    };
    Some(format!("the registration with the fabric {state}"))
}

/// Returns what a health mask says is wrong; `None` where it tells nothing.
pub(super) fn ailments(mask: u32) -> Option<Vec<String>> {
    let is_told = |(shift, _): &(u32, &str)| mask >> shift & 3 != 0;
    let configuration = mask >> CONFIGURATION & 15;
    if configuration == 0 && !AILMENTS.iter().any(is_told) {
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
        6 => ailments.push("its firmware does not go with the fabric's".to_owned()),
        7 => ailments.push("it is in a wrong place".to_owned()),
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
            // As a healthy one has it: no to all, and no fault of the configuration.
            (0b0001_1010_1010, Some("")),
            (0b10, Some("")),
            (0b01, Some("bandwidth is degraded")),
            (
                0b0000_0101_0110,
                Some(
                    "a route is being mended, a route is not well, an access that timed out is being mended",
                ),
            ),
            (0x200, Some("the machine's GUID is wrong")),
            (0x300, Some("the chassis' serial number is wrong")),
            (0x400, Some("it is in no partition")),
            (0x500, Some("it has too few NVLinks")),
            (0x600, Some("its firmware does not go with the fabric's")),
            (0x800, Some("its state is not valid")),
            (0x900, Some("its configuration is wrong (9)")),
        ] {
            let found = ailments(mask).map(|ailments| ailments.join(", "));
            assert_eq!(found.as_deref(), expected, "{mask:#x}");
        }
    }
}
