//! The labels of a node for DCGM, its driver and Kata Containers.

use std::collections::BTreeSet;

use contract::keys;
use model::node::{NodeChange, NodeView};

use crate::LabelConfig;
use crate::pod::{DcgmVersion, Pod, PodRole};

/// Value of labels and of the annotation.
const TRUE: &str = "true";
/// Label values that switch Kata Containers on, in any case.
const TRUTHY: [&str; 4] = [TRUE, "enabled", "1", "yes"];

/// A node, and what of it is known.
pub(crate) struct Software<'a> {
    pub(crate) config: &'a LabelConfig,
    pub(crate) node: &'a NodeView,
    /// Pods of the node.
    pub(crate) pods: Vec<(PodRole, &'a Pod)>,
    /// Roles whose pods are known.
    pub(crate) known: &'a BTreeSet<PodRole>,
}

/// Sets a label, or removes it for `None`, unless the node is so already.
pub(crate) fn set_label(change: &mut NodeChange, node: &NodeView, key: &str, value: Option<&str>) {
    if node.labels.get(key).map(String::as_str) != value {
        change
            .labels
            .insert(key.to_owned(), value.map(str::to_owned));
    }
}

// === impl Software ===

impl Software<'_> {
    /// Adds what is to change on the node. All labels are decided together.
    pub(crate) fn change(&self, change: &mut NodeChange) {
        self.kata(change);
        self.driver(change);
        self.dcgm(change);
    }

    fn label(&self, key: &str) -> Option<&str> {
        self.node.labels.get(key).map(String::as_str)
    }

    fn kata(&self, change: &mut NodeChange) {
        let is_on = |key: &str| {
            let value = self.label(key).unwrap_or_default();
            TRUTHY.iter().any(|one| value.eq_ignore_ascii_case(one))
        };
        let own = self.config.kata_label.as_deref();
        let enabled = is_on(keys::KATA_RUNTIME) || own.is_some_and(is_on);
        let value = if enabled { TRUE } else { "false" };
        set_label(change, self.node, keys::KATA_ENABLED, Some(value));
    }

    fn driver(&self, change: &mut NodeChange) {
        let has_gpus = || {
            let (key, value) = keys::GPU_NODE_LABEL
                .split_once('=')
                .unwrap_or((keys::GPU_NODE_LABEL, TRUE));
            self.label(key) == Some(value)
        };
        let is_ready = |(role, pod): &(PodRole, &Pod)| *role != PodRole::Dcgm && pod.ready;
        let installed = self.pods.iter().any(is_ready) || self.config.assume_driver && has_gpus();
        let roles = [PodRole::Driver, PodRole::Installer];
        if installed || roles.iter().all(|role| self.known.contains(role)) {
            let value = installed.then_some(TRUE);
            set_label(change, self.node, keys::DRIVER_INSTALLED, value);
        }
    }

    fn dcgm(&self, change: &mut NodeChange) {
        let label = self
            .label(keys::DCGM_VERSION)
            .filter(|value| !value.is_empty());
        let annotation = self.node.annotations.get(keys::DCGM_BOOTSTRAPPED);
        let annotated = annotation.is_some_and(|value| value == TRUE);
        let may_be_unready = annotated || label.is_some() || !self.config.dcgm_ready_first;
        let pods = self.pods.iter().filter(|(role, _)| *role == PodRole::Dcgm);
        let pods: Vec<&Pod> = pods
            .map(|(_, pod)| *pod)
            .filter(|pod| pod.ready || may_be_unready)
            .collect();
        // While one pod takes the place of another one, the one that is ready counts.
        let told = pods.iter().filter(|pod| pod.version.is_some());
        let told = told.max_by_key(|pod| (pod.ready, pod.version));
        let version = told
            .and_then(|pod| pod.version)
            .or(self.config.dcgm_version);
        let wanted = match version.filter(|_| !pods.is_empty()) {
            Some(version) => Some(version.label()),
            // The version of its pod is not known.
            None if !pods.is_empty() => label,
            None if !self.known.contains(&PodRole::Dcgm) => label,
            None if self.config.assume_dcgm => {
                label.filter(|value| DcgmVersion::from_label(value).is_some())
            }
            None => None,
        };
        if wanted.is_some() || self.label(keys::DCGM_VERSION).is_some() {
            set_label(change, self.node, keys::DCGM_VERSION, wanted);
        }
        if !annotated && (label.is_some() || wanted.is_some()) {
            let value = Some(TRUE.to_owned());
            let key = keys::DCGM_BOOTSTRAPPED.to_owned();
            change.annotations.insert(key, value);
        }
    }
}
