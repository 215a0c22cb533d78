//! Reports which pods of this node have which GPUs, from the kubelet's socket, to the component
//! that writes it on the pods: the controller, or this process. Informs the GPU monitor whether
//! pods rely on the machine's IMEX service.
//!
//! Device plugins name the GPU itself. For a claim (DRA) the kubelet has the driver's name of
//! the device, which only a component with access to the cluster can resolve; an agent has
//! none, so it reports the name. A machine without a kubelet has no socket, and nothing is
//! reported.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use connector::Header;
use contract::keys;
use contract::node::node_service_client::NodeServiceClient;
use contract::node::{ClaimedDevice, PodGpus, ReportPodsRequest, ResourceGpus};
use contract::pod_resources::pod_resources_lister_client::PodResourcesListerClient;
use contract::pod_resources::{ListPodResourcesRequest, ListPodResourcesResponse, PodResources};
use diagnosis::gpu::Inventory;
use diagnosis::gpu::dcgm::ImexUse;
use futures::future::BoxFuture;
use runtime::logging::{Trouble, chain};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

/// Interval of requests to the kubelet, the same as NVSentinel's.
const EVERY: Duration = Duration::from_secs(30);
/// Time after which an unchanged report is sent again: an annotation may have been removed, and
/// a controller that has just started has no reports.
const REPEAT: Duration = Duration::from_secs(600);
/// Timeout of one request to the kubelet or the controller.
const DEADLINE: Duration = Duration::from_secs(25);
/// Largest response of the kubelet, in bytes, the same as in its own clients.
const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;

/// Function that sends a report. Returns true if the report must be sent again soon, or the
/// reason why it was not accepted.
pub type Tell =
    Arc<dyn Fn(ReportPodsRequest) -> BoxFuture<'static, Result<bool, String>> + Send + Sync>;

/// Polls the kubelet, and sends reports.
pub struct PodGpuReporter {
    pub node_name: String,
    pub socket: PathBuf,
    /// GPUs of this machine, to find the GPU of a partition.
    pub inventory: watch::Receiver<Inventory>,
    /// Receives whether pods rely on IMEX. Does not change while the kubelet does not respond.
    pub imex: watch::Sender<ImexUse>,
    /// Function that sends a report; `None` if no component writes on pods.
    pub tell: Option<Tell>,
}

/// The last report that was sent.
#[derive(Default)]
struct LastReport {
    report: Option<ReportPodsRequest>,
    /// Time when the report is sent again even if unchanged.
    again_at: Option<Instant>,
}

/// Returns a function that sends reports to the controller at the other end of a channel.
pub fn to_controller(channel: Channel, header: Header) -> Tell {
    Arc::new(move |report| {
        let mut client = NodeServiceClient::new(channel.clone());
        let header = header();
        Box::pin(async move {
            let mut request = Request::new(report);
            if let Some(value) = header? {
                request.metadata_mut().insert("authorization", value);
            }
            request.set_timeout(DEADLINE);
            match client.report_pods(request).await {
                Ok(answer) => Ok(answer.into_inner().again),
                Err(status) => Err(why(&status)),
            }
        })
    })
}

// === impl PodGpuReporter ===

impl PodGpuReporter {
    /// Polls and sends reports until `cancel`.
    pub async fn run(self, cancel: CancellationToken) {
        let work = async {
            let (mut last, mut trouble) = (LastReport::default(), Trouble::default());
            loop {
                if self.socket.exists() {
                    let result = self.poll(&mut last).await;
                    trouble.note(result.map_err(|why| format!("{why}; retrying")));
                }
                tokio::time::sleep(EVERY).await;
            }
        };
        cancel.run_until_cancelled(work).await;
    }

    /// Queries the kubelet, and sends a report if it has changed.
    async fn poll(&self, last: &mut LastReport) -> Result<(), String> {
        let answer = list_pods(&self.socket, DEADLINE).await;
        let answer = answer.map_err(|why| {
            format!(
                "cannot list the devices of pods at the kubelet's socket {}: {why}",
                self.socket.display()
            )
        })?;
        let imex = imex_use(&answer.pod_resources);
        (self.imex).send_if_modified(|known| std::mem::replace(known, imex) != imex);
        let Some(tell) = &self.tell else {
            return Ok(());
        };
        let pods = answer.pod_resources.iter();
        let inventory = self.inventory.borrow().clone();
        let mut pods: Vec<PodGpus> = pods.filter_map(|pod| gpus_of(pod, &inventory)).collect();
        pods.sort_by(|one, other| {
            (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name))
        });
        let report = ReportPodsRequest {
            node_name: self.node_name.clone(),
            pods,
        };
        let is_new = last.report.as_ref() != Some(&report);
        if !is_new && last.again_at.is_some_and(|at| Instant::now() < at) {
            return Ok(());
        }
        last.report = Some(report.clone());
        // Applies unless the receiver requests an earlier repeat.
        last.again_at = Some(Instant::now() + REPEAT);
        let again = tell(report).await;
        let again = again.map_err(|why| format!("cannot report which pods have GPUs: {why}"));
        if again != Ok(false) {
            last.again_at = None;
        }
        again.map(drop)
    }
}

