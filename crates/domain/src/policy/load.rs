//! Reads a policy file. Everything that can be wrong with it is found here, with the
//! line it stands on and what to do; all findings at once.

use contract::findings::{FileError, Findings, start_of};
use serde::Deserialize;
use toml::Spanned;

use super::unknown;
use super::{CompileError, MAX_COST, NamedPolicy, Policy, Rule, RuleKind, RuleSet};
use crate::node::Taint;

mod brake;
mod wrong_value;

/// What is said of a policy without a text.
const EMPTY: &str = "it is empty; a comment in it (# no rules) says that no rules are meant";

/// Largest policy, in bytes: what a `ConfigMap` can hold.
pub const MAX_POLICY_BYTES: usize = 1024 * 1024;
/// Most rule sets of a file, those of its named policies included. Each is asked about each
/// fault; the largest known files have some dozens.
pub const MAX_RULE_SETS: usize = 512;
/// Most rules of a file.
pub const MAX_RULES: usize = 2048;
/// Most steps that all rules of a file can take together: those that a fault is judged by.
pub const MAX_POLICY_COST: u64 = 4 * MAX_COST;
#[derive(Deserialize)]
struct File {
    #[serde(rename = "label-prefix", default)]
    label_prefix: String,
    #[serde(rename = "circuitBreaker")]
    circuit_breaker: Option<Spanned<brake::CircuitBreakerEntry>>,
    brake: Option<brake::BrakeEntry>,
    #[serde(rename = "match-any-all", default)]
    match_any_all: AnyAll,
    #[serde(rename = "unhealthy-taint", default)]
    unhealthy_taint: bool,
    #[serde(rename = "uncordon-labels", default)]
    uncordon_labels: bool,
    #[serde(rename = "rule-sets", default)]
    rule_sets: Vec<Spanned<RuleSetEntry>>,
    #[serde(default)]
    policies: Vec<Spanned<PolicyEntry>>,
}

/// What `any` and `all` in one rule set mean together.
#[derive(Deserialize, Clone, Copy, Default, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum AnyAll {
    /// Both must hold, as the names say.
    #[default]
    Both,
    /// One of them is enough, as in the reference.
    Either,
}

#[derive(Deserialize)]
struct PolicyEntry {
    name: String,
    #[serde(rename = "rule-sets", default)]
    rule_sets: Vec<Spanned<RuleSetEntry>>,
}

#[derive(Deserialize)]
struct RuleSetEntry {
    /// On where absent, as the reference's chart renders it.
    #[serde(default = "on")]
    enabled: bool,
    #[serde(rename = "version", default)]
    _version: String,
    name: String,
    #[serde(default)]
    priority: i64,
    #[serde(rename = "match", default)]
    matches: MatchEntry,
    taint: Option<Spanned<TaintEntry>>,
    cordon: Option<CordonEntry>,
}

#[derive(Deserialize, Default)]
struct MatchEntry {
    #[serde(default)]
    any: Vec<RuleEntry>,
    #[serde(default)]
    all: Vec<RuleEntry>,
}

#[derive(Deserialize)]
struct RuleEntry {
    kind: Spanned<String>,
    expression: Spanned<String>,
}

#[derive(Deserialize)]
struct TaintEntry {
    #[serde(default)]
    key: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    effect: String,
}

#[derive(Deserialize)]
struct CordonEntry {
    #[serde(rename = "shouldCordon", default)]
    should_cordon: bool,
}

/// Reads a policy.
pub(super) fn parse(text: &str, source: &str) -> Result<Policy, FileError> {
    let mut findings = Findings::new(text, source);
    if text.len() > MAX_POLICY_BYTES {
        let found = text.len();
        let what = format!("it has {found} bytes, at most {MAX_POLICY_BYTES} are taken");
        return Err(findings.stop(0, &what));
    }
    if text.trim().is_empty() {
        // Most likely somebody's editor or disk: nobody wants to lose all rules by that.
        return Err(findings.stop(0, EMPTY));
    }
    let file: File = match toml::from_str(text) {
        Ok(file) => file,
        Err(error) => {
            let what = wrong_value::explain(text, &error);
            return Err(findings.stop(start_of(&error), &what));
        }
    };
    let sets = file.policies.iter().map(|entry| &entry.get_ref().rule_sets);
    let sets: Vec<_> = file.rule_sets.iter().chain(sets.flatten()).collect();
    let rules = sets.iter().map(|entry| &entry.get_ref().matches);
    let rules: usize = rules.map(|entry| entry.any.len() + entry.all.len()).sum();
    if let Some(beyond) = sets.get(MAX_RULE_SETS) {
        let (start, found) = (beyond.span().start, sets.len());
        let what = format!("{found} rule sets, at most {MAX_RULE_SETS} are taken");
        return Err(findings.stop(start, &what));
    }
    if rules > MAX_RULES {
        let what = format!("{rules} rules, at most {MAX_RULES} are taken");
        return Err(findings.stop(0, &what));
    }
    let mut warnings = Vec::new();
    for key in unknown::keys(text) {
        if key.is_error {
            findings.at(key.offset, &key.what);
        } else {
            warnings.push(findings.said(key.offset, &key.what));
        }
    }
    let mut reading = Reading {
        findings,
        warnings,
        any_or_all: file.match_any_all == AnyAll::Either,
        cost: 0,
        unchecked: None,
    };
    let rule_sets = reading.rule_sets(file.rule_sets);
    let mut policies: Vec<NamedPolicy> = Vec::new();
    for entry in file.policies {
        let start = entry.span().start;
        let entry = entry.into_inner();
        let name = entry.name;
        if name.trim().is_empty() {
            reading.findings.at(start, "a policy needs a name");
        } else if policies.iter().any(|known| known.name == name) {
            reading.findings.at(
                start,
                &format!("policy '{name}' is there twice: give one of them another name"),
            );
        }
        let rule_sets = reading.rule_sets(entry.rule_sets);
        policies.push(NamedPolicy { name, rule_sets });
    }
    let brake = brake::brake(file.brake, file.circuit_breaker, |at, what| {
        reading.findings.at(at, &what);
    });
    if let Some(why) = reading.unchecked {
        reading.findings.at(0, &why);
    }
    reading.findings.result(Policy {
        source: source.to_owned(),
        label_prefix: file.label_prefix,
        rule_sets,
        policies,
        unhealthy_taint: file.unhealthy_taint,
        uncordon_labels: file.uncordon_labels,
        brake,
        warnings: reading.warnings,
    })
}

