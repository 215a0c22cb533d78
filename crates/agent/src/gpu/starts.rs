//! Closes faults of failed GPU starts, which the kernel log reports, once the GPUs answer.
//!
//! The log reports only failures. The GPU monitor observes that a GPU answers again, and so
//! reports the recovery in the name of the monitor that reported the failure.

use contract::{HealthEvent, keys};
use devices::faults::{NodeFaults, concerns};
use diagnosis::gpu::{Gpu, Readings};

use super::{GpuMonitor, event};

/// Number of polls that a GPU must answer while its fault is open: the first may have started
/// before the failure.
pub(super) const POLLS: u32 = 2;
/// Number of polls after which the recovery is reported again if the fault is still open: the
/// start of a flaky GPU may have failed once more before the fault was seen closed.
pub(super) const REPEAT_AFTER: u32 = 12;

impl GpuMonitor {
    /// Closes the faults of failed starts of GPUs that answer.
    pub(super) fn end_failed_starts(&mut self, readings: &[Readings]) {
        let answering = self.answering_failed(readings);
        self.answered_since_failure
            .retain(|uuid, _| answering.iter().any(|gpu| gpu.uuid == *uuid));
        for gpu in answering {
            let polls = self.answered_since_failure.entry(gpu.uuid.clone());
            let polls = polls.or_default();
            *polls = polls.saturating_add(1);
            if *polls % REPEAT_AFTER == POLLS {
                self.report_started(&gpu);
            }
        }
    }

    /// Returns the GPUs that answer and have an open fault of a failed start.
    fn answering_failed(&self, readings: &[Readings]) -> Vec<Gpu> {
        let NodeFaults::Told(known) = self.faults.borrow().clone() else {
            return Vec::new();
        };
        let mut failed = known.faults;
        failed.retain(|it| it.agent == keys::SYSLOG_AGENT && it.check == keys::CHECK_GPU_INIT);
        if failed.is_empty() || self.config.is_fake {
            return Vec::new();
        }
        let shown = self.devices.gpus();
        let is_failed = |gpu: &&Gpu| {
            let mut shown = shown
                .iter()
                .filter(|it| it.name.eq_ignore_ascii_case(&gpu.uuid));
            let answers = readings.iter().any(|read| read.uuid == gpu.uuid);
            answers && shown.any(|shown| failed.iter().any(|it| concerns(it, shown)))
        };
        self.inventory
            .gpus
            .iter()
            .filter(is_failed)
            .cloned()
            .collect()
    }

    fn report_started(&mut self, gpu: &Gpu) {
        let blank = HealthEvent {
            agent: keys::SYSLOG_AGENT.to_owned(),
            ..self
                .reporter
                .event(keys::CHECK_GPU_INIT, keys::COMPONENT_GPU)
        };
        let message = "The driver has started the GPU, and it answers";
        self.report(event::recovery(gpu, message, blank));
    }
}
