//! What decisions about all nodes share: settings, policy, faults, devices, switches.

use std::sync::Arc;

use jiff::Timestamp;
use model::device::{NodeDevices, Rule};
use model::fault::FaultBook;
use model::node::NodeView;
use model::ownership::Maker;
use policy::Policy;
use policy::assess::{Desired, assess};

use super::devices::{DeviceWatch, Devices};
use super::{Owns, Settings, Switched};
use crate::brake::Hold;
use crate::remediation::validation::ValidationConfig;

/// What decisions about all nodes share: settings, policy, faults, devices, switches.
#[derive(Debug)]
pub(super) struct FleetState {
    pub(super) settings: Settings,
    /// The policy in force; `None` where it is not known yet.
    pub(super) policy: Option<Arc<Policy>>,
    pub(super) book: FaultBook,
    pub(super) devices: Devices,
    /// The switches that people have set.
    pub(super) switched: Switched,
    /// The time at which the store was made, see `Ownership::kept_by_another`.
    pub(super) begun: Timestamp,
    pub(super) now: Timestamp,
    /// True once all events that were stored at the start are in the book.
    pub(super) caught_up: bool,
    /// True once the cluster's nodes are known, and where there is no cluster.
    pub(super) listed: bool,
}

impl FleetState {
    /// Returns the hold on all new quarantines now.
    pub(super) fn stop(&self) -> Option<Hold> {
        self.switched.stop(self.settings.brake, self.now)
    }

    /// Returns what is wanted for a node of which nothing is known but its faults; nothing where there is
    /// no policy.
    pub(super) fn desired_of_unknown(&self, node: &str) -> Desired {
        let Some(policy) = &self.policy else {
            return Desired::default();
        };
        let (faults, devices) = (self.book.faults(node), self.devices_of(node));
        assess(faults, policy, &NodeView::unknown(node), &devices, None)
    }

    /// Returns the devices of a node that can be tainted; none where the policy does not ask.
    pub(super) fn devices_of(&self, node: &str) -> NodeDevices {
        let asks = |policy: &Arc<Policy>| policy.device_taints.is_some();
        if self.policy.as_ref().is_some_and(asks) {
            self.devices.of_node(node)
        } else {
            NodeDevices::default()
        }
    }

    /// Returns whether decisions are carried out in a cluster.
    pub(super) fn acts(&self) -> bool {
        self.settings.mode.writes() && self.settings.cluster
    }

    /// Returns how nodes are validated; `None`: they are not.
    pub(super) fn validates(&self) -> Option<&ValidationConfig> {
        self.settings.remediation.as_deref()?.validation.as_ref()
    }

    /// Returns whether the devices are not known yet, and the policy asks for them.
    pub(super) fn awaits_devices(&self) -> bool {
        let asks = |policy: &Arc<Policy>| policy.device_taints.is_some();
        self.devices.watch == DeviceWatch::Pending && self.policy.as_ref().is_some_and(asks)
    }

    /// Returns whether a rule is ours: of a controller, or of our own store where we run for one
    /// node. One of our node that another store has made before ours began was left behind by a
    /// store that was lost; see `Ownership::kept_by_another`.
    pub(super) fn owns_rule(&self, rule: &Rule) -> bool {
        match &self.settings.owns {
            Owns::All => rule.spec.by == Maker::Controller,
            Owns::Node(own) => {
                let ours = rule.spec.store.as_ref() == Some(&self.settings.store);
                let before = rule.created_at.is_some_and(|at| at < self.begun);
                rule.spec.by == Maker::Node && (ours || rule.spec.node == *own && before)
            }
        }
    }
}
