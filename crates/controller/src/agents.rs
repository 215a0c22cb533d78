//! Service for agents beside events: they report the GPUs of pods ([`crate::pods`]) and announced
//! maintenance ([`crate::maintenance`]), and list the open faults of their node. Each node may report and list only its own.

use std::sync::Arc;

use connector::Caller;
use contract::node::node_service_server::NodeService;
use contract::node::{
    ListFaultsRequest, ListFaultsResponse, ReportMaintenanceRequest, ReportMaintenanceResponse,
    ReportPodsRequest, ReportPodsResponse,
};
use fleet::view::FleetView;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use crate::maintenance::MachineNotices;
use crate::pods::PodDevices;

/// gRPC service for agents.
#[derive(Clone)]
pub struct Agents {
    /// Writer of the annotations with the GPUs of pods.
    pub pods: PodDevices,
    /// Notices of the machines' metadata services; `None` without a monitor of maintenance.
    pub maintenance: Option<MachineNotices>,
    /// Receiver of the state of all nodes.
    pub fleet: watch::Receiver<Arc<FleetView>>,
    /// Id of the event store that the state follows from.
    pub store_id: String,
}

#[tonic::async_trait]
impl NodeService for Agents {
    async fn report_pods(
        &self,
        request: Request<ReportPodsRequest>,
    ) -> Result<Response<ReportPodsResponse>, Status> {
        check(&request, &request.get_ref().node_name)?;
        let again = self.pods.handle(request.get_ref()).await;
        let again = again.map_err(Status::invalid_argument)?;
        Ok(Response::new(ReportPodsResponse { again }))
    }

    async fn report_maintenance(
        &self,
        request: Request<ReportMaintenanceRequest>,
    ) -> Result<Response<ReportMaintenanceResponse>, Status> {
        check(&request, &request.get_ref().node_name)?;
        let notices = self.maintenance.as_ref().ok_or_else(|| {
            Status::failed_precondition(
                "the controller does not read announced maintenance: give it --maintenance FILE",
            )
        })?;
        let may_begin = notices.handle(request.get_ref());
        let may_begin = may_begin.map_err(Status::invalid_argument)?;
        Ok(Response::new(ReportMaintenanceResponse { may_begin }))
    }

    async fn list_faults(
        &self,
        request: Request<ListFaultsRequest>,
    ) -> Result<Response<ListFaultsResponse>, Status> {
        let node = &request.get_ref().node_name;
        check(&request, node)?;
        let fleet = Arc::clone(&self.fleet.borrow());
        let faults = fleet.faults_of(node, &self.store_id);
        let faults = faults.ok_or_else(|| {
            Status::unavailable("the controller has just begun and does not know all faults yet")
        });
        faults.map(Response::new)
    }
}

/// Fails for a request that does not come from the agent of `node`.
fn check<T>(request: &Request<T>, node: &str) -> Result<(), Status> {
    match request.extensions().get::<Caller>() {
        Some(Caller::Node(own)) if own == node => Ok(()),
        // A port without identification, for trials.
        Some(Caller::Anybody) => Ok(()),
        _ => Err(Status::permission_denied(format!(
            "only the agent of {node:?} speaks for its node"
        ))),
    }
}

#[cfg(test)]
mod tests;
