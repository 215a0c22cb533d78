//! Writes the GPUs of a node's pods, as its agent reports them, into the pods' annotations.
//! NVSentinel finds the pods of a GPU by this annotation.
//!
//! An agent may report only pods that the API server shows as bound to its node. No state is
//! kept: each report is compared with the current pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use cluster::{ApiError, Cluster, NodePod, Reason};
use contract::keys;
use contract::node::{PodGpus, ReportPodsRequest};
use model::device::{DeviceId, GPU_DRIVER, NodeDevices};
use runtime::logging::{Seldom, chain};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

/// Largest report (bytes), some ten times that of a node full of pods with GPUs.
pub const MAX_REPORT_BYTES: usize = 1024 * 1024;
/// Most pods in a report. A kubelet runs 110 by default, and seldom 500.
pub const MAX_PODS: usize = 1024;
/// Most devices of one pod, as 16 GPUs in partitions have.
pub const MAX_DEVICES: usize = 256;
/// Longest name of a pod, a device or a resource in Kubernetes (bytes).
const MAX_NAME_BYTES: usize = 253;
/// Most reports that are handled at once. After a restart all agents send one.
const MAX_AT_ONCE: usize = 8;
/// Longest wait for a turn, after which the agent is asked to send the report again.
const TURN: Duration = Duration::from_secs(5);
/// Longest time to handle a report, less than that of a request. The rest is done when the
/// report is sent again.
const WORK: Duration = Duration::from_secs(15);

/// Refused pods after which a report is given up: the refusals are not about single pods.
const MAX_REFUSED: usize = 10;

/// Writer of the annotations. Cheap to clone.
#[derive(Clone)]
pub struct PodDevices(Arc<Shared>);

struct Shared {
    /// Cluster of the pods; `None` to write nothing.
    cluster: Option<Arc<Cluster>>,
    turns: Semaphore,
    seldom: Seldom,
}

/// The GPUs of a pod by resource.
type Gpus<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

// === impl PodDevices ===

impl PodDevices {
    /// Creates a writer to `cluster`. Without a cluster, reports are accepted and not written.
    pub fn new(cluster: Option<Arc<Cluster>>) -> Self {
        Self(Arc::new(Shared {
            cluster,
            turns: Semaphore::new(MAX_AT_ONCE),
            seldom: Seldom::default(),
        }))
    }

    /// Handles a report. Returns true if the agent is to send it again soon. The error describes
    /// an invalid report.
    pub async fn handle(&self, report: &ReportPodsRequest) -> Result<bool, String> {
        check(report)?;
        let Some(cluster) = &self.0.cluster else {
            return Ok(false);
        };
        let Ok(Ok(_turn)) = timeout(TURN, self.0.turns.acquire()).await else {
            return Ok(true);
        };
        let node = &report.node_name;
        Ok(match write(cluster, report).await {
            Ok(again) => again,
            Err(error) => {
                if let Some(before) = self.0.seldom.now() {
                    tracing::warn!(
                        node,
                        err = %chain(&error),
                        not_logged_before = before,
                        "the GPUs of a node's pods cannot be written on the pods; this takes the \
                         permissions `list` and `patch` on pods, and `list` on \
                         resourceslices.resource.k8s.io"
                    );
                }
                error.is_retryable()
            }
        })
    }
}

/// Fails for a report that our agents would not send.
fn check(report: &ReportPodsRequest) -> Result<(), String> {
    if report.pods.len() > MAX_PODS {
        let found = report.pods.len();
        return Err(format!(
            "the report has {found} pods, at most {MAX_PODS} are taken"
        ));
    }
    name("node_name", &report.node_name)?;
    for (index, pod) in report.pods.iter().enumerate() {
        let field = |key: &str| format!("pods[{index}].{key}");
        name(&field("namespace"), &pod.namespace)?;
        name(&field("name"), &pod.name)?;
        let gpus = pod
            .resources
            .iter()
            .map(|one| one.gpus.len())
            .sum::<usize>();
        let found = gpus + pod.devices.len();
        if found > MAX_DEVICES || pod.resources.len() > MAX_DEVICES {
            let what = field("resources");
            return Err(format!(
                "{what}: {found} devices, at most {MAX_DEVICES} are taken"
            ));
        }
        for resource in &pod.resources {
            name(&field("resources"), &resource.resource)?;
            for gpu in &resource.gpus {
                name(&field("resources.gpus"), gpu)?;
            }
        }
        for device in &pod.devices {
            for part in [&device.driver, &device.pool, &device.device] {
                name(&field("devices"), part)?;
            }
        }
    }
    Ok(())
}

