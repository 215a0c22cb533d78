//! The monitor of providers: converts conditions that providers set in the Device API to health
//! events, like any monitor's findings.
//!
//! A false condition is a non-fatal fault of the check that its type names; an override in the
//! connector's configuration can make it fatal. The fault ends when its provider reports so: a
//! provider that is silent or gone has not reported a recovery.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use contract::device::{Condition, ConditionStatus, Gpu};
use contract::{Entity, HealthEvent, keys};
use devices::DeviceApi;
use devices::board::{Own, READY};
use devices::faults::PROVIDERS_AGENT;
use runtime::metrics::Group;
use runtime::sources::SourceState;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use monitor::{Frame, Monitor, Reporter};

const MONITOR: Monitor = Monitor {
    name: "providers",
    agent: PROVIDERS_AGENT,
    // Providers report themselves which faults a reboot has remediated.
    checks: &[],
};

/// Interval of checks for changes; changes within it are processed together.
const EVERY: Duration = Duration::from_secs(1);

pub struct ProviderMonitor {
    api: DeviceApi,
    reporter: Reporter<Reported>,
}

/// Faults whose recovery must be reported, which a restart must not forget: types of
/// conditions, by the name of the GPU.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Reported {
    bad: BTreeMap<String, BTreeSet<String>>,
}

// === impl ProviderMonitor ===

/// Returns the descriptions of the metrics of this monitor.
pub(crate) fn described_metrics() -> Group {
    Group::new("providers", MONITOR.described_metrics())
}

impl ProviderMonitor {
    /// Creates a monitor of the conditions at `api`.
    pub fn new(api: DeviceApi, frame: &Frame) -> Self {
        Self {
            api,
            reporter: Reporter::new(&MONITOR, frame.clone()),
        }
    }

    /// Reports conditions until `cancel`.
    pub async fn run(mut self, cancel: CancellationToken) {
        let mut versions = self.api.versions();
        versions.mark_changed();
        loop {
            // Fails only once no sender is left, and then nothing can change.
            if versions.has_changed().unwrap_or_default() {
                versions.mark_unchanged();
                self.poll();
            }
            if !self.reporter.pause(EVERY, &cancel).await {
                break;
            }
        }
        self.reporter.finish(&cancel).await;
    }

    fn poll(&mut self) {
        let gpus = self.api.gpus();
        let mut conditions = 0;
        for gpu in &gpus {
            let all = gpu.status.iter().flat_map(|status| &status.conditions);
            for condition in all.filter(|one| !is_ours(one)) {
                conditions += 1;
                self.process(gpu, condition);
            }
        }
        self.reporter.has_read(self.reporter.now());
        let detail = format!("{conditions} conditions of providers");
        self.reporter.show(SourceState::Following, &detail);
    }

    fn process(&mut self, gpu: &Gpu, condition: &Condition) {
        let reported = &self.reporter.memory().bad;
        let was_bad = reported
            .get(&gpu.name)
            .is_some_and(|bad| bad.contains(&condition.r#type));
        let is_bad = match condition.status() {
            ConditionStatus::True => false,
            ConditionStatus::False => true,
            ConditionStatus::Unknown | ConditionStatus::Unspecified => return,
        };
        if is_bad == was_bad {
            return;
        }
        let event = self.event(gpu, condition, is_bad);
        let memory = self.reporter.memory_mut();
        let bad = memory.bad.entry(gpu.name.clone()).or_default();
        if is_bad {
            bad.insert(condition.r#type.clone());
        } else {
            bad.remove(&condition.r#type);
        }
        memory.bad.retain(|_, bad| !bad.is_empty());
        self.reporter.report(event, self.reporter.now());
    }

    fn event(&self, gpu: &Gpu, condition: &Condition, is_bad: bool) -> HealthEvent {
        let mut event = self.reporter.event(&condition.r#type, keys::COMPONENT_GPU);
        event.is_healthy = !is_bad;
        let message = format!(
            "{}: {} {}",
            condition.source, condition.reason, condition.message
        );
        message.trim_end().clone_into(&mut event.message);
        let pci = gpu
            .spec
            .as_ref()
            .map_or("", |spec| spec.pci_bus_id.as_str());
        let entities = [
            (keys::ENTITY_PCI, pci),
            (keys::ENTITY_GPU_UUID, gpu.name.as_str()),
        ];
        let named = entities.into_iter().filter(|(_, value)| !value.is_empty());
        event.entities_impacted = named
            .map(|(kind, value)| Entity {
                entity_type: kind.to_owned(),
                entity_value: value.to_owned(),
            })
            .collect();
        event
    }
}

fn is_ours(condition: &Condition) -> bool {
    condition.r#type == READY || Own::is_source(&condition.source)
}

#[cfg(test)]
mod tests;
