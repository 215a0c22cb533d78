//! Metrics of the webhook; two have the names of ADR-026.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use runtime::metrics::Labels;

/// Bounds of the time that an answer takes (seconds); the API server waits for 10.
const SECONDS: [f64; 9] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 10.0];

runtime::metrics! {
    /// Counts what the webhook is asked, and what it keeps.
    pub(crate) struct WebhookMetrics {
        /// Pods by what became of them.
        pub(crate) injections: Family<Labels<1>, Counter> = "preflight_injection",
        /// How long an answer took.
        pub(crate) latency: Histogram = "preflight_webhook_latency_seconds"(SECONDS),
        /// Gangs whose pods run or wait for checks.
        pub(crate) gangs: Gauge = "gpuwarden_preflight_gangs",
        /// Pods beyond the size of their gang.
        pub(crate) surplus: Gauge = "gpuwarden_preflight_surplus_pods",
        /// Members of gangs that a majority of their gang did not reach.
        pub(crate) unreached: Counter = "gpuwarden_preflight_unreached_members",
    }
}
