//! Brings what waits in the outbox to the controller, by the gRPC service that monitors
//! use.
//!
//! Events go oldest first, one request at a time, so the order stays. A request whose events are
//! not taken is made again for ever, with growing pauses. What is refused for what it is would be
//! refused for ever: it is put aside (`outbox/refused.rs`), counted and logged.
//!
//! Where the receiver fails (INTERNAL and the like, which a store that is full or away does not
//! answer), or refuses something without saying what, fewer events are sent at once. One that
//! fails alone is left behind and tried beside the others, which shows whose fault it is
//! (`suspects.rs`); then it is put aside, too.
//!
//! Who answers may be another controller, with a store that lacks what the one before had
//! taken: it refuses the request (`addressee.rs`), and all that the outbox has kept is sent
//! again, in order, before anything new. While something is kept and nothing is to be sent,
//! an empty request asks now and then who is there.
//!
//! A request may arrive twice. Events carry the id and the time that they were accepted
//! with, so the store takes each once.

pub(crate) mod answer;
mod header;
mod metrics;
mod pauses;
mod suspects;

use std::time::Duration;

use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{EVENT_VERSION, HealthEvents, keys};
use jiff::Timestamp;
use model::event;
use runtime::backoff::Backoff;
use runtime::metrics::Metrics;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::outbox::{Outbox, OutboxStatus, WaitingEvent};
use crate::{MAX_REQUEST_BYTES, addressee};
use answer::NotTaken;
use metrics::DeliveryMetrics;
use pauses::{PAUSES, Pauses, Stay, pause};
use suspects::Suspects;

pub use header::{Header, token_header};

/// Most events in a request.
const BATCH: usize = 500;
/// About how many bytes a request has; far below what receivers take.
const BATCH_BYTES: u64 = 1024 * 1024;
/// Time after which a request that is not answered is sent again.
const DEADLINE: Duration = Duration::from_secs(10);
/// Attempts to send a batch whole on which the receiver fails, before its events are sent one
/// by one: with the pauses between, some three seconds.
const STRIKES: u32 = 5;

/// The kind of receiver that is delivered to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// A controller of ours.
    Controller,
    /// Another service that an operator has events handed on to.
    SinkTarget,
}

/// The delivery of the events of an outbox to one receiver.
pub struct Delivery {
    receiver: Receiver,
    outbox: Outbox,
    client: PlatformConnectorClient<Channel>,
    header: Header,
    metrics: DeliveryMetrics,
    status: watch::Sender<DeliveryStatus>,
    pauses: Pauses,
    /// The pauses between attempts that fail.
    backoff: Backoff,
    /// The position up to which all is done, but for suspects.
    done: u64,
    /// Most events of the next request.
    size: usize,
    /// Failures of the receiver since all up to `narrow_until` was done.
    strikes: u32,
    /// The position up to which `size` may be less than [`BATCH`].
    narrow_until: u64,
    suspects: Suspects,
    /// The time at which the next suspect is tried.
    suspect_at: Instant,
    /// The store that has what is delivered.
    store: Option<String>,
    /// Another store that has answered.
    elsewhere: Option<String>,
    stay: Stay,
    /// The time of the last request.
    asked_at: Instant,
}

/// The state of delivery, for those who show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryStatus {
    /// The reason why the last attempt failed; `None` after one that did not.
    pub failing: Option<String>,
    /// Events delivered.
    pub delivered: u64,
    /// Events that the controller refused, and that were put aside.
    pub refused: u64,
    /// Events on which the controller failed while it took others, and that were put aside.
    pub not_taken: u64,
    /// Events on which the controller fails, and that are not given up yet.
    pub suspects: usize,
    /// The store that has taken what is delivered, as it calls itself.
    pub store: Option<String>,
    /// Number of changes to another store, since the start.
    pub store_changes: u64,
    /// Events that were sent again for it, since the start.
    pub resent: u64,
}

