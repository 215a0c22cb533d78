//! Metric of the leader election, under the name that Kubernetes' own controllers use.

use std::fmt;

use cluster::{Candidate, Standing};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use runtime::metrics::Metrics;
use tokio::sync::watch;

/// Collector that reads the standing when metrics are scraped.
#[derive(Debug)]
struct MasterStatus {
    standing: watch::Receiver<Standing>,
    lease: &'static str,
}

/// Registers in `metrics` whether `candidate` holds the Lease of this name.
pub fn register(candidate: &Candidate, lease: &'static str, metrics: &Metrics) {
    let standing = candidate.standing();
    metrics.collect_from(MasterStatus { standing, lease });
}

impl Collector for MasterStatus {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let leads = ConstGauge::new(i64::from(self.standing.borrow().leads));
        let mut encoder = encoder.encode_descriptor(
            "leader_election_master_status",
            "Whether this process holds the Lease: 1, or 0 while it stands by",
            None,
            MetricType::Gauge,
        )?;
        leads.encode(encoder.encode_family(&[("name", self.lease)])?)
    }
}
