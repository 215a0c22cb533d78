//! Requests of the controller in the simulated cluster: their arrival at the API server and the
//! store, and the answers.

use std::sync::Arc;

use contract::{HealthEvent, keys};
use fleet::session::{Intent, RequestFailure};
use fleet::{
    CreateAnswer, EventInStore, FleetInput, PatchAnswer, Planned, PlannedCheckpoint,
    PlannedRemoval, PlannedResource, PlannedRule, PodUpdate, RemovalAnswer,
};
use jiff::Timestamp;
use model::attempt::Attempt;
use model::ownership::Ownership;

use super::super::happening::Broken;
use super::super::happening::Fate;
use super::super::node::holds;
use super::World;
use super::judge;

/// Request that has not arrived yet.
pub(super) enum PendingRequest {
    Patch(Box<Planned>),
    Remove(Box<PlannedRemoval>),
    Checkpoint(Box<PlannedCheckpoint>),
    Rule(Box<PlannedRule>),
    LookUp(String, Vec<String>),
    Append(String, Vec<(HealthEvent, Timestamp)>),
    Make(Box<PlannedResource>),
    /// Deletion of the custom resource of an attempt; true: also if something has started.
    Withdraw(Box<Attempt>, bool),
}

// === impl World ===

impl World {
    /// Lets one of the pending requests arrive. Returns false if there are none.
    pub(in crate::simulate) fn arrives(
        &mut self,
        which: usize,
        fate: Fate,
    ) -> Result<bool, Broken> {
        if self.pending.is_empty() {
            return Ok(false);
        }
        let request = self.pending.remove(which % self.pending.len());
        let done = matches!(fate, Fate::Done | Fate::DoneUnanswered);
        let mut made = None;
        let input = match request {
            PendingRequest::Patch(planned) => {
                let answer = if done {
                    self.patch(&planned)?
                } else {
                    PatchAnswer::Unknown
                };
                let answer = match fate {
                    Fate::Done => answer,
                    Fate::DoneUnanswered | Fate::Lost => PatchAnswer::Unknown,
                    Fate::Refused => PatchAnswer::Refused { retry_after: None },
                };
                let node = planned.node;
                FleetInput::NodePatched { node, answer }
            }
            PendingRequest::Remove(planned) => {
                let answer = if done {
                    self.remove(&planned)
                } else {
                    failed()
                };
                let answer = match fate {
                    Fate::Done => answer,
                    Fate::DoneUnanswered | Fate::Lost => failed(),
                    Fate::Refused => RemovalAnswer::Held {
                        why: "a disruption budget".to_owned(),
                        retry_after: None,
                    },
                };
                let PlannedRemoval { node, uid, .. } = *planned;
                FleetInput::PodAnswered { node, uid, answer }
            }
            PendingRequest::Checkpoint(planned) => {
                let answer = if done {
                    self.ask_checkpoint(&planned)
                } else {
                    failed()
                };
                let PlannedCheckpoint { node, uid, .. } = *planned;
                FleetInput::PodAnswered {
                    node,
                    uid,
                    answer: Some(answer)
                        .filter(|_| fate == Fate::Done)
                        .unwrap_or_else(failed),
                }
            }
            PendingRequest::Rule(planned) => {
                let PlannedRule { node, change, .. } = *planned;
                let changed = done.then(|| self.rules.change(&change));
                let failed = Err(RequestFailure::Error { retry_after: None });
                FleetInput::RuleChanged {
                    node,
                    rule: change.rule_name(),
                    result: changed.filter(|_| fate == Fate::Done).unwrap_or(failed),
                }
            }
            PendingRequest::Make(planned) => {
                let answer = if done {
                    self.resources.make(&planned)
                } else {
                    not_made()
                };
                let answer = match fate {
                    Fate::Done => answer,
                    Fate::DoneUnanswered | Fate::Lost | Fate::Refused => not_made(),
                };
                let PlannedResource {
                    node, key, name, ..
                } = *planned;
                made = Some(name).filter(|_| done);
                FleetInput::ResourceCreated { node, key, answer }
            }
            PendingRequest::Withdraw(attempt, begun) => {
                if !done {
                    // The request is repeated as long as the controller runs.
                    self.pending.push(PendingRequest::Withdraw(attempt, begun));
                } else if self.resources.withdraw(&attempt, begun) {
                    self.send_resource(&attempt.name);
                }
                return Ok(true); // The controller expects no answer.
            }
            PendingRequest::LookUp(node, ids) => {
                let found = ids.into_iter().map(|id| {
                    let found = if self.store.has(&id) {
                        EventInStore::Current
                    } else {
                        EventInStore::Missing
                    };
                    (id, found)
                });
                let found = (fate == Fate::Done).then(|| found.collect());
                FleetInput::EventsFound { node, found }
            }
            PendingRequest::Append(node, events) => {
                let mut last = None;
                for (event, created_at) in events.into_iter().filter(|_| done) {
                    last = last.max(self.store.append(event, created_at));
                }
                let result = if fate == Fate::Done {
                    Ok(last)
                } else {
                    Err(())
                };
                FleetInput::EventsAppended { node, result }
            }
        };
        self.send(input);
        if let Some(name) = made {
            self.send_resource(&name);
        }
        Ok(true)
    }

