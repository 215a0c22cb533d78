//! `/api/v1/stream`: server-sent events that tell a client when to refresh.
//!
//! The messages carry no state, so a client that misses some loses nothing.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use fleet::view::{FleetView, PolicyView};
use futures::stream;
use jiff::Timestamp;
use model::position::Position;
use runtime::sources::SourceStatus;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::error::Refusal;
use super::{App, ControllerPart};

/// Most concurrent clients of the stream.
pub const MAX_SUBSCRIBERS: usize = 64;
/// Shortest time between two messages of a stream.
const PACE: Duration = Duration::from_millis(200);
/// Interval for polling sources and GPUs, which have no watch channel.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Interval of keep-alive messages.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

pub(super) async fn stream(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let ControllerPart { fleet, policy, .. } = app.controller()?.clone();
    let permit = Arc::clone(&app.subscribers)
        .try_acquire_owned()
        .map_err(|_| {
            Refusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("{MAX_SUBSCRIBERS} clients already read the stream, which is the limit"),
                "Close a page that shows gpuwarden, or ask for /api/v1/status every few seconds.",
            )
        })?;
    let events = stream::unfold(
        Changes::new(app, fleet, policy, permit),
        async |mut changes| {
            let applied = changes.next().await?;
            let event = Event::default().event("changed").data(applied.to_string());
            Some((Ok::<_, Infallible>(event), changes))
        },
    );
    Ok(Sse::new(events)
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
        .into_response())
}

/// Sources, and the version of the GPUs.
type Polled = (Vec<SourceStatus>, Option<u64>);

/// Client of the stream, and the state of its last message.
struct Changes {
    app: Arc<App>,
    fleet: watch::Receiver<Arc<FleetView>>,
    policy: watch::Receiver<Arc<PolicyView>>,
    polled: Polled,
    look: Interval,
    /// Time of the last message; `None` before the first, which is sent at once.
    sent: Option<Instant>,
    _permit: OwnedSemaphorePermit,
}

// === impl Changes ===

impl Changes {
    fn new(
        app: Arc<App>,
        fleet: watch::Receiver<Arc<FleetView>>,
        policy: watch::Receiver<Arc<PolicyView>>,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let mut look = tokio::time::interval_at(Instant::now() + POLL_INTERVAL, POLL_INTERVAL);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            fleet,
            policy,
            polled: poll(&app),
            app,
            look,
            sent: None,
            _permit: permit,
        }
    }

    /// Waits for a change and returns the position of the fleet's state; `None` when the
    /// process ends.
    async fn next(&mut self) -> Option<Position> {
        let cancel = self.app.cancel.clone();
        cancel.run_until_cancelled(self.wait()).await?;
        self.sent = Some(Instant::now());
        Some(self.fleet.borrow_and_update().applied)
    }

    async fn wait(&mut self) {
        let Some(sent) = self.sent else {
            return;
        };
        let (mut fleet_ended, mut policy_ended) = (false, false);
        loop {
            tokio::select! {
                changed = self.fleet.changed(), if !fleet_ended => match changed {
                    Ok(()) => break,
                    // `/readyz` reports this; the sources may still change.
                    Err(_) => fleet_ended = true,
                },
                changed = self.policy.changed(), if !policy_ended => match changed {
                    Ok(()) => break,
                    Err(_) => policy_ended = true,
                },
                _ = self.look.tick() => {
                    let polled = poll(&self.app);
                    if polled != self.polled {
                        self.polled = polled;
                        break;
                    }
                }
            }
        }
        tokio::time::sleep_until(sent + PACE).await;
    }
}

/// Returns the sources without heartbeats, which count as no change, and the version of the
/// GPUs.
fn poll(app: &App) -> Polled {
    let mut statuses = app.console.sources.statuses();
    for status in &mut statuses {
        status.alive_at = Timestamp::UNIX_EPOCH;
    }
    let devices = app.console.devices.as_ref();
    (
        statuses,
        devices.map(|devices| *devices.versions().borrow()),
    )
}
