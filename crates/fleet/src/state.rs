//! State that the decisions about all nodes share: settings, policy, faults, devices, switches.

use std::sync::Arc;

use jiff::Timestamp;
use model::device::{DeviceTaintRule, NodeDevices};
use model::fault::FaultBook;
use model::node::NodeView;
use model::ownership::Maker;
use model::position::Position;
use policy::Policy;
use policy::assess::{Desired, assess};

use super::devices::{DeviceWatch, Devices};
use super::{Owns, Settings, SwitchState};
use crate::brake::Hold;
use crate::remediation::validation::ValidationConfig;

/// State that the decisions about all nodes share.
#[derive(Debug)]
pub(super) struct FleetState {
    pub(super) settings: Settings,
    /// The policy in force; `None` until one is loaded.
    pub(super) policy: Option<Arc<Policy>>,
    pub(super) book: FaultBook,
    pub(super) devices: Devices,
    /// Switches that people have set in the cluster.
    pub(super) switches: SwitchState,
    /// Time when the store was created; see `Ownership::kept_by_another`.
    pub(super) begun: Timestamp,
    pub(super) now: Timestamp,
    /// True once all events that were stored at the start are in the fault book.
    pub(super) caught_up: bool,
    /// Position of the last event that an earlier process has recorded.
    pub(super) restored: Position,
    /// Position up to which the analysis has read the events, with its conclusions recorded; `None`
    /// without an analysis.
    pub(super) analysed: Option<Position>,
    /// True once the nodes of the cluster are listed, and always without a cluster.
    pub(super) listed: bool,
}

impl FleetState {
    /// Returns the hold on all new quarantines.
    pub(super) fn stop(&self) -> Option<Hold> {
        self.switches.stop(self.settings.brake, self.now)
    }

    /// Returns what the faults of a node ask for if nothing else is known of it; nothing without
    /// a policy.
    pub(super) fn desired_of_unknown(&self, node: &str) -> Desired {
        let Some(policy) = &self.policy else {
            return Desired::default();
        };
        let (faults, devices) = (self.book.faults(node), self.devices_of(node));
        assess(
            faults,
            policy,
            &NodeView::unknown(node),
            &devices,
            None,
            self.now,
        )
    }

    /// Returns the devices of a node that can be tainted; none where the policy has no device
    /// taints.
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

    /// Returns whether the analysis has read the events up to `latest`, and all that an earlier
    /// process has recorded. True without an analysis.
    pub(super) fn has_analysed(&self, latest: Position) -> bool {
        self.analysed
            .is_none_or(|upto| latest.max(self.restored) <= upto)
    }

    /// Returns how nodes are validated; `None` where validation is off.
    pub(super) fn validates(&self) -> Option<&ValidationConfig> {
        self.settings.remediation.as_deref()?.validation.as_ref()
    }

    /// Returns whether the policy needs devices that are not listed yet.
    pub(super) fn awaits_devices(&self) -> bool {
        let asks = |policy: &Arc<Policy>| policy.device_taints.is_some();
        self.devices.watch == DeviceWatch::Pending && self.policy.as_ref().is_some_and(asks)
    }

    /// Returns whether a rule belongs to this gpuwarden: to a controller, or to its own store on
    /// a node. A rule for this process's node that is older than the store was left behind by a
    /// store that was lost; see `Ownership::kept_by_another`.
    pub(super) fn owns_rule(&self, rule: &DeviceTaintRule) -> bool {
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
