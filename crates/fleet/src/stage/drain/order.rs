//! The drain that a node's session asks for: which pods leave, or why none do.

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use model::device::{DeviceTaint, TaintEffect};
use model::node::HANDED_OVER;
use model::ownership::Ownership;
use model::status::eviction::Skip;
use policy::assess::Desired;

use super::Facts;
use crate::drain::partial::{DrainedGpus, fate_of};
use crate::drain::{CustomDrain, Drain, DrainConfig, Fate, Gangs, PodView};
use crate::stage::remediation::NOT_OUT;

/// A drain to carry out, and its configuration.
pub(super) struct DrainOrder<'a> {
    pub(super) drain: Drain,
    /// UUIDs of the GPUs whose pods leave; empty if all pods leave.
    pub(super) uuids: Vec<String>,
    /// State of these GPUs, with the pods that hold them; `None` if all pods leave.
    pub(super) gpus: Option<DrainedGpus>,
    pub(super) config: &'a DrainConfig,
}

// === impl DrainOrder ===

impl<'a> DrainOrder<'a> {
    /// Returns the drain of a node, as the settings and the senders of its faults ask for it;
    /// `own` says what of the node is out of service.
    pub(super) fn of(facts: &Facts<'a>, own: &Ownership, desired: &Desired) -> Option<Self> {
        let uuids = drained_gpus(facts, own, desired)?;
        if skips_drain(facts, own, desired).is_some() {
            return None;
        }
        let (fleet, now) = (facts.state, facts.state.now);
        let mark = own.mark.drain_of(&uuids);
        Some(Self {
            drain: Drain {
                since: mark.map_or(now, |mark| mark.since.min(now)),
                force: desired.drains()?,
            },
            gpus: (!uuids.is_empty()).then(|| fleet.devices.gpus(facts.name, &uuids)),
            uuids,
            config: fleet.settings.drain.as_deref()?,
        })
    }

    pub(super) fn fate_of(&self, pod: &PodView, gangs: &Gangs, now: Timestamp) -> Fate {
        fate_of(pod, gangs, self.drain, self.gpus.as_ref(), self.config, now)
    }
}

/// Returns the custom drain that applies to the node, if any.
pub(in crate::stage) fn custom_of(facts: &Facts<'_>) -> Option<Arc<CustomDrain>> {
    let custom = facts.state.settings.drain.as_ref()?.custom.as_ref()?;
    let applies = custom.applies_to(&facts.observed?.view.labels);
    applies.then(|| Arc::clone(custom))
}

/// Returns why the pods are left alone now, whatever is desired; `None` if they are not.
pub(super) fn waits_for_others(facts: &Facts<'_>, own: &Ownership) -> Option<&'static str> {
    let view = &facts.observed?.view;
    // Pods that leave a node without its cordon could come back.
    let not_out = || own.lacks_a_deed(view).then_some(NOT_OUT);
    let handed_over = view.is_handed_over().then_some(HANDED_OVER);
    handed_over.or_else(not_out)
}

/// Returns why all pods of an out-of-service node stay; `None` if they do not.
pub(super) fn skips_drain(facts: &Facts<'_>, own: &Ownership, desired: &Desired) -> Option<Skip> {
    if facts.state.settings.drain.is_none() {
        return Some(Skip::Off);
    }
    // The session has no place to record the progress of a drain.
    if own.replaced_labels.is_none() {
        return Some(Skip::Nvsentinel);
    }
    if desired.drains().is_none() {
        let approval = desired.unapproved_by().map(Skip::Approval);
        let route = || desired.skipped_by().map(Skip::Route);
        return Some(approval.or_else(route).unwrap_or(Skip::Override));
    }
    // A veto does not undo a drain that has begun.
    let veto = facts.veto.filter(|_| own.mark.drain.is_none());
    veto.map(|veto| Skip::Veto(veto.to_string()))
}

/// Returns the UUIDs of the GPUs whose pods are to leave; empty if all pods leave, `None` if no
/// pod does. The node is out of service, or has single devices that are.
pub(in crate::stage) fn drained_gpus(
    facts: &Facts<'_>,
    own: &Ownership,
    desired: &Desired,
) -> Option<Vec<String>> {
    let config = facts.state.settings.drain.as_ref()?;
    match (own.takes_node_out(), desired.takes_node_out()) {
        // Under a veto no pod is added to those that were to leave.
        (was, is) if was == is && own.mark.drain.is_some() && facts.veto.is_some() => {
            Some(own.mark.drain_gpus.clone())
        }
        // A drain that began with all pods continues with all pods.
        (true, true) if own.mark.drain.is_some() && own.mark.drain_gpus.is_empty() => {
            Some(Vec::new())
        }
        (true, true) if custom_of(facts).is_some() => Some(Vec::new()),
        (true, true) if config.partial && !facts.remediates_whole_node => {
            Some(desired.reset_gpus().unwrap_or_default())
        }
        (true, true) => Some(Vec::new()),
        (false, false) if config.partial && custom_of(facts).is_none() => {
            let inventory = facts.state.devices.of_node(facts.name);
            let out = |taints: &[DeviceTaint]| {
                taints.iter().any(|taint| taint.effect > TaintEffect::None)
            };
            let devices = desired.devices.iter().filter(|(_, taints)| out(taints));
            let gpus: BTreeSet<String> = devices
                .filter_map(|(device, _)| inventory.get(device)?.gpu.clone())
                .collect();
            (!gpus.is_empty()).then(|| gpus.into_iter().collect())
        }
        // The pending patch decides between node and devices.
        _ => None,
    }
}
