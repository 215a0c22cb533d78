//! Metrics of requests to the API server: their number, failures, and the limit of those in
//! flight. Watches and lists are not counted.

use std::fmt;
use std::sync::Arc;

use cluster::Cluster;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use runtime::metrics::{Description, Kind, Metrics};

/// Collector that reads the counts when metrics are scraped.
struct ApiRequests(Arc<Cluster>);

/// Registers the requests of `cluster` in `metrics`.
pub fn register(cluster: &Arc<Cluster>, metrics: &Metrics) {
    metrics.collect_from(ApiRequests(Arc::clone(cluster)));
}

impl Collector for ApiRequests {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let now = self.0.requests();
        let [sent, throttled, failed, limit] = described();
        for (described, count) in [
            (sent, now.sent),
            (throttled, now.throttled),
            (failed, now.failed),
        ] {
            let counter = ConstCounter::new(count);
            let kind = counter.metric_type();
            let (name, help) = (&described.name, &described.help);
            counter.encode(encoder.encode_descriptor(name, help, None, kind)?)?;
        }
        let gauge = ConstGauge::new(i64::try_from(now.limit).unwrap_or(i64::MAX));
        let kind = gauge.metric_type();
        gauge.encode(encoder.encode_descriptor(&limit.name, &limit.help, None, kind)?)
    }
}

/// Returns the descriptions of these metrics.
pub(crate) fn described() -> [Description; 4] {
    [
        (Kind::Counter, "", "Requests to the API server"),
        (
            Kind::Counter,
            "_throttled",
            "Requests that the API server throttled (429)",
        ),
        (
            Kind::Counter,
            "_failed",
            "Requests to the API server without an answer in time, or with a 5xx",
        ),
        (
            Kind::Gauge,
            "_limit",
            "Limit of concurrent requests to the API server",
        ),
    ]
    .map(|(kind, suffix, help)| {
        let name = format!("gpuwarden_api_server_requests{suffix}");
        Description::new(kind, &name, &[], help)
    })
}

impl fmt::Debug for ApiRequests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ApiRequests")
            .field(&self.0.requests())
            .finish()
    }
}
