//! The layout in which an XID 144 to 150 line is read.

use RecommendedAction::{ComponentReset, ContactSupport, Unknown};

use super::*;

fn judged(driver: &str, line: &str) -> Finding {
    let mut decoder = KernelLogDecoder::default();
    let machine = format!(r#"{{"driver_version": "{driver}"}}"#);
    decoder.set_machine(Some(Machine::parse(&machine).unwrap()));
    one(&mut decoder, &format!("NVRM: Xid (PCI:0000:b3:00): {line}"))
}

/// Words of the other layout may be those of a graver unit: what the driver calls not fatal
/// would reset the GPU.
#[test]
fn a_line_is_read_in_the_layout_of_a_known_driver_only() {
    // Unit and status as drivers before R575 print them, and as those from R575 on do.
    let down = ["(0x025525c6 0x00000000)", "(0x02500011 0x00000000)"];
    let track = ["(0x000000e2 0x00000001)", "(0x00000007 0x00000001)"];
    for (driver, layout) in [
        ("565.57.01", 0),
        ("570.86.15", 0),
        ("574.99", 0),
        ("575.51.03", 1),
        ("576.02", 1),
        ("580.65.06", 1),
    ] {
        for (code, unit, words) in [(149, "NETIR_LINK_EVT", down), (145, "RLW_SRC_TRACK", track)] {
            for (severity, otherwise) in [
                ("Fatal", (true, ContactSupport)),
                ("Nonfatal", (false, Unknown)),
            ] {
                for (index, words) in words.into_iter().enumerate() {
                    let line = format!("{code}, {unit} {severity} XC0 i0 Link 09 {words}");
                    let finding = judged(driver, &line);
                    let (expected, basis) = if index == layout {
                        ((true, ComponentReset), None)
                    } else {
                        (otherwise, Some("undetermined: no row covers these words"))
                    };
                    assert_eq!(
                        (finding.fatal, finding.action),
                        expected,
                        "{driver}: {line}"
                    );
                    let told = finding.basis.as_deref();
                    assert_eq!(
                        told.and_then(|told| told.split(',').next()),
                        basis,
                        "{driver}: {line}"
                    );
                }
            }
        }
    }
}

/// Units of 149 put a number into the status, of which no bit means anything.
#[test]
fn a_status_that_is_a_number_is_not_taken_apart() {
    for (status, expected) in [
        (1, (true, ComponentReset)),
        (4, (true, ComponentReset)),
        (5, (true, ComponentReset)),
        (3, (false, RecommendedAction::None)),
        (6, (false, Unknown)),
    ] {
        let line =
            format!("149, NETIR_MFDE_EVENT Nonfatal XC0 i0 Link 09 (0x00000014 {status:#x})");
        let finding = judged("580.65.06", &line);
        assert_eq!((finding.fatal, finding.action), expected, "{line}");
    }
}
