//! What follows from the faults of a node, kept for as long as all stands from which it follows: the rules are not
//! asked again for each pod that leaves, and nobody is told what was told.

use std::sync::Arc;

use jiff::Timestamp;

use super::common::Common;
use super::entry::NodeEntry;
use crate::assess::{Desired, Dismissal};
use crate::fault::Fault;
use crate::node::NodeView;
use crate::policy::Policy;
use crate::position::Position;

/// What is wanted for a node, and from what that follows.
#[derive(Debug)]
pub(super) struct Judged {
    view: Arc<NodeView>,
    policy: Arc<Policy>,
    faults: Vec<Reported>,
    dismissal: Option<Dismissal>,
    desired: Desired,
}

/// What was told of a node last.
#[derive(Debug)]
pub(super) struct Told {
    view: Arc<NodeView>,
    faults: Vec<Reported>,
    /// Number of checks that have spoken of it; none is forgotten.
    heard: usize,
}

/// The state of a fault: what opened it, and its newest report.
#[derive(Debug, PartialEq)]
struct Reported {
    seq: Position,
    title: String,
    count: u64,
    last_seen: Timestamp,
    accepted_at: Timestamp,
}

// === impl Reported ===

impl Reported {
    fn of(fault: &Fault) -> Self {
        Self {
            seq: fault.seq,
            title: fault.title(),
            count: fault.count,
            last_seen: fault.last_seen,
            accepted_at: fault.accepted_at,
        }
    }
}

// === impl NodeEntry ===

impl NodeEntry {
    /// Returns what is wanted for the node ([`Common::desired`]).
    pub(super) fn judge(&mut self, name: &str, common: &Common) -> Desired {
        let policy = common.policy.as_ref();
        // Devices come and go without a node's doing.
        let policy = policy.filter(|policy| policy.device_taints.is_none());
        let (Some(observed), Some(policy)) = (&self.observed, policy) else {
            return common.desired(name, Some(self));
        };
        let faults: Vec<Reported> = common.book.faults(name).iter().map(Reported::of).collect();
        let dismissal = self.dismissal(common);
        let known = self.judged.as_ref().filter(|known| {
            Arc::ptr_eq(&known.view, &observed.view)
                && Arc::ptr_eq(&known.policy, policy)
                && known.dismissal == dismissal
                && known.faults == faults
        });
        if let Some(known) = known {
            debug_assert_eq!(known.desired, common.desired(name, Some(self)));
            return known.desired.clone();
        }
        let desired = common.desired(name, Some(self));
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
    pub(super) fn has_news(&mut self, name: &str, common: &Common) -> bool {
        let Some(view) = self.view.clone() else {
            return true;
        };
        let told = Told {
            view,
            faults: common.book.faults(name).iter().map(Reported::of).collect(),
            heard: common.book.heard(name).count(),
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
