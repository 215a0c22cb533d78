use contract::findings::MAX_FILE_BYTES;
use proptest::prelude::*;

use super::*;
use crate::catalog::NvlinkReport;
use crate::limits::{CheckLimits, HYSTERESES, KEYS};

fn changed(text: &str) -> Catalog {
    let overrides = Overrides::parse(text, "site.toml").unwrap_or_else(|error| panic!("{error}"));
    Catalog::builtin().with(&overrides)
}

#[test]
fn a_file_changes_verdicts_and_the_event_says_so() {
    let catalog = changed(
        "[[xid]]\ncode = 79\nfatal = false\nreason = \"a bench that is unplugged\"\n\
         [[xid]]\ncode = 94\naction = \"COMPONENT_RESET\"\n\
         [[xid]]\ncode = 300\nfatal = true\naction = \"RESTART_BM\"\nmeaning = \"Seen at our site\"\n\
         [[sxid]]\ncode = 20034\nfatal = false\n\
         [[sxid]]\ncode = 28006\naction = \"RESTART_VM\"\n",
    );
    for (code, fatal, action) in [
        (79, false, RecommendedAction::None),
        (94, true, RecommendedAction::ComponentReset),
        (300, true, RecommendedAction::RestartBm),
        (48, true, RecommendedAction::ComponentReset),
    ] {
        let verdict = catalog.judge_xid(code, "");
        assert_eq!(
            (verdict.fatal, verdict.action),
            (fatal, action),
            "XID {code}"
        );
    }
    let verdict = catalog.judge_xid(79, "");
    assert_eq!(
        verdict.basis.as_deref(),
        Some("site.toml:1: a bench that is unplugged")
    );
    assert_eq!(catalog.judge_xid(300, "").meaning, "Seen at our site");
    assert!(!catalog.judge_sxid(20034, Some(true)).fatal);
    assert!(catalog.judge_sxid(28006, Some(false)).fatal);
    // The built-in catalogue is unchanged.
    assert!(Catalog::builtin().judge_xid(79, "").fatal);
}

#[test]
fn a_file_may_fix_what_lines_otherwise_decide() {
    let link_down = |status| NvlinkReport {
        unit: "NETIR_LINK_EVT",
        severity: None,
        intr_info: 0x0255_25c6,
        error_status: status,
    };
    let by_words = changed("[[nvlink5]]\ncode = 149\ncause = 37\nfatal = false\n");
    assert!(!by_words.judge_nvlink5(149, &link_down(0), Some(570)).fatal);
    let whole_code = changed("[[xid]]\ncode = 149\naction = \"RESTART_BM\"\n");
    let verdict = whole_code.judge_nvlink5(149, &link_down(0), Some(570));
    assert_eq!(verdict.action, RecommendedAction::RestartBm);
    let both = changed(
        "[[xid]]\ncode = 149\naction = \"RESTART_BM\"\n\
         [[nvlink5]]\ncode = 149\nunit = \"netir_link_down\"\nfatal = false\n",
    );
    assert!(!both.judge_nvlink5(149, &link_down(0), Some(570)).fatal);
    let advice = changed("[[xid]]\ncode = 154\nfatal = false\n");
    let verdict = advice.judge_xid(154, "changed from 0x0 (None) to 0x2 (Node Reboot Required)");
    assert_eq!((verdict.fatal, verdict.healthy), (false, false));
}

/// Files as NVSentinel's chart renders them.
#[test]
fn the_files_of_nvsentinel_are_read_as_they_are() {
    let nic = changed(
        "[nicDriverDetection]\n\n  [[nicDriverDetection.patterns]]\n  name = \"netdev_watchdog\"\n  \
         enabled = true\n  processingStrategy = \"STORE_ONLY\"\n\n  \
         [[nicDriverDetection.patterns]]\n  name = \"cmd_exec_timeout\"\n  enabled = true\n  \
         processingStrategy = \"\"\n\n  [[nicDriverDetection.patterns]]\n  \
         name = \"of a later version\"\n  enabled = false\n",
    );
    let on: Vec<_> = nic.nics().iter().filter(|row| row.enabled).collect();
    let names: Vec<_> = on.iter().map(|row| (&*row.name, row.strategy)).collect();
    assert_eq!(
        names,
        [
            ("netdev_watchdog", ProcessingStrategy::StoreOnly),
            ("cmd_exec_timeout", ProcessingStrategy::ExecuteRemediation)
        ]
    );

    let cancel = changed(
        "[[checks]]\nname = \"SysLogsXIDError\"\nenabled = true\n\n  [[checks.cancellations]]\n  \
         onErrorCode = \"162\"\n  cancelErrorCodes = [\"163\", \"164\"]\n\n  \
         [[checks.cancellations]]\n  onErrorCode = \"162\"\n  cancelErrorCodes = [\"165\"]\n\n\
         [[checks]]\nname = \"SysLogsSXIDError\"\nenabled = false\n",
    );
    assert_eq!(cancel.cancelled_by("162"), ["163", "164", "165"]);
    let none = changed("[[checks]]\nname = \"SysLogsXIDError\"\nenabled = false\n");
    assert!(none.cancelled_by("162").is_empty());
    assert_eq!(changed("").cancelled_by("162"), ["163"]);
}

