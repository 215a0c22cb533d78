//! Counters of the requests to the API server; `request.rs` increments them.

use std::sync::atomic::AtomicU64;

use crate::warnings::Warnings;

/// Numbers of requests to the API server since the start, without watches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// Requests sent, with or without an answer.
    pub sent: u64,
    /// Requests answered with HTTP status 429.
    pub throttled: u64,
    /// Requests without an answer in time, or with a 5xx.
    pub failed: u64,
    /// Warnings in the answers, such as a field that the API server does not know.
    pub warned: u64,
    /// Most requests that may be in flight at once now.
    pub limit: usize,
}

/// The counters behind [`RequestCounts`].
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) sent: AtomicU64,
    pub(crate) throttled: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) warnings: Warnings,
}
