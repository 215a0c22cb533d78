//! Cached assessment of a node's faults, valid until one of its inputs changes: without it the
//! rules would be evaluated again for each pod that leaves, and conditions written that have not
//! changed.

use std::sync::Arc;

use policy::assess::{Desired, assess};

use super::entry::NodeEntry;
use super::remembered::{Judged, Reported, Told};
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
        assess(faults, policy, &observed.view, &devices, dismissal)
    }

    /// Returns the same as [`Self::desired`], from a cache while no input has changed.
    pub(super) fn judge(&mut self, name: &str, fleet: &FleetState) -> Desired {
        let policy = fleet.policy.as_ref();
        // Devices change without a change of the node, so they are not cached.
        let policy = policy.filter(|policy| policy.device_taints.is_none());
        let (Some(observed), Some(policy)) = (&self.observed, policy) else {
            return self.desired(name, fleet);
        };
        let faults: Vec<Reported> = fleet.book.faults(name).iter().map(Reported::of).collect();
        let dismissal = self.dismissal(fleet);
        let known = self.judged.as_ref().filter(|known| {
            Arc::ptr_eq(&known.view, &observed.view)
                && Arc::ptr_eq(&known.policy, policy)
                && known.dismissal == dismissal
                && known.faults == faults
        });
        if let Some(known) = known {
            debug_assert_eq!(known.desired, self.desired(name, fleet));
            return known.desired.clone();
        }
        let desired = self.desired(name, fleet);
        // A node in service is rarely asked about twice; caching thousands of them costs memory.
        self.judged = desired.wanted().then(|| {
            Box::new(Judged {
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
    pub(super) fn has_news(&mut self, name: &str, fleet: &FleetState) -> bool {
        let Some(view) = self.view.clone() else {
            return true;
        };
        let told = Told {
            view,
            faults: fleet.book.faults(name).iter().map(Reported::of).collect(),
            heard: fleet.book.heard(name).count(),
        };
        let same = self.told.as_ref().is_some_and(|before| {
            Arc::ptr_eq(&before.view, &told.view)
                && before.faults == told.faults
                && before.heard == told.heard
        });
        self.told = Some(Box::new(told));
        !same
    }
}