/// The reason why an event is put aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// The receiver says that it is not to be taken.
    Refused,
    /// The receiver fails on it.
    Failed,
}

// === impl Delivery ===

impl Delivery {
    /// Delivers from `outbox` over `channel` to a controller.
    pub fn new(outbox: Outbox, channel: Channel, header: Header, metrics: &Metrics) -> Self {
        Self::to(Receiver::Controller, outbox, channel, header, metrics)
    }

    /// Delivers from `outbox` over `channel` to a receiver of some kind.
    pub(crate) fn to(
        receiver: Receiver,
        outbox: Outbox,
        channel: Channel,
        header: Header,
        metrics: &Metrics,
    ) -> Self {
        let client = PlatformConnectorClient::new(channel);
        let store = outbox.opened_for();
        let status = DeliveryStatus {
            store: store.clone(),
            ..DeliveryStatus::default()
        };
        let now = Instant::now();
        Self {
            receiver,
            outbox,
            client: client.max_encoding_message_size(MAX_REQUEST_BYTES),
            header,
            metrics: DeliveryMetrics::new(receiver, metrics),
            status: watch::Sender::new(status),
            pauses: PAUSES,
            backoff: PAUSES.backoff(),
            done: 0,
            size: BATCH,
            strikes: 0,
            narrow_until: 0,
            suspects: Suspects::default(),
            suspect_at: now,
            store,
            elsewhere: None,
            stay: Stay::new(&PAUSES),
            asked_at: now,
        }
    }

    /// Returns the state of delivery, as it changes.
    pub fn status(&self) -> watch::Receiver<DeliveryStatus> {
        self.status.subscribe()
    }

