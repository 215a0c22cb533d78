//! Metrics of the webhook. Two have the names of ADR-026.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::Labels;

/// Buckets of the response time in seconds; the API server's timeout is 10.
const SECONDS: [f64; 9] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 10.0];

runtime::metrics! {
    /// Counters of admission, and gauges of gangs.
    pub(crate) struct WebhookMetrics {
        /// Pods, by result of their admission.
        pub(crate) injections: Family<Labels<1>, Counter> = "preflight_injection",
        /// Time that an answer took (seconds).
        pub(crate) latency: Histogram = "preflight_webhook_latency_seconds"(SECONDS),
        /// Gangs whose pods run or wait for checks.
        pub(crate) gangs: Gauge = "gpuwarden_preflight_gangs",
        /// Pods beyond the size of their gang.
        pub(crate) surplus: Gauge = "gpuwarden_preflight_surplus_pods",
        /// Members of gangs that a majority of their gang did not reach.
        pub(crate) unreached: Counter = "gpuwarden_preflight_unreached_members",
    }
}
