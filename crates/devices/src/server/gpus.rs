//! gpuwarden's service for consumers.

use contract::device::gpu_service_server::GpuService;
use contract::device::{
    GetGpuRequest, GetGpuResponse, Gpu, ListGpusRequest, ListGpusResponse, WatchGpusRequest,
    WatchGpusResponse,
};
use tonic::{Request, Response, Status};

use super::{Answers, Service, status};

#[tonic::async_trait]
impl GpuService for Service {
    type WatchGpusStream = Answers<WatchGpusResponse>;

    async fn get_gpu(
        &self,
        request: Request<GetGpuRequest>,
    ) -> Result<Response<GetGpuResponse>, Status> {
        let board = self.api.board();
        let gpu = board.gpu(&request.get_ref().name);
        let gpu = gpu.map_err(|error| status(&error))?;
        Ok(Response::new(GetGpuResponse {
            gpu: Some(Gpu::clone(gpu)),
        }))
    }

    async fn list_gpus(
        &self,
        _: Request<ListGpusRequest>,
    ) -> Result<Response<ListGpusResponse>, Status> {
        Ok(Response::new(self.api.list()))
    }

    async fn watch_gpus(
        &self,
        request: Request<WatchGpusRequest>,
    ) -> Result<Response<Self::WatchGpusStream>, Status> {
        let version = &request.get_ref().resource_version;
        Ok(Response::new(self.watch(version, request.extensions())?))
    }
}
