use RecommendedAction::{ComponentReset, ContactSupport, None, RestartBm, RestartVm};

use self::published::{EXPECTED, decodes, is_right_xid, words};
use super::*;

mod dcgm;
mod published;

fn all<T>(rows: impl Iterator<Item = Result<T, RowError>>) -> usize {
    let rows: Result<Vec<T>, RowError> = rows.collect();
    rows.unwrap().len()
}

#[test]
fn every_row_of_the_data_files_is_read() {
    let catalog = Catalog::builtin();
    let xids = all(rows::XID.rows(rows::xid));
    assert_eq!(
        (xids, catalog.xids().count()),
        (172, 172),
        "a code stands twice"
    );
    let sxids = all(rows::SXID.rows(rows::sxid));
    assert_eq!(
        (sxids, catalog.sxids().count()),
        (93, 93),
        "a code stands twice"
    );
    // 95 rows of the publisher, three of them with a second pattern.
    let nvlink5 = all(rows::NVLINK5.rows(rows::nvlink5));
    assert_eq!((nvlink5, catalog.nvlink5().len()), (98, 98));
    assert_eq!(all(rows::NIC.rows(rows::nic)), catalog.nics().len());
    // 133 of DCGM, and three from others.
    let dcgm = all(super::dcgm::DCGM.rows(super::dcgm::read));
    assert_eq!((dcgm, catalog.dcgms().len()), (136, 136));
}

#[test]
fn every_row_says_what_it_means_and_where_that_comes_from() {
    let catalog = Catalog::builtin();
    let texts = |meaning: &str, source: &str, title: &str| {
        assert!(
            !meaning.is_empty() && meaning.len() <= 160,
            "{title}: {meaning}"
        );
        assert!(
            !meaning.ends_with('.') && meaning.is_ascii(),
            "{title}: {meaning}"
        );
        assert!(!source.is_empty(), "{title}");
    };
    for row in catalog.xids() {
        texts(&row.meaning, &row.source, &row.mnemonic);
        assert!(!row.mnemonic.is_empty());
        assert!(
            !row.fatal || row.action != None,
            "fatal without an action: {row:?}"
        );
        // A job's own crash is no evidence about the GPU.
        assert!(row.scope != "application" || !row.fatal, "{row:?}");
    }
    for row in catalog.sxids() {
        texts(&row.meaning, &row.source, &row.name);
    }
    for row in catalog.nvlink5() {
        texts(&row.meaning, &row.source, &row.key());
        assert_eq!(row.fatal, row.action != None, "{row:?}");
    }
    for row in catalog.dcgms() {
        texts(&row.meaning, &row.source, &row.name);
    }
    for row in catalog.nics() {
        texts(&row.meaning, &row.source, &row.name);
        assert_eq!(row.fatal, row.action != None, "{row:?}");
    }
}

/// A node that is out of service for a fault without an action would stay out.
#[test]
fn no_verdict_is_fatal_and_asks_for_nothing() {
    let catalog = Catalog::builtin();
    let mut verdicts: Vec<LineVerdict> = Vec::new();
    for code in (0..=200).filter(|code| *code != 154) {
        verdicts.push(catalog.judge_xid(code, ""));
        for severity in [
            Option::None,
            Some(Severity::Fatal),
            Some(Severity::NonFatal),
        ] {
            verdicts.push(catalog.judge_unread_nvlink5(code, severity));
        }
    }
    for to in 0..=9 {
        let text = format!("GPU recovery action changed from 0x0 (None) to 0x{to} (New Word)");
        verdicts.push(catalog.judge_xid(154, &text));
    }
    for row in catalog.sxids() {
        let severities = [Option::None, Some(true), Some(false)];
        verdicts.extend(severities.map(|fatal| catalog.judge_sxid(row.code, fatal)));
    }
    verdicts.push(catalog.judge_sxid(99_999, Some(true)));
    for row in catalog.nvlink5() {
        verdicts.push(LineVerdict::of(
            (row.fatal, row.action),
            &row.meaning,
            Option::None,
        ));
    }
    // Readings of NVML use DCGM's names.
    verdicts.extend((catalog.dcgms().iter()).map(|row| catalog.judge_dcgm(&row.name)));
    verdicts.extend(catalog.nics().iter().map(Nic::verdict));
    for verdict in verdicts {
        assert!(!verdict.fatal || verdict.action != None, "{verdict:?}");
    }
}

