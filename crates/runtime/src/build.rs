//! Metric of the running program.

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use crate::metrics::{Labels, Metrics};

crate::metrics! {
    /// Metric of the running program.
    pub(crate) struct BuildMetrics {
        /// 1, with the version of the program and its role: `run`, `agent`, `controller`,
        /// `webhook`.
        info: Family<Labels<2>, Gauge> = "gpuwarden_build_info" {version, role},
    }
}

/// Registers the version and the role of this process.
pub fn register(metrics: &Metrics, version: &'static str, role: &'static str) {
    let labels = [("version", version), ("role", role)];
    let info = BuildMetrics::registered(metrics).info;
    info.get_or_create(&labels).set(1);
}
