//! Metrics of the janitor, by NVSentinel's names.

use std::time::Duration;

use domain::janitor::{Action, Key, News, Outcome};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use runtime::metrics::{Labels, LegacyCounter, Metrics};

/// Buckets of the time that an action takes: 10 s, doubled up to 85 min.
const FIRST: f64 = 10.0;
const BUCKETS: u16 = 10;

#[derive(Clone)]
pub(crate) struct JanitorMetrics {
    actions: Family<Labels<3, String>, LegacyCounter>,
    mttr: Family<Labels<1>, Histogram, fn() -> Histogram>,
    deleted: Family<Labels<1>, Counter>,
}

// === impl JanitorMetrics ===

impl JanitorMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let mttr: Family<Labels<1>, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(FIRST, 2.0, BUCKETS))
            });
        Self {
            actions: metrics.family(
                "janitor_actions_count",
                "Actions that were begun, and that ended well or not",
            ),
            mttr: metrics.register(
                "janitor_action_mttr_seconds",
                "From the begin of an action that succeeded to its end",
                mttr,
            ),
            deleted: metrics.family(
                "janitor_ttl_deletions",
                "Resources that were deleted because they had ended long ago",
            ),
        }
    }

    /// Counts what has happened.
    pub(crate) fn happened(&self, news: &News) {
        match news {
            News::Begun { key, node } => self.count(key, node, "started"),
            News::Ended {
                key,
                node,
                outcome,
                took,
                ..
            } => {
                let succeeded = outcome == Outcome::Succeeded.word();
                self.count(key, node, if succeeded { "succeeded" } else { "failed" });
                if succeeded && let Some(took) = took {
                    let labels = [("action_type", key.action.name())];
                    let took = Duration::try_from(*took).unwrap_or_default();
                    self.mttr.get_or_create(&labels).observe(took.as_secs_f64());
                }
            }
        }
    }

    /// Counts a resource that was deleted.
    pub(crate) fn deleted(&self, action: Action) {
        self.deleted.get_or_create(&[("kind", action.kind())]).inc();
    }

    fn count(&self, key: &Key, node: &str, status: &str) {
        let labels = [
            ("action_type", key.action.name().to_owned()),
            ("status", status.to_owned()),
            ("node", node.to_owned()),
        ];
        self.actions.get_or_create(&labels).inc();
    }
}