/// A file on its way to a policy.
struct Reading<'a> {
    findings: Findings<'a>,
    warnings: Vec<String>,
    any_or_all: bool,
    /// Steps of all rules up to here.
    cost: u64,
    /// Why not all rules could be looked at.
    unchecked: Option<String>,
}

// === impl Reading ===

impl Reading<'_> {
    fn rule_sets(&mut self, entries: Vec<Spanned<RuleSetEntry>>) -> Vec<RuleSet> {
        let rule_sets = entries.into_iter().map(|entry| self.rule_set(entry));
        rule_sets
            .collect::<Vec<_>>()
            .into_iter()
            .flatten()
            .collect()
    }

    /// Returns a rule set; `None` where it is switched off. It is checked all the same.
    fn rule_set(&mut self, entry: Spanned<RuleSetEntry>) -> Option<RuleSet> {
        let start = entry.span().start;
        let entry = entry.into_inner();
        let name = entry.name;
        if name.trim().is_empty() {
            self.findings.at(start, "a rule set needs a name");
        }
        let any = self.rules(&name, entry.matches.any);
        let all = self.rules(&name, entry.matches.all);
        let taint = entry.taint.and_then(|taint| self.taint(&name, &taint));
        let rule_set = RuleSet {
            cordon: entry.cordon.is_some_and(|cordon| cordon.should_cordon),
            priority: entry.priority,
            any_or_all: self.any_or_all,
            name,
            any,
            all,
            taint,
        };
        entry.enabled.then_some(rule_set)
    }

    fn rules(&mut self, rule_set: &str, entries: Vec<RuleEntry>) -> Vec<Rule> {
        let mut rules = Vec::new();
        for entry in entries {
            let (expression, place) = (entry.expression.get_ref(), entry.expression.span().start);
            let Some(kind) = RuleKind::parse(entry.kind.get_ref()) else {
                let what = format!(
                    "rule set '{rule_set}': kind '{}' is unknown; it is HealthEvent or Node",
                    entry.kind.get_ref()
                );
                self.findings.at(entry.kind.span().start, &what);
                // What is wrong in it as either kind is wrong whichever is meant.
                let node = Rule::compile(RuleKind::Node, expression).err();
                let event = Rule::compile(RuleKind::HealthEvent, expression).err();
                if let (Some(what), Some(_)) = (event, node) {
                    self.refused(place, rule_set, &what);
                }
                continue;
            };
            match Rule::compile(kind, expression) {
                Ok(rule) => {
                    let before = self.cost;
                    self.cost = before.saturating_add(rule.cost);
                    if before <= MAX_POLICY_COST && self.cost > MAX_POLICY_COST {
                        let what = format!(
                            "rule set '{rule_set}': the rules up to here can take {} steps, at \
                             most {MAX_POLICY_COST} are taken in one file; loop over less",
                            self.cost
                        );
                        self.findings.at(place, &what);
                    }
                    rules.push(rule);
                }
                Err(what) => self.refused(place, rule_set, &what),
            }
        }
        rules
    }

    fn refused(&mut self, place: usize, rule_set: &str, why: &CompileError) {
        match why {
            CompileError::Wrong(what) => {
                self.findings
                    .at(place, &format!("rule set '{rule_set}': expression {what}"));
            }
            // Of every rule, and of none in particular.
            CompileError::NoThread(_) => self.unchecked = Some(why.to_string()),
        }
    }

    /// Returns a taint. One that is not filled in is none, as in the reference, and said.
    fn taint(&mut self, rule_set: &str, entry: &Spanned<TaintEntry>) -> Option<Taint> {
        let start = entry.span().start;
        let TaintEntry { key, value, effect } = entry.get_ref();
        if key.is_empty() || value.is_empty() || effect.is_empty() {
            let what = format!(
                "rule set '{rule_set}': the taint has no effect: it needs key, value and effect"
            );
            self.warnings.push(self.findings.said(start, &what));
            return None;
        }
        if !["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&effect.as_str()) {
            let what = format!(
                "rule set '{rule_set}': taint effect '{effect}' is unknown; it is NoSchedule, \
                 PreferNoSchedule or NoExecute"
            );
            self.findings.at(start, &what);
            return None;
        }
        Some(Taint {
            key: key.clone(),
            value: value.clone(),
            effect: effect.clone(),
        })
    }
}

fn on() -> bool {
    true
}
