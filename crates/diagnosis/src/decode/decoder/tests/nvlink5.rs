//! Tests of the layout of XID 144 to 150 lines.

use RecommendedAction::{ComponentReset, ContactSupport, Unknown};

use super::*;

fn judged(driver: &str, line: &str) -> Finding {
    let mut decoder = KernelLogDecoder::default();
    let machine = format!(r#"{{"driver_version": "{driver}"}}"#);
    decoder.set_machine(Some(MachineGpus::parse(&machine).unwrap()));
    one(&mut decoder, &format!("NVRM: Xid (PCI:0000:b3:00): {line}"))
}

/// Words of the other layout may be those of a more severe unit: a report that the driver calls
/// non-fatal would reset the GPU.
#[test]
fn a_line_is_read_in_the_layout_of_a_known_driver_only() {
    // Unit and status, first of drivers before R575, then of those from R575 on.
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
                    let (expected, expected_basis) = if index == layout {
                        ((true, ComponentReset), None)
                    } else {
                        (otherwise, Some("undetermined: no row covers these words"))
                    };
                    assert_eq!(
                        (finding.fatal, finding.action),
                        expected,
                        "{driver}: {line}"
                    );
                    let basis = finding.basis.as_deref();
                    assert_eq!(
                        basis.and_then(|basis| basis.split(',').next()),
                        expected_basis,
                        "{driver}: {line}"
                    );
                }
            }
        }
    }
}

/// For units of 149 the status is a number, whose bits have no meaning.
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

