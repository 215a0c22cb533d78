//! Checks of the alert rules against the descriptions of the metrics, their tests and their
//! runbooks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, bail};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::Group;
use super::expression::{Registry, Uses};

const RULES: &str = "deploy/helm/gpuwarden/files/alerts/gpuwarden.rules.yaml";
const TESTS: &str = "deploy/helm/gpuwarden/files/alerts/gpuwarden.test.yaml";
const RUNBOOKS: &str = "docs/runbooks.md";
/// Alert about metrics that other alerts need and that are missing.
const GUARD: &str = "GpuwardenMetricMissing";
/// Metrics that Prometheus makes itself, and so are never missing.
const ALWAYS_THERE: [&str; 1] = ["up"];

#[derive(Deserialize)]
struct RuleFile {
    groups: Vec<RuleGroup>,
}

#[derive(Deserialize)]
struct RuleGroup {
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
struct Rule {
    alert: String,
    expr: String,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct TestFile {
    tests: Vec<Test>,
}

#[derive(Deserialize)]
struct Test {
    alert_rule_test: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    alertname: String,
    #[serde(default)]
    exp_alerts: Vec<serde_json::Value>,
}

/// Fails if a rule uses a metric or label that does not exist, or lacks a guard, a test or a
/// runbook.
pub(super) fn check(root: &Path, groups: &[Group]) -> anyhow::Result<()> {
    let rules: RuleFile = read(root, RULES)?;
    let tests: TestFile = read(root, TESTS)?;
    let runbooks = std::fs::read_to_string(root.join(RUNBOOKS));
    let runbooks = runbooks.with_context(|| format!("read {RUNBOOKS}"))?;
    let rules = rules.groups.into_iter().flat_map(|group| group.rules);
    let findings = findings(&rules.collect::<Vec<_>>(), &tests, &runbooks, groups);
    if !findings.is_empty() {
        bail!("{RULES}:\n  {}", findings.join("\n  "));
    }
    Ok(())
}

fn read<T: DeserializeOwned>(root: &Path, file: &str) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(root.join(file)).with_context(|| format!("read {file}"))?;
    serde_saphyr::from_str(&text).with_context(|| format!("read {file}"))
}

fn findings(rules: &[Rule], tests: &TestFile, runbooks: &str, groups: &[Group]) -> Vec<String> {
    let registry = Registry::new(groups);
    let mut findings = Vec::new();
    let mut names = BTreeSet::new();
    let (mut used, mut guarded) = (BTreeSet::new(), BTreeSet::new());
    for rule in rules {
        let alert = &rule.alert;
        if !names.insert(alert.as_str()) {
            findings.push(format!("{alert}: there are two alerts of this name"));
        }
        match Uses::of(&rule.expr) {
            Ok(uses) => {
                findings.extend(
                    registry
                        .unknown(&uses)
                        .map(|what| format!("{alert}: {what}")),
                );
                let metrics = uses.selectors.into_iter().map(|(metric, _)| metric);
                let all = if alert == GUARD {
                    &mut guarded
                } else {
                    &mut used
                };
                all.extend(metrics);
            }
            Err(error) => findings.push(format!("{alert}: {error}")),
        }
        let anchor = format!("{RUNBOOKS}#{}", alert.to_lowercase());
        if rule.annotations.get("runbook_url") != Some(&anchor) {
            findings.push(format!("{alert}: runbook_url is not {anchor}"));
        }
        for annotation in ["summary", "description"] {
            if !rule.annotations.contains_key(annotation) {
                findings.push(format!("{alert}: no {annotation}"));
            }
        }
        if !rule.labels.contains_key("severity") {
            findings.push(format!("{alert}: no severity"));
        }
        let cases = tests.tests.iter().flat_map(|test| &test.alert_rule_test);
        let cases = cases.filter(|case| case.alertname == *alert);
        let (silent, firing): (Vec<_>, Vec<_>) = cases.partition(|case| case.exp_alerts.is_empty());
        if silent.is_empty() || firing.is_empty() {
            findings.push(format!(
                "{alert}: {TESTS} lets it not fire, or never be silent"
            ));
        }
    }
    for metric in used.difference(&guarded) {
        if !ALWAYS_THERE.contains(&metric.as_str()) {
            findings.push(format!("{metric}: {GUARD} does not cover it"));
        }
    }
    let pages: BTreeSet<&str> = runbooks
        .lines()
        .filter_map(|it| it.strip_prefix("## "))
        .collect();
    let pages: BTreeSet<&str> = pages
        .into_iter()
        .filter(|it| it.starts_with("Gpuwarden"))
        .collect();
    for alert in names.symmetric_difference(&pages) {
        findings.push(format!(
            "{alert}: an alert without a runbook, or the reverse"
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, Metric};
    use super::*;

    const RUNBOOK: &str = "# Runbooks\n\n## GpuwardenX\n\n## GpuwardenMetricMissing\n";

    fn found(expr: &str, guard: &str, firing: bool, runbooks: &str) -> Vec<String> {
        let rule = |alert: &str, expr: &str| Rule {
            alert: alert.to_owned(),
            expr: expr.to_owned(),
            labels: [("severity".to_owned(), "warning".to_owned())].into(),
            annotations: [
                ("summary".to_owned(), "S".to_owned()),
                ("description".to_owned(), "D".to_owned()),
                (
                    "runbook_url".to_owned(),
                    format!("docs/runbooks.md#{}", alert.to_lowercase()),
                ),
            ]
            .into(),
        };
        let case = |alert: &str, fires| Case {
            alertname: alert.to_owned(),
            exp_alerts: if fires { vec![true.into()] } else { vec![] },
        };
        let tests = TestFile {
            tests: vec![Test {
                alert_rule_test: vec![
                    case("GpuwardenX", false),
                    case("GpuwardenX", firing),
                    case(GUARD, false),
                    case(GUARD, true),
                ],
            }],
        };
        let metric = Metric {
            name: "a_b".to_owned(),
            kind: Kind::Counter,
            labels: vec!["node".to_owned()],
            help: String::new(),
        };
        let group = Group {
            name: "g".to_owned(),
            metrics: vec![metric],
        };
        let rules = [rule("GpuwardenX", expr), rule(GUARD, guard)];
        findings(&rules, &tests, runbooks, &[group])
    }

    #[test]
    fn a_rule_needs_known_metrics_a_guard_tests_and_a_runbook() {
        let expr = "sum by (node) (a_b_total{node=\"n\"}) > 0";
        let guard = "absent(a_b_total)";
        assert_eq!(found(expr, guard, true, RUNBOOK), [""; 0]);
        let unknown = found("a_c_total > 0", guard, true, RUNBOOK);
        assert_eq!(
            unknown,
            [
                "GpuwardenX: there is no metric a_c_total",
                "a_c_total: GpuwardenMetricMissing does not cover it"
            ]
        );
        let label = found("a_b_total{gpu=\"1\"} > 0", guard, true, RUNBOOK);
        assert_eq!(label, ["GpuwardenX: a_b_total has no label gpu"]);
        let unguarded = found(expr, "absent(up)", true, RUNBOOK);
        assert_eq!(
            unguarded,
            ["a_b_total: GpuwardenMetricMissing does not cover it"]
        );
        assert_eq!(found(expr, guard, false, RUNBOOK).len(), 1);
        let more = format!("{RUNBOOK}\n## GpuwardenY\n");
        assert_eq!(
            found(expr, guard, true, &more),
            ["GpuwardenY: an alert without a runbook, or the reverse"]
        );
    }
}
