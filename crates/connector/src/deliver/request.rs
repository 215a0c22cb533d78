//! Requests of delivery: their contents, their time limit, and the store that answers.

use std::time::Duration;

use contract::{EVENT_VERSION, HealthEvents, keys};
use jiff::Timestamp;
use model::event;
use tokio::time::Instant;
use tonic::{Request, Status};

use super::{Delivery, Receiver};
use crate::addressee;
use crate::outbox::WaitingEvent;

/// Time limit for a request, which is then sent again.
const DEADLINE: Duration = Duration::from_secs(10);

impl Delivery {
    /// Makes one request, acknowledged by an OK.
    pub(super) async fn send(&mut self, events: &[WaitingEvent]) -> Result<(), Status> {
        self.asked_at = Instant::now();
        let request = self.request(events)?;
        let began = Instant::now();
        let sending = self.client.health_event_occurred_v1(request);
        // Covers connections that hang without an error.
        let answer = tokio::time::timeout(DEADLINE, sending)
            .await
            .unwrap_or_else(|_| {
                let seconds = DEADLINE.as_secs();
                Err(Status::deadline_exceeded(format!(
                    "no answer in {seconds} s"
                )))
            });
        self.metrics.sent(answer.is_ok(), began.elapsed());
        if self.receiver == Receiver::Controller {
            let from = match &answer {
                Ok(answer) => addressee::from_answer(answer.metadata()),
                Err(status) => addressee::from_refusal(status),
            };
            self.elsewhere = from.filter(|from| self.store.as_ref() != Some(from));
        }
        answer.map(drop)
    }

    fn request(&self, events: &[WaitingEvent]) -> Result<Request<HealthEvents>, Status> {
        let ours = self.receiver == Receiver::Controller;
        let events = events.iter().map(|one| {
            let mut event = one.event.event.clone();
            if ours {
                event::mark_accepted(&mut event, one.event.received_at);
            }
            event
        });
        let mut request = Request::new(HealthEvents {
            version: EVENT_VERSION,
            events: events.collect(),
        });
        request.set_timeout(DEADLINE);
        let metadata = request.metadata_mut();
        if let Some(value) = (self.header)().map_err(Status::unauthenticated)? {
            metadata.insert("authorization", value);
        }
        if ours {
            addressee::expect(metadata, self.store.as_deref());
            if let Ok(now) = Timestamp::now().to_string().parse() {
                metadata.insert(keys::HEADER_SENT_AT, now);
            }
        }
        Ok(request)
    }
}
