//! One thing that decides about a node, and what is found of it.

use serde::{Deserialize, Serialize};

/// A check of one thing that decides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    /// The name of the thing: `sources`, `cluster`, `node`, `mode`, `session`, `faults`, `rules`, `brake`, `change`.
    pub name: String,
    /// The result, which says whether the thing stands in the way of a quarantine.
    pub result: CheckResult,
    /// The finding.
    pub text: String,
    /// Further lines about it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<String>,
    /// The way out, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// The result of a check: whether something stands in the way of a quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckResult {
    /// Nothing does.
    Passes,
    /// Something does.
    Stops,
    /// That cannot be seen.
    Unknown,
}

/// Name of the checks of which one that passes is enough.
pub(super) const RULES: &str = "rules";

pub(super) fn passes(name: &str, text: impl Into<String>) -> Check {
    check(name, CheckResult::Passes, text)
}

pub(super) fn stops(name: &str, text: impl Into<String>) -> Check {
    check(name, CheckResult::Stops, text)
}

pub(super) fn check(name: &str, result: CheckResult, text: impl Into<String>) -> Check {
    Check {
        name: name.to_owned(),
        result,
        text: text.into(),
        details: Vec::new(),
        fix: None,
    }
}

// === impl Check ===

impl Check {
    /// Adds a way out.
    pub(super) fn fix(mut self, fix: &str) -> Self {
        self.fix = Some(fix.to_owned());
        self
    }
}
