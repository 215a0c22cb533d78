//! Brings what waits in the outbox to the controller, by the same gRPC service by which
//! monitors report.
//!
//! Oldest first, one batch at a time, so the order stays. A batch leaves the outbox when
//! it is answered OK; until then it is tried again for ever, with growing pauses. Events
//! that the controller refuses for what they are would be refused for ever: they are put
//! aside (`outbox/refused.rs`), counted and logged, and hold up nothing behind them.
//!
//! So does an event on which the controller fails (INTERNAL and the like, which a store
//! that is full or away does not answer): the events of a batch that fails again and again
//! are sent one by one, in their order, and one that goes on failing while others are taken is
//! put aside (`suspects.rs`).
//!
//! Who answers may be another controller, with a store that lacks what the one before had
//! taken: it refuses the request (`addressee.rs`), and all that the outbox has kept is sent
//! again, in order, before anything new. While something is kept and nothing is to be sent,
//! an empty request asks now and then who is there.
//!
//! A batch may arrive twice. Events carry the id and the time that they were accepted
//! with, so the store takes each once.

mod metrics;
mod pauses;
mod suspects;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use contract::proto::platform_connector_client::PlatformConnectorClient;
use contract::{EVENT_VERSION, HealthEvents, keys};
use domain::event;
use jiff::Timestamp;
use runtime::backoff::Backoff;
use runtime::metrics::Metrics;
use runtime::tcp_grpc;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::outbox::{Outbox, Waiting};
use crate::{MAX_REQUEST_BYTES, addressee, refusal};
use metrics::DeliveryMetrics;
use pauses::{PAUSES, Pauses, pause};
use suspects::Suspects;

/// Most events in a request.
const BATCH: usize = 500;
/// About how many bytes a request has; far below what receivers take.
const BATCH_BYTES: u64 = 1024 * 1024;
/// A request that is not answered by then is sent again.
const DEADLINE: Duration = Duration::from_secs(10);
/// How often a batch on which the receiver fails is sent whole before its events are sent one
/// by one: with the pauses between, some three seconds.
const STRIKES: u32 = 5;
/// What gives each request its `authorization` header; `None`: none is sent. An error
/// says why it cannot be made now.
pub type Header = Arc<dyn Fn() -> Result<Option<MetadataValue<Ascii>>, String> + Send + Sync>;

/// To whom is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiver {
    /// A controller of ours.
    Controller,
    /// Whoever an operator wants events to be handed on to.
    SinkTarget,
}

/// Delivers until it is cancelled.
pub struct Delivery {
    receiver: Receiver,
    outbox: Outbox,
    client: PlatformConnectorClient<Channel>,
    header: Header,
    metrics: DeliveryMetrics,
    status: watch::Sender<DeliveryStatus>,
    suspects: Suspects,
    /// All up to here is done, but for suspects.
    done: u64,
    /// The store that has what is delivered.
    store: Option<String>,
    /// Another one that has answered.
    elsewhere: Option<String>,
    /// When we turned to it, and how long we stay at least.
    turned: Option<(Instant, Duration)>,
    /// When somebody was last asked for anything.
    asked_at: Instant,
    pauses: Pauses,
}

/// How delivery does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeliveryStatus {
    /// Why the last attempt failed; `None` after one that did not.
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
    /// How often it was another one than before, since the start.
    pub store_changes: u64,
    /// Events that were sent again for it, since the start.
    pub resent: u64,
}

/// What an answer means for a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    /// Not now.
    Again,
    /// The receiver failed: over something in it, or altogether.
    Failed,
    /// Something in it is refused; smaller parts show what.
    Split,
    /// These, by index, are refused; all others are stored.
    Refused(Vec<usize>),
}

/// Why an event is put aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// The receiver says that it is not to be taken.
    Refused,
    /// The receiver fails on it.
    Failed,
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passage {
    /// It is done, but for suspects.
    Done,
    /// Another store answers than the one that has what was delivered.
    Elsewhere,
    /// It was cancelled, or the outbox is closed.
    Ended,
}

// === impl Delivery ===

