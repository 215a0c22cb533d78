//! The question to the controller which faults of this node are open, for the Device API.
//!
//! The agent asks now and then: an answer is a few bytes where nothing is broken, and 5,000 agents
//! ask 500 times a second. A controller that is away for a while, as when another takes over, changes
//! nothing; one that is away for longer makes unknown what it has said.

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

/// Time between two questions.
const EVERY: Duration = Duration::from_secs(10);
/// Time for one answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Without an answer for so long, nothing is known any more. A controller that takes over from
/// another needs some 20 s.
const UNSEEN_AFTER: Duration = Duration::from_secs(120);

/// Asks the controller, and tells the Device API.
pub struct FaultAsker {
    /// Name of this node.
    pub node_name: String,
    /// The way to the controller.
    pub channel: Channel,
    /// The header that says who asks.
    pub header: Header,
    /// The API that is told.
    pub devices: DeviceApi,
}

/// The answers that were heard so far.
struct Heard {
    /// The time of the last one, or that of the start.
    at: Instant,
    /// True if there was one.
    was_told: bool,
    /// Why there is none any more.
    trouble: Trouble,
}

// === impl FaultAsker ===

impl FaultAsker {
    /// Asks and tells until `cancel`.
    pub async fn run(self, cancel: CancellationToken) {
        let work = async {
            let mut heard = Heard::new(Instant::now());
            loop {
                let answer = self.ask().await;
                if let Some(told) = heard.judge(answer, Instant::now()) {
                    self.devices.take_faults(told);
                }
                tokio::time::sleep(EVERY).await;
            }
        };
        cancel.run_until_cancelled(work).await;
    }

    async fn ask(&self) -> Result<ListFaultsResponse, Status> {
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

// === impl Heard ===

impl Heard {
    fn new(now: Instant) -> Self {
        Self {
            at: now,
            was_told: false,
            trouble: Trouble::default(),
        }
    }

    /// Returns what is known by an answer; `None`: what was known before.
    fn judge(
        &mut self,
        answer: Result<ListFaultsResponse, Status>,
        now: Instant,
    ) -> Option<NodeFaults> {
        let status = match answer {
            Ok(told) => {
                *self = Self {
                    was_told: true,
                    ..Self::new(now)
                };
                return Some(NodeFaults::Told(told));
            }
            Err(status) => status,
        };
        if now.duration_since(self.at) < UNSEEN_AFTER {
            return None;
        }
        let why = why(&status);
        self.trouble.note(Err(format!(
            "the controller does not say which faults of this node are open, so the Device API does \
             not know NVSentinelHealth: {why}"
        )));
        // One that is older than the question: there is no such condition, as there was none.
        if status.code() == Code::Unimplemented && !self.was_told {
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
