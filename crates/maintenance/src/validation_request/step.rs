//! Decision on the next step of a request.

use jiff::{SignedDuration, Timestamp};
use model::node::{NodeChange, NodeView};
use serde_json::{Value, json};

use super::cluster_view::{ClusterView, NodeState, ObjectState, Readiness};
use super::config::{Run, ValidationConfiguration};
use super::gate::NodeRecord;
use super::groups;
use super::status::{Attempt, Phase, Skipped, Status, TestGroup};
use super::{FINALIZER, GROUP, KIND, Request, VERSION};

/// Reasons of failed attempts, as named by NVSentinel.
const TEST_FAILED: &str = "TestFailed";
const TIMED_OUT: &str = "TestTimeout";
const NOT_READY: &str = "NodeReadinessViolation";
const NODE_DELETED: &str = "NodeDeleted";
/// Time for the object of an ended attempt to disappear. Its pods may be on a machine that is
/// gone.
const GOES_WITHIN: SignedDuration = SignedDuration::from_mins(15);
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
pub struct Step {
    /// Actions to take. Empty if the request waits.
    pub acts: Vec<Act>,
    /// Time of the next decision if nothing happens before.
    pub wake: Option<Timestamp>,
}

/// State of a decision about a request.
struct Decision<'a> {
    request: &'a Request,
    config: &'a ValidationConfiguration,
    cluster: &'a ClusterView<'a>,
    status: Status,
}

