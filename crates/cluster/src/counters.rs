//! Counts of the requests to the API server. `request.rs` counts them.

use std::sync::atomic::AtomicU64;

use crate::warnings::Warnings;

/// The number of requests to the API server since the start, watches not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Requests that were sent.
    pub sent: u64,
    /// Requests that were answered with 429.
    pub throttled: u64,
    /// Requests without an answer in time, or with a 5xx.
    pub failed: u64,
    /// Warnings in the answers: of a field that the API server does not know, for example.
    pub warned: u64,
    /// Number of requests that may be under way at once now.
    pub limit: usize,
}

/// The counters behind [`Requests`].
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) sent: AtomicU64,
    pub(crate) throttled: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) warnings: Warnings,
}
