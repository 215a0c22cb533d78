//! Metrics of the outbox. Deliveries are counted in `deliver/metrics.rs`.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::gauge::Gauge;

use super::OutboxStatus;

runtime::metrics! {
    /// Shows the contents of the outbox.
    #[derive(Clone, Debug)]
    pub(super) struct OutboxMetrics {
        /// Health events that wait to be delivered.
        events: Gauge = "waiting_events",
        /// Room that the outbox takes on disk.
        bytes: Gauge = "bytes",
        /// Time when the oldest waiting event was accepted, 0 if none waits.
        oldest: Gauge<f64, AtomicU64> = "oldest_timestamp_seconds",
        /// Bytes of the outbox that belong to no whole event, since the start.
        damaged: Gauge = "damaged_bytes",
        /// Refused health events that are kept on disk for a person.
        aside: Gauge = "aside_events",
        /// Health events that were delivered and are kept, for another store that may lack them.
        kept: Gauge = "kept_events",
    }
}

// === impl OutboxMetrics ===

impl OutboxMetrics {
    pub(super) fn set(&self, status: &OutboxStatus) {
        let whole = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.events.set(whole(status.events as u64));
        self.bytes.set(whole(status.bytes));
        self.damaged.set(whole(status.damaged));
        self.aside.set(whole(status.aside));
        self.kept.set(whole(status.kept as u64));
        let oldest = status
            .oldest
            .map_or(0.0, |at| at.as_duration().as_secs_f64());
        self.oldest.set(oldest);
    }
}
