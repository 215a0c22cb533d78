//! GPU operator services that hold GPUs open, and how they are stopped for a reset and
//! restored.
//!
//! Each service has a label on the node, and its pod runs while the label is `true`. The patch
//! that changes a label also records the previous value on the node. After a crash, or after
//! the request is gone, exactly these changes can be undone, without touching what others have
//! changed since.

use std::collections::{BTreeMap, BTreeSet};

use contract::keys;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use model::node::{NodeChange, NodeView};

/// A service of the GPU operator that holds GPUs open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperatorService {
    /// Label on nodes that deploys the service.
    pub label: &'static str,
    /// Value of the label `app` on the service's pods.
    pub app: &'static str,
}

/// Services that hold GPUs open, in both kinds of installation: with a device plugin, and with
/// dynamic resource allocation (`-dra`; GPU operator 26.7, without plugin and discovery).
pub const SERVICES: [OperatorService; 6] = [
    OperatorService::new(
        "nvidia.com/gpu.deploy.device-plugin",
        "nvidia-device-plugin-daemonset",
    ),
    OperatorService::new("nvidia.com/gpu.deploy.dcgm", "nvidia-dcgm"),
    OperatorService::new(
        "nvidia.com/gpu.deploy.dcgm-exporter",
        "nvidia-dcgm-exporter",
    ),
    OperatorService::new(
        "nvidia.com/gpu.deploy.gpu-feature-discovery",
        "gpu-feature-discovery",
    ),
    OperatorService::new("nvidia.com/gpu.deploy.dcgm-dra", "nvidia-dcgm-dra"),
    OperatorService::new(
        "nvidia.com/gpu.deploy.dcgm-exporter-dra",
        "nvidia-dcgm-exporter-dra",
    ),
];

/// Value of a label whose service is deployed.
const ON: &str = "true";
/// Value of a label whose service is not deployed.
const OFF: &str = "false";

/// A service pod on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePod {
    /// `NAMESPACE/NAME` of the pod.
    pub title: String,
    /// Value of the pod's label `app`.
    pub app: String,
    /// True if the pod is ready.
    pub ready: bool,
}

/// Record on the node of the services that a reset has stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stopped {
    /// Name of the request.
    pub request: String,
    /// `metadata.uid` of the request.
    pub uid: String,
    /// Time of the first stop.
    pub since: Timestamp,
    /// Labels that were set to `false`, with their previous values. Empty once they are
    /// restored.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Labels of services that had a pod and have to have one again.
    #[serde(default)]
    pub running: BTreeSet<String>,
}

// === impl OperatorService ===

impl OperatorService {
    const fn new(label: &'static str, app: &'static str) -> Self {
        Self { label, app }
    }

    fn is(self, label: &str, node: &NodeView) -> bool {
        node.labels
            .get(self.label)
            .is_some_and(|value| value == label)
    }

    fn pods(self, pods: &[ServicePod]) -> impl Iterator<Item = &ServicePod> {
        pods.iter().filter(move |pod| pod.app == self.app)
    }
}

/// Returns a service label with a value other than `true` and `false`, such as
/// `paused-for-driver-upgrade`: another program is working on the node.
pub(super) fn at_work(node: &NodeView) -> Option<String> {
    SERVICES.iter().find_map(|service| {
        let value = node.labels.get(service.label)?;
        let other = value != ON && value != OFF;
        other.then(|| format!("{}={value}", service.label))
    })
}

/// Returns the change that stops the running services and records their labels on the node.
/// `None` if no service runs. `before` is the record of services that were stopped earlier.
pub(super) fn stop(
    node: &NodeView,
    pods: &[ServicePod],
    before: Option<&Stopped>,
    (request, uid): (&str, &str),
    now: Timestamp,
) -> Option<NodeChange> {
    let on: Vec<OperatorService> = SERVICES
        .into_iter()
        .filter(|one| one.is(ON, node))
        .collect();
    if on.is_empty() {
        return None;
    }
    let mut stopped = before.cloned().unwrap_or_else(|| Stopped {
        request: request.to_owned(),
        uid: uid.to_owned(),
        since: now,
        labels: BTreeMap::new(),
        running: BTreeSet::new(),
    });
    let mut change = NodeChange::default();
    for service in on {
        stopped
            .labels
            .insert(service.label.to_owned(), ON.to_owned());
        if service.pods(pods).next().is_some() {
            stopped.running.insert(service.label.to_owned());
        }
        let off = Some(OFF.to_owned());
        change.labels.insert(service.label.to_owned(), off);
    }
    let text = serde_json::to_string(&stopped).unwrap_or_default();
    change
        .annotations
        .insert(keys::RESET_STOPPED.to_owned(), Some(text));
    Some(change)
}

/// Returns the pods of stopped services that still exist.
pub(super) fn still_there<'a>(node: &NodeView, pods: &'a [ServicePod]) -> Vec<&'a str> {
    let off = SERVICES.into_iter().filter(|one| one.is(OFF, node));
    let pods = off.flat_map(|service| service.pods(pods).map(|pod| pod.title.as_str()));
    pods.collect()
}

// === impl Stopped ===

impl Stopped {
    /// Reads the record from a node. `None` if there is none, or it is malformed.
    pub fn read(node: &NodeView) -> Option<Self> {
        serde_json::from_str(node.annotations.get(keys::RESET_STOPPED)?).ok()
    }

    /// Returns the change that restores the labels, except those that others have changed
    /// since. With `keep`, the record of the services that have to run again stays on the node.
    pub fn put_back(&self, node: &NodeView, keep: bool) -> NodeChange {
        let mut change = NodeChange::default();
        for (label, before) in &self.labels {
            let now = node.labels.get(label);
            let ours = now.is_some_and(|value| value == OFF);
            // Includes an unchanged label, so that the patch fails if the label has changed
            // since.
            let value = if ours { Some(before) } else { now };
            change.labels.insert(label.clone(), value.cloned());
        }
        let rest = keep.then(|| Self {
            labels: BTreeMap::new(),
            ..self.clone()
        });
        let text = rest.and_then(|rest| serde_json::to_string(&rest).ok());
        change
            .annotations
            .insert(keys::RESET_STOPPED.to_owned(), text);
        change
    }

    /// Returns the services that ran before, are deployed, and have no ready pod.
    pub(super) fn not_ready(&self, node: &NodeView, pods: &[ServicePod]) -> Vec<&'static str> {
        let missing = SERVICES.into_iter().filter(|service| {
            self.running.contains(service.label)
                && service.is(ON, node)
                && !service.pods(pods).any(|pod| pod.ready)
        });
        missing.map(|service| service.app).collect()
    }
}
