//! Decision on the next step of a request.

mod execution;
mod objects;

use jiff::Timestamp;
use model::node::{NodeChange, NodeView};
use serde_json::Value;

use super::cluster_view::{ClusterView, NodeState};
use super::config::ValidationConfiguration;
use super::gate::NodeRecord;
use super::groups;
use super::status::{Attempt, Phase, Skipped, Status, TestGroup};
use super::{FINALIZER, ValidationRequest};

/// Reasons of failed attempts, as named by NVSentinel.
const TEST_FAILED: &str = "TestFailed";
const TIMED_OUT: &str = "TestTimeout";
const NOT_READY: &str = "NodeReadinessViolation";
const NODE_DELETED: &str = "NodeDeleted";
/// Longest message, in characters.
const MAX_TEXT: usize = 500;

/// An action of a step. Actions are ordered; each requires the success of the previous one.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Sets the finalizers of the request.
    Finalizers(Vec<String>),
    /// Changes a node of the request.
    Node(Box<NodeView>, NodeChange),
    /// Creates the object of an attempt, unless it exists.
    Make {
        /// Provider that runs the tests.
        provider: String,
        /// Index of the group in the status, for [`refused`].
        group: usize,
        /// Object to create for the attempt.
        object: Value,
    },
    /// Deletes the object of an attempt.
    Delete {
        /// Provider of the object.
        provider: String,
        /// Name of the object.
        name: String,
        /// `metadata.uid` of the object.
        uid: String,
    },
    /// Writes the status of the request.
    Status(Box<Status>),
}

/// Next step of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValidationStep {
    /// Actions to take. Empty if the request waits.
    pub acts: Vec<Act>,
    /// Time of the next decision if nothing happens before.
    pub wake: Option<Timestamp>,
}

/// State of a decision about a request.
struct Decision<'a> {
    request: &'a ValidationRequest,
    config: &'a ValidationConfiguration,
    cluster: &'a ClusterView<'a>,
    status: Status,
}

/// Returns the next step of a request.
pub fn step(
    request: &ValidationRequest,
    config: &ValidationConfiguration,
    cluster: &ClusterView<'_>,
) -> ValidationStep {
    let decision = Decision {
        request,
        config,
        cluster,
        status: request.status.clone(),
    };
    decision.step()
}

/// Returns the status of a request after the API server has refused the object of a group,
/// which fails the attempt.
pub fn refused(
    request: &ValidationRequest,
    config: &ValidationConfiguration,
    group: usize,
    why: &str,
    now: Timestamp,
) -> Status {
    let mut status = request.status.clone();
    if let Some(group) = status.test_groups.get_mut(group) {
        let name = groups::object_name(&request.name, &group.name, group.attempts.len() + 1);
        begin(group, name, now);
        let message = short(&format!("its object cannot be made: {why}"));
        group.end(Phase::Failed, second(now), Some((TEST_FAILED, message)));
        group.phase = after_failure(group, config);
    }
    status
}

// === impl Decision ===

