//! Asks the controller which faults of this node are open, for the Device API.
//!
//! The agent polls: a response without faults is a few bytes, and 5,000 agents send 500
//! requests a second. A controller that is away for a while, as when another takes over,
//! changes nothing; a longer absence makes its conditions unknown.

use std::time::Duration;

use connector::Header;
use contract::node::node_service_client::NodeServiceClient;
use contract::node::{ListFaultsRequest, ListFaultsResponse};
use devices::DeviceApi;
use devices::faults::NodeFaults;
use runtime::logging::Trouble;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::pods::why;

/// Interval between two requests.
const EVERY: Duration = Duration::from_secs(10);
/// Timeout of one request.
const DEADLINE: Duration = Duration::from_secs(10);
/// Time without a response after which the faults are unknown. A fail-over between controllers
/// takes some 20 s.
const UNSEEN_AFTER: Duration = Duration::from_secs(120);

/// Polls the controller, and forwards its responses to the Device API.
pub struct FaultAsker {
    pub node_name: String,
    /// Connection to the controller.
    pub channel: Channel,
    /// Returns the header that authenticates this agent.
    pub header: Header,
    /// Device API that receives the faults.
    pub devices: DeviceApi,
}

/// State of the responses so far.
struct Responses {
    /// Time of the last response, or of the start.
    at: Instant,
    /// True if there was a response.
    had_response: bool,
    /// Limits the log lines about missing responses.
    trouble: Trouble,
}

// === impl FaultAsker ===

impl FaultAsker {
    /// Polls and forwards responses until `cancel`.
    pub async fn run(self, cancel: CancellationToken) {
        let work = async {
            let mut responses = Responses::new(Instant::now());
            loop {
                let answer = self.list_faults().await;
                if let Some(faults) = responses.evaluate(answer, Instant::now()) {
                    self.devices.take_faults(faults);
                }
                tokio::time::sleep(EVERY).await;
            }
        };
        cancel.run_until_cancelled(work).await;
    }

    async fn list_faults(&self) -> Result<ListFaultsResponse, Status> {
        let mut request = Request::new(ListFaultsRequest {
            node_name: self.node_name.clone(),
        });
        if let Some(value) = (self.header)().map_err(Status::unauthenticated)? {
            request.metadata_mut().insert("authorization", value);
        }
        request.set_timeout(DEADLINE);
        let mut client = NodeServiceClient::new(self.channel.clone());
        client
            .list_faults(request)
            .await
            .map(tonic::Response::into_inner)
    }
}

// === impl Responses ===

impl Responses {
    fn new(now: Instant) -> Self {
        Self {
            at: now,
            had_response: false,
            trouble: Trouble::default(),
        }
    }

    /// Returns what the Device API must be set to; `None` for no change.
    fn evaluate(
        &mut self,
        answer: Result<ListFaultsResponse, Status>,
        now: Instant,
    ) -> Option<NodeFaults> {
        let status = match answer {
            Ok(faults) => {
                *self = Self {
                    had_response: true,
                    ..Self::new(now)
                };
                return Some(NodeFaults::Told(faults));
            }
            Err(status) => status,
        };
        if now.duration_since(self.at) < UNSEEN_AFTER {
            return None;
        }
        let why = why(&status);
        self.trouble.note(Err(format!(
            "the controller does not report the open faults of this node, so the Device API cannot \
             set NVSentinelHealth: {why}"
        )));
        // The controller predates the request: without an earlier response, there is no
        // condition.
        if status.code() == Code::Unimplemented && !self.had_response {
            return None;
        }
        let seconds = UNSEEN_AFTER.as_secs();
        Some(NodeFaults::Unseen {
            why: format!("The controller has not answered for {seconds} s: {why}"),
        })
    }
}

#[cfg(test)]
mod tests;
