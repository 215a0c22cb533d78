//! Metrics of announced maintenance.

use notices::{Record, State};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use runtime::metrics::{Labels, Metrics};

runtime::metrics! {
    #[derive(Clone)]
    pub(super) struct MaintenanceMetrics {
        /// Maintenances of nodes, also of late ones, by their state.
        maintenances: Family<Labels<1>, Gauge> = "gpuwarden_maintenances" {state},
    }
}

// === impl MaintenanceMetrics ===

impl MaintenanceMetrics {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        own.show(&[]);
        own
    }

    /// Shows the number of maintenances in each state.
    pub(super) fn show(&self, records: &[Record]) {
        for state in State::ALL {
            let count = records.iter().filter(|one| one.state == state).count();
            let gauge = self.maintenances.get_or_create(&[("state", state.name())]);
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }
}
