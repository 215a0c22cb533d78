//! Which pods of this node have which GPUs, as the kubelet says on its own socket, told to whoever
//! writes it on the pods: the controller, or this very process. The GPU monitor is told whether pods
//! rely on the machine's IMEX service.
//!
//! Device plugins name the GPU itself. Of a claim (DRA) the kubelet knows the driver's name of the
//! device, which is looked up where the cluster is seen. An agent sees none, so it tells what it
//! was told. A machine without a kubelet has no socket, and nothing is said.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
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

/// Time between two questions to the kubelet, as in NVSentinel.
const EVERY: Duration = Duration::from_secs(30);
/// Time after which a report is sent again though nothing has changed: somebody may have taken an
/// annotation off, and a controller that has just begun knows nothing.
const REPEAT: Duration = Duration::from_secs(600);
/// Time for one answer of the kubelet or the controller.
const DEADLINE: Duration = Duration::from_secs(25);
/// Largest answer of the kubelet (bytes), as its own clients have it.
const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;

/// The function that sends a report. It returns true if the same is to be sent again soon; the error
/// says why the report was not taken.
pub type Tell =
    Arc<dyn Fn(ReportPodsRequest) -> BoxFuture<'static, Result<bool, String>> + Send + Sync>;

/// Asks the kubelet, and tells.
pub struct PodGpuReporter {
    /// Name of this node.
    pub node_name: String,
    /// Socket of the kubelet.
    pub socket: PathBuf,
    /// The GPUs of this machine, by which a partition is known as one of its GPU.
    pub inventory: watch::Receiver<Inventory>,
    /// Where it is told whether pods rely on IMEX. A kubelet that does not answer changes nothing.
    pub imex: watch::Sender<ImexUse>,
    /// The function that sends a report; `None`: nobody writes on pods.
    pub tell: Option<Tell>,
}

/// The report that was sent last.
#[derive(Default)]
struct Told {
    report: Option<ReportPodsRequest>,
    /// The time at which the report is sent again though nothing has changed.
    again_at: Option<Instant>,
}

/// Returns what brings reports to the controller at the other end of a channel.
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
    /// Asks and tells until `cancel`.
    pub async fn run(self, cancel: CancellationToken) {
        let work = async {
            let (mut told, mut trouble) = (Told::default(), Trouble::default());
            loop {
                if self.socket.exists() {
                    let result = self.look(&mut told).await;
                    trouble.note(result.map_err(|why| format!("{why}; it is tried again")));
                }
                tokio::time::sleep(EVERY).await;
            }
        };
        cancel.run_until_cancelled(work).await;
    }

    /// Asks the kubelet, and tells what has changed.
    async fn look(&self, told: &mut Told) -> Result<(), String> {
        let answer = self.ask().await;
        let answer = answer.map_err(|why| {
            format!(
                "the kubelet does not say at {} which pods have which devices: {why}",
                self.socket.display()
            )
        })?;
        let imex = imex_use(&answer.pod_resources);
        (self.imex).send_if_modified(|told| std::mem::replace(told, imex) != imex);
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
        let is_new = told.report.as_ref() != Some(&report);
        if !is_new && told.again_at.is_some_and(|at| Instant::now() < at) {
            return Ok(());
        }
        told.report = Some(report.clone());
        // Whatever comes of it, where nothing else is said.
        told.again_at = Some(Instant::now() + REPEAT);
        let again = tell(report).await;
        let again = again.map_err(|why| format!("which pods have GPUs cannot be told: {why}"));
        if again != Ok(false) {
            told.again_at = None;
        }
        again.map(drop)
    }

    async fn ask(&self) -> Result<ListPodResourcesResponse, String> {
        let endpoint = Endpoint::try_from(format!("unix://{}", self.socket.display()));
        let endpoint = endpoint.map_err(|error| chain(&error))?;
        let asked = async {
            let channel = endpoint.connect().await.map_err(|error| chain(&error))?;
            let client = PodResourcesListerClient::new(channel);
            let mut client = client.max_decoding_message_size(MAX_ANSWER_BYTES);
            let answer = client.list(ListPodResourcesRequest {}).await;
            answer
                .map(tonic::Response::into_inner)
                .map_err(|status| why(&status))
        };
        let answer = tokio::time::timeout(DEADLINE, asked).await;
        answer.unwrap_or_else(|_| Err(format!("no answer within {} s", DEADLINE.as_secs())))
    }
}

/// Returns what a status says, to a person.
pub(crate) fn why(status: &Status) -> String {
    match status.code() {
        Code::Unimplemented => "the other end does not know the question; is it older?".to_owned(),
        code => format!("{code:?}: {}", status.message()),
    }
}

/// Returns whether pods rely on the IMEX service of this machine: one has a channel of a
/// `ComputeDomain`. Where the driver runs IMEX itself, as it does unless told otherwise, that is in a
/// pod with a network of its own, and DCGM, which asks the machine's service, calls broken what it
/// cannot see there.
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

/// Returns the GPUs of a pod; `None` where it has none.
fn gpus_of(pod: &PodResources, inventory: &Inventory) -> Option<PodGpus> {
    let mut resources: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let mut devices = BTreeSet::new();
    for container in &pod.containers {
        for given in &container.devices {
            // A GPU is known by its id, for plugins can give the resource any name.
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
            // Those of other drivers are no GPUs.
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

/// Returns the UUID of the GPU that a device plugin means; `None` where it is no GPU. A partition
/// is one of its GPU, if that is known, for faults are the GPU's.
fn gpu_of(id: &str, inventory: &Inventory) -> Option<String> {
    // A GPU that is shared is listed several times: GPU-...::3.
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
mod tests;
