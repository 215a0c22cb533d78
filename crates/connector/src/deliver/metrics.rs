//! Metrics of delivery.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use runtime::metrics::{Labels, Metrics};
use tonic::Code;

use super::{Receiver, Why};

#[derive(Clone, Debug)]
pub(super) struct DeliveryMetrics {
    delivered: Counter,
    refused: Counter,
    not_taken: Counter,
    suspects: Gauge,
    stores: Counter,
    again: Counter,
    failed: Family<Labels<1, String>, Counter>,
    sink: Option<SinkMetrics>,
}

/// What NVSentinel measures of its gRPC sink, under its names.
#[derive(Clone, Debug)]
struct SinkMetrics {
    sent: Family<Labels<1>, Counter>,
    retried: Counter,
    duration: Histogram,
}

// === impl DeliveryMetrics ===

impl DeliveryMetrics {
    pub(super) fn new(receiver: Receiver, metrics: &Metrics) -> Self {
        let sink = (receiver == Receiver::SinkTarget).then(|| SinkMetrics::new(metrics));
        let metrics = metrics.with_prefix(match receiver {
            Receiver::Controller => "gpuwarden_delivery",
            Receiver::SinkTarget => "gpuwarden_forward",
        });
        Self {
            delivered: metrics.counter(
                "events",
                "Health events that were delivered and acknowledged",
            ),
            refused: metrics.counter(
                "refused_events",
                "Health events that the receiver refused, and that were put aside",
            ),
            not_taken: metrics.counter(
                "not_taken_events",
                "Health events on which the receiver failed while it took others, and that were \
                 put aside",
            ),
            suspects: metrics.gauge(
                "suspect_events",
                "Health events on which the receiver fails, and that are tried again",
            ),
            stores: metrics.counter(
                "store_changes",
                "Times that the receiver had another store, or another beginning of it, than before",
            ),
            again: metrics.counter(
                "resent_events",
                "Health events that were delivered and wait again, for another store",
            ),
            failed: metrics.family(
                "failures",
                "Failed attempts to deliver a batch, by gRPC code; each is tried again",
            ),
            sink,
        }
    }

    pub(super) fn delivered(&self, events: u64) {
        self.delivered.inc_by(events);
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

    /// Counts that the receiver has another store, for which so many events are sent again.
    pub(super) fn store_changed(&self, again: usize) {
        self.stores.inc();
        self.again.inc_by(again as u64);
    }

    /// Counts an attempt that has ended after `took`.
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

// === impl SinkMetrics ===

impl SinkMetrics {
    fn new(metrics: &Metrics) -> Self {
        let own = Self {
            sent: metrics.family(
                "grpc_sink_platform_connector_send",
                "Requests to the gRPC sink's target",
            ),
            retried: metrics.counter(
                "grpc_sink_platform_connector_retry",
                "Requests to the gRPC sink's target that failed and are made again",
            ),
            duration: metrics.histogram(
                "grpc_sink_platform_connector_send_duration_milliseconds",
                "Time until the gRPC sink's target has answered",
                exponential_buckets(10.0, 2.0, 12),
            ),
        };
        for status in ["success", "failed"] {
            drop(own.sent.get_or_create(&[("status", status)]));
        }
        own
    }
}