#[test]
fn a_pattern_of_a_nic_is_turned_on_and_regraded() {
    let catalog = changed(
        "[[nic]]\nname = \"access_reg_failed\"\nenabled = true\nstrategy = \"EXECUTE_REMEDIATION\"\n\
         fatal = true\naction = \"REPLACE_VM\"\n[[nic]]\nname = \"module_unplugged\"\nenabled = false\n",
    );
    let row = |name: &str| catalog.nics().iter().find(|row| row.name == name).unwrap();
    let access = row("access_reg_failed");
    assert!(access.enabled && access.fatal && access.action == RecommendedAction::ReplaceVm);
    assert!(!row("module_unplugged").enabled);
    assert!(row("cmd_exec_timeout").enabled);
}

#[test]
fn a_code_of_dcgm_is_changed_by_each_of_its_names() {
    for (name, fatal, action) in [
        ("DCGM_FR_FABRIC_PROBE_STATE", false, RecommendedAction::None),
        (
            "DCGM_FR_CLOCK_THROTTLE_THERMAL",
            true,
            RecommendedAction::RestartVm,
        ),
    ] {
        let action_name = action.as_str_name();
        let catalog = changed(&format!(
            "[[dcgm]]\nname = \"{name}\"\nfatal = {fatal}\naction = \"{action_name}\"\n"
        ));
        let verdict = catalog.judge_dcgm(name);
        assert_eq!((verdict.fatal, verdict.action), (fatal, action));
        assert_eq!(verdict.basis.as_deref(), Some("site.toml:1"));
        let fields = Catalog::builtin().changes_to(&catalog);
        let fields: Vec<_> = fields.iter().map(|it| (it.kind, it.field)).collect();
        assert_eq!(fields, [("dcgm", "fatal"), ("dcgm", "action")]);
    }
}

