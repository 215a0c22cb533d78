//! Connector that records what it receives, for trying out checks of gpuwarden and of others.

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

/// File name of the socket.
const SOCKET: &str = "connector.sock";
/// Permissions of the socket: any user may report, as at the connector of a node.
const MODE: u32 = 0o666;

/// Connector on its own socket, until it is dropped.
pub struct Witness {
    socket: PathBuf,
    received: Received,
    serving: JoinHandle<()>,
}

/// Events and checks received so far.
#[derive(Clone, Default)]
struct Received(Arc<Mutex<(Vec<HealthEvent>, Vec<ReportCheckRequest>)>>);

// === impl Witness ===

impl Witness {
    /// Listens on a socket in a directory.
    pub fn listen(directory: &Path) -> io::Result<Self> {
        let socket = directory.join(SOCKET);
        let listener = runtime::unix_grpc::bind(&socket, MODE).map_err(io::Error::other)?;
        let received = Received::default();
        let events = PlatformConnectorServer::new(received.clone());
        let checks = PreflightServiceServer::new(received.clone());
        let serving = tokio::spawn(async move {
            let incoming = runtime::unix_grpc::incoming(listener);
            let served = Server::builder().add_service(events).add_service(checks);
            if let Err(error) = served.serve_with_incoming(incoming).await {
                tracing::error!(%error, "the connector has failed; further events are not recorded");
            }
        });
        Ok(Self {
            socket,
            received,
            serving,
        })
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the events received so far, in order of arrival.
    pub fn events(&self) -> Vec<HealthEvent> {
        self.received.lock().0.clone()
    }

    /// Returns the counted checks so far, in order of arrival.
    pub fn checks(&self) -> Vec<ReportCheckRequest> {
        self.received.lock().1.clone()
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

// === impl Received ===

impl Received {
    fn lock(&self) -> MutexGuard<'_, (Vec<HealthEvent>, Vec<ReportCheckRequest>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl PlatformConnector for Received {
    async fn health_event_occurred_v1(
        &self,
        request: Request<HealthEvents>,
    ) -> Result<Response<()>, Status> {
        self.lock().0.extend(request.into_inner().events);
        Ok(Response::new(()))
    }
}

#[tonic::async_trait]
impl PreflightService for Received {
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
        let is_known = self.lock().1.iter().any(|report| {
            report.result() == CheckResult::Passed
                && (&report.node, &report.check, &report.gpu_uuids)
                    == (&asked.node, &asked.check, &asked.gpu_uuids)
        });
        Ok(Response::new(FindPassResponse {
            age_seconds: is_known.then_some(7.0),
        }))
    }
}