    /// Runs until `cancel`, and then until nothing waits or an attempt fails. What is not
    /// delivered stays in the outbox.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut newest = self.outbox.status();
        while self.step(&mut newest, &cancel).await.is_some() {}
    }

    /// Makes one request, or waits for something to send. `None`: it has ended.
    async fn step(
        &mut self,
        newest: &mut watch::Receiver<OutboxStatus>,
        cancel: &CancellationToken,
    ) -> Option<()> {
        if let Some(store) = self.elsewhere.take() {
            if self.stay.is_over() {
                self.turn_to(store).await?;
            } else if cancel.is_cancelled() {
                return None;
            } else {
                pause(self.backoff.pause(), cancel).await;
            }
        }
        if Instant::now() >= self.suspect_at
            && let Some(position) = self.suspects.next()
        {
            return self.try_suspect(position, cancel).await;
        }
        // Looked at before the read: if that finds nothing, nothing waits up to here.
        let seen = newest.borrow_and_update().newest;
        let batch = self.read(self.done, self.size, cancel).await?;
        if batch.is_empty() {
            self.done = self.done.max(seen);
            return self.wait(newest, cancel).await;
        }
        self.deliver(&batch, cancel).await
    }

    /// Waits for an event, or for the time of something else.
    async fn wait(
        &mut self,
        newest: &mut watch::Receiver<OutboxStatus>,
        cancel: &CancellationToken,
    ) -> Option<()> {
        let asks = self.receiver == Receiver::Controller && newest.borrow().kept > 0;
        let (done, suspected) = (self.done, self.suspects.len() > 0);
        let ask = tokio::select! {
            // What has come in before the end is worked off.
            biased;
            changed = newest.wait_for(|status| status.newest > done) => {
                // Fails once the outbox is closed.
                drop(changed.ok()?);
                false
            }
            () = cancel.cancelled() => return None,
            () = tokio::time::sleep_until(self.suspect_at), if suspected => false,
            () = tokio::time::sleep_until(self.asked_at + self.pauses.ask), if asks => true,
        };
        if ask {
            // Who is away is noticed when there is something to send.
            drop(self.send(&[]).await);
        }
        Some(())
    }

    /// Turns to another store, and begins again for it. `None`: the outbox is closed.
    async fn turn_to(&mut self, store: String) -> Option<()> {
        let again = self.outbox.turn_to(store.clone()).await.ok()?;
        let before = self.store.replace(store.clone());
        tracing::info!(
            store,
            before,
            events = again,
            "events are brought to another store: what is kept of those before is sent again"
        );
        if before.is_some() || again > 0 {
            self.metrics.store_changed(again);
            self.stay.begin();
        }
        (self.done, self.narrow_until, self.suspects) = (0, 0, Suspects::default());
        self.status.send_modify(|status| {
            status.store_changes += u64::from(before.is_some());
            status.resent += again as u64;
            status.store = Some(store);
        });
        Some(())
    }

    /// Returns what waits behind `after`. `None`: it is cancelled, and cannot be read.
    async fn read(
        &self,
        after: u64,
        events: usize,
        cancel: &CancellationToken,
    ) -> Option<Vec<WaitingEvent>> {
        loop {
            match self.outbox.waiting(after, events, BATCH_BYTES).await {
                Ok(batch) => return Some(batch),
                Err(error) => {
                    tracing::error!(err = %runtime::logging::chain(&error), "the outbox cannot be read");
                    if cancel.is_cancelled() {
                        return None;
                    }
                    pause(self.pauses.alone, cancel).await;
                }
            }
        }
    }

    /// Sends the oldest events that wait. `None`: it was cancelled, or the outbox is closed.
    async fn deliver(&mut self, batch: &[WaitingEvent], cancel: &CancellationToken) -> Option<()> {
        let last = batch.last()?.position;
        if let Err((why, status)) = self.attempt(batch).await {
            if self.elsewhere.is_some() {
                return Some(());
            }
            self.narrow_until = self.narrow_until.max(last);
            if why == NotTaken::Split {
                self.size = batch.len().div_ceil(2);
                return Some(());
            }
            self.failed(&status);
            if cancel.is_cancelled() {
                return None;
            }
            let due = self.backoff.pause();
            self.strikes += u32::from(why == NotTaken::Failed);
            if why != NotTaken::Failed || self.strikes < STRIKES {
                pause(due, cancel).await;
                return Some(());
            }
            self.size = 1;
            pause(due.min(self.pauses.alone), cancel).await;
            let [one] = batch else {
                return Some(());
            };
            tracing::warn!(
                event = one.event.event.id,
                node = one.event.event.node_name,
                check = one.event.event.check_name,
                err = answer::describe(&status),
                "an event is not taken; those behind it are sent, and it is tried again"
            );
            self.suspects.accuse(one.position);
        } else {
            self.backoff.reset();
            self.size = (self.size * 2).min(BATCH);
        }
        self.done = self.done.max(last);
        if self.done >= self.narrow_until {
            (self.size, self.strikes) = (BATCH, 0);
        }
        self.forget_done().await
    }

    /// Sends a suspect again, alone. `None`: it was cancelled, or the outbox is closed.
    async fn try_suspect(&mut self, position: u64, cancel: &CancellationToken) -> Option<()> {
        let mut one = self.read(position.saturating_sub(1), 1, cancel).await?;
        one.retain(|one| one.position == position);
        if one.is_empty() {
            // Damaged since.
            self.suspects.clear(position);
        } else if let Err((why, status)) = self.attempt(&one).await {
            if self.elsewhere.is_some() {
                return Some(());
            }
            if why == NotTaken::Failed {
                self.metrics.failed(status.code());
                if self.suspects.accuse(position) {
                    self.put_aside(&one, &status, Why::Failed).await;
                }
            } else {
                self.failed(&status);
            }
        }
        let wait = match self.suspects.others_taken_since(position) {
            None => {
                self.backoff.reset();
                Duration::ZERO
            }
            Some(_) if cancel.is_cancelled() => return None,
            Some(true) => self.pauses.alone,
            // Where nothing else is taken, time tells no more than a try now and then.
            Some(false) => self.backoff.pause(),
        };
        self.suspect_at = Instant::now() + wait;
        self.forget_done().await
    }

    /// Sends events, and puts aside those of them that are refused. An error says why none of
    /// them is done.
    async fn attempt(&mut self, events: &[WaitingEvent]) -> Result<(), (NotTaken, Status)> {
        let Err(status) = self.send(events).await else {
            for one in events {
                self.suspects.clear(one.position);
            }
            self.succeeded(events.len());
            return Ok(());
        };
        if self.elsewhere.is_some() {
            if !self.stay.is_over() {
                self.failed(&status);
            }
            return Err((NotTaken::Again, status));
        }
        match answer::judge(&status, events.len()) {
            NotTaken::Refused(indices) => {
                let refused = indices.into_iter().filter_map(|index| events.get(index));
                let refused: Vec<_> = refused.cloned().collect();
                self.succeeded(events.len() - refused.len());
                self.put_aside(&refused, &status, Why::Refused).await;
                Ok(())
            }
            why => Err((why, status)),
        }
    }

    /// Puts events aside on disk. Those for which there is no room stay in the outbox, as
    /// suspects.
    async fn put_aside(&mut self, events: &[WaitingEvent], status: &Status, why: Why) {
        let reason = match why {
            Why::Refused => status.message().to_owned(),
            Why::Failed => answer::describe(status),
        };
        let kept = events.iter().map(|one| (one.event.clone(), reason.clone()));
        if self.outbox.put_aside(kept.collect()).await.is_err() {
            for one in events {
                self.suspects.accuse(one.position);
            }
            return;
        }
        for one in events {
            self.suspects.clear(one.position);
        }
        let count = events.len() as u64;
        self.metrics.put_aside(why, count);
        self.status.send_modify(|status| match why {
            Why::Refused => status.refused += count,
            Why::Failed => status.not_taken += count,
        });
    }

    /// Lets the outbox forget what is done: everything up to the first suspect. `None`: it is
    /// closed; then it is sent again after the start.
    async fn forget_done(&mut self) -> Option<()> {
        let suspects = self.suspects.len();
        self.metrics.suspects(suspects);
        self.status.send_if_modified(|status| {
            std::mem::replace(&mut status.suspects, suspects) != suspects
        });
        let first = self.suspects.first();
        let done = first.map_or(self.done, |first| self.done.min(first - 1));
        self.outbox.delivered(done).await.ok()
    }

    /// Makes one request, which an answer OK acknowledges.
    async fn send(&mut self, events: &[WaitingEvent]) -> Result<(), Status> {
        self.asked_at = Instant::now();
        let request = self.request(events)?;
        let began = Instant::now();
        let sending = self.client.health_event_occurred_v1(request);
        // Also where the connection hangs and nobody tells us.
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

    /// Notes that so many events were taken, and that the receiver is well.
    fn succeeded(&mut self, delivered: usize) {
        if delivered > 0 {
            self.suspects.taken();
        }
        let delivered = delivered as u64;
        self.metrics.delivered.inc_by(delivered);
        let waited = self.outbox.status().borrow().events;
        self.status.send_modify(|status| {
            if status.failing.take().is_some() {
                tracing::info!(
                    waiting = waited,
                    "events are delivered to {} again",
                    self.receiver.name()
                );
            }
            status.delivered += delivered;
        });
    }

    fn failed(&self, status: &Status) {
        self.metrics.failed(status.code());
        let text = answer::describe(status);
        self.status.send_modify(|known| {
            if known.failing.as_ref() != Some(&text) {
                tracing::warn!(
                    err = text,
                    waiting = self.outbox.status().borrow().events,
                    "events wait for {}; it is tried again",
                    self.receiver.name()
                );
                known.failing = Some(text);
            }
        });
    }
}

// === impl Receiver ===

impl Receiver {
    fn name(self) -> &'static str {
        match self {
            Self::Controller => "the controller",
            Self::SinkTarget => "the gRPC sink's target",
        }
    }
}

#[cfg(test)]
mod tests;
