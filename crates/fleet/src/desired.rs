//! What follows from the faults of a node, kept for as long as all stands from which it follows: the rules are not
//! asked again for each pod that leaves, and nobody is told what was told.

use std::sync::Arc;

use policy::assess::{Desired, assess};

use super::entry::NodeEntry;
use super::remembered::{Judged, Reported, Told};
use super::state::FleetState;

// === impl NodeEntry ===

impl NodeEntry {
    /// Returns what is wanted for the node, as it was last seen; nothing where there is no policy.
    pub(super) fn desired(&self, name: &str, fleet: &FleetState) -> Desired {
        let (Some(policy), Some(observed)) = (&fleet.policy, &self.observed) else {
            return fleet.desired_of_unknown(name);
        };
        let (faults, devices) = (fleet.book.faults(name), fleet.devices_of(name));
        let dismissal = self.dismissal(fleet);
        assess(faults, policy, &observed.view, &devices, dismissal)
    }

    /// Returns what is wanted for the node ([`Self::desired`]), kept since it was last asked where nothing has
    /// changed from which it follows.
    pub(super) fn judge(&mut self, name: &str, fleet: &FleetState) -> Desired {
        let policy = fleet.policy.as_ref();
        // Devices come and go without a node's doing.
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
        // Of a node in service it is asked once.
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

    /// Returns whether there is news of the node for those who are told of it, and takes that for told.
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