impl Decision<'_> {
    fn step(mut self) -> ValidationStep {
        if self.request.deleted {
            return self.leave();
        }
        let acts = self.sweep();
        if !acts.is_empty() || self.request.is_over() {
            return ValidationStep { acts, wake: None };
        }
        if !self.request.finalizers.iter().any(|one| one == FINALIZER) {
            let mut finalizers = self.request.finalizers.clone();
            finalizers.push(FINALIZER.to_owned());
            return of(Act::Finalizers(finalizers));
        }
        match self.request.status.phase {
            None => {
                self.status.phase = Some(Phase::Pending);
                self.status.start_time = Some(second(self.cluster.now));
                self.write()
            }
            // A request that ended now would leave unknown nodes held.
            _ if !self.knows_all_nodes() => ValidationStep::default(),
            Some(Phase::Pending) => self.pending(),
            _ => self.running(),
        }
    }

    /// Undoes everything for a request that is being deleted.
    fn leave(self) -> ValidationStep {
        if !self.request.finalizers.iter().any(|one| one == FINALIZER) {
            return ValidationStep::default();
        }
        let mut acts = Vec::new();
        let mut has_objects = false;
        for group in &self.status.test_groups {
            let attempts = group.attempts.iter();
            has_objects |= attempts
                .clone()
                .any(|one| self.is_there(self.request, group, one));
            acts.extend(attempts.filter_map(|one| self.delete(&group.provider, &one.object_name)));
        }
        // Nodes stay held until none of its tests can be running.
        if has_objects {
            return ValidationStep { acts, wake: None };
        }
        acts.extend(self.change_nodes(|record| record.remove(&self.request.name, false)));
        if self.knows_all_nodes() {
            let mut finalizers = self.request.finalizers.clone();
            finalizers.retain(|one| one != FINALIZER);
            acts.push(Act::Finalizers(finalizers));
        }
        ValidationStep { acts, wake: None }
    }

    fn pending(mut self) -> ValidationStep {
        self.status.skipped = Skipped::default();
        let tests = self.tests();
        if let Some(unknown) = tests.iter().find(|name| self.config.test(name).is_none()) {
            let known = self.config.known_tests();
            self.status.message = Some(format!("there is no test {unknown}; there are {known}"));
            return self.finish(Phase::Failed);
        }
        if tests.is_empty() {
            self.status.message = Some("it names no test, and there is no default".to_owned());
            return self.finish(Phase::Failed);
        }
        // A node records the request before anything else, so that it is released later.
        let acts = self.change_nodes(|record| record.add(&self.request.name, &tests));
        if !acts.is_empty() {
            return ValidationStep { acts, wake: None };
        }
        let mut waits = Vec::new();
        let mut nodes = Vec::new();
        for name in &self.request.nodes {
            match self.cluster.nodes.get(name) {
                None => {} // Not reached: all nodes are known.
                Some(NodeState::Gone) => self.status.skipped.node(name),
                Some(NodeState::There { view, readiness }) => {
                    if let Some(other) = self.tested_for(name, view) {
                        waits.push(format!("{name} is tested for {other}"));
                    } else if let Some(why) = readiness.reason_to_wait(name) {
                        waits.push(why);
                    }
                    nodes.push(name.clone());
                }
            }
        }
        if !waits.is_empty() {
            return self.wait(&waits);
        }
        self.status.test_groups =
            groups::form(&tests, &nodes, self.config, &mut self.status.skipped);
        let groups = self.status.test_groups.len();
        if groups > groups::MOST_GROUPS {
            self.status.test_groups.clear();
            let most = groups::MOST_GROUPS;
            self.status.message = Some(format!(
                "it needs {groups} groups of tests, at most {most} are possible: request fewer nodes at once"
            ));
            return self.finish(Phase::Failed);
        }
        self.status.message = None;
        if nodes.is_empty() || self.status.test_groups.is_empty() {
            return self.finish(Phase::Succeeded);
        }
        if self.status.count(Phase::Failed) > 0 {
            self.status.message = Some("a test has too few nodes".to_owned());
            return self.finish(Phase::Failed);
        }
        let mut acts = self.change_nodes(|record| record.activate(&self.request.name));
        self.status.phase = Some(Phase::Running);
        acts.extend(self.write().acts);
        ValidationStep { acts, wake: None }
    }

    /// Returns the other request whose tests run on a node, or whose objects still exist there.
    /// Determined from the node's record, or from the requests themselves if another party has
    /// removed the record.
    fn tested_for(&self, name: &str, node: &NodeView) -> Option<String> {
        let mut record = NodeRecord::read(node);
        record.keep(|name| self.cluster.knows(name));
        if let Some(other) = record.active().filter(|other| *other != self.request.name) {
            return Some(other.to_owned());
        }
        let others = self.cluster.requests.values();
        let mut others = others.filter(|other| other.name != self.request.name);
        let other = others.find(|other| {
            let groups = other.status.test_groups.iter();
            let mut of_node = groups.filter(|group| group.nodes.iter().any(|one| one == name));
            of_node.any(|one| one.phase == Phase::Running || self.lingers(other, one))
        });
        other.map(|other| other.name.clone())
    }

    /// Ends the request. The nodes are released first, so that nobody has to return to the
    /// request.
    fn finish(mut self, phase: Phase) -> ValidationStep {
        // Skipped tests do not make up for an earlier failure.
        let passed = !self.status.test_groups.is_empty() && self.status.skipped.tests.is_empty();
        let mut acts = match phase {
            Phase::Succeeded => {
                self.change_nodes(|record| record.remove(&self.request.name, passed))
            }
            _ => self.change_nodes(|record| record.fail(&self.request.name)),
        };
        self.status.phase = Some(phase);
        self.status.completion_time = Some(second(self.cluster.now));
        acts.extend(self.write().acts);
        ValidationStep { acts, wake: None }
    }

    /// Records what the request waits for.
    fn wait(mut self, waits: &[String]) -> ValidationStep {
        let next = self.status.test_groups.iter().filter_map(|group| {
            let provider = self.config.providers.get(&group.provider)?;
            let began = group.attempt()?.start_time;
            began.checked_add(provider.timeout).ok()
        });
        // An object past its time limit ends the request once no test runs.
        let goes_by = self.goes_by().filter(|by| *by > self.cluster.now);
        let wake = next.chain(goes_by).min();
        self.status.message = (!waits.is_empty()).then(|| short(&waits.join("; ")));
        let acts = if self.status == self.request.status {
            Vec::new()
        } else {
            self.write().acts
        };
        ValidationStep { acts, wake }
    }

    fn write(self) -> ValidationStep {
        of(Act::Status(Box::new(self.status)))
    }

    /// Returns the tests of the request.
    fn tests(&self) -> Vec<String> {
        if self.request.tests.is_empty() {
            self.config.default_tests.clone()
        } else {
            self.request.tests.clone()
        }
    }

    fn knows_all_nodes(&self) -> bool {
        let mut nodes = self.request.nodes.iter();
        nodes.all(|name| self.cluster.nodes.contains_key(name))
    }

    /// Returns the changes that apply `edit` to the records on all nodes of the request.
    fn change_nodes(&self, edit: impl Fn(&mut NodeRecord)) -> Vec<Act> {
        let nodes = self.request.nodes.iter();
        let changed = nodes.filter_map(|name| match self.cluster.nodes.get(name)? {
            NodeState::There { view, .. } => {
                let mut record = NodeRecord::read(view);
                record.keep(|name| self.cluster.knows(name));
                edit(&mut record);
                let change = record.change(view, &self.config.gate, self.cluster.now)?;
                Some(Act::Node(view.clone(), change))
            }
            NodeState::Gone => None,
        });
        changed.collect()
    }
}

fn of(act: Act) -> ValidationStep {
    ValidationStep {
        acts: vec![act],
        wake: None,
    }
}

fn begin(group: &mut TestGroup, object_name: String, now: Timestamp) {
    group.phase = Phase::Running;
    group.attempts.push(Attempt {
        object_name,
        phase: Phase::Running,
        start_time: second(now),
        end_time: None,
        failure_reason: None,
        failed_nodes: Vec::new(),
        message: None,
    });
}

/// Returns the phase of a group whose last attempt has failed.
fn after_failure(group: &TestGroup, config: &ValidationConfiguration) -> Phase {
    let provider = config.providers.get(&group.provider);
    let retries = provider.map_or(0, |provider| provider.retries);
    let retries = usize::try_from(retries).unwrap_or(usize::MAX);
    if group.attempts.len() > retries {
        Phase::Failed
    } else {
        Phase::Pending
    }
}

/// Returns a time truncated to whole seconds, the precision of Kubernetes.
fn second(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

fn short(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}
