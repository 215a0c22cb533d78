//! Hands events over to the connector while the monitor continues: a store that accepts nothing
//! for a while must not let the kernel's ring buffer overwrite unread records.

use std::time::Duration;

use connector::{AcceptError, Caller, Connector};
use contract::{EVENT_VERSION, HealthEvent, HealthEvents};
use futures::future::BoxFuture;
use model::event::MAX_EVENTS;
use runtime::backoff::Backoff;
use runtime::logging::{Seldom, chain};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::Reporter;

/// Pauses between attempts to hand events over, doubling from the first to the last.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Attempts with a single event that the store refuses, before it is dropped.
const REFUSALS: u32 = 3;

/// The request in progress to the connector, or the time of the next attempt.
pub(super) struct HandOver {
    under_way: Option<BoxFuture<'static, HandedOver>>,
    not_before: Option<Instant>,
    backoff: Backoff,
    refusals: u32,
    /// Limits the log lines about refused events.
    refusal_log: Seldom,
}

/// Number of events in a request, and the connector's answer.
pub(super) type HandedOver = (usize, Result<(), AcceptError>);

// === impl HandOver ===

impl HandOver {
    /// Returns true if a request may start now.
    fn is_free(&mut self) -> bool {
        if self.not_before.is_some_and(|then| Instant::now() >= then) {
            self.not_before = None;
        }
        self.under_way.is_none() && self.not_before.is_none()
    }

    /// Returns true if a request is in progress.
    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Ends the pause before the next attempt.
    pub(super) fn try_now(&mut self) {
        self.not_before = None;
    }

    /// Starts a request with waiting events.
    fn begin(&mut self, waiting: &[HealthEvent], connector: &Connector) {
        // After a refusal one by one, to find the refused event.
        let most = if self.refusals == 0 { MAX_EVENTS } else { 1 };
        let events: Vec<HealthEvent> = waiting.iter().take(most).cloned().collect();
        let connector = connector.clone();
        self.under_way = Some(Box::pin(async move {
            let count = events.len();
            let version = EVENT_VERSION;
            let batch = HealthEvents { version, events };
            let answer = connector.accept(batch, &Caller::Monitor).await;
            (count, answer.map(drop))
        }));
    }

    /// Returns the connector's next answer; `None` if the pause before the next attempt is
    /// over. Waits forever if there is neither. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<HandedOver> {
        if let Some(under_way) = &mut self.under_way {
            let answer = under_way.await;
            self.under_way = None;
            return Some(answer);
        }
        match self.not_before {
            Some(then) => tokio::time::sleep_until(then).await,
            None => std::future::pending().await,
        }
        None
    }

    /// Starts the pause before the next attempt.
    fn begin_pause(&mut self) {
        self.not_before = Some(Instant::now() + self.backoff.pause());
    }
}

impl Default for HandOver {
    fn default() -> Self {
        Self {
            under_way: None,
            not_before: None,
            backoff: Backoff::new(PAUSES.0, PAUSES.1),
            refusals: 0,
            refusal_log: Seldom::default(),
        }
    }
}

// === impl Reporter ===

impl<M> Reporter<M>
where
    M: Clone + Default + Serialize + DeserializeOwned + Send + Sync + 'static,
{
    /// Starts to hand over waiting events, if there are any and no request is in progress.
    /// Events that are not in the file, and would not be found again, are saved first.
    pub(super) fn begin_hand_over(&mut self) {
        if self.state.outbox.is_empty() || !self.hand_over.is_free() {
            return;
        }
        let ready = self
            .state
            .outbox
            .get(..self.may_hand_over())
            .unwrap_or_default();
        if ready.is_empty() {
            self.save();
        } else {
            self.hand_over.begin(ready, &self.frame.connector);
        }
    }

    /// Processes the result of [`HandOver::next`].
    pub(super) fn handed_over(&mut self, answer: Option<HandedOver>) {
        let Some((count, answer)) = answer else {
            return;
        };
        match answer {
            Ok(()) => {
                self.source.handed_over(self.now(), 0, Ok(()));
                self.sent(count);
                self.hand_over.backoff.reset();
                self.hand_over.refusals = self.hand_over.refusals.min(1);
            }
            Err(AcceptError::Refused { refused, .. }) => {
                // All others are stored; the refused ones would be refused again.
                let newest = match refused.last() {
                    Some(last) if last.index + 1 == count => Err(last.problem.to_string()),
                    _ => Ok(()),
                };
                self.refused(refused.len(), newest);
                self.sent(count);
            }
            Err(error) if error.blames_events() => {
                self.hand_over.refusals += 1;
                if count == 1 && self.hand_over.refusals > REFUSALS {
                    let error = chain(&error);
                    let monitor = self.monitor.name;
                    if let Some(not_logged_before) = self.hand_over.refusal_log.now() {
                        tracing::error!(err = %error, monitor, not_logged_before, "an event was refused");
                    }
                    self.refused(1, Err(error));
                    self.sent(1);
                    self.hand_over.refusals = 1;
                } else {
                    self.hand_over.begin_pause();
                }
            }
            Err(error) => {
                let monitor = self.monitor.name;
                tracing::warn!(err = %chain(&error), monitor, "events wait for the store");
                self.hand_over.begin_pause();
            }
        }
    }

    /// Records events that are dropped; `newest` is the answer for the newest one handed over.
    fn refused(&self, count: usize, newest: Result<(), String>) {
        for _ in 0..count {
            self.metrics.refused.inc();
        }
        self.source.handed_over(self.now(), count as u64, newest);
    }

    fn sent(&mut self, count: usize) {
        self.state.outbox.drain(..count);
        self.ready = self.ready.saturating_sub(count);
        if let Some(saving) = &mut self.saving {
            saving.sent(count);
        }
        self.mark_changed();
        if self.state.outbox.is_empty() {
            // The refused event is among those sent, so the next ones go in one request again.
            self.hand_over = HandOver::default();
            if let Some(saving) = &mut self.saving {
                saving.soon = true;
            }
        }
    }
}
