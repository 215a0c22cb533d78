//! Node of the simulated cluster.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fleet::drain::PodView;
use jiff::Timestamp;
use model::device::{Claim, DeviceId};
use model::node::{NodeChange, NodeView, Taint};
use model::ownership::SESSION_ANNOTATIONS;
use serde_json::json;

use super::happening::SCHEDULER;

/// Prefix of taints and labels that do not belong to gpuwarden.
pub(super) const FOREIGN: &str = "foreign-";

/// Node, as the API server stores it.
pub(super) struct SimNode {
    pub(super) view: Arc<NodeView>,
    /// States that the watch has not delivered yet.
    pub(super) undelivered: VecDeque<Arc<NodeView>>,
    /// True if the cordon was set by somebody else.
    pub(super) cordoned_by_hand: bool,
    /// Last boot, after which a machine may uncordon the node.
    pub(super) booted: Option<Timestamp>,
    /// True if a machine removed the cordon.
    pub(super) uncordoned_by_machine: bool,
    /// Pods by `NAMESPACE/NAME`.
    pub(super) pods: BTreeMap<String, SimPod>,
    /// True while the controller watches its pods.
    pub(super) followed: bool,
    /// True while its pods cannot be listed.
    pub(super) hidden: bool,
}

/// Pod, as the API server stores it.
pub(super) struct SimPod {
    pub(super) view: PodView,
    /// UUID of the GPU that it holds, whether or not somebody says so; `None`: it has none.
    pub(super) gpu: Option<String>,
    /// Device that its claim was given.
    pub(super) claim: Option<DeviceId>,
}

// === impl SimPod ===

impl SimPod {
    /// Returns true if it is known which GPU the pod holds, if any.
    pub(super) fn is_known(&self) -> bool {
        self.gpu.is_none() || self.claim.is_some() || !self.view.gpus.is_empty()
    }

    /// Returns the claim of the pod, if it has one.
    pub(super) fn claim(&self) -> Option<Claim> {
        let device = self.claim.clone()?;
        Some(Claim {
            devices: vec![device],
            pods: vec![self.view.title()],
        })
    }
}

// === impl SimNode ===

impl SimNode {
    pub(super) fn new(index: usize) -> Option<Self> {
        let mut object = json!({
            "metadata": {"name": name(index), "uid": format!("uid-{index}"), "resourceVersion": "1",
                         "labels": {"nvidia.com/gpu.present": "true"}},
            "spec": {},
            "status": {"nodeInfo": {"bootID": "boot"}},
        });
        if index == 0 {
            object["metadata"]["labels"][SCHEDULER.0] = json!(SCHEDULER.1);
        }
        Some(Self {
            view: Arc::new(NodeView::from_object(object)?),
            undelivered: VecDeque::new(),
            cordoned_by_hand: false,
            booted: None,
            uncordoned_by_machine: false,
            pods: BTreeMap::new(),
            followed: false,
            hidden: false,
        })
    }

    pub(super) fn boot(&mut self, now: Timestamp) {
        let mut object = self.view.object();
        object["status"]["nodeInfo"]["bootID"] = json!(format!("boot-{now}"));
        if let Some(view) = NodeView::from_object(object) {
            self.booted = Some(now);
            self.becomes(view);
        }
    }

    pub(super) fn change(&mut self, change: &NodeChange) {
        if change.unschedulable.is_some() {
            self.uncordoned_by_machine = false;
        }
        self.becomes(self.view.after(change));
    }

    fn becomes(&mut self, mut view: NodeView) {
        let version = view.resource_version.parse::<u64>().unwrap_or_default() + 1;
        view.resource_version = version.to_string();
        self.view = Arc::new(view);
        self.undelivered.push_back(Arc::clone(&self.view));
    }
}

/// Returns the name of the node with this index.
pub(super) fn name(index: usize) -> String {
    format!("n{index}")
}

/// Returns true if the precondition of a patch holds, as in `cluster::patch`.
pub(super) fn holds(seen: &NodeView, is: &NodeView, change: &NodeChange) -> bool {
    let session =
        |node: &NodeView| SESSION_ANNOTATIONS.map(|key| node.annotations.get(key).cloned());
    let touches = |key: &String| SESSION_ANNOTATIONS.contains(&key.as_str());
    let of_session = change.unschedulable.is_some()
        || !change.add_taints.is_empty()
        || !change.remove_taints.is_empty()
        || change.annotations.keys().any(touches);
    let same = |seen: &BTreeMap<String, String>,
                is: &BTreeMap<String, String>,
                change: &BTreeMap<String, Option<String>>| {
        change.keys().all(|key| seen.get(key) == is.get(key))
    };
    let removed = |taint: &Taint| !seen.has_taint(taint) || is.has_taint(taint);
    let clashes = |taint: &&Taint| {
        let mut on_node = is.taints.iter().map(|on| &on.taint);
        on_node.any(|on| on.key == taint.key && on.effect == taint.effect)
    };
    let clash = change.add_taints.iter().find(clashes);
    seen.uid == is.uid
        && same(&seen.labels, &is.labels, &change.labels)
        && same(&seen.annotations, &is.annotations, &change.annotations)
        && (!of_session || seen.unschedulable == is.unschedulable && session(seen) == session(is))
        && change.remove_taints.iter().all(removed)
        && (change.add_taints.is_empty() || seen.taints.is_empty() == is.taints.is_empty())
        && clash.is_none_or(|taint| {
            change
                .remove_taints
                .iter()
                .any(|gone| gone.key == taint.key)
        })
}
