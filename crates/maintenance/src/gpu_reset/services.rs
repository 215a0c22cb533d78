//! The services of the GPU operator on a node: which hold GPUs open, and how they are stopped for a reset and
//! put back.
//!
//! Each has a label on the node: `true`, and its pod runs there. What a label was stands on the node from the
//! very patch on that changes it. So whoever comes later, after a crash or after the request is gone, puts
//! back exactly what was taken away, and leaves alone what somebody has changed meanwhile.

use std::collections::{BTreeMap, BTreeSet};

use contract::keys;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use model::node::{NodeChange, NodeView};

/// A service of the GPU operator that holds GPUs open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its label on nodes.
    pub label: &'static str,
    /// Value of the label `app` of its pods.
    pub app: &'static str,
}

/// The services that hold GPUs open, under the names of both kinds of installation: with a device plugin, and
/// with dynamic resource allocation (`-dra`; GPU operator 26.7, where there is neither plugin nor discovery).
pub const SERVICES: [Service; 6] = [
    Service::new(
        "nvidia.com/gpu.deploy.device-plugin",
        "nvidia-device-plugin-daemonset",
    ),
    Service::new("nvidia.com/gpu.deploy.dcgm", "nvidia-dcgm"),
    Service::new(
        "nvidia.com/gpu.deploy.dcgm-exporter",
        "nvidia-dcgm-exporter",
    ),
    Service::new(
        "nvidia.com/gpu.deploy.gpu-feature-discovery",
        "gpu-feature-discovery",
    ),
    Service::new("nvidia.com/gpu.deploy.dcgm-dra", "nvidia-dcgm-dra"),
    Service::new(
        "nvidia.com/gpu.deploy.dcgm-exporter-dra",
        "nvidia-dcgm-exporter-dra",
    ),
];

/// Value of a label whose service runs.
const ON: &str = "true";
/// Value of a label whose service does not.
const OFF: &str = "false";

/// A pod on the node, as far as a reset looks at it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePod {
    /// `NAMESPACE/NAME`.
    pub title: String,
    /// Value of its label `app`.
    pub app: String,
    /// True if it is ready.
    pub ready: bool,
}

/// What a reset has stopped on a node, as the node says itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stopped {
    /// Name of the request.
    pub request: String,
    /// Its uid.
    pub uid: String,
    /// Since when.
    pub since: Timestamp,
    /// The labels that were set to `false`, and what each was; empty once they are put back.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The labels of services of which a pod was there: one is to be there again.
    #[serde(default)]
    pub running: BTreeSet<String>,
}

// === impl Service ===

impl Service {
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

/// Returns the label of a service that says something else than whether it runs, such as
/// `paused-for-driver-upgrade`: then somebody else is at work on the node.
pub(super) fn at_work(node: &NodeView) -> Option<String> {
    SERVICES.iter().find_map(|service| {
        let value = node.labels.get(service.label)?;
        let other = value != ON && value != OFF;
        other.then(|| format!("{}={value}", service.label))
    })
}

/// Returns the change that stops the services that run, or run again, and says on the node what they were;
/// `None` where none is to be stopped.
pub(super) fn stop(
    node: &NodeView,
    pods: &[ServicePod],
    before: Option<&Stopped>,
    (request, uid): (&str, &str),
    now: Timestamp,
) -> Option<NodeChange> {
    let on: Vec<Service> = SERVICES
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

/// Returns the pods of services that are stopped and that are still there.
pub(super) fn still_there<'a>(node: &NodeView, pods: &'a [ServicePod]) -> Vec<&'a str> {
    let off = SERVICES.into_iter().filter(|one| one.is(OFF, node));
    let pods = off.flat_map(|service| service.pods(pods).map(|pod| pod.title.as_str()));
    pods.collect()
}

// === impl Stopped ===

impl Stopped {
    /// Returns what a reset has stopped on a node; `None` where none has, or nobody can tell any more.
    pub fn read(node: &NodeView) -> Option<Self> {
        serde_json::from_str(node.annotations.get(keys::RESET_STOPPED)?).ok()
    }

    /// Returns the change that puts the labels back, but those that somebody has changed meanwhile. With
    /// `keep` the node goes on saying which services are to be there again.
    pub fn put_back(&self, node: &NodeView, keep: bool) -> NodeChange {
        let mut change = NodeChange::default();
        for (label, before) in &self.labels {
            let now = node.labels.get(label);
            let ours = now.is_some_and(|value| value == OFF);
            // Also one that stays: the change holds only where it still is what was seen.
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

    /// Returns the services that ran, run by their labels, and have no pod that is ready.
    pub(super) fn not_ready(&self, node: &NodeView, pods: &[ServicePod]) -> Vec<&'static str> {
        let missing = SERVICES.into_iter().filter(|service| {
            self.running.contains(service.label)
                && service.is(ON, node)
                && !service.pods(pods).any(|pod| pod.ready)
        });
        missing.map(|service| service.app).collect()
    }
}
