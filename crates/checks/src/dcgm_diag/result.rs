//! Parser of the output of `dcgmi diag -j`. DCGM 3 identifies GPUs by `gpu_ids` or `gpu_id`,
//! DCGM 4 by an entity, and its warnings have codes. The format differs between versions, so
//! each part is parsed on its own: an unknown part is left out, and an unknown state is no
//! pass.

use serde_json::Value;

/// Results of a diagnosis.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Diagnosis {
    /// Version of DCGM, if stated.
    pub(super) version: Option<String>,
    pub(super) tests: Vec<TestResult>,
}

/// Result of a test on some GPUs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TestResult {
    /// Name of the test, such as `PCIe`.
    pub(super) test: String,
    pub(super) state: State,
    /// Numbers of the GPUs at the host engine; empty if the result concerns no single GPU.
    pub(super) gpus: Vec<u32>,
    pub(super) problems: Vec<TestProblem>,
}

/// State of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Pass,
    Fail,
    Warn,
    Skipped,
    /// The test did not run, or its state is unknown.
    Other,
}

/// Problem found by a test.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TestProblem {
    /// Number of a `DCGM_FR_*`, if stated.
    pub(super) code: Option<u32>,
    /// Number of the severity, if stated.
    pub(super) severity: Option<u32>,
    pub(super) text: String,
}

// === impl Diagnosis ===

impl Diagnosis {
    /// Parses the output; other text may precede and follow the JSON.
    pub(super) fn read(text: &str) -> Option<Self> {
        let begin = text.find('{')?;
        let end = text.rfind('}')?;
        let whole: Value = serde_json::from_str(text.get(begin..=end)?).ok()?;
        let of_either = ["DCGM Diagnostic", "DCGM GPU Diagnostic"];
        let of_either = of_either.iter().find_map(|key| whole.get(key));
        let inner = of_either.unwrap_or(&whole);
        let mut diagnosis = Self {
            version: version(inner).or_else(|| version(&whole)),
            tests: Vec::new(),
        };
        for category in items(inner, "test_categories") {
            for test in items(category, "tests") {
                diagnosis.add(test);
            }
        }
        for test in items(inner, "tests") {
            diagnosis.add(test);
        }
        Some(diagnosis)
    }

    fn add(&mut self, test: &Value) {
        let Some(name) = test.get("name").and_then(Value::as_str) else {
            return;
        };
        let before = self.tests.len();
        let results = items(test, "results").filter_map(|result| TestResult::read(name, result));
        self.tests.extend(results);
        // Problems without an entity are only in the summary.
        let summary = test.get("test_summary");
        let summary = summary.and_then(|summary| TestResult::read(name, summary));
        let found = self.tests.get(before..).unwrap_or_default();
        if let Some(summary) = summary
            && !found.iter().any(|result| result.state == summary.state)
        {
            self.tests.push(summary);
        }
    }
}

// === impl TestResult ===

impl TestResult {
    fn read(test: &str, result: &Value) -> Option<Self> {
        let state = State::of(result.get("status")?.as_str()?);
        let problems = items(result, "warnings").filter_map(TestProblem::read);
        Some(Self {
            test: test.to_owned(),
            state,
            gpus: gpus(result),
            problems: problems.collect(),
        })
    }
}

/// Returns the numbers of the GPUs of a result.
fn gpus(result: &Value) -> Vec<u32> {
    if let Some(group) = result.get("entity_group").and_then(Value::as_str)
        && !group.eq_ignore_ascii_case("GPU")
    {
        return Vec::new();
    }
    let named = ["gpu_ids", "gpu_id", "entity_id"];
    let Some(named) = named.iter().find_map(|key| result.get(key)) else {
        return Vec::new();
    };
    match named {
        Value::Array(all) => all.iter().filter_map(number).collect(),
        Value::String(list) => list
            .split(',')
            .filter_map(|one| one.trim().parse().ok())
            .collect(),
        one => number(one).into_iter().collect(),
    }
}

fn number(value: &Value) -> Option<u32> {
    match value {
        Value::String(text) => text.trim().parse().ok(),
        value => u32::try_from(value.as_u64()?).ok(),
    }
}

/// Returns the items of a list, or the single item in place of a list.
fn items<'a>(of: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    let items = match of.get(key) {
        Some(Value::Array(all)) => all.as_slice(),
        Some(Value::Null) | None => &[],
        Some(one) => std::slice::from_ref(one),
    };
    items.iter()
}

fn version(of: &Value) -> Option<String> {
    let metadata = of.get("metadata").unwrap_or(of);
    let named = ["version", "DCGM Version"].iter();
    let mut found = named.filter_map(|key| metadata.get(key).or_else(|| of.get(key)));
    found.next().and_then(Value::as_str).map(str::to_owned)
}

