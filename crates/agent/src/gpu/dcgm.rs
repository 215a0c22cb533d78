//! Queries DCGM beside the driver, if enabled: a source of its own, `gpu-dcgm`, and a second
//! source of the same faults.
//!
//! A host engine that does not answer is a failure of that source. It is reported by
//! NVSentinel's check, whose condition alerts rely on, and is not fatal: no response is no
//! evidence of a fault.

use contract::{HealthEvent, RecommendedAction, keys};
use devices::board::{Own, Said};
use diagnosis::gpu::checks::Health;
use diagnosis::gpu::dcgm::{DcgmGpu, DcgmLook};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use runtime::metrics::Description;
use runtime::sources::{SourceHandle, SourceState};

use super::{GpuMemory, GpuMonitor, Seen, in_short};
use monitor::{Frame, Monitor, Reporter};

/// Name of the source for DCGM.
pub(super) const NAME: &str = "gpu-dcgm";

/// Describes the GPU health monitor if it queries DCGM.
pub(super) const MONITOR: Monitor = Monitor {
    checks: &[
        (keys::CHECK_GPU_PCIE, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_MEMORY, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_THERMAL, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_THERMAL_MARGIN, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_POWER, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_DRIVER, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_NVLINK, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_COUNT, keys::COMPONENT_GPU),
        (keys::CHECK_XID, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_PMU, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_MCU, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_SM, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_INFOROM, keys::COMPONENT_GPU),
        (keys::CHECK_NVSWITCH_NON_FATAL, keys::COMPONENT_GPU),
        (keys::CHECK_NVSWITCH_FATAL, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_IMEX, keys::COMPONENT_GPU),
        (keys::CHECK_GPU_ALL, keys::COMPONENT_GPU),
    ],
    ..super::MONITOR
};

/// Detail of the source before the first poll.
const WAITING: &str = "waiting for the host engine's first response";

runtime::metrics! {
    struct DcgmMetrics {
        /// 1 if the host engine of DCGM answers.
        connected: Gauge = "gpuwarden_dcgm_connected",
        /// Incidents in the last answer of DCGM's watches.
        incidents: Gauge = "gpuwarden_dcgm_incidents",
        /// Looks at DCGM's watches that were answered.
        looks: Counter = "gpuwarden_dcgm_looks",
    }
}

/// State of the monitoring of DCGM.
pub(super) struct DcgmWatch {
    source: SourceHandle,
    metrics: DcgmMetrics,
    /// Reason for missing responses that was last logged.
    blind: Option<String>,
}

/// Returns the descriptions of the metrics of this file.
pub(super) fn described_metrics() -> Vec<Description> {
    DcgmMetrics::described()
}

// === impl DcgmWatch ===

impl DcgmWatch {
    pub(super) fn new(frame: &Frame) -> Self {
        Self {
            source: (frame.sources).add(NAME, WAITING, (frame.clock)()),
            metrics: DcgmMetrics::registered(&frame.metrics),
            blind: None,
        }
    }
}

/// Forgets DCGM's reports to an earlier process if DCGM is not queried now: otherwise a problem
/// that the driver reports too would never close. A fault that only DCGM reported stays open,
/// since its end is unknown.
pub(super) fn forget(health: &mut Health, reporter: &mut Reporter<GpuMemory>) {
    let codes = health.forget_dcgm();
    if codes.is_empty() {
        return;
    }
    tracing::warn!(
        codes = codes.join(", "),
        "DCGM is no longer queried; faults that only DCGM reported stay open until the driver reports \
         the check healthy, or a person ends them"
    );
    reporter.memory_mut().health = health.remembered().clone();
}

impl GpuMonitor {
    pub(super) fn process_dcgm(&mut self, seen: Seen) {
        if let Seen::Blind { stuck, .. } = &seen {
            self.probe_metrics.blind(NAME, *stuck);
        }
        match seen {
            // Wait for the driver's names, and its list of known GPUs.
            Seen::Dcgm(_) if !self.driver_has_answered => {}
            Seen::Dcgm(look) => self.process_dcgm_look(&look),
            Seen::Blind { reason, stuck, .. } if stuck > 0 => {
                self.cannot_see_dcgm(&format!("{reason} ({stuck} probes cannot be killed)"));
            }
            Seen::Blind { reason, .. } => self.cannot_see_dcgm(&reason),
            // Only a probe of the driver sends these.
            Seen::Library(_) | Seen::Inventory(_) | Seen::Readings(_) | Seen::Event(_) => {}
        }
    }

    /// Updates the source's heartbeat, unless the monitor has to wait.
    pub(super) fn beat_dcgm(&self) {
        if let Some(dcgm) = self.dcgm.as_ref().filter(|_| self.reporter.has_room()) {
            dcgm.source.beat(self.reporter.now());
        }
    }

