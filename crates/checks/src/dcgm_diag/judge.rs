//! Interpretation of a diagnosis: one event for each GPU that fails a test, and one for each
//! test with the GPUs that pass it.

use std::collections::BTreeMap;

use contract::RecommendedAction;
use diagnosis::catalog::Catalog;

use super::result::{Diagnosis, State, TestProblem, TestResult};
use super::{CHECK, KnownGpu};
use crate::outcome::{CheckOutcome, Finding, Result as Meaning};

/// Severities of DCGM that make a failure one of the hardware.
const GRAVE: [&str; 3] = ["ISOLATE", "RESET", "TRIAGE"];
/// Failures that DCGM rates as grave, but that only mean that a test could not run: another
/// program uses or limits the GPU, or driver or DCGM are not installed properly.
const NOT_OF_HARDWARE: [&str; 12] = [
    "DCGM_FR_CANNOT_OPEN_LIB",
    "DCGM_FR_NVML_LIB_BAD",
    "DCGM_FR_GRAPHICS_PROCESSES",
    "DCGM_FR_INTERNAL",
    "DCGM_FR_MEMORY_ALLOC",
    "DCGM_FR_TARGET_POWER",
    "DCGM_FR_DCGM_API",
    "DCGM_FR_MEMORY_ALLOC_HOST",
    "DCGM_FR_EUD_BINARY_PERMISSIONS",
    "DCGM_FR_EUD_NON_ROOT_USER",
    "DCGM_FR_BINARY_PERMISSIONS",
    "DCGM_FR_RETEST_REQUESTED",
];
/// Severities that rate a failure, by number (`dcgmErrorSeverity_t` of `dcgm_errors.h`). The
/// two others rate none: 0 is "no severity", and 3 a code that DCGM does not know.
const SEVERITIES: [(u32, &str); 5] = [
    (1, "MONITOR"),
    (2, "ISOLATE"),
    (4, "TRIAGE"),
    (5, "CONFIG"),
    (6, "RESET"),
];
/// Code of an XID that occurred during a test.
const XID: &str = "DCGM_FR_XID_ERROR";
/// XID that the end of a test causes itself: a program was ended before its work was done.
const OWN_XID: u32 = 45;
/// XIDs whose meaning depends on words that a diagnosis does not pass on: reports of NVLink 5,
/// and the driver's advice. The kernel log has these words.
const NEEDS_WORDS: [u32; 8] = [144, 145, 146, 147, 148, 149, 150, 154];
/// Prefixes of the names of tests that check settings of the machine, in lower case without
/// punctuation: DCGM's deployment tests except those of retired pages and the `InfoROM`, and
/// DCGM 4's single name for all of them.
const OF_SETTINGS: [&str; 11] = [
    "blacklist",
    "cudamainlibrar",
    "cudatoolkitlibrar",
    "denylist",
    "environment",
    "fabricmanager",
    "graphicsprocesses",
    "nvmllibrar",
    "permissionsandos",
    "persistencemode",
    "software",
];

/// Returns the outcome of a diagnosis.
pub(super) fn outcome(level: u64, gpus: &[KnownGpu], diagnosis: Diagnosis) -> CheckOutcome {
    let dcgm = diagnosis.version.map(|version| format!(", DCGM {version}"));
    let dcgm = dcgm.unwrap_or_default();
    let mut wrong = Vec::new();
    let mut passed: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut failed = false;
    for result in diagnosis.tests {
        let problems: Vec<&TestProblem> =
            result.problems.iter().filter(|one| !is_own(one)).collect();
        let only_own = problems.is_empty() && !result.problems.is_empty();
        let check = format!("{CHECK}{}", camel_case(&result.test));
        match result.state {
            State::Skipped => continue,
            State::Pass | State::Fail if only_own => {}
            // A test that could not run may be reported as a pass.
            State::Pass if problems.iter().all(|one| one.code.is_none()) => {}
            state => {
                failed |= state == State::Fail;
                let findings = names(&result, gpus).into_iter();
                wrong.extend(findings.map(|uuid| finding(&check, &result, &problems, uuid)));
                continue;
            }
        }
        let names = names(&result, gpus).into_iter().flatten();
        passed
            .entry(check)
            .or_default()
            .extend(names.map(str::to_owned));
    }
    if wrong.is_empty() && passed.is_empty() {
        return CheckOutcome {
            result: Meaning::NotTested,
            code: "NOTHING_TESTED".to_owned(),
            text: format!("level {level} of the diagnosis{dcgm} has left all tests out"),
            findings: Vec::new(),
            gang_wait: None,
        };
    }
    let mut findings: Vec<Finding> = passed
        .into_iter()
        .map(|(check, uuids)| well(&check, uuids))
        .collect();
    let tested = gpus.len();
    let Some(first) = wrong.first() else {
        let text = format!("{tested} GPUs pass level {level} of the diagnosis{dcgm}");
        findings.push(Finding::healthy(CHECK, text.clone()));
        return CheckOutcome::passed(text, findings);
    };
    let more = match wrong.len() {
        1 => String::new(),
        count => format!(" (and {} more)", count - 1),
    };
    CheckOutcome {
        result: if failed {
            Meaning::Failed
        } else {
            Meaning::NotTested
        },
        code: first.code.clone(),
        text: format!("{}{more}", first.message),
        findings: wrong.into_iter().chain(findings).collect(),
        gang_wait: None,
    }
}

