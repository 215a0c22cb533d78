//! The Device API: the GPUs of this machine and their health, over gRPC.
//!
//! - [`board`]: the state, which is pure: GPUs, conditions by source, versions, changes.
//! - [`DeviceApi`]: a handle to the board for sources within this process.
//! - [`serve`]: the server on a Unix socket, for consumers and for providers outside this
//!   process; [`serve_tcp`]: the same over the network, for consumers.
//! - [`faults`]: the open faults of this node, which become conditions.
//! - [`gate`]: the answer to job launchers that ask whether the node is fit.
//!
//! The board serves both gRPC services for GPUs, gpuwarden's own and NVSentinel's.

pub mod board;
pub mod faults;
pub mod gate;
mod metrics;
mod server;
mod watch;

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use contract::device::{ConditionStatus, Gpu, ListGpusResponse};
use diagnosis::gpu::Inventory;
use futures::Stream;
use jiff::Timestamp;
use runtime::logging::Seldom;
use runtime::metrics::{Group, Metrics};
use runtime::shares::{Share, Shares};
use tokio::sync::watch::{Receiver, Sender};

use board::{Board, BoardError, Own, Position, Said};
use faults::NodeFaults;
use metrics::DeviceMetrics;
use watch::{Cursor, Message};

pub use server::{Providers, serve, serve_tcp};

/// Most watchers at the same time. One user of this machine is limited to a share of them
/// ([`runtime::shares`]).
pub const MAX_WATCHERS: usize = 4096;

/// Time without a message after which a watcher gets a bookmark, so that both ends detect a
/// dead connection.
const BOOKMARK_EVERY: Duration = Duration::from_secs(30);

/// The board of this machine, for its readers and writers. Cheap to clone.
#[derive(Clone)]
pub struct DeviceApi {
    shared: Arc<Shared>,
}

struct Shared {
    board: Mutex<Board>,
    /// Version of the board, to wait for the next one.
    version: Sender<u64>,
    faults: Sender<NodeFaults>,
    watchers: Arc<Shares>,
    metrics: DeviceMetrics,
    no_room: Seldom,
    clock: fn() -> Timestamp,
}

/// A consumer that watches the board, with its place in the history.
struct Watcher {
    api: DeviceApi,
    cursor: Cursor,
    version: Receiver<u64>,
    /// Counts the watcher until it is dropped.
    _share: Share,
    _counted: metrics::Counted,
}

/// Returns the descriptions of the metrics of this room.
pub fn described_metrics() -> Vec<Group> {
    vec![Group::new("devices", DeviceMetrics::described())]
}

// === impl DeviceApi ===

impl DeviceApi {
    /// Creates the API of a machine without known GPUs.
    pub fn new(metrics: &Metrics, clock: fn() -> Timestamp) -> Self {
        // Versions of an earlier process must not be taken for this one's.
        let epoch = format!("{:x}", clock().as_nanosecond());
        Self {
            shared: Arc::new(Shared {
                board: Mutex::new(Board::new(epoch)),
                version: Sender::default(),
                faults: Sender::default(),
                watchers: Shares::new(MAX_WATCHERS),
                metrics: DeviceMetrics::new(metrics),
                no_room: Seldom::default(),
                clock,
            }),
        }
    }

    /// Applies the driver's inventory. Ends the effect of [`away`](Self::away).
    pub fn set_inventory(&self, inventory: &Inventory) {
        let left_out = self.change(|board, now| board.set_inventory(inventory, now));
        if left_out > 0
            && let Some(not_logged_before) = self.shared.no_room.now()
        {
            tracing::warn!(
                left_out,
                limit = board::MAX_GPUS,
                not_logged_before,
                "there are more GPUs than the limit of the Device API"
            );
        }
    }

    /// Sets the condition of a source within this process on a GPU, which the inventory or a
    /// provider has named before.
    pub fn set_condition(&self, own: Own, uuid: &str, said: Said) -> Result<(), BoardError> {
        self.change(|board, now| board.set_own(own, uuid, said, now))
    }

    /// Makes the condition of a source within this process unknown on all GPUs, because the
    /// source cannot observe them, which is no fault of theirs. `reason` is a word in
    /// `CamelCase`, `message` an explanation.
    pub fn away(&self, own: Own, reason: &str, message: &str) {
        self.change(|board, now| board.own_away(own, reason, message, now));
    }