    /// Processes a poll of DCGM's watches.
    fn process_dcgm_look(&mut self, look: &DcgmLook) {
        self.begin_boot();
        self.report_dcgm_is_back();
        let changes = self.health.take_dcgm(look, self.started.elapsed());
        let faults = changes.iter().filter(|change| change.message.is_some());
        let faults = faults.count() as u64;
        let (now, fake) = (self.reporter.now(), self.fake_mark());
        if let Some(dcgm) = &mut self.dcgm {
            dcgm.blind = None;
            dcgm.metrics.connected.set(1);
            dcgm.metrics.looks.inc();
            let incidents = i64::try_from(look.incidents.len()).unwrap_or(i64::MAX);
            dcgm.metrics.incidents.set(incidents);
            dcgm.source.update(now, |status| {
                status.state = SourceState::Following;
                status.advice = None;
                status.detail = format!("{fake}{}", detail(look));
                status.records += 1;
                status.last_record_at = Some(now);
                status.faults += faults;
            });
        }
        self.report_changes(&changes);
        for gpu in &look.gpus {
            self.show_health(gpu);
        }
    }

    /// Processes whether pods rely on IMEX, and closes faults that do not count now. Since this
    /// is not a poll of the GPUs, it does not handle a reboot.
    pub(super) fn process_imex(&mut self) {
        let imex = *self.imex.borrow_and_update();
        let changes = self.health.imex_is(imex);
        self.report_changes(&changes);
    }

    /// Shows that DCGM does not answer, with the reason; logs and reports it once.
    pub(super) fn cannot_see_dcgm(&mut self, why: &str) {
        let (why, advice) = in_short(why);
        let why = why.as_str();
        self.health.dcgm_is_away();
        self.devices.away(Own::Dcgm, "DcgmNotSeen", why);
        let now = self.reporter.now();
        if let Some(dcgm) = &mut self.dcgm {
            if dcgm.blind.as_deref() != Some(why) {
                tracing::error!(err = why, advice, "DCGM does not answer; retrying");
                dcgm.blind = Some(why.to_owned());
            }
            dcgm.metrics.connected.set(0);
            dcgm.metrics.incidents.set(0);
            dcgm.source.update(now, |status| {
                status.state = SourceState::Failing;
                why.clone_into(&mut status.detail);
                status.advice = advice;
            });
        }
        if !self.reporter.memory().dcgm_is_lost {
            self.reporter.memory_mut().dcgm_is_lost = true;
            let message = format!("Failed to connect to DCGM for health check: {why}");
            let code = vec![keys::CODE_DCGM_CONNECTIVITY.to_owned()];
            self.report_connectivity(false, code, message);
        }
    }

    fn report_dcgm_is_back(&mut self) {
        if self.reporter.memory().dcgm_is_lost {
            self.reporter.memory_mut().dcgm_is_lost = false;
            let message = "DCGM connectivity reported no errors".to_owned();
            self.report_connectivity(true, Vec::new(), message);
        }
    }

    /// Closes the fault that DCGM does not answer if DCGM is not queried now.
    pub(super) fn forget_connectivity(&mut self) {
        if self.dcgm.is_none() && self.reporter.memory().dcgm_is_lost {
            self.reporter.memory_mut().dcgm_is_lost = false;
            let message = "DCGM is no longer queried".to_owned();
            self.report_connectivity(true, Vec::new(), message);
        }
    }

    /// Reports whether DCGM answers, as a non-fatal fault that needs a person: a notice would
    /// be closed after a while.
    fn report_connectivity(&mut self, is_healthy: bool, error_code: Vec<String>, message: String) {
        let check = keys::CHECK_DCGM_CONNECTIVITY;
        let action = if is_healthy {
            RecommendedAction::None
        } else {
            RecommendedAction::ContactSupport
        };
        let event = HealthEvent {
            is_healthy,
            recommended_action: action as i32,
            error_code,
            message,
            ..self.reporter.event(check, keys::COMPONENT_GPU)
        };
        self.report(event);
    }

    /// Sets the condition of DCGM in the Device API, from DCGM's fatal findings about a GPU.
    fn show_health(&self, gpu: &DcgmGpu) {
        let Some(uuid) = &gpu.uuid else {
            return;
        };
        let codes = self.health.dcgm_codes(uuid);
        let fatal = codes.filter(|code| self.config.catalog.judge_dcgm(code).fatal);
        let fatal: Vec<&str> = fatal.map(AsRef::as_ref).collect();
        let condition = if fatal.is_empty() {
            Said::well("NoIncidents", "DCGM finds nothing fatal")
        } else {
            Said::bad("Incidents", format!("DCGM finds {}", fatal.join(", ")))
        };
        // Fails for a GPU that the driver does not name, which is not in the Device API.
        if let Err(error) = self.devices.set_condition(Own::Dcgm, uuid, condition) {
            tracing::debug!(%error, "the Device API refuses a condition of DCGM");
        }
    }
}

/// Describes what DCGM monitors, with the number of incidents.
fn detail(look: &DcgmLook) -> String {
    let version = look.version.as_deref().unwrap_or("of unknown version");
    let mut detail = format!("{} GPUs, DCGM {version}", look.gpus.len());
    match look.incidents.len() {
        0 => {}
        incidents => detail.push_str(&format!(", incidents: {incidents}")),
    }
    if !look.is_whole {
        detail.push_str(" and more than the limit: no problem is closed");
    }
    detail
}