/// Returns the names of a result's GPUs; a single `None` if the result concerns no known GPU.
fn names<'a>(result: &TestResult, gpus: &'a [KnownGpu]) -> Vec<Option<&'a str>> {
    let known = gpus.iter().filter(|gpu| result.gpus.contains(&gpu.number));
    let known: Vec<Option<&str>> = known.map(|gpu| Some(gpu.uuid.as_str())).collect();
    if known.is_empty() { vec![None] } else { known }
}

fn well(check: &str, mut uuids: Vec<String>) -> Finding {
    uuids.sort();
    uuids.dedup();
    let finding = Finding::healthy(check, "passed".to_owned());
    uuids
        .iter()
        .fold(finding, |finding, uuid| finding.about_gpu(uuid))
}

/// Returns the event for a GPU that has not passed a test.
fn finding(
    check: &str,
    result: &TestResult,
    problems: &[&TestProblem],
    uuid: Option<&str>,
) -> Finding {
    let is_failure = result.state == State::Fail;
    let judged = problems.iter().map(|problem| judge(problem));
    // The gravest problem determines code and action.
    let judged =
        judged.max_by_key(|judged| (judged.grave, judged.code.is_some(), rank(judged.action)));
    let (code, action, grave) = match judged {
        Some(Judged {
            code: Some(code),
            action,
            grave,
        }) => (code, action, grave),
        _ => (
            format!("DCGM_DIAG_{:?}", result.state).to_uppercase(),
            of_test(&result.test),
            !is_of_settings(&result.test),
        ),
    };
    let texts: Vec<&str> = problems
        .iter()
        .map(|problem| problem.text.as_str())
        .collect();
    let state = match result.state {
        State::Fail => "fails",
        State::Warn => "warns in",
        State::Pass => "passes, but could not do all of",
        State::Skipped | State::Other => "did not end",
    };
    let who = uuid.map_or_else(|| "the diagnosis".to_owned(), str::to_owned);
    let finding = Finding {
        check: check.to_owned(),
        fatal: is_failure && grave,
        action: if is_failure {
            action
        } else {
            RecommendedAction::None
        },
        code,
        message: format!(
            "{who} {state} the test {}: {}",
            result.test,
            texts.join("; ")
        ),
        ..Finding::default()
    };
    match uuid {
        Some(uuid) => finding.about_gpu(uuid),
        None => finding,
    }
}

/// Meaning of a problem.
struct Judged {
    code: Option<String>,
    action: RecommendedAction,
    /// True if the hardware is to blame.
    grave: bool,
}

fn judge(problem: &TestProblem) -> Judged {
    let Some(number) = problem.code else {
        return Judged {
            code: None,
            action: RecommendedAction::None,
            grave: false,
        };
    };
    let stated = SEVERITIES
        .iter()
        .find(|(severity, _)| problem.severity == Some(*severity));
    let stated = stated.map(|(_, word)| *word);
    let is_grave = |severity: &str| GRAVE.contains(&severity);
    let catalog = Catalog::builtin();
    let Some(row) = catalog.dcgm(number) else {
        // The code is newer than the table.
        return Judged {
            code: Some(format!("DCGM_FR_{number}")),
            action: RecommendedAction::Unknown,
            grave: stated.is_some_and(is_grave),
        };
    };
    let (action, grave) = if row.name == XID {
        of_xids(&problem.text)
    } else {
        // Each test of DCGM assigns its own severity to a code; the table has one for all
        // tests.
        let grave = is_grave(stated.unwrap_or(&row.severity));
        let action = catalog.judge_dcgm(&row.name).action;
        (action, grave && !NOT_OF_HARDWARE.contains(&&*row.name))
    };
    Judged {
        code: Some(row.name.to_string()),
        action,
        grave: grave && action != RecommendedAction::None,
    }
}

