//! `/api/v1/stream`: server-sent events that say when to look again.
//!
//! The messages carry no state: a reader that misses some loses nothing.

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

/// Most readers of the stream at a time.
pub const MAX_SUBSCRIBERS: usize = 64;
/// Least time between two events of a stream.
const PACE: Duration = Duration::from_millis(200);
/// Pause between two looks at what changes by the minute: sources, and GPUs.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Longest silence on the wire.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

pub(super) async fn stream(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let ControllerPart { fleet, policy, .. } = app.controller()?.clone();
    let permit = Arc::clone(&app.subscribers)
        .try_acquire_owned()
        .map_err(|_| {
            Refusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!(
                    "{MAX_SUBSCRIBERS} readers of the stream are there already, which is the most"
                ),
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

/// The sources, and the version of the GPUs.
type Looked = (Vec<SourceStatus>, Option<u64>);

/// One reader.
struct Changes {
    app: Arc<App>,
    fleet: watch::Receiver<Arc<FleetView>>,
    policy: watch::Receiver<Arc<PolicyView>>,
    looked: Looked,
    look: Interval,
    /// The time of the last event; `None` before the first, which comes at once.
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
        let mut look = tokio::time::interval_at(Instant::now() + LOOK_EVERY, LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            fleet,
            policy,
            looked: look_at(&app),
            app,
            look,
            sent: None,
            _permit: permit,
        }
    }

    /// Waits for a change; the fleet's `applied`. `None` at the end of the process.
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
                    // `/readyz` tells that; the sources may still change.
                    Err(_) => fleet_ended = true,
                },
                changed = self.policy.changed(), if !policy_ended => match changed {
                    Ok(()) => break,
                    Err(_) => policy_ended = true,
                },
                _ = self.look.tick() => {
                    let looked = look_at(&self.app);
                    if looked != self.looked {
                        self.looked = looked;
                        break;
                    }
                }
            }
        }
        tokio::time::sleep_until(sent + PACE).await;
    }
}

/// Returns the sources without their heartbeat, which is no change, and the version of the GPUs.
fn look_at(app: &App) -> Looked {
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
