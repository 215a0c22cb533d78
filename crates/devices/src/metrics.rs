//! Metrics of the Device API.

use contract::device::GpuPhase;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use runtime::metrics::{Labels, Metrics};

use crate::board::Board;
use crate::watch::Message;

runtime::metrics! {
    /// Metrics of the board's content and its watchers.
    pub(crate) struct DeviceMetrics {
        /// GPUs of the Device API by phase: `pending`, `ready`, `not_ready`, `unknown`.
        gpus: Family<Labels<1>, Gauge> = "gpuwarden_device_api_gpus" {phase},
        /// Registrations of GPUs whose provider sends no heartbeats.
        silent: Gauge = "gpuwarden_device_api_silent_registrations",
        /// Connected watchers of GPUs.
        watchers: Gauge = "gpuwarden_device_api_watchers",
        /// Events that were sent to watchers of GPUs.
        events: Counter = "gpuwarden_device_api_events",
        /// Times that a watcher of GPUs had to start anew after missed changes.
        resyncs: Counter = "gpuwarden_device_api_resyncs",
        /// Writes of providers that were refused.
        pub(crate) refused: Counter = "gpuwarden_device_api_refused_writes",
        /// Answers to launchers of jobs.
        pub(crate) gate: Family<Labels<1>, Counter> = "gpuwarden_job_gate_answers" {answer},
    }
}

/// A watcher, counted until it is dropped.
pub(crate) struct Counted(Gauge);

// === impl DeviceMetrics ===

impl DeviceMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let own = Self::registered(metrics);
        own.show(&Board::new(String::new()));
        own
    }

    /// Updates the gauges from the board.
    pub(crate) fn show(&self, board: &Board) {
        for (label, phase) in [
            ("pending", GpuPhase::Pending),
            ("ready", GpuPhase::Ready),
            ("not_ready", GpuPhase::NotReady),
            ("unknown", GpuPhase::Unknown),
        ] {
            let phases = board.gpus().filter_map(|gpu| gpu.status.as_ref());
            let count = phases.filter(|status| status.phase() == phase).count();
            let gauge = self.gpus.get_or_create(&[("phase", label)]);
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        let silent = i64::try_from(board.silent()).unwrap_or(i64::MAX);
        self.silent.set(silent);
    }

    /// Counts a watcher until the result is dropped.
    pub(crate) fn watcher(&self) -> Counted {
        self.watchers.inc();
        Counted(self.watchers.clone())
    }

    pub(crate) fn count_message(&self, message: &Message) {
        self.events.inc();
        if matches!(message, Message::Resync) {
            self.resyncs.inc();
        }
    }
}

// === impl Counted ===

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}