/// Returns the action for the XIDs in a text, by the catalogue of XIDs, and whether it is
/// grave: the gravest XID counts. XIDs that only the kernel log can interpret are ignored.
fn of_xids(text: &str) -> (RecommendedAction, bool) {
    let named = xids(text).into_iter();
    let named = named.filter(|xid| *xid != OWN_XID && !NEEDS_WORDS.contains(xid));
    let judged = named.map(|xid| Catalog::builtin().judge_xid(xid, ""));
    let gravest = judged.max_by_key(|verdict| (verdict.fatal, rank(verdict.action)));
    gravest.map_or((RecommendedAction::None, false), |verdict| {
        (verdict.action, verdict.fatal)
    })
}

/// Ranks actions by their extent: a reset, then a reboot, then a person. Remediation escalates
/// in this order.
fn rank(action: RecommendedAction) -> u8 {
    match action {
        RecommendedAction::None => 0,
        RecommendedAction::Unknown | RecommendedAction::Custom => 1,
        RecommendedAction::ComponentReset => 2,
        RecommendedAction::RestartVm => 3,
        RecommendedAction::RestartBm => 4,
        RecommendedAction::ContactSupport
        | RecommendedAction::RunFielddiag
        | RecommendedAction::RunDcgmeud => 5,
        RecommendedAction::ReplaceVm => 6,
    }
}

/// Returns the numbers of the XIDs in a text such as `Detected XID 79 for GPU 4`.
fn xids(text: &str) -> Vec<u32> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    let named = words.windows(2).filter_map(|pair| match pair {
        [word, number] if word.eq_ignore_ascii_case("xid") => number.parse().ok(),
        _ => None,
    });
    named.collect()
}

/// Returns true if the diagnosis has caused a problem itself.
fn is_own(problem: &TestProblem) -> bool {
    let row = problem.code.and_then(|code| Catalog::builtin().dcgm(code));
    let xids = xids(&problem.text);
    row.is_some_and(|row| row.name == XID)
        && !xids.is_empty()
        && xids.iter().all(|xid| *xid == OWN_XID)
}

/// Returns true if a test checks settings, which do not indicate broken hardware.
fn is_of_settings(test: &str) -> bool {
    let letters = test.chars().filter(char::is_ascii_alphanumeric);
    let name: String = letters.map(|letter| letter.to_ascii_lowercase()).collect();
    OF_SETTINGS.iter().any(|begin| name.starts_with(begin))
}

/// Returns the action for a test that fails without a code (preflight ADR, "Error to
/// Recommended Action Mapping").
fn of_test(test: &str) -> RecommendedAction {
    let test = test.to_ascii_lowercase();
    if ["stress", "power", "diagnostic"]
        .iter()
        .any(|word| test.contains(word))
    {
        RecommendedAction::RunDcgmeud
    } else {
        RecommendedAction::ContactSupport
    }
}

