//! Metrics of the outbox. What is delivered is counted in `deliver/metrics.rs`.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::gauge::Gauge;
use runtime::metrics::Metrics;

use super::Status;

#[derive(Clone, Debug)]
pub(super) struct OutboxMetrics {
    events: Gauge,
    bytes: Gauge,
    oldest: Gauge<f64, AtomicU64>,
    damaged: Gauge,
    aside: Gauge,
    kept: Gauge,
}

// === impl OutboxMetrics ===

impl OutboxMetrics {
    /// Registers the metrics of an outbox; their names begin with `name`.
    pub(super) fn new(name: &str, metrics: &Metrics) -> Self {
        let metrics = metrics.with_prefix(name);
        Self {
            events: metrics.gauge("waiting_events", "Health events that wait to be delivered"),
            bytes: metrics.gauge("bytes", "Room that the outbox takes on disk"),
            oldest: metrics.float_gauge(
                "oldest_timestamp_seconds",
                "When the oldest waiting event was accepted, 0 where none waits",
            ),
            damaged: metrics.gauge(
                "damaged_bytes",
                "Bytes of the outbox that were no whole event, since the start",
            ),
            aside: metrics.gauge(
                "aside_events",
                "Health events that were not taken, and that are kept on disk for a person",
            ),
            kept: metrics.gauge(
                "kept_events",
                "Health events that were delivered and are kept, for another store that may lack \
                 them",
            ),
        }
    }

    pub(super) fn set(&self, status: &Status) {
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
