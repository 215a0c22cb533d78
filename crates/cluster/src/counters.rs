//! What was asked of the API server, in numbers. `request.rs` counts.

use std::sync::atomic::AtomicU64;

/// What was asked of the API server since the start, the watch not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Requests that were sent.
    pub sent: u64,
    /// Of these, answered with 429.
    pub throttled: u64,
    /// Of these, without an answer in time, or with a 5xx.
    pub failed: u64,
    /// How many may be under way at once now.
    pub limit: usize,
}

/// The counters behind [`Requests`].
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) sent: AtomicU64,
    pub(crate) throttled: AtomicU64,
    pub(crate) failed: AtomicU64,
}
