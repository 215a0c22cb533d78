//! Metrics of event delivery.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use runtime::metrics::{Description, Labels, Metrics};
use tonic::Code;

use super::{Receiver, Why};

runtime::metrics! {
    /// Counts the work of delivery, with a prefix for each receiver.
    #[derive(Clone, Debug)]
    pub(super) struct DeliveryMetrics {
        /// Health events that were delivered and acknowledged.
        pub(super) delivered: Counter = "events",
        /// Health events that the receiver refused, and that were put aside.
        refused: Counter = "refused_events",
        /// Health events that made the receiver fail while it accepted others, and that were
        /// put aside.
        not_taken: Counter = "not_taken_events",
        /// Health events that make the receiver fail, and that are retried.
        suspects: Gauge = "suspect_events",
        /// Changes of the receiver's store, or of the end of its history.
        stores: Counter = "store_changes",
        /// Delivered health events that were queued again, for another store.
        again: Counter = "resent_events",
        /// Failed attempts to deliver a batch, by gRPC code; each is retried.
        failed: Family<Labels<1, String>, Counter> = "failures" {code},
        sink: Option<SinkMetrics>,
    }
}

runtime::metrics! {
    /// Counts requests to the gRPC sink, under NVSentinel's names.
    #[derive(Clone, Debug)]
    struct SinkMetrics {
        /// Requests to the gRPC sink's target: `success`, `failed`.
        sent: Family<Labels<1>, Counter> =
            "grpc_sink_platform_connector_send" {status},
        /// Requests to the gRPC sink's target that failed and are retried.
        retried: Counter = "grpc_sink_platform_connector_retry",
        /// Time until the gRPC sink's target has answered.
        duration: Histogram = "grpc_sink_platform_connector_send_duration_milliseconds"(
            exponential_buckets(10.0, 2.0, 12)
        ),
    }
}

/// Returns the descriptions of the metrics of a delivery to `receiver`.
pub(crate) fn described_metrics(receiver: Receiver) -> Vec<Description> {
    let own = DeliveryMetrics::described().into_iter();
    let mut all: Vec<_> = own
        .map(|metric| metric.with_prefix(prefix(receiver)))
        .collect();
    if matches!(receiver, Receiver::SinkTarget) {
        all.extend(SinkMetrics::described());
    }
    all
}

fn prefix(receiver: Receiver) -> &'static str {
    match receiver {
        Receiver::Controller => "gpuwarden_delivery",
        Receiver::SinkTarget => "gpuwarden_forward",
    }
}

// === impl DeliveryMetrics ===

impl DeliveryMetrics {
    pub(super) fn new(receiver: Receiver, metrics: &Metrics) -> Self {
        let sink = match receiver {
            Receiver::Controller => None,
            Receiver::SinkTarget => Some(SinkMetrics::registered(metrics)),
        };
        if let Some(sink) = &sink {
            for status in ["success", "failed"] {
                drop(sink.sent.get_or_create(&[("status", status)]));
            }
        }
        let own = Self::registered(&metrics.with_prefix(prefix(receiver)));
        Self { sink, ..own }
    }

    pub(super) fn put_aside(&self, why: Why, events: u64) {
        let counter = match why {
            Why::Refused => &self.refused,
            Why::Failed => &self.not_taken,
        };
        counter.inc_by(events);
    }

    pub(super) fn suspects(&self, events: usize) {
        self.suspects.set(i64::try_from(events).unwrap_or(i64::MAX));
    }

    /// Counts a change to another store, and the events that are sent again for it.
    pub(super) fn store_changed(&self, again: usize) {
        self.stores.inc();
        self.again.inc_by(again as u64);
    }

    /// Counts an attempt that took `took`.
    pub(super) fn sent(&self, taken: bool, took: Duration) {
        if let Some(sink) = &self.sink {
            let status = if taken { "success" } else { "failed" };
            sink.sent.get_or_create(&[("status", status)]).inc();
            sink.duration.observe(took.as_secs_f64() * 1_000.0);
        }
    }

    pub(super) fn failed(&self, code: Code) {
        if let Some(sink) = &self.sink {
            sink.retried.inc();
        }
        let code = format!("{code:?}");
        self.failed.get_or_create(&[("code", code)]).inc();
    }
}