    /// Sets the open faults of this node.
    pub fn take_faults(&self, faults: NodeFaults) {
        self.shared.faults.send_if_modified(|known| {
            let is_new = *known != faults;
            *known = faults;
            is_new
        });
    }

    /// Returns a receiver of the open faults of this node.
    pub fn faults(&self) -> Receiver<NodeFaults> {
        self.shared.faults.subscribe()
    }

    /// Returns a receiver of the number of the last change.
    pub fn versions(&self) -> Receiver<u64> {
        self.shared.version.subscribe()
    }

    /// Returns all GPUs, sorted by name.
    pub fn gpus(&self) -> Vec<Arc<Gpu>> {
        self.board().gpus().cloned().collect()
    }

    /// Returns all GPUs, with the version and the notices for consumers.
    pub(crate) fn list(&self) -> ListGpusResponse {
        // Under one lock, so that the version belongs to exactly these GPUs.
        let board = self.board();
        let gpus: Vec<Arc<Gpu>> = board.gpus().cloned().collect();
        let resource_version = board.name_of(board.version());
        let left_out = board.left_out();
        drop(board);
        ListGpusResponse {
            resource_version,
            left_out: u32::try_from(left_out).unwrap_or(u32::MAX),
            unplaced_faults: faults::unplaced(&self.shared.faults.borrow(), &gpus),
            gpus: gpus.into_iter().map(Arc::unwrap_or_clone).collect(),
        }
    }

    /// Makes the conditions of silent providers unknown.
    pub(crate) fn expire(&self) {
        self.change(Board::expire);
    }

    pub(crate) fn board(&self) -> MutexGuard<'_, Board> {
        let board = self.shared.board.lock();
        board.unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the board, and wakes the watchers if anything has changed.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Board, Timestamp) -> T) -> T {
        let now = (self.shared.clock)();
        let mut board = self.board();
        let changed = change(&mut board, now);
        let version = board.version();
        self.shared.metrics.show(&board);
        drop(board);
        self.shared.version.send_if_modified(|known| {
            let is_newer = version > *known;
            *known = version.max(*known);
            is_newer
        });
        changed
    }

    /// Returns the messages to a watcher from a position on; `None` if there are too many
    /// watchers. `user` is the watcher's user, if the user's share applies. The stream does not
    /// end.
    pub(crate) fn watch(
        &self,
        from: Option<Position>,
        user: Option<u32>,
    ) -> Option<Pin<Box<dyn Stream<Item = Message> + Send>>> {
        let watcher = Watcher {
            api: self.clone(),
            cursor: Cursor::new(from),
            version: self.shared.version.subscribe(),
            _share: self.shared.watchers.take(user, 1)?,
            _counted: self.shared.metrics.watcher(),
        };
        Some(Box::pin(futures::stream::unfold(
            watcher,
            |mut watcher| async {
                let message = watcher.next().await;
                Some((message, watcher))
            },
        )))
    }
}

// === impl Watcher ===

impl Watcher {
    async fn next(&mut self) -> Message {
        let metrics = &self.api.shared.metrics;
        loop {
            self.version.mark_unchanged();
            let next = self.cursor.next(&self.api.board());
            if let Some(message) = next {
                metrics.count_message(&message);
                return message;
            }
            // Fails only once no sender can change the board, and then the watcher just waits.
            let changed = tokio::time::timeout(BOOKMARK_EVERY, self.version.changed());
            if changed.await.is_err() {
                return self.cursor.bookmark(&self.api.board());
            }
        }
    }
}

// === impl Said ===

impl Said {
    /// Returns the condition of a healthy GPU.
    pub fn well(reason: &str, message: impl Into<String>) -> Self {
        Self::new(ConditionStatus::True, reason, message)
    }

    /// Returns the condition of an unhealthy GPU.
    pub fn bad(reason: &str, message: impl Into<String>) -> Self {
        Self::new(ConditionStatus::False, reason, message)
    }

    /// Returns the condition of a GPU in an unknown state.
    pub fn unknown(reason: &str, message: impl Into<String>) -> Self {
        Self::new(ConditionStatus::Unknown, reason, message)
    }

    fn new(status: ConditionStatus, reason: &str, message: impl Into<String>) -> Self {
        Self {
            status,
            reason: reason.to_owned(),
            message: message.into(),
        }
    }
}
