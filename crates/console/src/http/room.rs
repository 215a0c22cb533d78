//! Memory budget of all responses together, since clients may read slowly or not at all.
//!
//! A response that can be large is built during its [`Turn`], one page at a time, and each page
//! occupies the [`Room`] until the client has received it. Probes and metrics need neither, so
//! they are answered even when the budget is exhausted.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use prometheus_client::metrics::gauge::Gauge;
use runtime::metrics::{Description, Kind, Metrics};
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::{Refusal, STORE_TIMEOUT};

/// Most bytes of responses held at a time: 32 of the largest pages. A larger response occupies
/// the whole budget.
pub(super) const MAX_HELD_BYTES: u32 = 32 * 1024 * 1024;
/// Most responses built at a time: building one takes several times its size.
const MAX_MADE: usize = 2;
/// Longest wait for a turn or for memory, as for the store.
const TIMEOUT: Duration = STORE_TIMEOUT;

/// Budget for responses. Cheap to clone.
#[derive(Clone)]
pub(super) struct Room {
    held: Arc<Semaphore>,
    made: Arc<Semaphore>,
    bytes: Gauge,
}

/// Permit to build a response.
pub(super) struct Turn {
    room: Room,
    _turn: OwnedSemaphorePermit,
}

/// Text that occupies a part of the budget.
struct Held {
    text: Vec<u8>,
    bytes: Gauge,
    _place: OwnedSemaphorePermit,
}

/// Returns the description of the gauge of held bytes.
pub(crate) fn held_bytes() -> Description {
    let help = "Bytes of answers that are held until their readers take them";
    Description::new(Kind::Gauge, "gpuwarden_http_held_bytes", &[], help)
}

// === impl Room ===

impl Room {
    /// Registers the gauge of held bytes.
    pub(super) fn register(&self, metrics: &Metrics) {
        metrics.add(&held_bytes(), self.bytes.clone());
    }

    /// Waits for the permit to build a response.
    pub(super) async fn turn(&self) -> Result<Turn, Refusal> {
        let turn = in_time(Arc::clone(&self.made).acquire_owned()).await?;
        Ok(Turn {
            room: self.clone(),
            _turn: turn,
        })
    }
}

impl Default for Room {
    fn default() -> Self {
        Self {
            held: Arc::new(Semaphore::new(MAX_HELD_BYTES as usize)),
            made: Arc::new(Semaphore::new(MAX_MADE)),
            bytes: Gauge::default(),
        }
    }
}

// === impl Turn ===

impl Turn {
    /// Reserves memory for a text until it is dropped.
    pub(super) async fn hold(self, mut text: Vec<u8>) -> Result<Bytes, Refusal> {
        text.shrink_to_fit();
        let size = u32::try_from(text.len()).unwrap_or(u32::MAX);
        let place = Arc::clone(&self.room.held).acquire_many_owned(size.min(MAX_HELD_BYTES));
        let place = in_time(place).await?;
        let bytes = self.room.bytes.clone();
        bytes.inc_by(i64::from(size));
        Ok(Bytes::from_owner(Held {
            text,
            bytes,
            _place: place,
        }))
    }

    /// Returns a response with one JSON document.
    pub(super) async fn json(self, document: &impl Serialize) -> Result<Response, Refusal> {
        let text = serde_json::to_vec(document).map_err(|error| {
            Refusal::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("the answer cannot be written: {error}"),
                "This is a fault of gpuwarden's: please report it.",
            )
        })?;
        let text = self.hold(text).await?;
        Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
    }
}

async fn in_time<T, E>(waiting: impl Future<Output = Result<T, E>>) -> Result<T, Refusal> {
    match tokio::time::timeout(TIMEOUT, waiting).await {
        Ok(Ok(place)) => Ok(place),
        // The semaphores are never closed.
        Ok(Err(_)) | Err(_) => Err(Refusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "other clients are slow to read their responses, which use up the memory for responses",
            "Try again in a few seconds.",
        )),
    }
}

// === impl Held ===

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let size = u32::try_from(self.text.len()).unwrap_or(u32::MAX);
        self.bytes.dec_by(i64::from(size));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_held_has_a_bound_and_who_finds_no_room_is_told() {
        let room = Room::default();
        let text = |megabytes: usize| vec![b'x'; megabytes * 1024 * 1024];
        let hold = async |megabytes| room.turn().await?.hold(text(megabytes)).await;
        let large = hold(31).await.unwrap();
        let small = hold(1).await.unwrap();
        assert_eq!(room.bytes.get(), i64::from(MAX_HELD_BYTES));
        let refused = hold(1).await.unwrap_err();
        assert_eq!(refused.status, 503);
        // A slice keeps the whole text alive.
        let part = small.slice(5..6);
        drop(small);
        assert_eq!(hold(1).await.unwrap_err().status, 503);
        drop((large, part));
        assert_eq!(room.bytes.get(), 0);
        // A text above the limit occupies the whole budget.
        let largest = hold(33).await.unwrap();
        assert_eq!(hold(1).await.unwrap_err().status, 503);
        drop(largest);
        hold(1).await.unwrap();
    }
}
