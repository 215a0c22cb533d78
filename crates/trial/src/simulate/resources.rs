//! Custom resources of remediations and drains, and those that complete them or fail: a janitor, and
//! an operator that drains nodes.

use std::collections::{BTreeMap, BTreeSet};

use contract::keys;
use fleet::{CreateAnswer, DRAIN_ACTION, PlannedResource, ResourceUpdate};
use model::attempt::{Attempt, AttemptOutcome, RemediationMark, ResourceKind};
use model::node::NodeView;
use model::ownership::Ownership;
use model::resource::{ATTEMPT_COMPLETE, CompletionReason, ResourceState};
use serde_json::{Value, json};

use super::happening::Broken;
use super::happening::Work;
use super::node::SimNode;

/// Reset of GPUs by a reboot of their node.
pub(super) const RESET_NODE: &str = r#"
[remediationActions.COMPONENT_RESET]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "RebootNode"
scope = "Cluster"
completeConditionType = "NodeReady"
templateFileName = "one"
equivalenceGroup = "restart"
"#;
/// Reset of single GPUs.
pub(super) const RESET_GPU: &str = r#"
[remediationActions.COMPONENT_RESET]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "GPUReset"
scope = "Cluster"
completeConditionType = "Complete"
templateFileName = "one"
equivalenceGroup = "reset"
supersedingEquivalenceGroups = ["restart"]
impactedEntityScope = "GPU_UUID"
"#;
/// Action that waits for an approval, where there are any.
pub(super) const ASKS: &str = "RESTART_BM";
/// Remediation of the simulated cluster beside resets: reboots, and the Job of a validation.
pub(super) const REMEDIATION: &str = r#"
[remediationActions.RESTART_BM]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "RebootNode"
scope = "Cluster"
completeConditionType = "NodeReady"
templateFileName = "one"
equivalenceGroup = "restart"

[remediationActions.VALIDATE]
apiGroup = "batch"
version = "v1"
kind = "Job"
namespace = "gpuwarden"
completeConditionType = "Complete"
templateFileName = "one"
equivalenceGroup = "validation"

