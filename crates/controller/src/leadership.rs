//! Metric of the leader election, under the name that Kubernetes' own controllers use.

use std::fmt;

use cluster::{Candidate, Standing};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use runtime::metrics::{Description, Kind, Metrics};
use tokio::sync::watch;

/// Collector that reads the standing when metrics are scraped.
#[derive(Debug)]
struct MasterStatus {
    /// `None` for a process that acts without an election.
    standing: Option<watch::Receiver<Standing>>,
    lease: &'static str,
}

/// Registers in `metrics` whether `candidate` holds the Lease of this name.
pub fn register(candidate: &Candidate, lease: &'static str, metrics: &Metrics) {
    let standing = Some(candidate.standing());
    metrics.collect_from(MasterStatus { standing, lease });
}

/// Registers in `metrics` that this process acts without an election for the Lease of this name.
pub fn register_sole(lease: &'static str, metrics: &Metrics) {
    let standing = None;
    metrics.collect_from(MasterStatus { standing, lease });
}

impl Collector for MasterStatus {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let leads = (self.standing.as_ref()).is_none_or(|standing| standing.borrow().leads);
        let leads = ConstGauge::new(i64::from(leads));
        let Description { name, help, .. } = described();
        let mut encoder = encoder.encode_descriptor(&name, &help, None, MetricType::Gauge)?;
        leads.encode(encoder.encode_family(&[("name", self.lease)])?)
    }
}

/// Returns the description of this metric.
pub(crate) fn described() -> Description {
    Description::new(
        Kind::Gauge,
        "leader_election_master_status",
        &["name"],
        "1 while this process leads, by the name of the Lease, or acts without an election; 0 while \
         it stands by",
    )
}
