//! The status of a request, as NVSentinel writes it; the messages are our own.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The phase of a request, of a group or of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Nothing is running yet.
    Pending,
    /// Something is running.
    Running,
    /// All tests have passed, or were skipped.
    Succeeded,
    /// A test has failed as often as it may.
    Failed,
}

/// The status of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// The phase; `None`: nobody has looked at it yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// When somebody has first looked at it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Timestamp>,
    /// When it came to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Timestamp>,
    /// What it waits for, or why it has failed. Written as null where there is nothing to say, which takes an
    /// older one away.
    pub message: Option<String>,
    /// What was left out.
    #[serde(skip_serializing_if = "Skipped::is_nothing")]
    pub skipped: Skipped,
    /// The groups of tests, once they are known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub test_groups: Vec<TestGroup>,
}

/// Nodes and tests that were left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Skipped {
    /// Nodes that are not there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// Tests that had too few nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tests: Vec<String>,
}

/// Tests that run together on nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TestGroup {
    /// Its name, which is part of the names of its objects.
    pub name: String,
    /// Who runs it, by its name in the configuration.
    pub provider: String,
    /// Its phase.
    pub phase: Phase,
    /// The nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// The tests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tests: Vec<String>,
    /// What was tried, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attempts: Vec<Attempt>,
}

/// One run of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    /// The name of its object.
    pub object_name: String,
    /// Its phase.
    pub phase: Phase,
    /// When it was begun.
    pub start_time: Timestamp,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_time: Option<Timestamp>,
    /// Why it has failed, in a word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure_reason: Option<String>,
    /// The nodes for which it has failed, where they are known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_nodes: Vec<String>,
    /// The same for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

// === impl Phase ===

impl Phase {
    /// Returns whether nothing follows it.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }

    /// Returns its name.
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
    /// Returns how many groups are running.
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
    /// Returns the attempt that is running.
    pub(super) fn attempt(&self) -> Option<&Attempt> {
        let last = self.attempts.last();
        last.filter(|_| self.phase == Phase::Running)
    }

    /// Ends the attempt that is running.
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
