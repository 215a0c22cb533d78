//! Brings what waits in the outbox to the controller, by the same gRPC service by which
//! monitors report.
//!
//! Oldest first, one batch at a time, so the order stays. A batch leaves the outbox when
//! it is answered OK; until then it is tried again for ever, with growing pauses. Events
//! that the controller refuses for what they are would be refused for ever: they are put
//! aside (`outbox/refused.rs`), counted and logged, and hold up nothing behind them.
//!
//! A batch may arrive twice. Events carry the id and the time that they were accepted
//! with, so the store takes each once.

mod metrics;

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{EVENT_VERSION, HealthEvents};
use domain::event;
use runtime::metrics::Metrics;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::outbox::{Outbox, Waiting};
use crate::{MAX_REQUEST_BYTES, refusal};
use metrics::DeliveryMetrics;

/// Most events in a request.
const BATCH: usize = 500;
/// About how many bytes a request has; far below what receivers take.
const BATCH_BYTES: u64 = 1024 * 1024;
/// A request that is not answered by then is sent again.
const DEADLINE: Duration = Duration::from_secs(10);
/// Pauses between attempts, doubling from the first to the last. The last one also
/// spreads the agents of a cluster when its controller comes back.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// Pause after the outbox could not be read.
const OUTBOX_PAUSE: Duration = Duration::from_secs(1);

/// What gives each request its `authorization` header; `None`: none is sent. An error
/// says why it cannot be made now.
pub type Header = Arc<dyn Fn() -> Result<Option<MetadataValue<Ascii>>, String> + Send + Sync>;

/// Delivers until it is cancelled.
pub struct Delivery {
    outbox: Outbox,
    client: PlatformConnectorClient<Channel>,
    header: Header,
    metrics: DeliveryMetrics,
    status: watch::Sender<DeliveryStatus>,
    random: RandomState,
}

/// How delivery does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryStatus {
    /// Why the last attempt failed; `None` after one that did not.
    pub failing: Option<String>,
    /// Events delivered.
    pub delivered: u64,
    /// Events that the controller refused.
    pub refused: u64,
}

/// What an answer means for a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// Not now.
    Again,
    /// Something in it is refused; smaller parts show what.
    Split,
    /// These, by index, are refused; all others are stored.
    Refused(Vec<usize>),
}

/// The pauses between failed attempts.
struct Backoff {
    next: Duration,
}

// === impl Delivery ===

impl Delivery {
    /// Delivers from `outbox` over `channel`.
    pub fn new(outbox: Outbox, channel: Channel, header: Header, metrics: &Metrics) -> Self {
        let client = PlatformConnectorClient::new(channel);
        Self {
            outbox,
            client: client.max_encoding_message_size(MAX_REQUEST_BYTES),
            header,
            metrics: DeliveryMetrics::new(metrics),
            status: watch::Sender::default(),
            random: RandomState::new(),
        }
    }

    /// How it does, as it changes.
    pub fn status(&self) -> watch::Receiver<DeliveryStatus> {
        self.status.subscribe()
    }