#[test]
fn what_is_wrong_is_named_with_its_line_and_all_at_once() {
    let long = format!(
        "[[xid]]\ncode = 1\nfatal = false\nreason = \"{}\"",
        "x".repeat(501)
    );
    for (text, expected) in [
        (
            "[[xid]]\ncode = \"a\"",
            "site.toml:2: xid[0].code is \"a\"; write a whole number from 0 to 4294967295",
        ),
        ("x = 1", "site.toml:1: unknown key 'x'; there is xid, sxid,"),
        (
            "[[xid]]\ncode = 1\nfatl = true",
            "site.toml:3: unknown key 'xid[0].fatl'; did you mean 'fatal'?",
        ),
        ("[[xid]]\nfatal = true", "xid[0]: the key 'code' is missing"),
        (
            "\n[[xid]]\ncode = 1",
            "site.toml:2: xid 1: needs fatal, action or both",
        ),
        (
            "[[xid]]\ncode = 1\nfatal = true",
            "xid 1: is fatal, so it needs an action",
        ),
        (
            "[[dcgm]]\nname = \"DCGM_FR_XID_ERROR\"\nfatal = true\naction = \"NONE\"",
            "dcgm 'DCGM_FR_XID_ERROR': is fatal, so it needs an action",
        ),
        (
            "[[xid]]\ncode = 1\naction = \"REBOOT\"",
            "site.toml:3: xid 1: action 'REBOOT' is none of",
        ),
        (
            "[[xid]]\ncode = 1\naction = \"CUSTOM\"",
            "action 'CUSTOM' is none of",
        ),
        (
            "[[xid]]\ncode = 1\nfatal = false\n[[xid]]\ncode = 1\nfatal = false",
            "site.toml:4: xid 1: is in the file twice",
        ),
        (
            &long,
            "site.toml:4: xid 1: reason must be one line of at most 500 bytes",
        ),
        (
            "[[nvlink5]]\ncode = 149\nunit = \"NETIR_X\"\nfatal = false",
            "nvlink5 149: there is no such row",
        ),
        (
            "[[nvlink5]]\ncode = 149\nstatus = \"1\"\nfatal = false",
            "site.toml:3: nvlink5 149: status '1'",
        ),
        (
            "[[dcgm]]\nname = \"DCGM_FR_X\"\nfatal = false",
            "site.toml:1: dcgm 'DCGM_FR_X': there is no such code",
        ),
        // One code under both of its names.
        (
            "[[dcgm]]\nname = \"DCGM_FR_CLOCKS_EVENT_POWER\"\nfatal = false\n\
             [[dcgm]]\nname = \"DCGM_FR_CLOCK_THROTTLE_POWER\"\nfatal = false",
            "is in the file twice",
        ),
        (
            "[[nic]]\nname = \"x\"",
            "site.toml:1: nic 'x': there is no such pattern; there are cmd_exec_timeout,",
        ),
        (
            "[[nic]]\nname = \"module_unplugged\"\nstrategy = \"LOUD\"",
            "strategy 'LOUD' is none of",
        ),
        (
            "[nicDriverDetection]\npatterns = [{name = \"x\", enabled = true}]",
            "site.toml:2: pattern 'x': there is no such pattern",
        ),
        (
            "[[checks]]\nname = \"SysLogsSXIDError\"\nenabled = true",
            "check 'SysLogsSXIDError': cancellations are supported for SysLogsXIDError only",
        ),
        (
            "[[checks]]\nname = \"SysLogsXIDError\"\nenabled = true\n[[checks.cancellations]]\nonErrorCode = \"1\"",
            "cancelErrorCodes is empty",
        ),
        (
            "[[checks]]\nname = \"SysLogsXIDError\"\nenabled = true\n[[checks.cancellations]]\ncancelErrorCodes = [\"1\"]",
            "site.toml:4: cancellation: a code is empty",
        ),
        (
            "[[checks]]\nname = \"SysLogsXIDError\"\nenabled = true\n[[checks.cancellations]]\nonErrorCode = \"1\"\ncancelErrorCodes = [\"1\"]",
            "1 would cancel itself",
        ),
        (
            "[gpu-limits]\ncalm-seconds = 0",
            "site.toml:2: gpu-limits.calm-seconds is 0; write a whole number from 1 to 86400",
        ),
        (
            "[gpu-limits]\nretired-pages = \"63\"",
            "retired-pages is \"63\"; write a whole number from 1 to 4096",
        ),
        (
            "[gpu-limits]\nmargin-hysteresis-c = -1",
            "margin-hysteresis-c is -1; write a whole number from 0 to 50",
        ),
        (
            "[gpu-limits]\nmargin-counts = 1",
            "margin-counts is 1; write true or false",
        ),
        (
            "\n[gpu-limits]\n\nretired-page = 1",
            "site.toml:4: unknown key 'gpu-limits.retired-page'; did you mean 'retired-pages'?",
        ),
        (
            "[gpu-limits]\ncelsius = 1",
            "unknown key 'gpu-limits.celsius'; there is missing-seconds, settling-seconds,",
        ),
        (
            "[gpu-limits]\nnvlink-crc-over-per-second = 10",
            "it stands beside nvlink-crc-per-second: give both",
        ),
        (
            "[gpu-limits]\npcie-replay-percent = 50\npcie-replay-over-percent = 51",
            "site.toml:3: gpu-limits.pcie-replay-over-percent is 51; that is above \
             pcie-replay-percent, which is 50",
        ),
        (
            "gpu-limits = 1",
            "site.toml:1: gpu-limits is 1; write keys with their values",
        ),
        ("= ", "site.toml:1: "),
        (&" ".repeat(MAX_FILE_BYTES + 1), "1048577 bytes"),
        (
            &"[[nic]]\nname = \"x\"\n".repeat(MAX_OVERRIDES + 1),
            "4097 entries",
        ),
    ] {
        let error = Overrides::parse(text, "site.toml").unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for (text, findings) in [
        ("[[xid]]\ncode = 1\n[[sxid]]\ncode = 2\n", 2),
        // A begin that is invalid makes no further error about its end.
        (
            "[gpu-limits]\npcie-replay-percent = 0\npcie-replay-over-percent = 5\nx = 1",
            2,
        ),
    ] {
        let error = Overrides::parse(text, "s").unwrap_err();
        assert_eq!(error.findings.len(), findings, "{error}");
    }
}

#[test]
fn thresholds_are_changed_one_by_one_and_the_last_file_has_the_last_word() {
    let first = changed(
        "[gpu-limits]\nretired-pages = 8\nmargin-counts = true\nnvlink-crc-per-second = 500\n\
         nvlink-crc-over-per-second = 400\n",
    );
    let expected = CheckLimits {
        retired_pages: 8,
        margin_counts: true,
        nvlink_crc_per_second: 500,
        nvlink_crc_over_per_second: 400,
        ..CheckLimits::default()
    };
    assert_eq!(*first.limits(), expected);
    let second = "[gpu-limits]\nretired-pages = 9\nnvlink-crc-per-second = 300\n";
    let both = first.with(&Overrides::parse(second, "own.toml").unwrap());
    let expected = CheckLimits {
        retired_pages: 9,
        nvlink_crc_per_second: 300,
        // A threshold without a given end uses its begin as the end.
        nvlink_crc_over_per_second: 300,
        ..expected
    };
    assert_eq!(*both.limits(), expected);
    let shown = Catalog::builtin().changes_to(&both);
    let shown: Vec<_> = (shown.iter())
        .map(|it| {
            format!(
                "{} {} {} -> {} ({})",
                it.kind, it.key, it.before, it.after, it.by
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            "gpu-limits margin-counts false -> true (site.toml:3)",
            "gpu-limits retired-pages 63 -> 9 (own.toml:2)",
            "gpu-limits nvlink-crc-per-second 100 -> 300 (own.toml:3)",
            "gpu-limits nvlink-crc-over-per-second 100 -> 300 (own.toml:3)",
        ]
    );
}

#[test]
fn the_default_of_each_threshold_may_be_given() {
    for key in &KEYS {
        let (name, default) = (key.name, key.shown(&CheckLimits::default()));
        let beside = HYSTERESES.iter().find(|one| one.ends == name);
        let beside = beside.map_or(String::new(), |one| format!("{} = 100\n", one.begins));
        let same = changed(&format!("[gpu-limits]\n{beside}{name} = {default}\n"));
        assert_eq!(*same.limits(), CheckLimits::default(), "{name}");
    }
}

#[test]
fn the_difference_is_shown() {
    let catalog = changed(
        "[[xid]]\ncode = 79\nfatal = false\nreason = \"bench\"\n[[xid]]\ncode = 300\nfatal = false\n\
         [[sxid]]\ncode = 20034\nfatal = false\n[[nvlink5]]\ncode = 148\naction = \"RESTART_BM\"\n\
         [[nic]]\nname = \"module_unplugged\"\nenabled = false\n[[checks]]\nenabled = false\n",
    );
    let shown: Vec<String> = Catalog::builtin()
        .changes_to(&catalog)
        .into_iter()
        .map(|it| {
            format!(
                "{} {} {}: {} -> {} ({})",
                it.kind, it.key, it.field, it.before, it.after, it.by
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            "xid 79 fatal: true -> false (site.toml:1: bench)",
            "xid 79 action: RESTART_BM -> NONE (site.toml:1: bench)",
            "xid 300 fatal:  -> false (site.toml:5)",
            "xid 300 action:  -> NONE (site.toml:5)",
            "xid 300 meaning:  -> GPU error that the file names (site.toml:5)",
            "sxid 20034 verdict: as in the line -> not fatal, NONE (site.toml:8)",
            "nvlink5 148 NVLPW_CTRL/NVLPW status 0x80000000 fatal: false -> true (site.toml:11)",
            "nvlink5 148 NVLPW_CTRL/NVLPW status 0x80000000 action: NONE -> RESTART_BM (site.toml:11)",
            "nic module_unplugged looked for: yes, STORE_ONLY -> no (site.toml:14)",
            "cancellation 162 cancels: 163 ->  ()",
        ]
    );
    assert_eq!(Catalog::builtin().changes_to(Catalog::builtin()), []);
}

proptest! {
    #[test]
    fn never_panics(text in "[ -~\n\u{e4}]{0,200}") {
        if let Ok(overrides) = Overrides::parse(&text, "f") {
            drop(Catalog::builtin().with(&overrides));
        }
    }
}

#[test]
fn the_example_is_one() {
    let catalog = changed(include_str!("../../../../../examples/catalog.toml"));
    assert_eq!(Catalog::builtin().changes_to(&catalog).len(), 8);
}