impl Delivery {
    /// Delivers from `outbox` over `channel` to a controller.
    pub fn new(outbox: Outbox, channel: Channel, header: Header, metrics: &Metrics) -> Self {
        Self::to(Receiver::Controller, outbox, channel, header, metrics)
    }

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
        Self {
            receiver,
            outbox,
            client: client.max_encoding_message_size(MAX_REQUEST_BYTES),
            header,
            metrics: DeliveryMetrics::new(receiver, metrics),
            status: watch::Sender::new(status),
            suspects: Suspects::default(),
            done: 0,
            store,
            elsewhere: None,
            turned: None,
            asked_at: Instant::now(),
            pauses: PAUSES,
        }
    }

    /// Returns how delivery does, as it changes.
    pub fn status(&self) -> watch::Receiver<DeliveryStatus> {
        self.status.subscribe()
    }

    /// Runs until `cancel`, and then until nothing waits or an attempt fails. What is not
    /// delivered stays in the outbox.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut newest = self.outbox.status();
        let mut after = 0;
        let mut backoff = self.pauses.backoff();
        let mut next_try = Instant::now();
        loop {
            if let Some(store) = self.elsewhere.take() {
                if self.may_turn() {
                    if !self.turn_to(store).await {
                        return;
                    }
                    after = 0;
                } else if cancel.is_cancelled() {
                    return;
                } else {
                    pause(backoff.pause(), &cancel).await;
                }
            }
            // Looked at before the read: if that finds nothing, nothing waits up to here.
            let seen = newest.borrow_and_update().newest;
            let Some(batch) = self.read(after, BATCH, &cancel).await else {
                return;
            };
            let last = batch.last().map(|one| one.position);
            if let Some(last) = last {
                match self.deliver(batch, &cancel).await {
                    Passage::Ended => return,
                    Passage::Elsewhere => continue,
                    Passage::Done => {}
                }
                after = last;
                backoff.reset();
            } else {
                after = after.max(seen);
            }
            if self.suspects.len() > 0 && Instant::now() >= next_try {
                let Some(pause) = self.try_suspect(&mut backoff, &cancel).await else {
                    return;
                };
                next_try = Instant::now() + pause;
            }
            if last.is_some() || self.elsewhere.is_some() {
                continue;
            }
            let asks = self.receiver == Receiver::Controller && newest.borrow().kept > 0;
            let suspected = self.suspects.len() > 0;
            let ask = tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep_until(next_try), if suspected => false,
                () = tokio::time::sleep_until(self.asked_at + self.pauses.ask), if asks => true,
                changed = newest.wait_for(|status| status.newest > after) => {
                    if changed.is_err() {
                        return; // The outbox is closed.
                    }
                    false
                }
            };
            if ask {
                // Who is away is noticed when there is something to send.
                drop(self.send(&[]).await);
            }
        }
    }

    /// Returns whether it is long enough since the last change of the store.
    fn may_turn(&self) -> bool {
        self.turned
            .is_none_or(|(at, stay)| Instant::now() >= at + stay)
    }

    /// Turns to another store, and begins again for it. `false`: the outbox is closed.
    async fn turn_to(&mut self, store: String) -> bool {
        let Ok(again) = self.outbox.turn_to(store.clone()).await else {
            return false;
        };
        let before = self.store.replace(store.clone());
        tracing::info!(
            store,
            before,
            events = again,
            "events are brought to another store: what is kept of those before is sent again"
        );
        if before.is_some() || again > 0 {
            self.metrics.store_changed(again);
            let now = Instant::now();
            self.turned = Some((now, self.pauses.stay(self.turned, now)));
        }
        (self.done, self.suspects) = (0, Suspects::default());
        self.status.send_modify(|status| {
            status.store_changes += u64::from(before.is_some());
            status.resent += again as u64;
            status.store = Some(store);
        });
        true
    }

    /// Returns what waits behind `after`. `None`: it is cancelled, and cannot be read.
    async fn read(
        &self,
        after: u64,
        events: usize,
        cancel: &CancellationToken,
    ) -> Option<Vec<Waiting>> {
        loop {
            match self.outbox.waiting(after, events, BATCH_BYTES).await {
                Ok(batch) => return Some(batch),
                Err(error) => {
                    tracing::error!(err = %runtime::logging::chain(&error), "the outbox cannot be read");
                    if cancel.is_cancelled() {
                        return None;
                    }
                    pause(self.pauses.outbox, cancel).await;
                }
            }
        }
    }

    /// Delivers a batch, whatever it takes, but for suspects, which are left behind.
    async fn deliver(&mut self, batch: Vec<Waiting>, cancel: &CancellationToken) -> Passage {
        let mut parts = VecDeque::from([batch]);
        let mut backoff = self.pauses.backoff();
        let mut strikes = 0;
        while let Some(part) = parts.pop_front() {
            let Some(last) = part.last().map(|one| one.position) else {
                continue;
            };
            if let Err(status) = self.send(&part).await {
                if self.elsewhere.is_some() {
                    if !self.may_turn() {
                        self.failed(&status);
                    }
                    return Passage::Elsewhere;
                }
                match judge(&status, part.len()) {
                    Verdict::Refused(indices) => {
                        backoff.reset();
                        let refused = indices.into_iter().filter_map(|index| part.get(index));
                        let refused: Vec<_> = refused.cloned().collect();
                        self.succeeded((part.len() - refused.len()) as u64);
                        self.put_aside(&refused, &status, Why::Refused).await;
                    }
                    Verdict::Split => {
                        put_back(&mut parts, &part, part.len().div_ceil(2));
                        continue;
                    }
                    verdict => {
                        self.failed(&status);
                        if cancel.is_cancelled() {
                            return Passage::Ended;
                        }
                        let failed = verdict == Verdict::Failed;
                        strikes += u32::from(failed);
                        let alone = failed && strikes >= STRIKES;
                        let due = backoff.pause();
                        let longest = if alone { self.pauses.alone } else { due };
                        pause(due.min(longest), cancel).await;
                        if !alone || part.len() > 1 {
                            put_back(&mut parts, &part, if alone { 1 } else { part.len() });
                            continue;
                        }
                        self.suspect(&part, &status);
                    }
                }
            } else {
                backoff.reset();
                self.succeeded(part.len() as u64);
            }
            if !self.forget_done(last).await {
                return Passage::Ended;
            }
        }
        Passage::Done
    }

    /// Sends the next suspect again, alone, and returns how long to wait before the one after it;
    /// `None`: it was cancelled, or the outbox is closed.
    async fn try_suspect(
        &mut self,
        backoff: &mut Backoff,
        cancel: &CancellationToken,
    ) -> Option<Duration> {
        let position = self.suspects.next()?;
        let mut one = self.read(position.saturating_sub(1), 1, cancel).await?;
        one.retain(|one| one.position == position);
        let decided = if one.is_empty() {
            // Damaged since.
            self.suspects.clear(position);
            true
        } else if let Err(status) = self.send(&one).await {
            match judge(&status, 1) {
                Verdict::Refused(_) => self.put_aside(&one, &status, Why::Refused).await,
                Verdict::Failed => {
                    self.metrics.failed(status.code());
                    let at_fault = self.suspects.accuse(position);
                    at_fault && self.put_aside(&one, &status, Why::Failed).await
                }
                Verdict::Again | Verdict::Split => {
                    self.failed(&status);
                    false
                }
            }
        } else {
            self.suspects.clear(position);
            self.succeeded(1);
            true
        };
        if !self.forget_done(0).await || (cancel.is_cancelled() && !decided) {
            return None;
        }
        Some(if decided {
            backoff.reset();
            Duration::ZERO
        } else if self.suspects.others_taken_since(position) {
            self.pauses.alone
        } else {
            // Where nothing else is taken, time tells no more than a try now and then.
            backoff.pause()
        })
    }

    /// Leaves an event behind that failed alone.
    fn suspect(&mut self, part: &[Waiting], status: &Status) {
        for one in part {
            tracing::warn!(
                event = one.event.event.id,
                node = one.event.event.node_name,
                check = one.event.event.check_name,
                err = describe(status),
                "an event is not taken; those behind it are sent, and it is tried again"
            );
            self.suspects.accuse(one.position);
        }
    }

    /// Puts events aside on disk. Those for which there is no room stay in the outbox and
    /// are tried again: `false`.
    async fn put_aside(&mut self, events: &[Waiting], status: &Status, why: Why) -> bool {
        if events.is_empty() {
            return true;
        }
        let reason = match why {
            Why::Refused => status.message().to_owned(),
            Why::Failed => describe(status),
        };
        let kept = events.iter().map(|one| (one.event.clone(), reason.clone()));
        let kept = self.outbox.put_aside(kept.collect()).await;
        for one in events {
            match kept {
                Ok(()) => self.suspects.clear(one.position),
                Err(_) => {
                    self.suspects.accuse(one.position);
                }
            }
        }
        if kept.is_err() {
            return false;
        }
        let count = events.len() as u64;
        self.metrics.put_aside(why, count);
        self.status.send_modify(|status| match why {
            Why::Refused => status.refused += count,
            Why::Failed => status.not_taken += count,
        });
        true
    }

    /// Lets the outbox forget what is done: everything up to the first suspect, or else
    /// up to `last`. `false`: it is closed; then it is sent again after the start.
    async fn forget_done(&mut self, last: u64) -> bool {
        self.done = self.done.max(last);
        let suspects = self.suspects.len();
        self.metrics.suspects(suspects);
        self.status.send_if_modified(|status| {
            let changed = status.suspects != suspects;
            status.suspects = suspects;
            changed
        });
        let first = self.suspects.first();
        let done = first.map_or(self.done, |first| self.done.min(first - 1));
        self.outbox.delivered(done).await.is_ok()
    }

    async fn send(&mut self, part: &[Waiting]) -> Result<(), Status> {
        let events = part.iter().map(|one| {
            let mut event = one.event.event.clone();
            if self.receiver == Receiver::Controller {
                event::mark_accepted(&mut event, one.event.received_at);
            }
            event
        });
        let mut request = Request::new(HealthEvents {
            version: EVENT_VERSION,
            events: events.collect(),
        });
        request.set_timeout(DEADLINE);
        if self.receiver == Receiver::Controller {
            addressee::expect(request.metadata_mut(), self.store.as_deref());
        }
        self.asked_at = Instant::now();
        if let Some(value) = (self.header)().map_err(Status::unauthenticated)? {
            request.metadata_mut().insert("authorization", value);
        }
        if self.receiver == Receiver::Controller
            && let Ok(now) = Timestamp::now().to_string().parse()
        {
            request.metadata_mut().insert(keys::HEADER_SENT_AT, now);
        }
        // Also where the connection hangs and nobody tells us.
        let (began, sending) = (
            Instant::now(),
            self.client.health_event_occurred_v1(request),
        );
        let answer = match tokio::time::timeout(DEADLINE, sending).await {
            Ok(answer) => answer,
            Err(_) => Err(Status::deadline_exceeded(format!(
                "no answer in {} s",
                DEADLINE.as_secs()
            ))),
        };
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

    fn succeeded(&mut self, delivered: u64) {
        if delivered > 0 {
            self.suspects.taken();
        }
        self.metrics.delivered(delivered);
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
        let text = describe(status);
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

/// Puts a part of a batch before the others, cut into parts of `size` events.
fn put_back(parts: &mut VecDeque<Vec<Waiting>>, part: &[Waiting], size: usize) {
    for part in part.chunks(size).rev() {
        parts.push_front(part.to_vec());
    }
}

/// Returns what an answer means for a batch of `events`.
///
/// Refusals of single events are those that name them, and those that say the same of a
/// batch of one. Whatever else the controller or something before it says may pass: a
/// wrong token, a missing permission, a proxy. To take those for refusals would throw
/// events away.
fn judge(status: &Status, events: usize) -> Verdict {
    if tcp_grpc::is_refused(status) {
        return Verdict::Again;
    }
    match status.code() {
        Code::InvalidArgument | Code::PermissionDenied
            if let Some(indices) = refusal::read_header(status.metadata(), events) =>
        {
            Verdict::Refused(indices)
        }
        Code::InvalidArgument | Code::OutOfRange if events > 1 => Verdict::Split,
        Code::InvalidArgument | Code::OutOfRange => Verdict::Refused(vec![0]),
        // A controller whose store is full, closed or out of order says so by
        // RESOURCE_EXHAUSTED or UNAVAILABLE. These are what is left: a fault of its own, or
        // of something between, in the face of this batch (CANCELLED: its task ended
        // without an answer).
        Code::Internal | Code::Unknown | Code::DataLoss | Code::Cancelled => Verdict::Failed,
        _ => Verdict::Again,
    }
}

/// Returns the header with the token that `file` holds; without one none is sent. The token is read
/// for every request: the kubelet replaces it long before it ends.
pub fn token_header(file: Option<PathBuf>) -> Header {
    Arc::new(move || {
        let Some(path) = &file else {
            return Ok(None);
        };
        let shown = path.display();
        let token = std::fs::read_to_string(path);
        let token = token.map_err(|error| format!("cannot read the token {shown}: {error}"))?;
        let value = format!("Bearer {}", token.trim()).parse();
        value
            .map(Some)
            .map_err(|_| format!("{shown} holds no token"))
    })
}

/// Returns a status with the causes that tonic hides.
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
