//! NVSentinel's service for consumers: the same GPUs in NVSentinel's messages.

use contract::device::{self, ConditionStatus, WatchEventType};
use contract::nvsentinel_device::gpu_service_server::GpuService;
use contract::nvsentinel_device::{
    Condition, GetGpuRequest, GetGpuResponse, Gpu, GpuList, GpuSpec, GpuStatus, ListGpusRequest,
    ListGpusResponse, WatchGpusRequest, WatchGpusResponse,
};
use futures::StreamExt as _;
use tonic::{Request, Response, Status};

use super::{Answers, Service, status};
use crate::watch::Message;

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
            gpu: Some(in_their_words(gpu)),
        }))
    }

    async fn list_gpus(
        &self,
        _: Request<ListGpusRequest>,
    ) -> Result<Response<ListGpusResponse>, Status> {
        let gpus = self.api.gpus();
        let items = gpus.iter().map(|gpu| in_their_words(gpu)).collect();
        Ok(Response::new(ListGpusResponse {
            gpu_list: Some(GpuList { items }),
        }))
    }

    async fn watch_gpus(
        &self,
        request: Request<WatchGpusRequest>,
    ) -> Result<Response<Self::WatchGpusStream>, Status> {
        let messages: Answers<Message> = self.watch("", request.extensions())?;
        let events = messages.filter_map(|message| async { message.map(event).transpose() });
        Ok(Response::new(Box::pin(events)))
    }
}

/// Converts a message to NVSentinel's event; `None` if there is none for it.
fn event(message: Message) -> Option<WatchGpusResponse> {
    let (kind, gpu) = match message {
        Message::Added(gpu) => ("ADDED", Some(gpu)),
        Message::Change(change) => {
            let kind = match change.kind {
                WatchEventType::Added => "ADDED",
                WatchEventType::Deleted => "DELETED",
                _ => "MODIFIED",
            };
            (kind, Some(change.gpu))
        }
        Message::Resync => ("ERROR", None),
        Message::Bookmark(_) => return None,
    };
    Some(WatchGpusResponse {
        r#type: kind.to_owned(),
        object: gpu.map(|gpu| in_their_words(&gpu)),
    })
}

fn in_their_words(gpu: &device::Gpu) -> Gpu {
    let conditions = gpu.status.iter().flat_map(|status| &status.conditions);
    let conditions = conditions.map(|condition| Condition {
        r#type: condition.r#type.clone(),
        status: match condition.status() {
            ConditionStatus::True => "True",
            ConditionStatus::False => "False",
            ConditionStatus::Unknown | ConditionStatus::Unspecified => "Unknown",
        }
        .to_owned(),
        last_transition_time: condition.last_transition_time,
        reason: condition.reason.clone(),
        message: condition.message.clone(),
    });
    Gpu {
        name: gpu.name.clone(),
        spec: gpu.spec.as_ref().map(|spec| GpuSpec {
            uuid: spec.uuid.clone(),
        }),
        status: Some(GpuStatus {
            conditions: conditions.collect(),
            recommended_action: String::new(),
        }),
    }
}