#[test]
fn an_nvlink5_line_is_read_by_its_words_and_never_silently_harmless() {
    let line = |code: u32, text: &str| format!("NVRM: Xid (PCI:0000:b3:00): {code}, {text}");
    let (reset, none) = (RecommendedAction::ComponentReset, RecommendedAction::None);
    let (support, unknown) = (
        RecommendedAction::ContactSupport,
        RecommendedAction::Unknown,
    );
    // Driver, code, text, error code, fatal, action, true if the verdict has a basis.
    let table = [
        // Two layouts of one report.
        (
            Some("570.86.15"),
            149,
            "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000)",
            "149.NETIR_LINK_EVT",
            true,
            reset,
            false,
        ),
        (
            Some("580.65.06"),
            149,
            "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x02500011 0x00000000)",
            "149.NETIR_LINK_EVT",
            true,
            reset,
            false,
        ),
        (
            None,
            149,
            "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000)",
            "149.NETIR_LINK_EVT",
            true,
            reset,
            true,
        ),
        // Link taken down on purpose: the action counts, not the severity.
        (
            Some("570.86.15"),
            149,
            "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x026001c6 0x00000000)",
            "149.NETIR_LINK_EVT",
            false,
            none,
            false,
        ),
        (
            Some("580.1"),
            149,
            "NETIR_BER_EVENT Nonfatal XC0 i0 Link 09 (0x00000013 0x00000002)",
            "149.NETIR_BER_EVENT",
            false,
            none,
            false,
        ),
        // The second pattern of a row: bit 7, or bit 10 before R575.
        (
            Some("580.1"),
            145,
            "RLW_RXPIPE Nonfatal XC0 i0 Link 09 (0x00000006 0x00000001)",
            "145.RLW_RXPIPE",
            false,
            none,
            false,
        ),
        (
            Some("580.1"),
            145,
            "RLW_RXPIPE Nonfatal XC0 i0 Link 09 (0x00000086 0x00000001)",
            "145.RLW_RXPIPE",
            true,
            reset,
            false,
        ),
        (
            Some("570.1"),
            145,
            "RLW_RXPIPE Nonfatal XC0 i0 Link 09 (0x000000c2 0x00000001)",
            "145.RLW_RXPIPE",
            false,
            none,
            false,
        ),
        (
            Some("570.1"),
            145,
            "RLW_RXPIPE Nonfatal XC0 i0 Link 09 (0x000004c2 0x00000001)",
            "145.RLW_RXPIPE",
            true,
            reset,
            false,
        ),
        // Several status bits: the most severe counts, an unknown one leaves the verdict
        // undetermined.
        (
            Some("580.1"),
            144,
            "SAW_MVB Fatal XC0 i0 Link 09 (0x00000001 0x00000005)",
            "144.SAW_MVB",
            false,
            none,
            false,
        ),
        (
            Some("580.1"),
            144,
            "SAW_MVB Fatal XC0 i0 Link 09 (0x00000001 0x00000013)",
            "144.SAW_MVB",
            true,
            reset,
            false,
        ),
        (
            Some("580.1"),
            144,
            "SAW_MVB Fatal XC0 i0 Link 09 (0x00000001 0x00000042)",
            "144.SAW_MVB",
            true,
            reset,
            false,
        ),
        (
            Some("580.1"),
            144,
            "SAW_MVB Nonfatal XC0 i0 Link 09 (0x00000001 0x00000041)",
            "144.SAW_MVB",
            false,
            unknown,
            true,
        ),
        // A blank in the name; a list of status words.
        (
            Some("580.1"),
            150,
            "MSE Degraded Fatal XC0 i0 Link 00 (0x00000000 0xffffffff)",
            "150.MSE_Degraded",
            true,
            reset,
            false,
        ),
        (
            Some("580.1"),
            150,
            "MSE_WATCHDOG Fatal XC0 i0 Link 00 (0x00000000 0x00000000)",
            "150.MSE_WATCHDOG",
            true,
            reset,
            false,
        ),
        (
            None,
            150,
            "MSE_WATCHDOG Fatal XC0 i0 Link 00 (0x00000000 0x00000000)",
            "150.MSE_WATCHDOG",
            true,
            reset,
            true,
        ),
        // XID 154 names the action.
        (
            Some("580.1"),
            145,
            "RLW_REMAP Nonfatal XC1 i0 Link 09 (0x00000004 0x00000001)",
            "145.RLW_REMAP",
            false,
            none,
            false,
        ),
        // No row: the driver's severity decides.
        (
            Some("580.1"),
            149,
            "NETIR_NEW Fatal XC0 i0 Link 09 (0x0000007f 0x00000001)",
            "149.NETIR_NEW",
            true,
            support,
            true,
        ),
        (
            Some("580.1"),
            149,
            "NETIR_NEW Nonfatal XC0 i0 Link 09 (0x0000007f 0x00000001)",
            "149.NETIR_NEW",
            false,
            unknown,
            true,
        ),
        (
            Some("580.1"),
            149,
            "NETIR_MFDE_EVENT Fatal XC0 i0 Link 09 (0x00000014 0x00000002)",
            "149.NETIR_MFDE_EVENT",
            true,
            support,
            true,
        ),
        (
            None,
            149,
            "NETIR_NEW (0x0000007f 0x00000001)",
            "149.NETIR_NEW",
            true,
            support,
            true,
        ),
        (
            Some("580.1"),
            149,
            "NETIR_NEW Correctable XC0 i0 Link 09 (0x0000007f 0x00000001)",
            "149.NETIR_NEW",
            false,
            unknown,
            true,
        ),
        // No words that can be parsed.
        (
            None,
            149,
            "NETIR_LINK_EVT Fatal",
            "149",
            true,
            support,
            true,
        ),
        (
            None,
            149,
            "NETIR_LINK_EVT Nonfatal XC0 i0 Link 09 (0x025525c6)",
            "149",
            false,
            unknown,
            true,
        ),
        (None, 144, "", "144", true, support, true),
        (None, 150, "nobody knows", "150", true, support, true),
    ];
    for (driver, code, text, error_code, fatal, action, has_basis) in table {
        let mut decoder = KernelLogDecoder::default();
        decoder.set_machine(driver.map(|version| {
            MachineGpus::parse(&format!(r#"{{"driver_version": "{version}"}}"#)).unwrap()
        }));
        let finding = one(&mut decoder, &line(code, text));
        assert_eq!(
            finding.code().as_deref(),
            Some(error_code),
            "{driver:?} {text}"
        );
        assert_eq!(
            (finding.fatal, finding.action),
            (fatal, action),
            "{driver:?} {text}"
        );
        assert_eq!(
            finding.basis.is_some(),
            has_basis,
            "{driver:?} {text}: {:?}",
            finding.basis
        );
    }
}
