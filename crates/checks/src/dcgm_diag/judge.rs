//! What the results of a diagnosis mean: one event for each GPU that fails a test, and one for each test
//! for those that pass it.

use std::collections::BTreeMap;

use contract::RecommendedAction;
use diagnosis::catalog::Catalog;

use super::result::{Diagnosis, Problem, State, TestResult};
use super::{CHECK, KnownGpu};
use crate::outcome::{Finding, Outcome, Result as Meaning};

/// The severities of DCGM with which a failure is one of the hardware.
const GRAVE: [&str; 3] = ["ISOLATE", "RESET", "TRIAGE"];
/// Failures that DCGM rates as grave, and that say that a test could not be made: something else uses or limits the GPU,
/// or DCGM is not installed as it should be.
const NOT_OF_HARDWARE: [&str; 11] = [
    "DCGM_FR_CANNOT_OPEN_LIB",
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
/// The severities by their numbers, from 0 on (`dcgmErrorSeverity_t` of `dcgm_errors.h`).
const SEVERITIES: [&str; 7] = [
    "NONE", "MONITOR", "ISOLATE", "UNKNOWN", "TRIAGE", "CONFIG", "RESET",
];
/// The code of an XID that was seen during a test.
const XID: &str = "DCGM_FR_XID_ERROR";
/// The XID that the end of a test provokes itself: a program was ended before its work was done.
const OWN_XID: &str = "45";

/// Returns the outcome of a diagnosis.
pub(super) fn outcome(level: u64, gpus: &[KnownGpu], diagnosis: Diagnosis) -> Outcome {
    let dcgm = diagnosis.version.map(|version| format!(", DCGM {version}"));
    let dcgm = dcgm.unwrap_or_default();
    let mut wrong = Vec::new();
    let mut passed: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut failed = false;
    for result in diagnosis.tests {
        let problems: Vec<&Problem> = result.problems.iter().filter(|one| !is_own(one)).collect();
        let only_own = problems.is_empty() && !result.problems.is_empty();
        let check = format!("{CHECK}{}", camel_case(&result.test));
        match result.state {
            State::Skipped => continue,
            State::Pass | State::Fail if only_own => {}
            // A test that could not do its work may call that a pass.
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
        return Outcome {
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
        return Outcome::passed(text, findings);
    };
    let more = match wrong.len() {
        1 => String::new(),
        count => format!(" (and {} more)", count - 1),
    };
    Outcome {
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

/// Returns the GPUs of a result by name; one nameless where it is about no GPU that we know.
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
fn finding(check: &str, result: &TestResult, problems: &[&Problem], uuid: Option<&str>) -> Finding {
    let is_failure = result.state == State::Fail;
    let judged = problems.iter().map(|problem| judge(problem));
    // The gravest one names it.
    let judged = judged.max_by_key(|judged| (judged.grave, judged.code.is_some()));
    let (code, action, grave) = match judged {
        Some(Judged {
            code: Some(code),
            action,
            grave,
        }) => (code, action, grave),
        _ => (
            format!("DCGM_DIAG_{:?}", result.state).to_uppercase(),
            of_test(&result.test),
            true,
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

/// The meaning of a problem.
struct Judged {
    code: Option<String>,
    action: RecommendedAction,
    /// True if the hardware is to blame.
    grave: bool,
}

fn judge(problem: &Problem) -> Judged {
    let Some(number) = problem.code else {
        return Judged {
            code: None,
            action: RecommendedAction::None,
            grave: false,
        };
    };
    let catalog = Catalog::builtin();
    let told = problem
        .severity
        .and_then(|severity| usize::try_from(severity).ok());
    let told = told.and_then(|severity| SEVERITIES.get(severity).copied());
    match catalog.dcgm(number) {
        Some(row) => Judged {
            code: Some(row.name.to_string()),
            action: catalog.judge_dcgm(&row.name).action,
            grave: GRAVE.contains(&&*row.severity) && !NOT_OF_HARDWARE.contains(&&*row.name),
        },
        // Newer than our table.
        None => Judged {
            code: Some(format!("DCGM_FR_{number}")),
            action: RecommendedAction::Unknown,
            grave: told.is_some_and(|severity| GRAVE.contains(&severity)),
        },
    }
}

/// Returns whether the diagnosis has provoked a problem itself.
fn is_own(problem: &Problem) -> bool {
    let row = problem.code.and_then(|code| Catalog::builtin().dcgm(code));
    let words = problem
        .text
        .split(|letter: char| !letter.is_ascii_alphanumeric());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    let mut xids = words.windows(2).filter_map(|pair| match pair {
        [word, number] if word.eq_ignore_ascii_case("xid") => Some(*number),
        _ => None,
    });
    let mut is_own = xids.clone().peekable();
    row.is_some_and(|row| row.name == XID)
        && is_own.peek().is_some()
        && xids.all(|number| number == OWN_XID)
}

/// Returns the action for a test that fails without a code (preflight ADR, "Error to Recommended Action
/// Mapping").
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

/// Returns the name of a test as checks have it: `NVML Library` is `NVMLLibrary`.
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
        let problems = problems.iter().map(|(code, text)| Problem {
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

    fn judged(tests: Vec<TestResult>) -> Outcome {
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

    /// The rows of the ADR, for tests that fail without a code; a warning asks for nothing.
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

    #[test]
    fn each_severity_decides_whether_a_failure_is_fatal() {
        // Of a GPU that others use, by time-slicing, and of how DCGM was installed.
        let no_fault = |name: &str| {
            let mut words = [
                "ALLOC",
                "PROCESSES",
                "PERMISSIONS",
                "NON_ROOT",
                "INTERNAL",
                "DCGM_API",
            ]
            .into_iter()
            .chain(["OPEN_LIB", "RETEST", "TARGET_POWER"]);
            words.any(|word| name.contains(word))
        };
        for row in Catalog::builtin().dcgms() {
            let Some(code) = row.code.filter(|code| *code != 0) else {
                continue;
            };
            let ended = judged(vec![result(
                "Memory",
                State::Fail,
                &[6],
                &[(Some(code), "bad")],
            )]);
            let finding = &ended.findings[0];
            assert_eq!(finding.code, row.name, "{row:?}");
            let grave = GRAVE.contains(&&*row.severity) && !no_fault(&row.name);
            assert_eq!(finding.fatal, grave, "{row:?}");
            assert_eq!(finding.action, row.action, "{row:?}");
            assert_eq!(finding.entities, [("GPU_UUID", "GPU-6".to_owned())]);
        }
    }

    #[test]
    fn a_code_that_is_newer_than_the_table_goes_by_the_severity_that_is_told() {
        for (severity, fatal) in [(1, false), (2, true), (4, true), (5, false), (6, true)] {
            let mut told = result("Memory", State::Fail, &[6], &[(Some(9999), "new")]);
            told.problems[0].severity = Some(severity);
            let finding = &judged(vec![told]).findings[0];
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
}
