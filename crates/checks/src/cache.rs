//! Recent passes of a check on this node for the same GPUs, as remembered by the node's
//! connector. Used only if the site has enabled that; if in doubt, the check runs.

use std::path::Path;
use std::time::Duration;

use contract::preflight::FindPassRequest;
use contract::preflight::preflight_service_client::PreflightServiceClient;
use tokio::time::Instant;
use tonic::transport::Endpoint;

use crate::environment::Environment;
use crate::outcome::{CheckOutcome, Result as Meaning};
use crate::worker::{FromWorker, Launcher, Libraries, Worker, WorkerRequest};

/// Time limit for the driver to name the GPUs.
const NAME: Duration = Duration::from_secs(30);
/// Time limit for the connector's answer.
const ASK: Duration = Duration::from_secs(2);

/// Returns the UUIDs of this container's GPUs and of their partitions; empty if they are
/// unknown.
pub(crate) async fn gpus(environment: &Environment, launcher: &Launcher) -> Vec<String> {
    let asked = async {
        let mut worker = Worker::start(launcher)?;
        let request = WorkerRequest::Gpus(Libraries::of(environment));
        worker.ask(&request, Instant::now() + NAME).await
    };
    match asked.await {
        Ok(FromWorker::Gpus(gpus)) => {
            let names = gpus.into_iter().map(|gpu| (gpu.uuid, gpu.partitions));
            names
                .flat_map(|(uuid, partitions)| std::iter::once(uuid).chain(partitions))
                .collect()
        }
        Ok(answer) => {
            tracing::warn!("the GPUs are not known by name: {}", answer.unexpected());
            Vec::new()
        }
        Err(failure) => {
            tracing::warn!("the GPUs are not known by name: {failure}");
            Vec::new()
        }
    }
}

/// Returns the outcome of a skipped check if it has passed recently enough.
pub(crate) async fn passed(
    socket: &Path,
    request: FindPassRequest,
    longest: Duration,
) -> Option<CheckOutcome> {
    if request.gpu_uuids.is_empty() {
        return None;
    }
    let asked = async {
        let address = format!("unix://{}", socket.display());
        let channel = Endpoint::try_from(address).ok()?.connect().await.ok()?;
        let mut client = PreflightServiceClient::new(channel);
        client.find_pass(request).await.ok()
    };
    let answer = tokio::time::timeout(ASK, asked).await.ok()??;
    let age = Duration::try_from_secs_f64(answer.into_inner().age_seconds?).ok()?;
    (age <= longest).then(|| CheckOutcome {
        result: Meaning::NotTested,
        code: "PASSED_BEFORE".to_owned(),
        text: format!(
            "the check has passed {} s ago on this node with the same GPUs, which counts for {} s",
            age.as_secs(),
            longest.as_secs()
        ),
        findings: Vec::new(),
        gang_wait: None,
    })
}