// === impl State ===

impl State {
    fn of(word: &str) -> Self {
        match word.trim().to_ascii_lowercase().as_str() {
            "pass" | "passed" => Self::Pass,
            "fail" | "failed" => Self::Fail,
            "warn" | "warning" => Self::Warn,
            "skip" | "skipped" => Self::Skipped,
            _ => Self::Other,
        }
    }
}

// === impl TestProblem ===

impl TestProblem {
    fn read(warning: &Value) -> Option<Self> {
        if let Some(text) = warning.as_str() {
            return Some(Self {
                text: text.to_owned(),
                ..Self::default()
            });
        }
        let text = ["warning", "message"]
            .iter()
            .find_map(|key| warning.get(key));
        let text = text.and_then(Value::as_str).unwrap_or_default();
        let code = warning.get("error_id").and_then(number);
        (code.is_some() || !text.is_empty()).then(|| Self {
            // Zero is `DCGM_FR_OK`.
            code: code.filter(|code| *code != 0),
            severity: warning.get("error_severity").and_then(number),
            text: text.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(code: Option<u32>, severity: Option<u32>, text: &str) -> TestProblem {
        TestProblem {
            code,
            severity,
            text: text.to_owned(),
        }
    }

    #[test]
    fn both_forms_are_read() {
        let third = r#"WARNING: something before
        {"DCGM GPU Diagnostic": {"version": "3.3.9", "test_categories": [
          {"category": "Deployment", "tests": [
            {"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "PASS"}]}, null]},
          {"category": "Integration", "tests": [{"name": "PCIe", "results": [
            {"gpu_id": "0", "info": "fast", "status": "Pass"},
            {"gpu_ids": "1", "status": "Fail", "warnings": ["slow", {"warning": "narrow", "error_id": 46}]}]}]}]}}"#;
        let third = Diagnosis::read(third).unwrap();
        assert_eq!(third.version.as_deref(), Some("3.3.9"));
        let found: Vec<_> = third
            .tests
            .iter()
            .map(|one| (one.test.as_str(), one.state, &one.gpus[..]))
            .collect();
        assert_eq!(
            found,
            [
                ("Denylist", State::Pass, &[0, 1][..]),
                ("PCIe", State::Pass, &[0]),
                ("PCIe", State::Fail, &[1])
            ]
        );
        assert_eq!(
            third.tests[2].problems,
            [
                problem(None, None, "slow"),
                problem(Some(46), None, "narrow")
            ]
        );

        let fourth = r#"{"DCGM Diagnostic": {"metadata": {"version": "4.6.0"}, "test_categories": [
          {"category": "Hardware", "tests": [{"name": "memory", "results": [
            {"entity_group": "GPU", "entity_group_id": 1, "entity_id": 4, "status": "Pass",
             "warnings": [{"error_category": 1, "error_id": 56, "error_severity": 4, "warning": "no memory"}]},
            {"entity_group": "CPU", "entity_id": 0, "status": "Skip"}],
            "test_summary": {"status": "Fail", "warnings": [{"error_id": "44", "warning": "internal"}]}}]}]}}"#;
        let fourth = Diagnosis::read(fourth).unwrap();
        assert_eq!(fourth.version.as_deref(), Some("4.6.0"));
        let found: Vec<_> = fourth
            .tests
            .iter()
            .map(|one| (one.state, &one.gpus[..]))
            .collect();
        assert_eq!(
            found,
            [
                (State::Pass, &[4][..]),
                (State::Skipped, &[]),
                (State::Fail, &[])
            ]
        );
        assert_eq!(
            fourth.tests[0].problems,
            [problem(Some(56), Some(4), "no memory")]
        );
        assert_eq!(
            fourth.tests[2].problems,
            [problem(Some(44), None, "internal")]
        );
    }

    #[test]
    fn what_is_garbled_has_no_results() {
        for garbled in [
            "",
            "{",
            "}{",
            "no json",
            "[]",
            "{\"DCGM Diagnostic\": [",
            "\u{fffd}{x}",
        ] {
            assert_eq!(Diagnosis::read(garbled), None, "{garbled}");
        }
        for empty in [
            "{}",
            "{\"DCGM Diagnostic\": null}",
            "{\"DCGM Diagnostic\": {\"runtime_error\": \"no\"}}",
            "{\"test_categories\": [1, null, {\"tests\": [{\"name\": 7}, {\"name\": \"a\", \"results\": [{\"status\": 7}]}]}]}",
        ] {
            assert_eq!(Diagnosis::read(empty).unwrap().tests, [], "{empty}");
        }
    }
}