[templates]
one = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {name: "{{ .NodeName }}-{{ .HealthEventID }}"}
"""
"#;

/// Custom resources of the cluster.
#[derive(Default)]
pub(super) struct Resources {
    by_name: BTreeMap<String, Resource>,
    /// Session of each attempt that the janitor has started, by the attempt's key.
    begun: BTreeMap<String, String>,
    /// Keys of the drains that the operator has completed.
    drained: BTreeSet<String>,
    /// Keys of the drains whose resource nobody deletes: the controller crashed when the session
    /// of the node did not name them.
    orphans: BTreeSet<String>,
}

struct Resource {
    kind: ResourceKind,
    node: String,
    object: Value,
}

// === impl Resources ===

impl Resources {
    /// Creates a custom resource like the API server, unless its name exists. Returns the
    /// stored one.
    pub(super) fn make(&mut self, planned: &PlannedResource) -> CreateAnswer {
        let made = || Resource {
            kind: planned.kind.clone(),
            node: planned.node.clone(),
            object: planned.object.clone(),
        };
        let entry = self.by_name.entry(planned.name.clone());
        CreateAnswer::There(Box::new(entry.or_insert_with(made).object.clone()))
    }

    /// Deletes the custom resource of an attempt, with `begun` also if something has started.
    /// Returns true if it did.
    pub(super) fn withdraw(&mut self, attempt: &Attempt, begun: bool) -> bool {
        let found = self.by_name.get(&attempt.name);
        let applies = found.is_some_and(|resource| {
            let state = resource.state();
            let unbegun = !state.begun && state.end.is_none();
            state.attempt == Some(attempt.key()) && (begun || unbegun)
        });
        if applies {
            self.by_name.remove(&attempt.name);
        }
        applies
    }

    /// Returns true if a custom resource validates its node.
    pub(super) fn validates(&self, name: &str) -> bool {
        self.by_name
            .get(name)
            .is_some_and(|one| one.kind.kind == "Job")
    }

    /// Returns true if the custom resource of an attempt exists.
    pub(super) fn has(&self, name: &str, key: &str) -> bool {
        let found = self.by_name.get(name);
        found.is_some_and(|one| one.state().attempt.as_deref() == Some(key))
    }

    /// Returns true if the operator has completed a drain.
    pub(super) fn is_drained(&self, key: &str) -> bool {
        self.drained.contains(key)
    }

    /// Notes which custom resources of drains the sessions of their nodes do not name, when the
    /// controller crashes.
    pub(super) fn crash(&mut self, nodes: &[SimNode]) {
        let names = |key: &str| {
            nodes
                .iter()
                .any(|node| drain_key(&node.view).as_deref() == Some(key))
        };
        let orphans = self.drains().map(|(_, key)| key).filter(|key| !names(key));
        let orphans: Vec<String> = orphans.collect();
        self.orphans.extend(orphans);
    }

    /// Returns the name of a custom resource of a drain that no session names, and that the
    /// controller should have deleted.
    pub(super) fn left(&self, nodes: &[SimNode]) -> Option<&str> {
        let named: BTreeSet<String> = nodes
            .iter()
            .filter_map(|node| drain_key(&node.view))
            .collect();
        let mut drains = self.drains();
        let left = |key: &String| !named.contains(key) && !self.orphans.contains(key);
        Some(drains.find(|(_, key)| left(key))?.0)
    }

    /// Returns name and key of the custom resources that drain nodes.
    fn drains(&self) -> impl Iterator<Item = (&str, String)> {
        let drains = self.by_name.iter().filter(|(_, one)| one.drains());
        drains.map(|(name, one)| (name.as_str(), one.state().attempt.unwrap_or_default()))
    }

    /// Lets the operator work on a custom resource that drains a node. Returns true if the node is
    /// drained by that; `None` if it is not such a resource.
    pub(super) fn drain(&mut self, name: &str, work: Work) -> Option<bool> {
        let resource = self.by_name.get_mut(name).filter(|one| one.drains())?;
        let state = resource.state();
        match work {
            _ if succeeded(&state) => {}
            Work::Begins if !state.begun => resource.add("Draining", "True", ""),
            Work::Succeeds if state.begun => {
                resource.add("DrainComplete", "True", "");
                self.drained.insert(state.attempt.unwrap_or_default());
                return Some(true);
            }
            Work::FailsForNow | Work::FailsForGood if state.begun => {
                resource.add("DrainComplete", "False", "");
            }
            _ => {}
        }
        Some(false)
    }

    /// Returns the name and node of one of the custom resources.
    pub(super) fn any(&self, which: usize) -> Option<(String, String)> {
        let found = self.by_name.iter().nth(which % self.by_name.len().max(1));
        found.map(|(name, resource)| (name.clone(), resource.node.clone()))
    }

    /// Returns true if the current remediation of a node has started and not ended, and the
    /// node records that its custom resource was created.
    pub(super) fn is_begun(&self, node: &NodeView) -> bool {
        let own = Ownership::read(node);
        let mark = own.as_ref().and_then(|own| own.mark.remediation.as_ref());
        if (mark.and_then(RemediationMark::under_way)).is_none_or(|one| one.made.is_none()) {
            // The response may be lost, so the controller may not know of the custom resource.
            return false;
        }
        let permitted = Ownership::permit(node).attempt;
        let begun = permitted.filter(|key| self.begun.contains_key(key));
        let mut remediations = self.by_name.values().filter(|one| one.remediates());
        begun.is_some_and(|key| {
            remediations.any(|one| {
                let state = one.state();
                state.attempt.as_ref() == Some(&key) && state.end.is_none()
            })
        })
    }

    /// Returns names and nodes of the custom resources that have not ended.
    pub(super) fn open(&self) -> Vec<(String, String)> {
        let open = self.by_name.iter();
        let open = open.filter(|(_, resource)| {
            let state = resource.state();
            // A drain that has failed may still succeed.
            state.end.is_none() || resource.drains() && !succeeded(&state)
        });
        open.map(|(name, resource)| (name.clone(), resource.node.clone()))
            .collect()
    }

    pub(super) fn delete(&mut self, name: &str) {
        self.by_name.remove(name);
    }

    pub(super) fn news(&self, name: &str) -> ResourceUpdate {
        match self.by_name.get(name) {
            Some(resource) => ResourceUpdate::There(Box::new(resource.object.clone())),
            None => ResourceUpdate::Absent,
        }
    }

    /// Lets a janitor work on a custom resource. It starts nothing that the node's session does
    /// not permit, and the start must be allowed.
    pub(super) fn work(&mut self, name: &str, work: Work, node: &SimNode) -> Result<(), Broken> {
        let session = Ownership::read(&node.view).map(|own| own.session_id);
        let others = self.by_name.iter().filter(|(other, _)| *other != name);
        let others = others.filter(|(_, one)| one.remediates());
        let mut goes_on = others.filter(|(_, one)| {
            let state = one.state();
            let of = state.attempt.and_then(|key| self.begun.get(&key));
            of.is_some() && of == session.as_ref() && state.end.is_none()
        });
        let goes_on = goes_on.next().map(|(other, _)| other.clone());
        let Some(resource) = self.by_name.get_mut(name) else {
            return Ok(());
        };
        let state = resource.state();
        let key = state.attempt.unwrap_or_default();
        match work {
            _ if state.end.is_some() => {}
            Work::Begins if state.begun => {}
            Work::Begins => {
                let permit = Ownership::permit(&node.view);
                if permit.attempt.as_ref() != Some(&key) {
                    resource.ends(CompletionReason::Cancelled);
                    return Ok(());
                }
                if permit.waits {
                    return Ok(());
                }
                may_begin(node, name)?;
                if let Some(other) = goes_on.filter(|_| resource.remediates()) {
                    return Err(format!("{name} begins while {other} goes on"));
                }
                let session = session.unwrap_or_default();
                if self.begun.insert(key, session).is_some() {
                    return Err(format!("{name} is carried out twice"));
                }
                resource.add("SignalSent", "True", "");
            }
            // Before it has started, it can only be given up.
            Work::FailsForNow if !state.begun => resource.ends(CompletionReason::TransientFailure),
            Work::FailsForGood if !state.begun => resource.ends(CompletionReason::PermanentFailure),
            _ if !state.begun => {}
            Work::Succeeds => resource.ends(CompletionReason::Succeeded),
            Work::FailsForNow => resource.ends(CompletionReason::TransientFailure),
            Work::FailsForGood => resource.ends(CompletionReason::PermanentFailure),
            Work::IsLost => resource.ends(CompletionReason::Cancelled),
        }
        Ok(())
    }
}

/// Checks that the node is out of service and drained.
fn may_begin(node: &SimNode, name: &str) -> Result<(), Broken> {
    let labels = &node.view.labels;
    let state = labels.get(keys::STATE_LABEL).map(String::as_str);
    let remediates = [
        keys::STATE_REMEDIATING,
        // The remediation may still run after a person was asked because it takes too long.
        keys::STATE_REMEDIATION_FAILED,
    ];
    if !node.view.unschedulable || !state.is_some_and(|state| remediates.contains(&state)) {
        let title = &node.view.name;
        return Err(format!(
            "{name} begins, and {title} is {state:?}, not being remediated"
        ));
    }
    Ok(())
}

// === impl Resource ===

impl Resource {
    fn state(&self) -> ResourceState {
        ResourceState::read(&self.object, &self.kind)
    }

    fn remediates(&self) -> bool {
        !self.drains() && self.kind.kind != "Job"
    }

    fn drains(&self) -> bool {
        self.kind.kind == "DrainRequest"
    }

    fn ends(&mut self, reason: CompletionReason) {
        self.add(ATTEMPT_COMPLETE, "True", reason.name());
    }

    fn add(&mut self, kind: &str, status: &str, reason: &str) {
        let condition = json!({"type": kind, "status": status, "reason": reason});
        let conditions = self.object.pointer_mut("/status/conditions");
        match conditions.and_then(Value::as_array_mut) {
            Some(conditions) => {
                conditions.retain(|one| one["type"] != kind);
                conditions.push(condition);
            }
            None => self.object["status"] = json!({"conditions": [condition]}),
        }
    }
}

fn succeeded(state: &ResourceState) -> bool {
    let end = state.end.as_ref();
    end.is_some_and(|(outcome, _)| *outcome == AttemptOutcome::Succeeded)
}

/// Returns the key of the custom resource that drains a node, if the session of the node asks for
/// it.
pub(super) fn drain_key(node: &NodeView) -> Option<String> {
    let own = Ownership::read(node)?;
    let mark = own.mark.drain?;
    Some(format!("{DRAIN_ACTION}-{}/{}", own.session_id, mark.since))
}