#[test]
fn actions_are_those_that_users_rely_on() {
    let catalog = Catalog::builtin();
    for code in 1..=172 {
        let row = catalog.xid(code).unwrap();
        assert!(is_right_xid(row), "{row:?}");
        if code == 154 {
            continue;
        }
        let verdict = catalog.judge_xid(code, "any text");
        let expected = &EXPECTED[&code];
        assert_eq!(
            (verdict.fatal, verdict.action, verdict.healthy),
            (expected.fatal, expected.action, false),
            "XID {code}"
        );
    }
}

/// NVSentinel skips empty cells, so these rows are left out or read from the wrong column, and
/// each becomes fatal with `CONTACT_SUPPORT`.
#[test]
fn the_codes_that_the_reference_misreads_have_rows_of_their_own() {
    let catalog = Catalog::builtin();
    for (code, fatal, action) in [
        (162, false, None),
        (163, false, None),
        (164, false, None),
        (165, false, ContactSupport),
        (166, true, ContactSupport),
        (167, true, RestartBm),
        (168, true, ContactSupport),
        (169, true, ComponentReset),
        (170, true, ContactSupport),
        (171, true, ComponentReset),
        (172, true, ComponentReset),
    ] {
        let verdict = catalog.judge_xid(code, "");
        assert_eq!((verdict.fatal, verdict.action), (fatal, action), "{code}");
    }
    let mut meanings = std::collections::BTreeSet::new();
    for code in 162..=172 {
        let row = catalog.xids().find(|row| row.code == code).unwrap();
        assert!(meanings.insert(row.meaning.to_string()), "{row:?}");
    }
}

#[test]
fn xid_154_is_judged_by_its_text() {
    for (text, action) in [
        (
            "changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            ComponentReset,
        ),
        (
            "changed from 0x0 (None) to 0x4 (Drain and Reset)",
            ComponentReset,
        ),
        ("changed from 0x0 (None) to 0x3 (Drain P2P)", ComponentReset),
        (
            "changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            RestartBm,
        ),
        ("changed from 0x1 (GPU Reset Required) to 0x0 (None)", None),
        // Names of drivers from R610 on.
        ("changed from 0x0 (None) to 0x1 (PF FLR)", ComponentReset),
        ("changed from 0x0 (None) to 0x2 (OS Reboot)", RestartBm),
        // The number decides, even with the name of another action.
        (
            "changed from 0x0 (None) to 0x2 (GPU Reset Required)",
            RestartBm,
        ),
        (
            "changed from 0x0 (None) to 0x6 (Sing a Song)",
            ComponentReset,
        ),
        ("changed from 0x0 (None) to 0x7 (Sing a Song)", RestartBm),
        // But PF FLR is a reset, whatever its number is.
        ("changed from 0x0 (None) to 0x2 (PF FLR)", ComponentReset),
        ("changed from 0x0 (None) to 0x9 (PF FLR)", ComponentReset),
        // For an unknown number, a known name decides.
        (
            "changed from 0x0 (None) to 0x9 (Drain and Reset)",
            ComponentReset,
        ),
        ("changed from 0x0 (None) to 0xa (OS Reboot)", RestartBm),
        // For an unknown name, the number decides.
        ("changed from 0x0 (None) to 0x2 (Sing a Song)", RestartBm),
        (
            "changed from 0x0 (None) to 0x4 (Sing a Song)",
            ComponentReset,
        ),
        (
            "changed from 0x0 (None) to 0x9 (Sing a Song)",
            ContactSupport,
        ),
        // Text after the driver's advice is not part of it, nor is text before it.
        (
            "changed from 0x0 (None) to 0x2 (Node Reboot Required), pid=12, name=evil(None)",
            RestartBm,
        ),
        (
            "changed from 0x0 (None) to 0x2 (Node Reboot Required). See (None)",
            RestartBm,
        ),
        (
            "changed from 0x0 (None) to 0x1 (GPU Reset Required), name=from 0x1 (x) to 0x0 (None)",
            ComponentReset,
        ),
        (
            "changed from 0x2 (Node Reboot Required) to 0x0 (None) x",
            None,
        ),
        ("to 0x0 (None)", ContactSupport),
        ("(None)", ContactSupport),
        ("x changed from 0x2 (None) to 0x0 (None)", ContactSupport),
        ("changed from 0x2 (None) to 0x (None)", ContactSupport),
        ("changed from 0x2 (None) to 0x0 None", ContactSupport),
        ("changed from 0x0 (None) to 0x9 (None)", ContactSupport),
        ("changed from 0x0 (None) to 0x2 (None)", RestartBm),
        // A driver with another name for no action.
        ("changed from 0x2 (OS Reboot) to 0x0 (Nothing)", None),
        ("no parentheses at all", ContactSupport),
        ("", ContactSupport),
        (")(", ContactSupport),
    ] {
        let verdict = Catalog::builtin().judge_xid(154, text);
        assert_eq!(verdict.action, action, "{text}");
        assert_eq!(verdict.fatal, action != None, "{text}");
        assert_eq!(verdict.healthy, action == None, "{text}");
    }
}

