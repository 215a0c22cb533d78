//! Sink that sends events to a controller and keeps nothing: events count as accepted once the
//! controller has stored them. For senders that report for others, which keep their reports and
//! send them again.

use std::time::Duration;

use async_trait::async_trait;
use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{EVENT_VERSION, HealthEvents};
use store::{Appended, NewEvent};
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::deliver::Header;
use crate::deliver::answer::{NotTaken, describe, judge};
use crate::{Sink, SinkError};

/// Longest wait for the controller.
const DEADLINE: Duration = Duration::from_secs(10);

/// Sink that is a controller. Answers that each event was new, since only the controller knows.
pub struct Direct {
    client: PlatformConnectorClient<Channel>,
    header: Header,
}

// === impl Direct ===

impl Direct {
    /// Creates the sink; `header` authenticates this sender.
    pub fn new(controller: Channel, header: Header) -> Self {
        Self {
            client: PlatformConnectorClient::new(controller),
            header,
        }
    }

    async fn send(&self, events: HealthEvents) -> Result<(), Status> {
        let mut request = Request::new(events);
        request.set_timeout(DEADLINE);
        if let Some(value) = (self.header)().map_err(Status::unavailable)? {
            request.metadata_mut().insert("authorization", value);
        }
        let mut client = self.client.clone();
        let sent = client.health_event_occurred_v1(request);
        let answer = tokio::time::timeout(DEADLINE, sent).await;
        let late = |_| Err(Status::deadline_exceeded("no answer in time"));
        answer.unwrap_or_else(late).map(drop)
    }
}

#[async_trait]
impl Sink for Direct {
    async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, SinkError> {
        let count = events.len();
        let ids = events.iter().map(|new| new.event.id.clone());
        let appended = ids.map(|id| Appended {
            id,
            seq: 0.into(),
            new: true,
        });
        let appended: Vec<Appended> = appended.collect();
        let events = HealthEvents {
            version: EVENT_VERSION,
            events: events.into_iter().map(|new| new.event).collect(),
        };
        let Err(status) = self.send(events).await else {
            return Ok(appended);
        };
        let why = describe(&status).into();
        Err(match judge(&status, count) {
            NotTaken::Split | NotTaken::Refused(_) => SinkError::Failed(why),
            NotTaken::Again | NotTaken::Failed => SinkError::Unavailable(why),
        })
    }
}
