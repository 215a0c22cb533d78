//! Metrics of the connector. The first name is NVSentinel's.

use prometheus_client::metrics::counter::Counter;
use runtime::metrics::Metrics;

#[derive(Clone, Default)]
pub(super) struct ConnectorMetrics {
    /// Events received, good or bad.
    pub(super) received: Counter,
    /// Events stored.
    pub(super) accepted: Counter,
    /// Events that were stored before.
    pub(super) repeated: Counter,
    refused: Counter,
}

impl ConnectorMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::default();
        metrics.register(|registry| {
            registry.register(
                "platform_connector_health_events_received",
                "Health events received, valid or not",
                own.received.clone(),
            );
            registry.register(
                "gpuwarden_events_accepted",
                "Health events stored",
                own.accepted.clone(),
            );
            registry.register(
                "gpuwarden_events_repeated",
                "Health events that were stored before, such as a sender's retry",
                own.repeated.clone(),
            );
            registry.register(
                "gpuwarden_events_refused",
                "Health events refused as invalid",
                own.refused.clone(),
            );
        });
        own
    }

    pub(super) fn refused(&self, count: u64) {
        self.refused.inc_by(count);
    }
}
