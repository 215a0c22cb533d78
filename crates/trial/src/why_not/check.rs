//! Check of why-not, and its finding.

use serde::{Deserialize, Serialize};

/// Check of one thing that decides about a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    /// Name of the check: `sources`, `cluster`, `node`, `mode`, `session`, `others`, `faults`,
    /// `rules`, `brake`, `change`.
    pub name: String,
    /// Result of the check: whether it prevents a quarantine.
    pub result: CheckResult,
    /// Finding, in one sentence.
    pub text: String,
    /// Details of the finding, one per line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<String>,
    /// Command or advice that removes the obstacle, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// Result of a check: whether it prevents a quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckResult {
    /// Nothing prevents a quarantine.
    Passes,
    /// Something prevents a quarantine.
    Stops,
    /// The state could not be observed.
    Unknown,
}

/// Name of the checks of rules. If one of them passes, that is enough.
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
    /// Adds a way to remove the obstacle.
    pub(super) fn fix(mut self, fix: &str) -> Self {
        self.fix = Some(fix.to_owned());
        self
    }
}
