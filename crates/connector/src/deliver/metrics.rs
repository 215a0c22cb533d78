//! Metrics of delivery.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use runtime::metrics::Metrics;
use tonic::Code;

use super::{Receiver, Why};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabels {
    code: String,
}

#[derive(Clone, Debug, Default)]
pub(super) struct DeliveryMetrics {
    delivered: Counter,
    refused: Counter,
    not_taken: Counter,
    suspects: Gauge,
    stores: Counter,
    again: Counter,
    failed: Family<CodeLabels, Counter>,
    sink: Option<SinkMetrics>,
}

/// What NVSentinel measures of its gRPC sink, under its names.
#[derive(Clone, Debug)]
struct SinkMetrics {
    sent: Family<StatusLabels, Counter>,
    retried: Counter,
    duration: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StatusLabels {
    status: &'static str,
}

// === impl DeliveryMetrics ===

impl DeliveryMetrics {
    pub(super) fn new(receiver: Receiver, metrics: &Metrics) -> Self {
        let sink = (receiver == Receiver::SinkTarget).then(|| SinkMetrics::new(metrics));
        let own = Self {
            sink,
            ..Self::default()
        };
        metrics.register(|registry| {
            let registry = registry.sub_registry_with_prefix(match receiver {
                Receiver::Controller => "gpuwarden_delivery",
                Receiver::SinkTarget => "gpuwarden_forward",
            });
            registry.register(
                "events",
                "Health events that were delivered and acknowledged",
                own.delivered.clone(),
            );
            registry.register(
                "refused_events",
                "Health events that the receiver refused, and that were put aside",
                own.refused.clone(),
            );
            registry.register(
                "not_taken_events",
                "Health events on which the receiver failed while it took others, and that were \
                 put aside",
                own.not_taken.clone(),
            );
            registry.register(
                "suspect_events",
                "Health events on which the receiver fails, and that are tried again",
                own.suspects.clone(),
            );
            registry.register(
                "store_changes",
                "Times that the receiver had another store, or another beginning of it, than before",
                own.stores.clone(),
            );
            registry.register(
                "resent_events",
                "Health events that were delivered and wait again, for another store",
                own.again.clone(),
            );
            registry.register(
                "failures",
                "Failed attempts to deliver a batch, by gRPC code; each is tried again",
                own.failed.clone(),
            );
        });
        own
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

    /// The receiver has another store; so many events are sent again.
    pub(super) fn turned(&self, again: usize) {
        self.stores.inc();
        self.again.inc_by(again as u64);
    }

    /// An attempt has ended after `took`.
    pub(super) fn sent(&self, taken: bool, took: Duration) {
        if let Some(sink) = &self.sink {
            let status = if taken { "success" } else { "failed" };
            sink.sent.get_or_create(&StatusLabels { status }).inc();
            sink.duration.observe(took.as_secs_f64() * 1_000.0);
        }
    }

    pub(super) fn failed(&self, code: Code) {
        if let Some(sink) = &self.sink {
            sink.retried.inc();
        }
        let code = format!("{code:?}");
        self.failed.get_or_create(&CodeLabels { code }).inc();
    }
}

// === impl SinkMetrics ===

impl SinkMetrics {
    fn new(metrics: &Metrics) -> Self {
        let own = Self {
            sent: Family::default(),
            retried: Counter::default(),
            duration: Histogram::new(exponential_buckets(10.0, 2.0, 12)),
        };
        for status in ["success", "failed"] {
            drop(own.sent.get_or_create(&StatusLabels { status }));
        }
        metrics.register(|registry| {
            registry.register(
                "grpc_sink_platform_connector_send",
                "Requests to the gRPC sink's target",
                own.sent.clone(),
            );
            registry.register(
                "grpc_sink_platform_connector_retry",
                "Requests to the gRPC sink's target that failed and are made again",
                own.retried.clone(),
            );
            registry.register(
                "grpc_sink_platform_connector_send_duration_milliseconds",
                "Time until the gRPC sink's target has answered",
                own.duration.clone(),
            );
        });
        own
    }
}
