//! Whether a check has passed lately on this node for the same GPUs, which the connector of the node
//! remembers. It is asked only where the site has switched that on, and in doubt a check runs.

use std::path::Path;
use std::time::Duration;

use contract::preflight::FindPassRequest;
use contract::preflight::preflight_service_client::PreflightServiceClient;
use tokio::time::Instant;
use tonic::transport::Endpoint;

use crate::environment::Environment;
use crate::outcome::{Outcome, Result as Meaning};
use crate::worker::{Launcher, Libraries, Request, Said, Worker};

/// Time for the driver to name the GPUs.
const NAME: Duration = Duration::from_secs(30);
/// Time for the connector to answer.
const ASK: Duration = Duration::from_secs(2);

/// Returns the UUIDs of the GPUs of this container and of their partitions; none where they are not known.
pub(crate) async fn gpus(environment: &Environment, launcher: &Launcher) -> Vec<String> {
    let asked = async {
        let mut worker = Worker::start(launcher)?;
        let request = Request::Gpus(Libraries::of(environment));
        worker.ask(&request, Instant::now() + NAME).await
    };
    match asked.await {
        Ok(Said::Gpus(gpus)) => {
            let names = gpus.into_iter().map(|gpu| (gpu.uuid, gpu.partitions));
            names
                .flat_map(|(uuid, partitions)| std::iter::once(uuid).chain(partitions))
                .collect()
        }
        Ok(said) => {
            tracing::warn!("the GPUs are not known by name: {}", said.unexpected());
            Vec::new()
        }
        Err(failure) => {
            tracing::warn!("the GPUs are not known by name: {failure}");
            Vec::new()
        }
    }
}

/// Returns that a check is left out, where it has passed so lately.
pub(crate) async fn passed(
    socket: &Path,
    request: FindPassRequest,
    longest: Duration,
) -> Option<Outcome> {
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
    (age <= longest).then(|| Outcome {
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