/// Lists the pods at the kubelet's socket with their devices, within `deadline`.
pub(crate) async fn list_pods(
    socket: &Path,
    deadline: Duration,
) -> Result<ListPodResourcesResponse, String> {
    let endpoint = Endpoint::try_from(format!("unix://{}", socket.display()));
    let endpoint = endpoint.map_err(|error| chain(&error))?;
    let request = async {
        let channel = endpoint.connect().await.map_err(|error| chain(&error))?;
        let client = PodResourcesListerClient::new(channel);
        let mut client = client.max_decoding_message_size(MAX_ANSWER_BYTES);
        let answer = client.list(ListPodResourcesRequest {}).await;
        answer
            .map(tonic::Response::into_inner)
            .map_err(|status| why(&status))
    };
    let answer = tokio::time::timeout(deadline, request).await;
    answer.unwrap_or_else(|_| Err(format!("no answer within {} s", deadline.as_secs())))
}

/// Describes a status to operators.
pub(crate) fn why(status: &Status) -> String {
    match status.code() {
        Code::Unimplemented => {
            "the other end does not support the request; is it older?".to_owned()
        }
        code => format!("{code:?}: {}", status.message()),
    }
}

/// Returns whether pods rely on the IMEX service of this machine: they do if a pod has a
/// channel of a `ComputeDomain`. If the driver runs IMEX itself, as by default, it does so in a
/// pod with a network of its own, and DCGM, which queries the machine's service, reports as
/// broken what it cannot reach there.
fn imex_use(pods: &[PodResources]) -> ImexUse {
    let containers = pods.iter().flat_map(|pod| &pod.containers);
    let claims = containers.flat_map(|container| &container.dynamic_resources);
    let devices = claims.flat_map(|claim| &claim.claim_resources);
    let of_domains = devices.filter(|device| device.driver_name == keys::COMPUTE_DOMAIN_DRIVER);
    let (daemons, channels): (Vec<_>, Vec<_>) =
        of_domains.partition(|it| it.device_name.starts_with(keys::COMPUTE_DOMAIN_DAEMON));
    if daemons.is_empty() && !channels.is_empty() {
        ImexUse::Used
    } else {
        ImexUse::Unused
    }
}

/// Returns the GPUs of a pod; `None` if it has none.
pub(crate) fn gpus_of(pod: &PodResources, inventory: &Inventory) -> Option<PodGpus> {
    let mut resources: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut devices = BTreeSet::new();
    for container in &pod.containers {
        for given in &container.devices {
            // A GPU is recognised by its id, since plugins may give the resource any name.
            let resource = given.resource_name.as_str();
            let ids = given.device_ids.iter();
            let found: Vec<String> = match resource {
                keys::RESOURCE_PGPU => ids.cloned().collect(),
                _ => ids.filter_map(|id| gpu_of(id, inventory)).collect(),
            };
            if !found.is_empty() {
                let of_machine = resource == keys::RESOURCE_PGPU;
                let name = if of_machine {
                    resource
                } else {
                    keys::RESOURCE_GPU
                };
                resources.entry(name).or_default().extend(found);
            }
        }
        let claims = container.dynamic_resources.iter();
        for device in claims.flat_map(|claim| &claim.claim_resources) {
            // Devices of other drivers are not GPUs.
            if device.driver_name == keys::GPU_DRIVER {
                let (pool, name) = (device.pool_name.clone(), device.device_name.clone());
                devices.insert((pool, name));
            }
        }
    }
    let has_gpus = !resources.is_empty() || !devices.is_empty();
    has_gpus.then(|| PodGpus {
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        resources: resources
            .into_iter()
            .map(|(resource, gpus)| ResourceGpus {
                resource: resource.to_owned(),
                gpus: gpus.into_iter().collect(),
            })
            .collect(),
        devices: devices
            .into_iter()
            .map(|(pool, device)| ClaimedDevice {
                driver: keys::GPU_DRIVER.to_owned(),
                pool,
                device,
            })
            .collect(),
    })
}

/// Returns the UUID of the GPU for a device plugin's id; `None` if the id is not a GPU's. A
/// partition counts as its GPU, if known, since faults are the GPU's.
fn gpu_of(id: &str, inventory: &Inventory) -> Option<String> {
    // A shared GPU is listed several times: GPU-...::3.
    let id = id.split("::").next().unwrap_or(id);
    if id.starts_with("GPU-") {
        return Some(id.to_owned());
    }
    // Drivers before 470 name the GPU: MIG-GPU-.../1/0.
    let partition = id.strip_prefix("MIG-")?;
    if partition.starts_with("GPU-") {
        return partition.split('/').next().map(str::to_owned);
    }
    let mut gpus = inventory.gpus.iter();
    let gpu = gpus.find(|gpu| gpu.mig_devices.iter().any(|device| device.uuid == id));
    Some(gpu.map_or(id, |gpu| gpu.uuid.as_str()).to_owned())
}

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;