fn name(field: &str, value: &str) -> Result<(), String> {
    let plausible = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/:".contains(&byte);
    if !value.is_empty() && value.len() <= MAX_NAME_BYTES && value.bytes().all(plausible) {
        return Ok(());
    }
    let shown: String = value.chars().take(40).collect();
    Err(format!("{field} is {shown:?}, which is no name"))
}

/// Writes the annotations that have changed. Returns true if the report has to be sent again.
async fn write(cluster: &Cluster, report: &ReportPodsRequest) -> Result<bool, ApiError> {
    let until = Instant::now() + WORK;
    let node = &report.node_name;
    let claimed = report.pods.iter().any(|pod| !pod.devices.is_empty());
    let devices = if claimed {
        cluster.devices_of_node(node).await?
    } else {
        NodeDevices::default()
    };
    let reported: BTreeMap<(&str, &str), &PodGpus> = report
        .pods
        .iter()
        .map(|pod| ((pod.namespace.as_str(), pod.name.as_str()), pod))
        .collect();
    let (mut again, mut refused) = (false, Vec::new());
    for pod in cluster.pods_of_node(node).await? {
        let has = reported.get(&(pod.namespace.as_str(), pod.name.as_str()));
        let (gpus, complete) = has.map_or((Gpus::new(), true), |has| gpus(has, &devices));
        // GPUs that are not known yet remove none that were.
        again |= !complete;
        if !complete && gpus.is_empty() {
            continue;
        }
        let wanted = (!gpus.is_empty()).then(|| json!({"devices": gpus}).to_string());
        if wanted == pod.devices {
            continue;
        }
        if Instant::now() >= until {
            return Ok(true);
        }
        let writing = cluster.set_pod_devices(&pod, wanted.as_deref());
        match Reason::of_node(node, None, "GPUs of a pod")
            .scope(writing)
            .await
        {
            Ok(()) => log_written(node, &pod, wanted.as_deref()),
            // The pod is gone.
            Err(ApiError::NotFound { .. } | ApiError::Conflict { .. }) => {}
            // A refusal of one pod, as by an admission webhook, does not affect the others.
            Err(error @ (ApiError::Forbidden { .. } | ApiError::Invalid { .. })) => {
                refused.push(error);
                if refused.len() >= MAX_REFUSED {
                    break;
                }
            }
            Err(error) => return Err(error),
        }
    }
    match refused.pop() {
        Some(error) => Err(error),
        None => Ok(again),
    }
}

fn log_written(node: &str, pod: &NodePod, devices: Option<&str>) {
    let (namespace, name) = (&pod.namespace, &pod.name);
    tracing::debug!(
        node,
        namespace,
        name,
        devices,
        "wrote the GPUs of a pod on it"
    );
}

/// Returns the GPUs of a pod, and true if they are complete.
fn gpus<'a>(pod: &'a PodGpus, devices: &'a NodeDevices) -> (Gpus<'a>, bool) {
    let (mut gpus, mut complete) = (Gpus::new(), true);
    for resource in pod.resources.iter().filter(|one| !one.gpus.is_empty()) {
        let of = gpus.entry(resource.resource.as_str()).or_default();
        of.extend(resource.gpus.iter().map(String::as_str));
    }
    for device in pod.devices.iter().filter(|one| one.driver == GPU_DRIVER) {
        let id = DeviceId {
            driver: device.driver.clone(),
            pool: device.pool.clone(),
            name: device.device.clone(),
        };
        match devices.get(&id).and_then(|device| device.gpu.as_deref()) {
            // The name that all versions of NVSentinel search for.
            Some(gpu) => _ = gpus.entry(keys::RESOURCE_GPU).or_default().insert(gpu),
            None => complete = false,
        }
    }
    (gpus, complete)
}

#[cfg(test)]
mod tests;
