//! Single devices: watches them where the policy taints any, and carries changes of their rules
//! out.

use std::sync::Arc;

use cluster::{ApiError, DeviceApi, DeviceEvent};
use fleet::session::Failure;
use fleet::{DeviceInput, DeviceWatch, FleetInput, PlannedRule};
use jiff::SignedDuration;
use model::device::Rule;
use model::journal::{Entry, EntryKind};
use runtime::logging::chain;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Answered, Quarantine, ROUND};

/// The watch of single devices, once the policy asks for it.
#[derive(Default)]
pub(super) struct DeviceTaints {
    pub(super) events: Option<mpsc::Receiver<DeviceEvent>>,
    /// True once a policy has asked for the watch; before, only rules that were left behind are
    /// looked for.
    asked: bool,
    /// The versions in which the cluster serves them.
    api: Option<Arc<DeviceApi>>,
}

/// A change of a rule that was answered.
pub(super) struct Changed {
    pub(super) planned: PlannedRule,
    pub(super) result: Result<Option<Rule>, ApiError>,
}

impl Quarantine {
    /// Watches single devices from the first policy on that taints any. With one that does not,
    /// the rules that are there are taken back.
    pub(super) fn watch_devices(&mut self, cancel: &CancellationToken) {
        let policy = self.policies.borrow().clone();
        let asks = policy.is_some_and(|policy| policy.device_taints.is_some());
        let Some(cluster) = &self.cluster else {
            return;
        };
        if asks && !self.devices.asked {
            self.devices.asked = true;
            self.devices.events = Some(cluster.watch_devices(cancel.clone()));
            let pending = DeviceInput::Watch(DeviceWatch::Pending);
            self.take(FleetInput::Devices(pending));
        } else if !asks && self.devices.events.is_none() && self.fleet.writes() {
            self.devices.events = Some(cluster.watch_left_rules(cancel.clone()));
        }
    }

    /// Takes in an event of the watch of devices, and what else it has said by now.
    pub(super) fn device_events(&mut self, first: DeviceEvent) {
        self.device_event(first);
        for _ in 1..ROUND {
            let events = self.devices.events.as_mut();
            let Some(event) = events.and_then(|events| events.try_recv().ok()) else {
                return;
            };
            self.device_event(event);
        }
    }

    fn device_event(&mut self, event: DeviceEvent) {
        match event {
            DeviceEvent::Served(api) => self.devices.api = Some(Arc::from(api)),
            DeviceEvent::News(input) => self.take(FleetInput::Devices(input)),
        }
    }

    /// Starts the change of a rule.
    pub(super) fn change_rule(&mut self, planned: PlannedRule) {
        let (Some(cluster), Some(api)) = (self.cluster.clone(), self.devices.api.clone()) else {
            return; // Without them nothing is planned.
        };
        self.requests.spawn(async move {
            let result = cluster.change_rule(&api, &planned.change).await;
            Answered::Rule(Box::new(Changed { planned, result }))
        });
    }

    /// Takes the answer to the change of a rule in.
    pub(super) fn rule_changed(&mut self, Changed { planned, result }: Changed) {
        let (node, rule) = (planned.node.clone(), planned.change.rule_name());
        let (text, status) = match &result {
            Ok(Some(_)) => (format!("DeviceTaintRule {rule} is written"), json!(200)),
            Ok(None) => (format!("DeviceTaintRule {rule} is deleted"), json!(200)),
            Err(error) => {
                let text = format!("DeviceTaintRule {rule}: {}", chain(error));
                (text, json!(error.status()))
            }
        };
        self.metrics.rule_changed(match &result {
            Ok(Some(_)) => "written",
            Ok(None) => "deleted",
            Err(error) if failure(error) == Failure::Conflict => "conflict",
            Err(_) => "failed",
        });
        let result = result.map(|rule| rule.map(Box::new)).map_err(|error| {
            let failure = failure(&error);
            if failure != Failure::Conflict {
                tracing::warn!(node, rule, err = %chain(&error), "a device taint failed; it is tried again");
                self.metrics.error("device_taint_error");
            }
            failure
        });
        self.put_entry(Entry {
            at: (self.clock)(),
            node: node.clone(),
            session: planned.session,
            kind: EntryKind::Answer,
            text,
            detail: json!({"status": status}),
        });
        self.take(FleetInput::RuleChanged { node, rule, result });
    }
}

/// Returns how the change failed. One of which nobody knows is made again: it is conditional.
fn failure(error: &ApiError) -> Failure {
    match error {
        // Of one that is gone the watch tells, and then there is nothing to change.
        ApiError::Conflict { .. } | ApiError::NotFound { .. } => Failure::Conflict,
        ApiError::Throttled { retry_after } => Failure::Error {
            retry_after: retry_after.and_then(|wait| SignedDuration::try_from(wait).ok()),
        },
        _ => Failure::Error { retry_after: None },
    }
}
