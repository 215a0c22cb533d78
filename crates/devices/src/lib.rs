//! The Device API: the GPUs of this machine and how they do, over gRPC.
//!
//! - [`board`]: the state, which is pure: GPUs, who says what of them, versions, changes.
//! - [`DeviceApi`]: a handle of it for the sources inside this process.
//! - [`serve`]: the server on a Unix socket, for consumers and for providers from outside;
//!   [`serve_tcp`]: the same over the network, for consumers.
//! - [`faults`]: the open faults of this node, which become conditions.
//! - [`gate`]: the answer to launchers of jobs that ask whether the node is fit.
//!
//! Both services of GPUs, ours and NVSentinel's, are served from the one board.

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
use runtime::metrics::Metrics;
use runtime::shares::{Share, Shares};
use tokio::sync::watch::{Receiver, Sender};

use board::{Board, BoardError, Own, Position, Said};
use faults::NodeFaults;
use metrics::DeviceMetrics;
use watch::{Cursor, Told};

pub use server::{Providers, serve, serve_tcp};

/// Most watchers at the same time. One user of this machine can have a share of them
/// ([`runtime::shares`]).
pub const MAX_WATCHERS: usize = 4096;

/// A watcher to whom nothing was told for so long is told a bookmark, by which both ends notice a
/// connection that is dead.
const BOOKMARK_EVERY: Duration = Duration::from_secs(30);

/// The board of this machine, for all who read or write it. Cheap to clone.
#[derive(Clone)]
pub struct DeviceApi {
    shared: Arc<Shared>,
}

struct Shared {
    board: Mutex<Board>,
    /// The version of the board, for those who wait for the next one.
    version: Sender<u64>,
    faults: Sender<NodeFaults>,
    watchers: Arc<Shares>,
    metrics: DeviceMetrics,
    no_room: Seldom,
    clock: fn() -> Timestamp,
}

/// A consumer that watches the board: its place in the history, and its wait for the next version.
struct Watcher {
    api: DeviceApi,
    cursor: Cursor,
    version: Receiver<u64>,
    /// Counts it until it is dropped.
    _share: Share,
    _counted: metrics::Counted,
}

// === impl DeviceApi ===

impl DeviceApi {
    /// Returns the API of a machine of which nothing is known yet.
    pub fn new(metrics: &Metrics, clock: fn() -> Timestamp) -> Self {
        // Versions of a process before this one are not taken for ours.
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

    /// Takes what the driver sees. Ends what [`away`](Self::away) has begun.
    pub fn set_inventory(&self, inventory: &Inventory) {
        let left_out = self.change(|board, now| board.set_inventory(inventory, now));
        if left_out > 0
            && let Some(not_logged_before) = self.shared.no_room.now()
        {
            tracing::warn!(
                left_out,
                limit = board::MAX_GPUS,
                not_logged_before,
                "there are more GPUs than the Device API has room for"
            );
        }
    }

    /// Sets the condition of one of our own sources on a GPU, which the inventory or a provider
    /// has named before.
    pub fn set_condition(&self, own: Own, uuid: &str, said: Said) -> Result<(), BoardError> {
        self.change(|board, now| board.set_own(own, uuid, said, now))
    }

    /// Makes the condition of one of our own sources unknown on all GPUs: what it looks at is not
    /// seen, which says nothing of them. `reason` is a word in `CamelCase`, `message` says why.
    pub fn away(&self, own: Own, reason: &str, message: &str) {
        self.change(|board, now| board.own_away(own, reason, message, now));
    }

    /// Takes what is told of the open faults of this node.
    pub fn take_faults(&self, told: NodeFaults) {
        self.shared.faults.send_if_modified(|known| {
            let is_new = *known != told;
            *known = told;
            is_new
        });
    }

    /// Returns what is known of the open faults of this node, as it changes.
    pub fn faults(&self) -> Receiver<NodeFaults> {
        self.shared.faults.subscribe()
    }

    /// Returns the number of the last change, for those who look again when it grows.
    pub fn versions(&self) -> Receiver<u64> {
        self.shared.version.subscribe()
    }

    /// Returns all GPUs as they are, in the order of their names.
    pub fn gpus(&self) -> Vec<Arc<Gpu>> {
        self.board().gpus().cloned().collect()
    }

    /// Returns all GPUs with what consumers are told beside them.
    pub(crate) fn list(&self) -> ListGpusResponse {
        // All under one lock: the version is that of just these GPUs.
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

    /// Makes unknown what providers have said that are not heard any more.
    pub(crate) fn expire(&self) {
        self.change(Board::expire);
    }

    pub(crate) fn board(&self) -> MutexGuard<'_, Board> {
        let board = self.shared.board.lock();
        board.unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the board, and wakes the watchers where anything has changed.
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

    /// Returns what a watcher is told from a position on; `None`: there are too many watchers.
    /// `user` is who watches, where that counts. The stream does not end.
    pub(crate) fn watch(
        &self,
        from: Option<Position>,
        user: Option<u32>,
    ) -> Option<Pin<Box<dyn Stream<Item = Told> + Send>>> {
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
                let told = watcher.next().await;
                Some((told, watcher))
            },
        )))
    }
}

// === impl Watcher ===

impl Watcher {
    async fn next(&mut self) -> Told {
        let metrics = &self.api.shared.metrics;
        loop {
            self.version.mark_unchanged();
            let next = self.cursor.next(&self.api.board());
            if let Some(told) = next {
                metrics.told(&told);
                return told;
            }
            // It fails only once nobody can change the board, and then it is quiet for ever.
            let changed = tokio::time::timeout(BOOKMARK_EVERY, self.version.changed());
            if changed.await.is_err() {
                return self.cursor.bookmark(&self.api.board());
            }
        }
    }
}

// === impl Said ===

impl Said {
    /// Returns that a GPU is well.
    pub fn well(reason: &str, message: impl Into<String>) -> Self {
        Self::new(ConditionStatus::True, reason, message)
    }

    /// Returns that a GPU is not well.
    pub fn bad(reason: &str, message: impl Into<String>) -> Self {
        Self::new(ConditionStatus::False, reason, message)
    }

    /// Returns that it is not known how a GPU does.
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
