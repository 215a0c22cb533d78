//! Metrics of the webhook. Two have the names of ADR-026.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::{Labels, Metrics};

/// Buckets of the response time in seconds; the API server's timeout is 10.
const SECONDS: [f64; 9] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 10.0];

runtime::metrics! {
    /// Counters of admission, and gauges of gangs.
    pub(crate) struct WebhookMetrics {
        /// Pods by result of their admission: `injected`, `skipped` (no GPU, or no check for
        /// it), `denied` (by their annotation), `unknown` (their claims could not be read; they
        /// start unchecked), `bad_request`, `too_large`, `late` (no answer within 8 s), `failed`.
        /// A pod counts twice if another webhook changes it.
        pub(crate) injections: Family<Labels<1>, Counter> = "preflight_injection" {result},
        /// Duration of an answer.
        pub(crate) latency: Histogram = "preflight_webhook_latency_seconds"(SECONDS),
        /// Gangs that have pods; in the leading replica.
        pub(crate) gangs: Gauge = "gpuwarden_preflight_gangs",
        /// Pods beyond the size of their gang; in the leading replica.
        pub(crate) surplus: Gauge = "gpuwarden_preflight_surplus_pods",
        /// Members of gangs that a majority of their gang did not reach; in the leading replica.
        pub(crate) unreached: Counter = "gpuwarden_preflight_unreached_members",
    }
}

/// Results of an admission.
const RESULTS: [&str; 8] = [
    "injected",
    "skipped",
    "denied",
    "unknown",
    "bad_request",
    "too_large",
    "late",
    "failed",
];

// === impl WebhookMetrics ===

impl WebhookMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        // Created at the start, so that an alert on the first failure sees an increase from 0.
        for result in RESULTS {
            drop(own.injections.get_or_create(&[("result", result)]));
        }
        own
    }
}
