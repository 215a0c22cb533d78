//! Metrics of requests to the API server: their number, failures, and the limit of those in
//! flight. Watches and lists are not counted.

use std::fmt;
use std::sync::Arc;

use cluster::Cluster;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use runtime::metrics::Metrics;

/// Collector that reads the counts when metrics are scraped.
struct ApiRequests(Arc<Cluster>);

/// Registers the requests of `cluster` in `metrics`.
pub fn register(cluster: &Arc<Cluster>, metrics: &Metrics) {
    metrics.collect_from(ApiRequests(Arc::clone(cluster)));
}

impl Collector for ApiRequests {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let now = self.0.requests();
        let counters = [
            ("", "Requests to the API server", now.sent),
            (
                "_throttled",
                "Requests that the API server put off (429)",
                now.throttled,
            ),
            (
                "_failed",
                "Requests to the API server without an answer in time, or with a 5xx",
                now.failed,
            ),
        ];
        for (suffix, help, count) in counters {
            let name = format!("gpuwarden_api_server_requests{suffix}");
            let counter = ConstCounter::new(count);
            let kind = counter.metric_type();
            counter.encode(encoder.encode_descriptor(&name, help, None, kind)?)?;
        }
        let limit = ConstGauge::new(i64::try_from(now.limit).unwrap_or(i64::MAX));
        let kind = limit.metric_type();
        limit.encode(encoder.encode_descriptor(
            "gpuwarden_api_server_requests_limit",
            "How many requests to the API server may be under way at once",
            None,
            kind,
        )?)
    }
}

impl fmt::Debug for ApiRequests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ApiRequests")
            .field(&self.0.requests())
            .finish()
    }
}
