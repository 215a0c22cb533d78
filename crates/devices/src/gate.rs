//! The job gate: answers from memory whether this machine is fit for a job.
//!
//! Launchers of training jobs ask before each rendezvous (`nvhcd.HealthCheckService`). Only a
//! known fault makes the machine unfit; an unknown state does not.

use contract::device::{GpuPhase, ListGpusResponse};
use contract::nvhcd::health_check_service_server::{HealthCheckService, HealthCheckServiceServer};
use contract::nvhcd::{HealthCheckRequest, HealthCheckResponse};
use runtime::unix_grpc;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::DeviceApi;
use crate::board::READY;
use crate::server::{self, MAX_REQUEST_BYTES};

/// Fitness of this machine for a job, with respect to its GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fitness {
    /// Unhealthy GPUs, each with the reason.
    pub bad: Vec<String>,
    /// GPUs in an unknown state, each with the reason.
    pub unknown: Vec<String>,
    /// Number of all GPUs.
    pub gpus: usize,
}

struct Gate(DeviceApi);

/// Serves the job gate on a bound Unix socket until `cancel`.
pub async fn serve(
    listener: UnixListener,
    api: DeviceApi,
    cancel: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let gate =
        HealthCheckServiceServer::new(Gate(api)).max_decoding_message_size(MAX_REQUEST_BYTES);
    server::builder()
        .add_service(gate)
        .serve_with_incoming_shutdown(unix_grpc::incoming(listener), cancel.cancelled_owned())
        .await
}

// === impl Fitness ===

impl Fitness {
    /// Returns the fitness for a list of the Device API.
    pub fn of(listed: &ListGpusResponse) -> Self {
        let mut fitness = Self {
            bad: listed.unplaced_faults.clone(),
            ..Self::default()
        };
        if listed.left_out > 0 {
            let left_out = listed.left_out;
            let why = format!("{left_out} GPUs beyond the limit of the Device API");
            fitness.unknown.push(why);
        }
        for gpu in &listed.gpus {
            fitness.gpus += 1;
            let Some(status) = &gpu.status else { continue };
            let why = || {
                let ready = status.conditions.iter().find(|one| one.r#type == READY);
                let message = ready.map_or("", |ready| ready.message.as_str());
                format!("{}: {message}", gpu.name)
            };
            match status.phase() {
                GpuPhase::NotReady => fitness.bad.push(why()),
                GpuPhase::Unknown | GpuPhase::Pending | GpuPhase::Unspecified => {
                    fitness.unknown.push(why());
                }
                GpuPhase::Ready => {}
            }
        }
        fitness
    }
}

// === impl Gate ===

#[tonic::async_trait]
impl HealthCheckService for Gate {
    async fn run_health_check(
        &self,
        _: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let fitness = Fitness::of(&self.0.list());
        let fit = fitness.bad.is_empty();
        let answer = [("answer", if fit { "fit" } else { "unfit" })];
        self.0.shared.metrics.gate.get_or_create(&answer).inc();
        Ok(Response::new(HealthCheckResponse {
            success: fit,
            exit_code: i32::from(!fit),
            output: format!("{{\"fail_count\": {}}}", fitness.bad.len()),
            error: fitness.bad.join("; "),
        }))
    }
}
