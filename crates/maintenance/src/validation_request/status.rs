//! The status of a request in NVSentinel's format, with our own messages.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Phase of a request, a group or an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Nothing has started yet.
    Pending,
    /// At least one test is running.
    Running,
    /// All tests have passed or were skipped.
    Succeeded,
    /// A test has failed, and no retries are left.
    Failed,
}

/// Status of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// Phase of the request. `None` for a new request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Time of the first decision about the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Timestamp>,
    /// End of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Timestamp>,
    /// Reason to wait, or for the failure. Serialised as null if absent, which removes an older
    /// message.
    pub message: Option<String>,
    /// Nodes and tests that were left out.
    #[serde(skip_serializing_if = "Skipped::is_nothing")]
    pub skipped: Skipped,
    /// Groups of tests. Empty until the tests start.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub test_groups: Vec<TestGroup>,
}

/// Nodes and tests that were left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Skipped {
    /// Nodes that do not exist.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// Tests that had too few nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tests: Vec<String>,
}

/// A group of tests that run together on nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TestGroup {
    /// Name of the group, part of the names of its objects.
    pub name: String,
    /// Name of the provider in the configuration.
    pub provider: String,
    /// Phase of the group.
    pub phase: Phase,
    /// Names of the nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// Names of the tests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tests: Vec<String>,
    /// Attempts in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attempts: Vec<Attempt>,
}

/// A run of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// Name of the attempt's object.
    pub object_name: String,
    /// Phase of the attempt.
    pub phase: Phase,
    /// Start of the attempt.
    pub start_time: Timestamp,
    /// End of the attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_time: Option<Timestamp>,
    /// Reason of the failure, for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    /// Nodes that caused the failure, if known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_nodes: Vec<String>,
    /// Message about the failure, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

// === impl Phase ===

impl Phase {
    /// Returns whether the phase is final.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }

    /// Returns the name of the phase, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
        }
    }
}

// === impl Skipped ===

impl Skipped {
    fn is_nothing(&self) -> bool {
        self.nodes.is_empty() && self.tests.is_empty()
    }

    pub(super) fn node(&mut self, node: &str) {
        if !self.nodes.iter().any(|other| other == node) {
            self.nodes.push(node.to_owned());
        }
    }

    pub(super) fn test(&mut self, test: &str) {
        if !self.tests.iter().any(|other| other == test) {
            self.tests.push(test.to_owned());
        }
    }
}

// === impl Status ===

impl Status {
    /// Returns the number of running groups.
    pub fn running(&self) -> usize {
        self.count(Phase::Running)
    }

    pub(super) fn count(&self, phase: Phase) -> usize {
        let groups = self.test_groups.iter();
        groups.filter(|group| group.phase == phase).count()
    }
}

// === impl TestGroup ===

impl TestGroup {
    /// Returns the running attempt.
    pub(super) fn attempt(&self) -> Option<&Attempt> {
        let last = self.attempts.last();
        last.filter(|_| self.phase == Phase::Running)
    }

    /// Ends the running attempt.
    pub(super) fn end(&mut self, phase: Phase, now: Timestamp, failure: Option<(&str, String)>) {
        let Some(attempt) = self.attempts.last_mut() else {
            return;
        };
        (attempt.phase, attempt.end_time) = (phase, Some(now));
        if let Some((reason, message)) = failure {
            attempt.failure_reason = Some(reason.to_owned());
            attempt.message = Some(message);
        }
    }
}