/// Returns the next step of a request.
pub fn step(
    request: &Request,
    config: &ValidationConfiguration,
    cluster: &ClusterView<'_>,
) -> Step {
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
    request: &Request,
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
    fn step(mut self) -> Step {
        if self.request.deleted {
            return self.leave();
        }
        let acts = self.sweep();
        if !acts.is_empty() || self.request.is_over() {
            return Step { acts, wake: None };
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
            _ if !self.knows_all_nodes() => Step::default(),
            Some(Phase::Pending) => self.pending(),
            _ => self.running(),
        }
    }

    /// Undoes everything for a request that is being deleted.
    fn leave(self) -> Step {
        if !self.request.finalizers.iter().any(|one| one == FINALIZER) {
            return Step::default();
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
            return Step { acts, wake: None };
        }
        acts.extend(self.change_nodes(|record| record.remove(&self.request.name, false)));
        if self.knows_all_nodes() {
            let mut finalizers = self.request.finalizers.clone();
            finalizers.retain(|one| one != FINALIZER);
            acts.push(Act::Finalizers(finalizers));
        }
        Step { acts, wake: None }
    }

    /// Returns the deletions of objects whose attempts have ended.
    fn sweep(&self) -> Vec<Act> {
        let groups = self.status.test_groups.iter();
        let ended = groups.flat_map(|group| {
            let attempts = group.attempts.iter().filter(|one| one.phase.is_over());
            attempts.filter_map(|one| self.delete(&group.provider, &one.object_name))
        });
        ended.collect()
    }

    /// Returns the groups with an object of an ended attempt that has not disappeared, and may
    /// still use the GPUs.
    fn lingering(&self) -> impl Iterator<Item = &TestGroup> {
        let groups = self.status.test_groups.iter();
        groups.filter(|group| self.lingers(self.request, group))
    }

    /// Returns whether an object of an ended attempt of the group still exists, for this or
    /// another request.
    fn lingers(&self, request: &Request, group: &TestGroup) -> bool {
        let mut ended = group.attempts.iter().filter(|one| one.phase.is_over());
        ended.any(|one| self.is_there(request, group, one))
    }

    /// Returns the earliest time limit for such an object to disappear.
    fn goes_by(&self) -> Option<Timestamp> {
        let attempts = self.lingering().flat_map(|group| {
            let ended = group.attempts.iter().filter(|one| one.phase.is_over());
            ended.filter(|one| self.is_there(self.request, group, one))
        });
        let ends = attempts.filter_map(|one| one.end_time?.checked_add(GOES_WITHIN).ok());
        ends.min()
    }

    /// Returns whether an attempt's object exists and belongs to the request.
    fn is_there(&self, request: &Request, group: &TestGroup, attempt: &Attempt) -> bool {
        let state = self.object(request, &group.provider, &attempt.object_name);
        !matches!(state, ObjectState::Gone | ObjectState::Foreign)
    }

    fn pending(mut self) -> Step {
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
            return Step { acts, wake: None };
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
        Step { acts, wake: None }
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

    fn running(mut self) -> Step {
        // Another party may have removed the record, and a recreated node has none.
        let tests = self.tests();
        let acts = self.change_nodes(|record| {
            record.add(&self.request.name, &tests);
            if record.active().is_none() {
                record.activate(&self.request.name);
            }
        });
        if !acts.is_empty() {
            return Step { acts, wake: None };
        }
        let mut status = std::mem::take(&mut self.status);
        for group in &mut status.test_groups {
            if group.phase == Phase::Running {
                self.update_group(group, &mut status.skipped);
            }
        }
        self.status = status;
        if self.status != self.request.status {
            return self.write();
        }
        let (running, failed) = (self.status.running(), self.status.count(Phase::Failed));
        let stays = self.goes_by().is_some_and(|by| by <= self.cluster.now);
        if running == 0 && stays {
            // No further test can start on its nodes, which stay held while the object may use
            // their GPUs.
            let why = self.lingering().next().map(not_gone);
            self.status.message = why;
            return self.finish(Phase::Failed);
        }
        if running == 0 && (failed > 0 || self.status.count(Phase::Pending) == 0) {
            let lingering: Vec<String> = self.lingering().map(not_gone).collect();
            if !lingering.is_empty() {
                return self.wait(&lingering);
            }
            // Nothing has to be proven about nodes that are gone.
            let gone = |name| matches!(self.cluster.nodes.get(name), Some(NodeState::Gone));
            let fails = failed > 0 && !self.request.nodes.iter().all(gone);
            self.status.message = self.failure().filter(|_| fails);
            return self.finish(if fails {
                Phase::Failed
            } else {
                Phase::Succeeded
            });
        }
        if failed > 0 {
            return self.wait(&[]);
        }
        self.start()
    }

    /// Updates a group that is running.
    fn update_group(&self, group: &mut TestGroup, skipped: &mut Skipped) {
        let now = second(self.cluster.now);
        let Some(attempt) = group.attempt() else {
            return;
        };
        let Some(provider) = self.config.providers.get(&group.provider) else {
            let why = format!("the configuration has no provider {}", group.provider);
            group.end(Phase::Failed, now, Some((TEST_FAILED, why)));
            group.phase = Phase::Failed;
            return;
        };
        let timed_out = now.duration_since(attempt.start_time) >= provider.timeout;
        let object = self.object(self.request, &group.provider, &attempt.object_name);
        let gone = self.gone(group);
        let failure = if !gone.is_empty() {
            (
                NODE_DELETED,
                format!("{} is gone", gone.join(", ")),
                gone.clone(),
            )
        } else if let Some((node, why)) = self.not_ready(group) {
            (NOT_READY, why, vec![node.to_owned()])
        } else if object == ObjectState::Succeeded {
            group.end(Phase::Succeeded, now, None);
            group.phase = Phase::Succeeded;
            return;
        } else if timed_out {
            let seconds = provider.timeout.as_secs();
            (TIMED_OUT, format!("no end after {seconds} s"), Vec::new())
        } else {
            let why = match object {
                ObjectState::Failed(why) => why,
                ObjectState::Gone => "its object was deleted".to_owned(),
                ObjectState::Foreign => "another object has its name".to_owned(),
                ObjectState::UnderWay | ObjectState::Succeeded => return,
            };
            (TEST_FAILED, why, Vec::new())
        };
        let (reason, message, nodes) = failure;
        group.end(Phase::Failed, now, Some((reason, short(&message))));
        if let Some(attempt) = group.attempts.last_mut() {
            attempt.failed_nodes = nodes;
        }
        // Nodes that disappear use up no retries: each can do so only once.
        group.phase = if gone.is_empty() {
            after_failure(group, self.config)
        } else {
            groups::without(group, &gone, self.config, skipped)
        };
    }

    /// Returns the reason of the request's failure.
    fn failure(&self) -> Option<String> {
        let mut groups = self.status.test_groups.iter();
        let failed = groups.find(|group| group.phase == Phase::Failed)?;
        let last = failed
            .attempts
            .last()
            .and_then(|one| one.message.as_deref());
        let why = last.unwrap_or("a test has too few nodes");
        Some(short(&format!("{}: {why}", failed.name)))
    }

    /// Starts the next group that can start.
    fn start(mut self) -> Step {
        let mut waits = Vec::new();
        let mut taken: Vec<String> = Vec::new();
        let running = self.status.test_groups.iter();
        let running = running.filter(|group| group.phase == Phase::Running);
        for group in running.chain(self.lingering()) {
            taken.extend(group.nodes.iter().cloned());
        }
        waits.extend(self.lingering().map(not_gone));
        let others = self.cluster.requests.values();
        let others = others.filter(|other| other.name != self.request.name);
        let running: usize = others.map(|other| other.status.running()).sum();
        let room = self.config.max_groups > self.status.running() + running;
        for at in 0..self.status.test_groups.len() {
            let Some(group) = self.status.test_groups.get(at) else {
                break;
            };
            if group.phase != Phase::Pending || group.nodes.iter().any(|node| taken.contains(node))
            {
                continue;
            }
            let gone = self.gone(group);
            if !gone.is_empty() {
                let skipped = &mut self.status.skipped;
                if let Some(group) = self.status.test_groups.get_mut(at) {
                    group.phase = groups::without(group, &gone, self.config, skipped);
                }
                return self.write();
            }
            let other = group.nodes.iter().find_map(|name| {
                let Some(NodeState::There { view, .. }) = self.cluster.nodes.get(name) else {
                    return None;
                };
                let other = self.tested_for(name, view)?;
                Some(format!("{name} is tested for {other}"))
            });
            if let Some(why) = other {
                waits.push(why);
                continue;
            }
            let unready = self
                .states(group)
                .find_map(|(name, one)| one.reason_to_wait(name));
            if let Some(why) = unready {
                waits.push(why);
                continue;
            }
            if !room {
                let most = self.config.max_groups;
                waits.push(format!("{most} groups are running"));
                break;
            }
            return self.begin(at);
        }
        self.wait(&waits)
    }

    /// Starts a group. The object is created before the status is written; after a crash it is
    /// found by its name.
    fn begin(mut self, at: usize) -> Step {
        let (namespace, now) = (self.cluster.namespace, self.cluster.now);
        let Some(group) = self.status.test_groups.get_mut(at) else {
            return Step::default();
        };
        let name = groups::object_name(&self.request.name, &group.name, group.attempts.len() + 1);
        let run = Run {
            request: &self.request.name,
            group: &group.name,
            namespace,
            nodes: &group.nodes,
            tests: &group.tests,
        };
        let rendered = match self.config.providers.get(&group.provider) {
            Some(provider) => self.config.render(provider, &run),
            None => Err(format!("there is no provider {}", group.provider)),
        };
        let mut object = match rendered {
            Ok(object) => object,
            Err(why) => {
                let status = refused(self.request, self.config, at, &why, now);
                return of(Act::Status(Box::new(status)));
            }
        };
        let owner = json!({
            "apiVersion": format!("{GROUP}/{VERSION}"), "kind": KIND, "name": self.request.name,
            "uid": self.request.uid, "controller": true, "blockOwnerDeletion": false,
        });
        object["metadata"]["name"] = json!(name);
        object["metadata"]["namespace"] = json!(namespace);
        object["metadata"]["ownerReferences"] = json!([owner]);
        begin(group, name, now);
        let make = Act::Make {
            provider: group.provider.clone(),
            group: at,
            object,
        };
        self.status.message = None;
        let mut acts = vec![make];
        acts.extend(self.write().acts);
        Step { acts, wake: None }
    }

    /// Ends the request. The nodes are released first, so that nobody has to return to the
    /// request.
    fn finish(mut self, phase: Phase) -> Step {
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
        Step { acts, wake: None }
    }

    /// Records what the request waits for.
    fn wait(mut self, waits: &[String]) -> Step {
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
        Step { acts, wake }
    }

    fn write(self) -> Step {
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

    /// Returns the nodes of a group that are gone.
    fn gone(&self, group: &TestGroup) -> Vec<String> {
        let is_gone = |name: &&String| {
            let state = self.cluster.nodes.get(*name);
            matches!(state, Some(NodeState::Gone))
        };
        group.nodes.iter().filter(is_gone).cloned().collect()
    }

    /// Returns the existing nodes of a group with their readiness.
    fn states<'b>(
        &'b self,
        group: &'b TestGroup,
    ) -> impl Iterator<Item = (&'b str, &'b Readiness)> {
        group
            .nodes
            .iter()
            .filter_map(|name| match self.cluster.nodes.get(name)? {
                NodeState::There { readiness, .. } => Some((name.as_str(), readiness)),
                NodeState::Gone => None,
            })
    }

    /// Returns the first node of a group whose criteria do not hold, and the reason.
    fn not_ready<'b>(&'b self, group: &'b TestGroup) -> Option<(&'b str, String)> {
        let mut states = self.states(group);
        states.find_map(|(name, readiness)| match readiness {
            Readiness::Not(_) => Some((name, readiness.reason_to_wait(name)?)),
            Readiness::Ready | Readiness::Unknown(_) => None,
        })
    }

    /// Returns the state of an object.
    fn object(&self, request: &Request, provider: &str, name: &str) -> ObjectState {
        let key = (provider.to_owned(), name.to_owned());
        let Some(object) = self.cluster.objects.get(&key) else {
            return ObjectState::Gone;
        };
        let owners = object.pointer("/metadata/ownerReferences");
        let mut owners = owners.and_then(Value::as_array).into_iter().flatten();
        if !owners.any(|one| one["uid"] == request.uid.as_str()) {
            return ObjectState::Foreign;
        }
        let Some(rules) = self.config.providers.get(provider) else {
            return ObjectState::UnderWay;
        };
        if rules.succeeded.of(object).is_some() {
            return ObjectState::Succeeded;
        }
        match rules.failed.of(object) {
            Some(why) => ObjectState::Failed(why),
            None => ObjectState::UnderWay,
        }
    }

    /// Returns the deletion of an object, if it belongs to the request and is not being deleted
    /// yet.
    fn delete(&self, provider: &str, name: &str) -> Option<Act> {
        let key = (provider.to_owned(), name.to_owned());
        let metadata = self.cluster.objects.get(&key)?.get("metadata")?;
        let state = self.object(self.request, provider, name);
        if state == ObjectState::Foreign || metadata.get("deletionTimestamp").is_some() {
            return None;
        }
        Some(Act::Delete {
            provider: provider.to_owned(),
            name: name.to_owned(),
            uid: metadata["uid"].as_str()?.to_owned(),
        })
    }
}

fn of(act: Act) -> Step {
    Step {
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

fn not_gone(group: &TestGroup) -> String {
    format!("{}: the object of its last attempt is not gone", group.name)
}

fn short(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}
