//! Reads a policy file. Everything that can be wrong with it is found here, with the
//! line it stands on and what to do; all findings at once.

use std::fmt;

use serde::Deserialize;
use toml::Spanned;

use super::{Policy, Rule, RuleKind, RuleSet};
use crate::node::Taint;

/// A policy file that cannot be used: every finding, one per line.
#[derive(Debug, PartialEq, Eq)]
pub struct PolicyError {
    /// Findings as `file:line: what`.
    pub findings: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "label-prefix", default)]
    label_prefix: String,
    #[serde(rename = "circuitBreaker")]
    circuit_breaker: Option<CircuitBreaker>,
    #[serde(rename = "rule-sets", default)]
    rule_sets: Vec<Spanned<RuleSetEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CircuitBreaker {
    #[serde(rename = "percentage")]
    _percentage: Option<i64>,
    #[serde(rename = "duration")]
    _duration: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleSetEntry {
    /// On where absent, as the reference's chart renders it.
    #[serde(default = "on")]
    enabled: bool,
    #[serde(rename = "version", default)]
    _version: String,
    name: String,
    #[serde(default)]
    priority: i64,
    #[serde(rename = "match")]
    matches: MatchEntry,
    taint: Option<Spanned<TaintEntry>>,
    cordon: Option<CordonEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MatchEntry {
    #[serde(default)]
    any: Vec<RuleEntry>,
    #[serde(default)]
    all: Vec<RuleEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleEntry {
    kind: Spanned<String>,
    expression: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TaintEntry {
    #[serde(default)]
    key: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    effect: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CordonEntry {
    #[serde(rename = "shouldCordon", default)]
    should_cordon: bool,
}

pub(super) fn parse(text: &str, source: &str) -> Result<Policy, PolicyError> {
    let line_of = |offset: usize| {
        1 + text
            .as_bytes()
            .iter()
            .take(offset)
            .filter(|byte| **byte == b'\n')
            .count()
    };
    let file: File = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_of(span.start));
        PolicyError {
            findings: vec![format!("{source}:{line}: {}", error.message())],
        }
    })?;
    let mut findings = Vec::new();
    let mut find = |offset: usize, what: String| {
        findings.push(format!("{source}:{}: {what}", line_of(offset)));
    };
    let mut rule_sets = Vec::new();
    for entry in file.rule_sets {
        let start = entry.span().start;
        let entry = entry.into_inner();
        let name = entry.name;
        if name.trim().is_empty() {
            find(start, "a rule set needs a name".to_owned());
        }
        let mut rules = |entries: Vec<RuleEntry>| -> Vec<Rule> {
            let mut rules = Vec::new();
            for entry in entries {
                let Some(kind) = RuleKind::parse(entry.kind.get_ref()) else {
                    find(
                        entry.kind.span().start,
                        format!(
                            "rule set '{name}': kind '{}' is unknown; it is HealthEvent or Node",
                            entry.kind.get_ref()
                        ),
                    );
                    continue;
                };
                match Rule::compile(kind, entry.expression.get_ref()) {
                    Ok(rule) => rules.push(rule),
                    Err(what) => find(
                        entry.expression.span().start,
                        format!("rule set '{name}': expression {what}"),
                    ),
                }
            }
            rules
        };
        let any = rules(entry.matches.any);
        let all = rules(entry.matches.all);
        let taint = match entry.taint {
            None => None,
            Some(taint) => match taint_of(taint.get_ref()) {
                Ok(taint) => Some(taint),
                Err(what) => {
                    find(taint.span().start, format!("rule set '{name}': {what}"));
                    None
                }
            },
        };
        if entry.enabled {
            rule_sets.push(RuleSet {
                cordon: entry.cordon.is_some_and(|cordon| cordon.should_cordon),
                priority: entry.priority,
                name,
                any,
                all,
                taint,
            });
        }
    }
    if !findings.is_empty() {
        return Err(PolicyError { findings });
    }
    let mut warnings = Vec::new();
    if file.circuit_breaker.is_some() {
        warnings.push(format!(
            "{source}: circuitBreaker is read but not enforced by this version: nothing limits \
             how many nodes are quarantined at once"
        ));
    }
    Ok(Policy {
        source: source.to_owned(),
        label_prefix: file.label_prefix,
        rule_sets,
        warnings,
    })
}

fn taint_of(entry: &TaintEntry) -> Result<Taint, String> {
    let taint = Taint {
        key: entry.key.clone(),
        value: entry.value.clone(),
        effect: entry.effect.clone(),
    };
    if taint.key.is_empty() || taint.value.is_empty() {
        return Err("a taint needs key, value and effect".to_owned());
    }
    if !["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&taint.effect.as_str()) {
        return Err(format!(
            "taint effect '{}' is unknown; it is NoSchedule, PreferNoSchedule or NoExecute",
            taint.effect
        ));
    }
    Ok(taint)
}

fn on() -> bool {
    true
}

// === impl PolicyError ===

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.findings.join("\n"))
    }
}

impl std::error::Error for PolicyError {}