/// Returns the name of a test in the form of check names: `NVML Library` is `NVMLLibrary`.
fn camel_case(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric());
    let words = words.filter_map(|word| {
        let mut letters = word.chars();
        let first = letters.next()?.to_ascii_uppercase();
        Some(format!("{first}{}", letters.as_str()))
    });
    words.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus() -> Vec<KnownGpu> {
        let gpu = |number| KnownGpu {
            uuid: format!("GPU-{number}"),
            number,
        };
        vec![gpu(4), gpu(6)]
    }

    fn result(
        test: &str,
        state: State,
        gpus: &[u32],
        problems: &[(Option<u32>, &str)],
    ) -> TestResult {
        let problems = problems.iter().map(|(code, text)| TestProblem {
            code: *code,
            severity: None,
            text: (*text).to_owned(),
        });
        TestResult {
            test: test.to_owned(),
            state,
            gpus: gpus.to_vec(),
            problems: problems.collect(),
        }
    }

    fn judged(tests: Vec<TestResult>) -> CheckOutcome {
        let diagnosis = Diagnosis {
            version: None,
            tests,
        };
        outcome(2, &gpus(), diagnosis)
    }

    #[test]
    fn tests_are_named_as_nvsentinel_names_them() {
        for (test, name) in [
            ("memory", "Memory"),
            ("PCIe", "PCIe"),
            ("NVML Library", "NVMLLibrary"),
            (
                "Permissions and OS-related Blocks",
                "PermissionsAndOSRelatedBlocks",
            ),
            ("targeted_power", "TargetedPower"),
        ] {
            assert_eq!(camel_case(test), name);
        }
    }

    /// Rows of the ADR for tests that fail without a code; a warning recommends no action.
    #[test]
    fn without_a_code_the_adrs_table_decides() {
        for (test, action) in [
            ("Memory", RecommendedAction::ContactSupport),
            ("PCIe", RecommendedAction::ContactSupport),
            ("NVLink", RecommendedAction::ContactSupport),
            ("Targeted Stress", RecommendedAction::RunDcgmeud),
            ("SM Stress", RecommendedAction::RunDcgmeud),
        ] {
            let fails = judged(vec![result(test, State::Fail, &[4], &[(None, "bad")])]);
            let finding = &fails.findings[0];
            assert_eq!((finding.action, finding.fatal), (action, true), "{test}");
            assert_eq!(fails.result, Meaning::Failed);
            let warns = judged(vec![result(test, State::Warn, &[4], &[(None, "hm")])]);
            let finding = &warns.findings[0];
            assert_eq!(
                (finding.action, finding.fatal),
                (RecommendedAction::None, false),
                "{test}"
            );
            assert_eq!(warns.result, Meaning::NotTested);
        }
    }

    #[test]
    fn what_was_left_out_is_no_pass() {
        let ended = judged(vec![result("Memory", State::Skipped, &[4, 6], &[])]);
        assert_eq!(ended.result, Meaning::NotTested);
        assert!(ended.findings.is_empty(), "{ended:?}");
    }

    /// Settings of a machine are no hardware fault, whether or not a report has codes for them.
    #[test]
    fn without_a_code_a_test_of_settings_is_not_fatal() {
        for test in [
            "Blacklist",
            "Denylist",
            "NVML Library",
            "CUDA Main Library",
            "CUDA Toolkit Libraries",
            "Permissions and OS Blocks",
            "Permissions and OS-related Blocks",
            "Persistence Mode",
            "Environment Variables",
            "Environmental Variables",
            "Graphics Processes",
            "Fabric Manager",
            "software",
        ] {
            for problems in [&[][..], &[(None, "is not as it should be")]] {
                let fails = judged(vec![result(test, State::Fail, &[], problems)]);
                assert_eq!(fails.result, Meaning::Failed, "{test}");
                assert!(!fails.findings[0].fatal, "{fails:?}");
                assert_eq!(fails.findings[0].code, "DCGM_DIAG_FAIL");
            }
        }
        for test in ["Page Retirement/Row Remap", "Inforom", "Memory", "NVLink"] {
            let fails = judged(vec![result(test, State::Fail, &[4], &[])]);
            assert!(fails.findings[0].fatal, "{fails:?}");
        }
    }

    /// Returns the finding about a failure with this code, severity and text.
    fn of_failure(code: u32, severity: Option<u32>, text: &str) -> Finding {
        let mut result = result("Memory", State::Fail, &[6], &[(Some(code), text)]);
        result.problems[0].severity = severity;
        let mut ended = judged(vec![result]);
        assert_eq!(ended.result, Meaning::Failed, "{ended:?}");
        ended.findings.remove(0)
    }

    /// Returns true if a code means that a test could not run: because others use the GPU by
    /// time-slicing, or because of how DCGM was installed.
    fn is_no_fault(name: &str) -> bool {
        let mut words = [
            "ALLOC",
            "PROCESSES",
            "BINARY_PERMISSIONS",
            "NON_ROOT",
            "INTERNAL",
            "DCGM_API",
            "OPEN_LIB",
            "LIB_BAD",
            "RETEST",
            "TARGET_POWER",
        ]
        .into_iter();
        words.any(|word| name.contains(word))
    }

    /// Each test of DCGM assigns its own severity to a code: nvbandwidth only monitors (1) what
    /// the table calls ISOLATE.
    #[test]
    fn the_severity_that_is_stated_goes_before_that_of_the_table() {
        for row in Catalog::builtin().dcgms() {
            let Some(code) = row.code.filter(|code| *code != 0) else {
                continue;
            };
            let of_table = GRAVE.contains(&&*row.severity);
            for (severity, is_grave) in [
                (None, of_table),
                (Some(0), of_table),
                (Some(1), false),
                (Some(2), true),
                (Some(3), of_table),
                (Some(4), true),
                (Some(5), false),
                (Some(6), true),
                (Some(7), of_table),
            ] {
                let finding = of_failure(code, severity, "bad");
                assert_eq!(finding.code, row.name, "{row:?}");
                let asks = row.action != RecommendedAction::None;
                let is_fatal = is_grave && asks && !is_no_fault(&row.name);
                assert_eq!(finding.fatal, is_fatal, "{severity:?} of {row:?}");
                assert_eq!(finding.action, row.action, "{row:?}");
                assert_eq!(finding.entities, [("GPU_UUID", "GPU-6".to_owned())]);
            }
        }
    }

    #[test]
    fn what_asks_for_nothing_does_not_hide_what_is_broken() {
        // ISOLATE with NONE behind and before ISOLATE with CONTACT_SUPPORT.
        for codes in [[13, 52], [52, 13]] {
            let problems = codes.map(|code| (Some(code), "bad"));
            let ended = judged(vec![result("Memory", State::Fail, &[6], &problems)]);
            let finding = &ended.findings[0];
            assert_eq!(finding.code, "DCGM_FR_FAULTY_MEMORY");
            assert!(finding.fatal, "{finding:?}");
        }
    }

    #[test]
    fn of_two_that_are_broken_the_one_that_asks_for_more_counts() {
        // COMPONENT_RESET, RESTART_VM, RESTART_BM and CONTACT_SUPPORT.
        let all = [85, 81, 120, 52];
        for (less, more) in [(0, 1), (1, 2), (2, 3)] {
            for codes in [[all[less], all[more]], [all[more], all[less]]] {
                let problems = codes.map(|code| (Some(code), "bad"));
                let ended = judged(vec![result("Memory", State::Fail, &[6], &problems)]);
                let row = Catalog::builtin().dcgm(all[more]).unwrap();
                let finding = &ended.findings[0];
                let found = (finding.code.as_str(), finding.action);
                assert_eq!(found, (&*row.name, row.action), "{codes:?}");
            }
        }
    }

    #[test]
    fn a_code_that_is_newer_than_the_table_goes_by_the_severity_that_is_told() {
        for (severity, fatal) in [(1, false), (2, true), (4, true), (5, false), (6, true)] {
            let mut unknown = result("Memory", State::Fail, &[6], &[(Some(9999), "new")]);
            unknown.problems[0].severity = Some(severity);
            let finding = &judged(vec![unknown]).findings[0];
            assert_eq!(
                (finding.code.as_str(), finding.fatal),
                ("DCGM_FR_9999", fatal)
            );
            assert_eq!(finding.action, RecommendedAction::Unknown);
        }
    }

    #[test]
    fn the_xid_that_the_diagnosis_provokes_is_its_own() {
        let xid = Catalog::builtin().dcgm_named(XID).and_then(|row| row.code);
        assert!(xid.is_some());
        let own = judged(vec![result(
            "Memory",
            State::Fail,
            &[4],
            &[(xid, "Detected XID 45 for GPU 4")],
        )]);
        assert_eq!(own.result, Meaning::Passed, "{own:?}");
        for text in [
            "Detected XID 79 for GPU 45",
            "Detected XID 145",
            "XID 45 and XID 79",
            "45",
        ] {
            let other = judged(vec![result("Memory", State::Fail, &[4], &[(xid, text)])]);
            assert_eq!(other.result, Meaning::Failed, "{text}");
        }
    }

    /// The severity belongs to the code, which is the same for all XIDs, so it does not rate
    /// this one.
    #[test]
    fn an_xid_that_came_in_a_test_is_judged_by_the_catalogue_of_xids() {
        let catalog = Catalog::builtin();
        let code = catalog.dcgm_named(XID).and_then(|row| row.code).unwrap();
        for row in catalog.xids().filter(|row| row.code != OWN_XID) {
            let expected = match row.code {
                144..=150 | 154 => (RecommendedAction::None, false),
                _ => (row.action, row.fatal),
            };
            for severity in [None, Some(1), Some(4)] {
                let text = format!("Detected XID {} for GPU 6. Consult the guide.", row.code);
                let finding = of_failure(code, severity, &text);
                assert_eq!(finding.code, XID);
                assert_eq!((finding.action, finding.fatal), expected, "{row:?}");
            }
        }
        for (text, action, fatal) in [
            ("Detected XID 31 for GPU 6", RecommendedAction::None, false),
            ("XID 79, XID 31, XID 45", RecommendedAction::RestartBm, true),
            ("XID 31 and XID 79", RecommendedAction::RestartBm, true),
            ("XID 79, XID 48", RecommendedAction::RestartBm, true),
            ("XID 48, XID 79", RecommendedAction::RestartBm, true),
            ("Detected XID 9999", RecommendedAction::Unknown, false),
            ("Detected some XID", RecommendedAction::None, false),
        ] {
            let finding = of_failure(code, Some(4), text);
            assert_eq!((finding.action, finding.fatal), (action, fatal), "{text}");
        }
    }
}
