//! Reads a policy file. Everything that can be wrong with it is found here, with the
//! line it stands on and what to do; all findings at once.

use std::fmt;

use serde::Deserialize;
use toml::Spanned;

use super::unknown::UnknownKeys;
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
/// Findings that are told; who has made more begins with these.
const MAX_FINDINGS: usize = 100;

/// A policy file that cannot be used: every finding, one per line.
#[derive(Debug, PartialEq, Eq)]
pub struct PolicyError {
    /// Findings as `file:line: what`.
    pub findings: Vec<String>,
}

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
pub(super) fn parse(text: &str, source: &str) -> Result<Policy, PolicyError> {
    let mut unknown = UnknownKeys::default();
    let mut reading = Reading {
        text,
        source,
        findings: Vec::new(),
        warnings: Vec::new(),
        any_or_all: false,
        cost: 0,
        unchecked: None,
    };
    if text.len() > MAX_POLICY_BYTES {
        let found = text.len();
        let what = format!("it has {found} bytes, at most {MAX_POLICY_BYTES} are taken");
        return Err(reading.only(0, &what));
    }
    if text.trim().is_empty() {
        // Most likely somebody's editor or disk: nobody wants to lose all rules by that.
        return Err(reading.only(0, EMPTY));
    }
    let toml = match toml::Deserializer::parse(text) {
        Ok(toml) => toml,
        Err(error) => return Err(reading.only(start_of(&error), error.message())),
    };
    let file: File = match serde_ignored::deserialize(toml, |path| unknown.note(&path)) {
        Ok(file) => file,
        Err(error) => {
            let what = wrong_value::explain(text, &error);
            return Err(reading.only(start_of(&error), &what));
        }
    };
    for said in unknown.said(text) {
        if said.is_error {
            reading.find(said.offset, &said.what);
        } else {
            reading.warn(said.offset, &said.what);
        }
    }
    let sets = file.policies.iter().map(|entry| &entry.get_ref().rule_sets);
    let sets: Vec<_> = file.rule_sets.iter().chain(sets.flatten()).collect();
    let rules = sets.iter().map(|entry| &entry.get_ref().matches);
    let rules: usize = rules.map(|entry| entry.any.len() + entry.all.len()).sum();
    if let Some(beyond) = sets.get(MAX_RULE_SETS) {
        let (start, found) = (beyond.span().start, sets.len());
        let what = format!("{found} rule sets, at most {MAX_RULE_SETS} are taken");
        return Err(reading.only(start, &what));
    }
    if rules > MAX_RULES {
        let what = format!("{rules} rules, at most {MAX_RULES} are taken");
        return Err(reading.only(0, &what));
    }
    reading.any_or_all = file.match_any_all == AnyAll::Either;
    let rule_sets = reading.rule_sets(file.rule_sets);
    let mut policies: Vec<NamedPolicy> = Vec::new();
    for entry in file.policies {
        let start = entry.span().start;
        let entry = entry.into_inner();
        let name = entry.name;
        if name.trim().is_empty() {
            reading.find(start, "a policy needs a name");
        } else if policies.iter().any(|known| known.name == name) {
            reading.find(
                start,
                &format!("policy '{name}' is there twice: give one of them another name"),
            );
        }
        let rule_sets = reading.rule_sets(entry.rule_sets);
        policies.push(NamedPolicy { name, rule_sets });
    }
    let brake = brake::brake(file.brake, file.circuit_breaker, |at, what| {
        reading.find(at, &what);
    });
    reading.findings.extend(reading.unchecked);
    if !reading.findings.is_empty() {
        return Err(PolicyError {
            findings: reading.findings,
        });
    }
    Ok(Policy {
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
    text: &'a str,
    source: &'a str,
    findings: Vec<String>,
    warnings: Vec<String>,
    any_or_all: bool,
    /// Steps of all rules up to here.
    cost: u64,
    /// Why not all rules could be looked at.
    unchecked: Option<String>,
}

// === impl Reading ===

impl Reading<'_> {
    fn find(&mut self, offset: usize, what: &str) {
        match self.findings.len() {
            ..MAX_FINDINGS => self.findings.push(self.line(offset, what)),
            MAX_FINDINGS => {
                let what = self.line(offset, "there are more findings, which are not listed");
                self.findings.push(what);
            }
            _ => {}
        }
    }

    /// The error where nothing else can be looked at.
    fn only(mut self, offset: usize, what: &str) -> PolicyError {
        self.find(offset, what);
        PolicyError {
            findings: self.findings,
        }
    }

    fn warn(&mut self, offset: usize, what: &str) {
        self.warnings.push(self.line(offset, what));
    }

    fn line(&self, offset: usize, what: &str) -> String {
        let before = self.text.as_bytes().iter().take(offset);
        let line = 1 + before.filter(|byte| **byte == b'\n').count();
        format!("{}:{line}: {what}", self.source)
    }

    fn rule_sets(&mut self, entries: Vec<Spanned<RuleSetEntry>>) -> Vec<RuleSet> {
        let rule_sets = entries.into_iter().map(|entry| self.rule_set(entry));
        rule_sets
            .collect::<Vec<_>>()
            .into_iter()
            .flatten()
            .collect()
    }

    /// A rule set; `None` where it is switched off. It is checked all the same.
    fn rule_set(&mut self, entry: Spanned<RuleSetEntry>) -> Option<RuleSet> {
        let start = entry.span().start;
        let entry = entry.into_inner();
        let name = entry.name;
        if name.trim().is_empty() {
            self.find(start, "a rule set needs a name");
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
                self.find(entry.kind.span().start, &what);
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
                        self.find(place, &what);
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
                self.find(place, &format!("rule set '{rule_set}': expression {what}"));
            }
            // Of every rule, and of none in particular.
            CompileError::NoThread(_) => self.unchecked = Some(self.line(0, &why.to_string())),
        }
    }

    /// A taint. One that is not filled in is none, as in the reference, and said.
    fn taint(&mut self, rule_set: &str, entry: &Spanned<TaintEntry>) -> Option<Taint> {
        let start = entry.span().start;
        let TaintEntry { key, value, effect } = entry.get_ref();
        if key.is_empty() || value.is_empty() || effect.is_empty() {
            let what = format!(
                "rule set '{rule_set}': the taint has no effect: it needs key, value and effect"
            );
            self.warn(start, &what);
            return None;
        }
        if !["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&effect.as_str()) {
            let what = format!(
                "rule set '{rule_set}': taint effect '{effect}' is unknown; it is NoSchedule, \
                 PreferNoSchedule or NoExecute"
            );
            self.find(start, &what);
            return None;
        }
        Some(Taint {
            key: key.clone(),
            value: value.clone(),
            effect: effect.clone(),
        })
    }
}

fn start_of(error: &toml::de::Error) -> usize {
    error.span().map_or(0, |span| span.start)
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