    /// Runs until `cancel`, and then until nothing waits or an attempt fails. What is not
    /// delivered stays in the outbox.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut newest = self.outbox.status();
        let mut after = 0;
        loop {
            // Looked at before the read: if that finds nothing, nothing waits up to here.
            let seen = newest.borrow_and_update().newest;
            let batch = match self.outbox.waiting(after, BATCH, BATCH_BYTES).await {
                Ok(batch) => batch,
                Err(error) => {
                    tracing::error!(err = %runtime::logging::chain(&error), "the outbox cannot be read");
                    if cancel.is_cancelled() {
                        return;
                    }
                    pause(OUTBOX_PAUSE, &cancel).await;
                    continue;
                }
            };
            if let Some(last) = batch.last().map(|one| one.position) {
                if !self.deliver(batch, &cancel).await {
                    return;
                }
                after = last;
                continue;
            }
            after = after.max(seen);
            tokio::select! {
                () = cancel.cancelled() => return,
                changed = newest.wait_for(|status| status.newest > after) => {
                    if changed.is_err() {
                        return; // The outbox is closed.
                    }
                }
            }
        }
    }

    /// Delivers a batch, whatever it takes. `false`: cancelled before that.
    async fn deliver(&mut self, batch: Vec<Waiting>, cancel: &CancellationToken) -> bool {
        let mut parts = VecDeque::from([batch]);
        let mut backoff = Backoff::default();
        while let Some(mut part) = parts.pop_front() {
            let Some(last) = part.last().map(|one| one.position) else {
                continue;
            };
            let refused = match self.send(&part).await {
                Ok(()) => Vec::new(),
                Err(status) => match judge(&status, part.len()) {
                    Verdict::Refused(indices) => {
                        let reason = status.message().to_owned();
                        let chosen = indices.into_iter().filter_map(|index| part.get(index));
                        chosen
                            .map(|one| (one.event.clone(), reason.clone()))
                            .collect()
                    }
                    Verdict::Split => {
                        let right = part.split_off(part.len() / 2);
                        parts.push_front(right);
                        parts.push_front(part);
                        continue;
                    }
                    Verdict::Again => {
                        self.failed(&status);
                        if cancel.is_cancelled() {
                            return false;
                        }
                        pause(backoff.next(&self.random), cancel).await;
                        parts.push_front(part);
                        continue;
                    }
                },
            };
            backoff = Backoff::default();
            let (sent, aside) = (part.len() as u64, refused.len() as u64);
            self.succeeded(sent - aside, aside);
            if !refused.is_empty() && self.outbox.put_aside(refused).await.is_err() {
                return false;
            }
            // Only when the outbox is closed: then they are sent again after the start.
            if self.outbox.delivered(last).await.is_err() {
                return false;
            }
        }
        true
    }

    async fn send(&mut self, part: &[Waiting]) -> Result<(), Status> {
        let events = part.iter().map(|one| {
            let mut event = one.event.event.clone();
            event::mark_accepted(&mut event, one.event.received_at);
            event
        });
        let mut request = Request::new(HealthEvents {
            version: EVENT_VERSION,
            events: events.collect(),
        });
        request.set_timeout(DEADLINE);
        if let Some(value) = (self.header)().map_err(Status::unauthenticated)? {
            request.metadata_mut().insert("authorization", value);
        }
        // Also where the connection hangs and nobody tells us.
        let sending = self.client.health_event_occurred_v1(request);
        match tokio::time::timeout(DEADLINE, sending).await {
            Ok(answer) => answer.map(drop),
            Err(_) => Err(Status::deadline_exceeded(format!(
                "no answer in {} s",
                DEADLINE.as_secs()
            ))),
        }
    }

    fn succeeded(&self, delivered: u64, refused: u64) {
        self.metrics.delivered(delivered, refused);
        let waited = self.outbox.status().borrow().events;
        self.status.send_modify(|status| {
            if status.failing.take().is_some() {
                tracing::info!(
                    waiting = waited,
                    "events are delivered to the controller again"
                );
            }
            status.delivered += delivered;
            status.refused += refused;
        });
    }

    fn failed(&self, status: &Status) {
        self.metrics.failed(status.code());
        let text = describe(status);
        self.status.send_modify(|known| {
            if known.failing.as_ref() != Some(&text) {
                tracing::warn!(
                    err = text,
                    waiting = self.outbox.status().borrow().events,
                    "events wait for the controller; it is tried again"
                );
                known.failing = Some(text);
            }
        });
    }
}

/// What an answer means for a batch of `events`.
///
/// Refusals of single events are those that name them, and those that say the same of a
/// batch of one. Whatever else the controller or something before it says may pass: a
/// wrong token, a missing permission, a proxy. To take those for refusals would throw
/// events away.
fn judge(status: &Status, events: usize) -> Verdict {
    match status.code() {
        Code::InvalidArgument | Code::PermissionDenied
            if let Some(indices) = refusal::read_header(status.metadata(), events) =>
        {
            Verdict::Refused(indices)
        }
        Code::InvalidArgument | Code::OutOfRange if events > 1 => Verdict::Split,
        Code::InvalidArgument | Code::OutOfRange => Verdict::Refused(vec![0]),
        _ => Verdict::Again,
    }
}

/// A status with the causes that tonic hides.
fn describe(status: &Status) -> String {
    let mut text = format!("{}: {}", status.code(), status.message());
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

async fn pause(duration: Duration, cancel: &CancellationToken) {
    tokio::select! {
        () = cancel.cancelled() => {}
        () = tokio::time::sleep(duration) => {}
    }
}

// === impl Backoff ===

impl Default for Backoff {
    fn default() -> Self {
        Self { next: PAUSES.0 }
    }
}

impl Backoff {
    /// The next pause: between half of what is due and all of it, at random.
    fn next(&mut self, random: &RandomState) -> Duration {
        let due = self.next;
        self.next = (due * 2).min(PAUSES.1);
        let half = due / 2;
        // The state of the hasher is random, and what is hashed never comes again.
        let spread = random.hash_one(std::time::Instant::now()) % 1024;
        half + half * u32::try_from(spread).unwrap_or(0) / 1024
    }
}

#[cfg(test)]
mod tests;