/// The driver reports an action twice: in an XID 154 line, and as a number in NVML, which is
/// reported with a DCGM code.
#[test]
fn the_drivers_advice_comes_to_the_same_however_it_is_told() {
    let catalog = Catalog::builtin();
    let of_line = |number: u32| {
        let text = format!("changed from 0x0 (None) to {number:#x} (Whatever)");
        let verdict = catalog.judge_xid(154, &text);
        (verdict.fatal, verdict.action)
    };
    for (number, action) in [
        (1, ComponentReset),
        (2, RestartBm),
        (3, ComponentReset),
        (4, ComponentReset),
        (6, ComponentReset),
        (7, RestartBm),
        (8, ContactSupport),
        (99, ContactSupport),
    ] {
        let of_nvml = catalog.judge_dcgm(recovery_code(number).unwrap());
        assert_eq!((of_nvml.fatal, of_nvml.action), (true, action), "{number}");
        assert_eq!(of_line(number), (true, action), "{number}");
    }
    assert_eq!(recovery_code(0), Option::None);
    let codes: Vec<&str> = recovery_codes().collect();
    assert_eq!(codes.len(), 6, "{codes:?}");
    assert!((0..99).all(|number| recovery_code(number).is_none_or(|code| codes.contains(&code))));
    // An override of the DCGM code also applies to the line.
    let site = "[[dcgm]]\nname = \"DCGM_FR_GPU_RECOVERY_RESET\"\nfatal = false\nreason = \"lab\"\n";
    let overrides = Overrides::parse(site, "site.toml").unwrap();
    let changed = Catalog::builtin().with(&overrides);
    let text = "changed from 0x0 (None) to 0x1 (GPU Reset Required)";
    let verdict = changed.judge_xid(154, text);
    assert!(!verdict.fatal, "{verdict:?}");
    assert!(verdict.basis.unwrap().contains("lab"));
}

#[test]
fn a_recovery_of_the_imex_domain_takes_no_node_out_and_is_no_all_clear() {
    for text in [
        "changed from 0x0 (None) to 0x5 (Recover IMEX Domain)",
        "changed from 0x1 (GPU Reset Required) to 0x5 (Something)",
    ] {
        let verdict = Catalog::builtin().judge_xid(154, text);
        assert_eq!(
            (verdict.fatal, verdict.action, verdict.healthy),
            (false, None, false),
            "{text}"
        );
        assert!(verdict.basis.unwrap().contains("IMEX"), "{text}");
    }
}

