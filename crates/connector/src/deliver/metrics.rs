//! Metrics of delivery.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use runtime::metrics::Metrics;
use tonic::Code;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabels {
    code: String,
}

#[derive(Clone, Debug, Default)]
pub(super) struct DeliveryMetrics {
    delivered: Counter,
    refused: Counter,
    failed: Family<CodeLabels, Counter>,
}

// === impl DeliveryMetrics ===

impl DeliveryMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::default();
        metrics.register(|registry| {
            registry.register(
                "gpuwarden_delivery_events",
                "Health events that the controller has stored",
                own.delivered.clone(),
            );
            registry.register(
                "gpuwarden_delivery_refused_events",
                "Health events that the controller refused, and that were put aside",
                own.refused.clone(),
            );
            registry.register(
                "gpuwarden_delivery_failures",
                "Failed attempts to deliver a batch, by gRPC code; each is tried again",
                own.failed.clone(),
            );
        });
        own
    }

    pub(super) fn delivered(&self, delivered: u64, refused: u64) {
        self.delivered.inc_by(delivered);
        self.refused.inc_by(refused);
    }

    pub(super) fn failed(&self, code: Code) {
        let code = format!("{code:?}");
        self.failed.get_or_create(&CodeLabels { code }).inc();
    }
}
