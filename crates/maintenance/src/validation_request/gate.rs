//! Record on a node of the requests that hold it: two annotations and a label, in NVSentinel's
//! format. A node held by no request returns to service.

use contract::keys;
use jiff::Timestamp;
use model::node::{NodeChange, NodeView};
use model::ownership::{CORDON_TIME, Ownership};
use serde::{Deserialize, Serialize};

use super::config::Gate;

/// Annotation with the request whose tests run on the node.
pub const ACTIVE: &str = "nvsentinel.nvidia.com/active-validation-request";
/// Annotation with all requests for the node that are waiting, running or failed.
pub const SESSION: &str = "nvsentinel.nvidia.com/validation-session";
/// Label with the state of the node's requests.
pub const STATE: &str = "nvsentinel.nvidia.com/validation-state";

/// A request that holds a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct GateEntry {
    name: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    tests: Vec<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    failed: bool,
}

/// Requests that hold a node, as recorded there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeRecord {
    active: Option<String>,
    entries: Vec<GateEntry>,
}

// === impl NodeRecord ===

impl NodeRecord {
    /// Reads the record. Malformed parts count as absent: the requests themselves are
    /// authoritative.
    pub(super) fn read(node: &NodeView) -> Self {
        let text = |key: &str| node.annotations.get(key);
        let entries = text(SESSION).and_then(|text| serde_json::from_str(text).ok());
        Self {
            active: text(ACTIVE).filter(|name| !name.is_empty()).cloned(),
            entries: entries.unwrap_or_default(),
        }
    }

    /// Returns the request whose tests run on the node.
    pub(super) fn active(&self) -> Option<&str> {
        self.active.as_deref()
    }

    /// Removes requests that do not exist, whose finalizers another party has removed.
    pub(super) fn keep(&mut self, known: impl Fn(&str) -> bool) {
        self.entries.retain(|one| known(&one.name));
        self.active.take_if(|name| !known(name));
    }

    /// Adds a request with its tests.
    pub(super) fn add(&mut self, request: &str, tests: &[String]) {
        if !self.entries.iter().any(|one| one.name == request) {
            self.entries.push(GateEntry {
                name: request.to_owned(),
                tests: tests.to_vec(),
                failed: false,
            });
        }
    }

    /// Marks the tests of a request as running.
    pub(super) fn activate(&mut self, request: &str) {
        self.active = Some(request.to_owned());
    }

    /// Marks a request as failed. It holds the node until it is deleted, or the same tests
    /// pass.
    pub(super) fn fail(&mut self, request: &str) {
        for one in self.entries.iter_mut().filter(|one| one.name == request) {
            one.failed = true;
        }
        self.deactivate(request);
    }

    /// Removes a request. With `passed`, also removes failed requests with the same tests.
    pub(super) fn remove(&mut self, request: &str, passed: bool) {
        let sorted = |tests: &[String]| {
            let mut tests = tests.to_vec();
            tests.sort_unstable();
            tests
        };
        let own = self.entries.iter().find(|one| one.name == request);
        let own = own.filter(|_| passed).map(|one| sorted(&one.tests));
        self.entries.retain(|one| {
            let same = own.as_ref() == Some(&sorted(&one.tests));
            one.name != request && !(one.failed && same)
        });
        self.deactivate(request);
    }

    fn deactivate(&mut self, request: &str) {
        self.active.take_if(|name| name == request);
    }

    /// Returns the change that writes the record to the node. `None` if it is up to date. When
    /// the last request is removed, the change also opens the gate.
    pub(super) fn change(
        &self,
        node: &NodeView,
        gate: &Gate,
        now: Timestamp,
    ) -> Option<NodeChange> {
        let before = Self::read(node);
        let mut change = NodeChange::default();
        let entries = (!self.entries.is_empty())
            .then(|| serde_json::to_string(&self.entries).unwrap_or_default());
        if self.entries != before.entries {
            change.annotations.insert(SESSION.to_owned(), entries);
        }
        if self.active != before.active {
            let active = self.active.clone();
            change.annotations.insert(ACTIVE.to_owned(), active);
        }
        let state = self.state();
        if node.labels.get(STATE).map(String::as_str) != state {
            let state = state.map(str::to_owned);
            change.labels.insert(STATE.to_owned(), state);
        }
        let has_gone = self.entries.is_empty() && !before.entries.is_empty();
        if has_gone {
            gate.open(node, &mut change, now);
        }
        (!change.is_empty()).then_some(change)
    }

    fn state(&self) -> Option<&'static str> {
        Some(match (self.entries.as_slice(), &self.active) {
            ([], _) => return None,
            (_, Some(_)) => "validating",
            (entries, None) if entries.iter().all(|one| one.failed) => "validation-failed",
            _ => "validation-pending",
        })
    }
}

// === impl Gate ===

impl Gate {
    /// Uncordons the node and removes its taints, as configured. A quarantined node stays
    /// cordoned until the end of the quarantine.
    fn open(&self, node: &NodeView, change: &mut NodeChange, now: Timestamp) {
        let taints = self.taints.iter().filter(|(_, goes)| *goes);
        let taints = taints.filter(|(taint, _)| node.has_taint(taint));
        change.remove_taints = taints.map(|(taint, _)| taint.clone()).collect();
        if !self.uncordons || !node.unschedulable {
            return;
        }
        if Ownership::read(node).is_some() {
            // The cordon now belongs to the quarantine alone, which removes it at its end.
            let pre_existing = keys::QUARANTINE_CORDON_PRE_EXISTING;
            if node.annotations.contains_key(pre_existing) {
                change.annotations.insert(pre_existing.to_owned(), None);
            }
            return;
        }
        change.unschedulable = Some(false);
        if self.label_prefix.is_empty() {
            return;
        }
        let label = |name: &str| format!("{}{name}", self.label_prefix);
        for name in [keys::CORDON_BY, keys::CORDON_REASON, keys::CORDON_TIMESTAMP] {
            if node.labels.contains_key(&label(name)) {
                change.labels.insert(label(name), None);
            }
        }
        let at = now.strftime(CORDON_TIME).to_string();
        for (name, value) in [
            (keys::UNCORDON_BY, keys::CORDONED_BY_VALUE),
            (keys::UNCORDON_REASON, "ValidationSucceeded"),
            (keys::UNCORDON_TIMESTAMP, &at),
        ] {
            change.labels.insert(label(name), Some(value.to_owned()));
        }
    }
}
