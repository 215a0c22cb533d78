//! A connector that keeps what it is told: for checks that are tried out, ours and those of others.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use contract::preflight::preflight_service_server::{PreflightService, PreflightServiceServer};
use contract::preflight::{
    CheckResult, FindPassRequest, FindPassResponse, ReportCheckRequest, ReportCheckResponse,
};
use contract::proto::platform_connector_server::{PlatformConnector, PlatformConnectorServer};
use contract::{HealthEvent, HealthEvents};
use tokio::task::JoinHandle;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// The name of its socket.
const SOCKET: &str = "connector.sock";
/// Anybody may report, as at the connector of a node.
const MODE: u32 = 0o666;

/// A connector on a socket of its own, until it is dropped.
pub struct Witness {
    socket: PathBuf,
    heard: Heard,
    serving: JoinHandle<()>,
}

/// What came so far.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<(Vec<HealthEvent>, Vec<ReportCheckRequest>)>>);

// === impl Witness ===

impl Witness {
    /// Listens on a socket in a directory.
    pub fn listen(directory: &Path) -> io::Result<Self> {
        let socket = directory.join(SOCKET);
        let listener = runtime::unix_grpc::bind(&socket, MODE).map_err(io::Error::other)?;
        let heard = Heard::default();
        let events = PlatformConnectorServer::new(heard.clone());
        let checks = PreflightServiceServer::new(heard.clone());
        let serving = tokio::spawn(async move {
            let incoming = runtime::unix_grpc::incoming(listener);
            let served = Server::builder().add_service(events).add_service(checks);
            if let Err(error) = served.serve_with_incoming(incoming).await {
                tracing::error!(%error, "events are not heard any more");
            }
        });
        Ok(Self {
            socket,
            heard,
            serving,
        })
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the events so far, in the order in which they came.
    pub fn events(&self) -> Vec<HealthEvent> {
        self.heard.lock().0.clone()
    }

    /// Returns the checks that had themselves counted so far, in the same order.
    pub fn checks(&self) -> Vec<ReportCheckRequest> {
        self.heard.lock().1.clone()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

// === impl Heard ===

impl Heard {
    fn lock(&self) -> MutexGuard<'_, (Vec<HealthEvent>, Vec<ReportCheckRequest>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl PlatformConnector for Heard {
    async fn health_event_occurred_v1(
        &self,
        request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        self.lock().0.extend(request.into_inner().events);
        Ok(Response::new(()))
    }
}

#[tonic::async_trait]
impl PreflightService for Heard {
    async fn report_check(
        &self,
        request: Request<ReportCheckRequest>,
    ) -> Result<Response<ReportCheckResponse>, Status> {
        self.lock().1.push(request.into_inner());
        Ok(Response::new(ReportCheckResponse {}))
    }

    async fn find_pass(
        &self,
        request: Request<FindPassRequest>,
    ) -> Result<Response<FindPassResponse>, Status> {
        let asked = request.into_inner();
        let is_known = self.lock().1.iter().any(|told| {
            told.result() == CheckResult::Passed
                && (&told.node, &told.check, &told.gpu_uuids)
                    == (&asked.node, &asked.check, &asked.gpu_uuids)
        });
        Ok(Response::new(FindPassResponse {
            age_seconds: is_known.then_some(7.0),
        }))
    }
}
