//! Running the groups of a request: start, supervision and end of their attempts.

use serde_json::json;

use super::objects::not_gone;
use super::{
    Act, Decision, NODE_DELETED, NOT_READY, TEST_FAILED, TIMED_OUT, ValidationStep, after_failure,
    begin, of, refused, second, short,
};
use crate::validation_request::cluster_view::{NodeState, ObjectState, Readiness};
use crate::validation_request::config::Run;
use crate::validation_request::groups;
use crate::validation_request::status::{Phase, Skipped, TestGroup};
use crate::validation_request::{GROUP, KIND, VERSION};

// === impl Decision ===

impl Decision<'_> {
    pub(super) fn running(mut self) -> ValidationStep {
        // Another party may have removed the record, and a recreated node has none.
        let tests = self.tests();
        let acts = self.change_nodes(|record| {
            record.add(&self.request.name, &tests);
            if record.active().is_none() {
                record.activate(&self.request.name);
            }
        });
        if !acts.is_empty() {
            return ValidationStep { acts, wake: None };
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
    fn start(mut self) -> ValidationStep {
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

    /// Starts a group. The object is created before the status is written; after a crash it is
    /// found by its name.
    fn begin(mut self, at: usize) -> ValidationStep {
        let (namespace, now) = (self.cluster.namespace, self.cluster.now);
        let Some(group) = self.status.test_groups.get_mut(at) else {
            return ValidationStep::default();
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
        ValidationStep { acts, wake: None }
    }
}
