//! gpuwarden's service for providers, whose writes go directly to the board.

use contract::device::provider_service_server::ProviderService;
use contract::device::{
    HeartbeatRequest, HeartbeatResponse, RegisterGpuRequest, RegisterGpuResponse,
    UnregisterGpuRequest, UnregisterGpuResponse, UpdateGpuConditionRequest,
    UpdateGpuConditionResponse, UpdateGpuStatusRequest, UpdateGpuStatusResponse,
};
use jiff::Timestamp;
use runtime::unix_grpc::UnixPeer;
use tonic::{Extensions, Request, Response, Status};

use super::{Providers, Service, status};
use crate::board::{Board, BoardError, Provider};

impl Service {
    /// Writes to the board for a provider, if the peer process may write.
    fn write<T>(
        &self,
        extensions: &Extensions,
        id: &str,
        write: impl FnOnce(&mut Board, &Provider, Timestamp) -> Result<T, BoardError>,
    ) -> Result<Response<T>, Status> {
        let written = self.provider(extensions, id).and_then(|provider| {
            let written = self.api.change(|board, now| write(board, &provider, now));
            written.map_err(|error| status(&error))
        });
        if written.is_err() {
            self.api.shared.metrics.refused.inc();
        }
        written.map(Response::new)
    }

    fn provider(&self, extensions: &Extensions, id: &str) -> Result<Provider, Status> {
        let Some(peer) = extensions.get::<UnixPeer>() else {
            return Err(Status::permission_denied(
                "providers write on gpuwarden's Unix socket only (--device-api), where it is known who \
                 they are",
            ));
        };
        if self.providers != Providers::Any && !peer.is_operator {
            return Err(Status::permission_denied(
                "only root and gpuwarden's own user may write as providers, in the namespaces of \
                 gpuwarden; start it with --device-api-providers any to let others",
            ));
        }
        Ok(Provider {
            id: id.to_owned(),
            uid: peer.uid,
            is_operator: peer.is_operator,
        })
    }
}

#[tonic::async_trait]
impl ProviderService for Service {
    async fn register_gpu(
        &self,
        request: Request<RegisterGpuRequest>,
    ) -> Result<Response<RegisterGpuResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        self.write(&extensions, &request.provider_id, |board, provider, now| {
            let spec = request.spec.unwrap_or_default();
            let registered =
                board.register(provider, &request.name, spec, request.initial_status, now);
            registered.map(|(gpu, created)| RegisterGpuResponse {
                gpu: Some((*gpu).clone()),
                created,
            })
        })
    }

    async fn unregister_gpu(
        &self,
        request: Request<UnregisterGpuRequest>,
    ) -> Result<Response<UnregisterGpuResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        self.write(&extensions, &request.provider_id, |board, provider, now| {
            board.unregister(provider, &request.name, now)?;
            Ok(UnregisterGpuResponse {})
        })
    }

    async fn update_gpu_status(
        &self,
        request: Request<UpdateGpuStatusRequest>,
    ) -> Result<Response<UpdateGpuStatusResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        self.write(&extensions, &request.provider_id, |board, provider, now| {
            let status = request.status.unwrap_or_default();
            let gpu = board.update_status(provider, &request.name, status, now)?;
            Ok(UpdateGpuStatusResponse {
                gpu: Some((*gpu).clone()),
            })
        })
    }

    async fn update_gpu_condition(
        &self,
        request: Request<UpdateGpuConditionRequest>,
    ) -> Result<Response<UpdateGpuConditionResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        self.write(&extensions, &request.provider_id, |board, provider, now| {
            let condition = request.condition.unwrap_or_default();
            let gpu = board.update_condition(provider, &request.name, condition, now)?;
            Ok(UpdateGpuConditionResponse {
                gpu: Some((*gpu).clone()),
            })
        })
    }

    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        self.write(&extensions, &request.provider_id, |board, provider, now| {
            let unknown_gpu_names = board.heartbeat(provider, &request.gpu_names, now)?;
            Ok(HeartbeatResponse { unknown_gpu_names })
        })
    }
}
