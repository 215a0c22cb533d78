//! Delivery of events from the outbox to the controller, by the gRPC service that monitors use.
//!
//! Events are sent oldest first, one request at a time, so the order is kept. A failed request
//! is retried forever, with growing pauses. Events that are refused for their contents would be
//! refused forever: they are put aside (`outbox/refused.rs`), counted and logged.
//!
//! If the receiver fails (INTERNAL and the like, which a full or unreachable store does not
//! answer), or refuses something without saying what, fewer events are sent per request. An
//! event that fails alone becomes a suspect: it is left behind and retried alongside the
//! others, which shows whether the event or the receiver is at fault (`suspects.rs`). If the
//! event is, it is put aside, too.
//!
//! The receiver may turn out to be another controller, whose store lacks the events accepted by
//! the one before. It refuses the request (`addressee.rs`), and all events kept in the outbox
//! are sent again, in order, before any new one. While events are kept and none is to be sent,
//! an empty request now and then asks which store answers.
//!
//! A request may arrive twice. Events carry the id and the time of their acceptance, so the
//! store keeps each once.

pub(crate) mod answer;
mod header;
mod metrics;
mod pauses;
mod request;
mod suspects;

use std::time::Duration;

use contract::proto::platform_connector_client::PlatformConnectorClient;
use runtime::backoff::Backoff;
use runtime::metrics::Metrics;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::transport::Channel;

pub(crate) use metrics::described_metrics;

use crate::MAX_REQUEST_BYTES;
use crate::outbox::{Outbox, OutboxStatus, WaitingEvent};
use answer::NotTaken;
use metrics::DeliveryMetrics;
use pauses::{PAUSES, Pauses, Stay, pause};
use suspects::Suspects;

pub use header::{Header, token_header};

/// Most events in a request.
const BATCH: usize = 500;
/// Approximate size of a request (bytes); far below the limit of receivers.
const BATCH_BYTES: u64 = 1024 * 1024;
/// Attempts to send a batch as a whole while the receiver fails, before its events are sent one
/// by one: some three seconds, with the pauses between.
const STRIKES: u32 = 5;

/// Kind of a receiver of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// A controller of gpuwarden.
    Controller,
    /// Another service that an operator has events forwarded to.
    SinkTarget,
}

/// Delivery of the events of an outbox to one receiver.
pub struct Delivery {
    receiver: Receiver,
    outbox: Outbox,
    client: PlatformConnectorClient<Channel>,
    header: Header,
    metrics: DeliveryMetrics,
    status: watch::Sender<DeliveryStatus>,
    pauses: Pauses,
    /// Pauses between failed attempts.
    backoff: Backoff,
    /// Position of the last event such that it and all before it, except suspects, are done.
    done: u64,
    /// Most events of the next request.
    size: usize,
    /// Failures of the receiver since `narrow_until` was reached.
    strikes: u32,
    /// Last position that may be sent with a `size` below [`BATCH`].
    narrow_until: u64,
    suspects: Suspects,
    /// Time of the next attempt to send a suspect.
    suspect_at: Instant,
    /// Store that has the delivered events.
    store: Option<String>,
    /// Different store that has answered.
    elsewhere: Option<String>,
    stay: Stay,
    /// Time of the last request.
    asked_at: Instant,
}

/// State of delivery, for display.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryStatus {
    /// Reason why the last attempt failed; `None` if it succeeded.
    pub failing: Option<String>,
    /// Number of events delivered.
    pub delivered: u64,
    /// Number of events that the receiver refused, and that were put aside.
    pub refused: u64,
    /// Number of events that made the receiver fail while it accepted others, and that were put
    /// aside.
    pub not_taken: u64,
    /// Number of events that make the receiver fail, and that are still retried.
    pub suspects: usize,
    /// Id of the store that has the delivered events.
    pub store: Option<String>,
    /// Number of changes to another store, since the start.
    pub store_changes: u64,
    /// Number of events that were sent again for another store, since the start.
    pub resent: u64,
}

/// Reason why an event is put aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// The receiver refuses the event.
    Refused,
    /// The receiver fails on the event.
    Failed,
}

// === impl Delivery ===

impl Delivery {
    /// Creates the delivery from `outbox` to a controller at `channel`.
    pub fn new(outbox: Outbox, channel: Channel, header: Header, metrics: &Metrics) -> Self {
        Self::to(Receiver::Controller, outbox, channel, header, metrics)
    }

    /// Creates the delivery from `outbox` to a receiver at `channel`.
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

    /// Runs until `cancel`, and then until no event waits or an attempt fails. Undelivered
    /// events stay in the outbox.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut newest = self.outbox.status();
        while self.step(&mut newest, &cancel).await.is_some() {}
    }

    /// Makes one request, or waits for an event to send. Returns `None` at the end of delivery.
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
        // Read before the outbox is: if that finds nothing, no event waits up to here.
        let seen = newest.borrow_and_update().newest;
        let batch = self.read(self.done, self.size, cancel).await?;
        if batch.is_empty() {
            self.done = self.done.max(seen);
            return self.wait(newest, cancel).await;
        }
        self.deliver(&batch, cancel).await
    }

    /// Waits for an event, or until another request is due.
    async fn wait(
        &mut self,
        newest: &mut watch::Receiver<OutboxStatus>,
        cancel: &CancellationToken,
    ) -> Option<()> {
        let asks = self.receiver == Receiver::Controller && newest.borrow().kept > 0;
        let (done, suspected) = (self.done, self.suspects.len() > 0);
        let ask = tokio::select! {
            // Events that arrived before the end are still delivered.
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
            // A receiver that is unreachable is noticed when there are events to send.
            drop(self.send(&[]).await);
        }
        Some(())
    }

    /// Switches to another store, and starts again for it. Returns `None` if the outbox is
    /// closed.
    async fn turn_to(&mut self, store: String) -> Option<()> {
        let again = self.outbox.turn_to(store.clone()).await.ok()?;
        let before = self.store.replace(store.clone());
        tracing::info!(
            store,
            before,
            events = again,
            "events are delivered to another store: delivered events that are still kept are sent again"
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

    /// Returns the events that wait behind `after`. Returns `None` if the outbox cannot be read
    /// and delivery is cancelled.
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

    /// Sends the oldest events that wait. Returns `None` if cancelled, or if the outbox is
    /// closed.
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
                "the receiver fails on an event; later events are sent, and this one is retried"
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

    /// Sends a suspect again, alone. Returns `None` if cancelled, or if the outbox is closed.
    async fn try_suspect(&mut self, position: u64, cancel: &CancellationToken) -> Option<()> {
        let mut one = self.read(position.saturating_sub(1), 1, cancel).await?;
        one.retain(|one| one.position == position);
        if one.is_empty() {
            // The record was damaged since.
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
            // While the receiver accepts nothing, frequent attempts show nothing more.
            Some(false) => self.backoff.pause(),
        };
        self.suspect_at = Instant::now() + wait;
        self.forget_done().await
    }

    /// Sends events, and puts aside those that are refused. The error is the reason why none of
    /// the events is done.
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

    /// Puts events aside on disk. Events that find no room there stay in the outbox, as
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

    /// Releases finished events from the outbox: all up to the first suspect. Returns `None` if
    /// the outbox is closed; then they are sent again after a restart.
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

    /// Records that `delivered` events were accepted, and that the receiver works.
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
                    "events wait for {}; delivery is retried",
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
