//! Metrics of the connector. The first name is NVSentinel's.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use runtime::metrics::Metrics;
use store::Appended;

use crate::{Reason, Refused};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Default)]
pub(super) struct ConnectorMetrics {
    /// Events received, good or bad.
    pub(super) received: Counter,
    accepted: Counter,
    repeated: Counter,
    refused: Family<ReasonLabels, Counter>,
}

impl ConnectorMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::default();
        // From the start, so that an alert on the first refusal sees it grow from nought.
        for reason in ["invalid", "foreign_node", "too_many"] {
            drop(own.refused.get_or_create(&ReasonLabels { reason }));
        }
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
                "Health events refused: invalid, of a node that the sender may not speak for, or \
                 too many in one request",
                own.refused.clone(),
            );
        });
        own
    }

    /// Counts what the sink has taken.
    pub(super) fn appended(&self, appended: &[Appended]) {
        let new = appended.iter().filter(|one| one.new).count();
        self.accepted.inc_by(new as u64);
        self.repeated.inc_by((appended.len() - new) as u64);
    }

    /// Counts events that were refused one by one.
    pub(super) fn refused(&self, refused: &[Refused]) {
        for one in refused {
            let reason = match one.reason {
                Reason::Invalid => "invalid",
                Reason::ForeignNode => "foreign_node",
            };
            self.refused.get_or_create(&ReasonLabels { reason }).inc();
        }
    }

    /// Counts events of a batch that was refused as a whole.
    pub(super) fn too_many(&self, found: usize) {
        let reason = "too_many";
        let counter = self.refused.get_or_create(&ReasonLabels { reason });
        counter.inc_by(found as u64);
    }
}