    /// Returns true if a request to a pod to write a checkpoint is pending.
    pub(in crate::simulate) fn asks_checkpoint(&self, uid: &str) -> bool {
        let mut pending = self.pending.iter();
        pending.any(
            |request| matches!(request, PendingRequest::Checkpoint(planned) if planned.uid == uid),
        )
    }

    /// Asks a pod to write a checkpoint.
    fn ask_checkpoint(&mut self, planned: &PlannedCheckpoint) -> RemovalAnswer {
        let Some(index) = self.index(&planned.node) else {
            return RemovalAnswer::Gone;
        };
        let title = format!("{}/{}", planned.namespace, planned.name);
        let pods = self.nodes.get_mut(index).map(|node| &mut node.pods);
        let pod = pods.and_then(|pods| pods.get_mut(&title));
        let Some(pod) = pod
            .map(|pod| &mut pod.view)
            .filter(|pod| pod.uid == planned.uid)
        else {
            return RemovalAnswer::Gone;
        };
        pod.checkpoint.get_or_insert_default().requested = Some(planned.at);
        let pod = pod.clone();
        self.send_pod(index, PodUpdate::Observed(Box::new(pod)));
        RemovalAnswer::Taken
    }

    /// Returns true if a request to create the custom resource of an attempt is pending.
    pub(in crate::simulate) fn creates(&self, key: &str) -> bool {
        let mut pending = self.pending.iter();
        pending
            .any(|request| matches!(request, PendingRequest::Make(planned) if planned.key == key))
    }

    /// Carries out a patch like the API server: only if the node still is as the decision saw
    /// it.
    fn patch(&mut self, planned: &Planned) -> Result<PatchAnswer, Broken> {
        let Some(index) = self.index(&planned.node) else {
            return Ok(PatchAnswer::NotFound);
        };
        let change = &planned.patch.change;
        let Some(node) = self.nodes.get(index) else {
            return Ok(PatchAnswer::NotFound);
        };
        if !holds(&planned.view, &node.view, change) {
            return Ok(PatchAnswer::Conflict);
        }
        judge::patch(self, node, planned)?;
        let patch = &planned.patch;
        let untainted = change.annotations.get(keys::UNTAINTED_MANUALLY);
        if let Some(node) = self.nodes.get_mut(index) {
            // The person who removed the taints owns the cordon from now on.
            if untainted.is_some_and(Option::is_some) {
                node.cordoned_by_hand |= node.view.unschedulable;
            }
            // A cordon that preceded the session is restored, and belongs to somebody else
            // again.
            let own = Ownership::read(&node.view);
            let theirs = own.is_some_and(|own| own.cordon_pre_existing);
            node.cordoned_by_hand |= theirs && change.unschedulable == Some(true);
            node.change(&patch.change);
            self.sessions += u64::from(patch.intent == Intent::Quarantine);
            return Ok(PatchAnswer::Made(Arc::clone(&node.view)));
        }
        Ok(PatchAnswer::NotFound)
    }

    /// Removes a pod like the API server: by its uid. With a grace period, the kubelet ends it
    /// later.
    fn remove(&mut self, planned: &PlannedRemoval) -> RemovalAnswer {
        let now = self.now;
        let Some(index) = self.index(&planned.node) else {
            return RemovalAnswer::Gone;
        };
        let title = format!("{}/{}", planned.namespace, planned.name);
        let pods = self.nodes.get_mut(index).map(|node| &mut node.pods);
        let pod = pods.and_then(|pods| pods.get_mut(&title));
        let Some(pod) = pod
            .map(|pod| &mut pod.view)
            .filter(|pod| pod.uid == planned.uid)
        else {
            return RemovalAnswer::Gone;
        };
        match planned.evict {
            Some(grace) => {
                pod.ends_by.get_or_insert(now + grace);
                let pod = pod.clone();
                self.send_pod(index, PodUpdate::Observed(Box::new(pod)));
            }
            None => self.pod_gone(index, &title),
        }
        RemovalAnswer::Taken
    }
}

fn failed() -> RemovalAnswer {
    RemovalAnswer::Failed {
        why: "no answer".to_owned(),
        retry_after: None,
    }
}

fn not_made() -> CreateAnswer {
    CreateAnswer::Failed {
        why: "no answer".to_owned(),
        retry_after: None,
    }
}