#[test]
fn a_code_without_a_row_is_kept_and_stops_nothing() {
    let verdict = Catalog::builtin().judge_xid(999, "");
    assert_eq!(
        (verdict.fatal, verdict.action),
        (false, RecommendedAction::Unknown)
    );
    // For a switch, the driver's line has the severity.
    for (word, fatal) in [
        (Some(true), true),
        (Some(false), false),
        (Option::None, false),
    ] {
        assert_eq!(Catalog::builtin().judge_sxid(28006, word).fatal, fatal);
    }
}

#[test]
fn an_sxid_is_as_grave_as_its_line_says_and_else_as_its_class() {
    for (code, word, fatal) in [
        (24007, Some(true), true),
        (24007, Some(false), false),
        (24007, Option::None, false),
        (23001, Option::None, true),
        (20001, Some(true), true),
        (20001, Option::None, false),
    ] {
        let verdict = Catalog::builtin().judge_sxid(code, word);
        let action = if fatal { ContactSupport } else { None };
        assert_eq!(
            (verdict.fatal, verdict.action),
            (fatal, action),
            "{code} {word:?}"
        );
    }
}

/// A line with the publisher's words for a row gets that row's verdict, in the layout of the
/// driver, also for the branches next to the change of layouts. Without a driver version, the
/// words reveal the layout.
#[test]
fn every_nvlink5_row_is_found_by_its_own_words() {
    let mut tried = 0;
    for row in decodes() {
        let statuses: Vec<u32> = match row.status {
            "-" => vec![0, 7, u32::MAX],
            status => words(status).collect(),
        };
        for status in statuses {
            for (bits, branches) in [
                (row.before_r575, [570, 574]),
                (row.from_r575, [575, 576]),
                (row.from_r575, [580, 600]),
            ] {
                let report = NvlinkReport {
                    unit: row.unit.split('/').next_back().unwrap(),
                    severity: Option::None,
                    intr_info: u32::from_str_radix(&bits.replace('-', "0"), 2).unwrap(),
                    error_status: status,
                };
                for branch in branches.map(Some).into_iter().chain([Option::None]) {
                    let verdict = Catalog::builtin().judge_nvlink5(row.code, &report, branch);
                    assert_eq!(
                        (verdict.fatal, verdict.action, verdict.healthy),
                        (row.action != None, row.action, false),
                        "{row:?} on {branch:?}"
                    );
                    assert_eq!(verdict.basis.is_some(), branch.is_none(), "{row:?}");
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 98 * 9);
}

#[test]
fn bit_patterns_are_read_and_shown() {
    let text = "------100101----------0111000110";
    let bits = Bits::parse(text).unwrap();
    assert_eq!(
        (bits.to_string().as_str(), bits.reason()),
        (text, 0b10_0101)
    );
    assert!(bits.covers(0x0255_25c6) && !bits.covers(0x0265_25c6));
    for wrong in [
        "",
        "1",
        "------100101----------01110001102",
        "------100101----------011100011x",
    ] {
        assert_eq!(Bits::parse(wrong), Option::None, "{wrong}");
    }
}

#[test]
fn a_malformed_row_is_named() {
    for (row, what) in [
        ("1\tA\tm\ttrue\tNONE\tgpu\t\thigh", "8 columns, 9 expected"),
        ("x\tA\tm\ttrue\tNONE\tgpu\t\thigh\ts", "code"),
        ("1\tA\tm\tyes\tNONE\tgpu\t\thigh\ts", "fatal"),
        ("1\tA\tm\ttrue\tREBOOT\tgpu\t\thigh\ts", "action"),
        ("1\tA\tm\ttrue\tNONE\tgpu\t\tsure\ts", "confidence"),
    ] {
        let text: &'static str = Box::leak(format!("h\n{row}").into_boxed_str());
        let table = rows::Table {
            file: "t.tsv",
            text,
        };
        let error = table.rows(rows::xid).next().unwrap().unwrap_err();
        assert!(error.line == 2 && error.what.contains(what), "{error}");
    }
}
