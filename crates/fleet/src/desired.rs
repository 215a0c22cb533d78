//! Cached assessment of a node's faults, valid until one of its inputs changes: without it the
//! rules would be evaluated again for each pod that leaves, and conditions written that have not
//! changed.

use std::sync::Arc;

use policy::assess::{Desired, assess};

use super::assessment::{Assessment, ConditionInputs, FaultVersion};
use super::entry::NodeEntry;
use super::state::FleetState;

// === impl NodeEntry ===

impl NodeEntry {
    /// Returns what the faults of the node ask for, given its last observed state; nothing
    /// without a policy.
    pub(super) fn desired(&self, name: &str, fleet: &FleetState) -> Desired {
        let (Some(policy), Some(observed)) = (&fleet.policy, &self.observed) else {
            return fleet.desired_of_unknown(name);
        };
        let (faults, devices) = (fleet.book.faults(name), fleet.devices_of(name));
        let dismissal = self.dismissal(fleet);
        assess(
            faults,
            policy,
            &observed.view,
            &devices,
            dismissal,
            fleet.now,
        )
    }

    /// Returns the same as [`Self::desired`], from a cache while no input has changed.
    pub(super) fn cached_desired(&mut self, name: &str, fleet: &FleetState) -> Desired {
        let policy = fleet.policy.as_ref();
        // Devices change without a change of the node, so they are not cached.
        let policy = policy.filter(|policy| policy.device_taints.is_none());
        let (Some(observed), Some(policy)) = (&self.observed, policy) else {
            return self.desired(name, fleet);
        };
        let faults: Vec<FaultVersion> = fleet
            .book
            .faults(name)
            .iter()
            .map(|fault| FaultVersion::of(fault, fleet.now))
            .collect();
        let dismissal = self.dismissal(fleet);
        let cached = self.assessment.as_ref().filter(|cached| {
            Arc::ptr_eq(&cached.view, &observed.view)
                && Arc::ptr_eq(&cached.policy, policy)
                && cached.dismissal == dismissal
                && cached.faults == faults
        });
        if let Some(cached) = cached {
            debug_assert_eq!(cached.desired, self.desired(name, fleet));
            return cached.desired.clone();
        }
        let desired = self.desired(name, fleet);
        // Only wanted nodes are cached: a node in service is asked about once.
        self.assessment = desired.wanted().then(|| {
            Box::new(Assessment {
                view: Arc::clone(&observed.view),
                policy: Arc::clone(policy),
                faults,
                dismissal,
                desired: desired.clone(),
            })
        });
        desired
    }

    /// Returns whether the inputs of the node's conditions have changed since the last call.
    pub(super) fn conditions_changed(&mut self, name: &str, fleet: &FleetState) -> bool {
        let Some(view) = self.view.clone() else {
            return true;
        };
        let condition_inputs = ConditionInputs {
            view,
            faults: fleet
                .book
                .faults(name)
                .iter()
                .map(|fault| FaultVersion::of(fault, fleet.now))
                .collect(),
            checks: fleet.book.reported_checks(name).count(),
        };
        let same = self.condition_inputs.as_ref().is_some_and(|before| {
            Arc::ptr_eq(&before.view, &condition_inputs.view)
                && before.faults == condition_inputs.faults
                && before.checks == condition_inputs.checks
        });
        self.condition_inputs = Some(Box::new(condition_inputs));
        !same
    }
}
