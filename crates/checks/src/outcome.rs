//! Outcome of a check: its meaning for the pod, and the health events for the node.

use std::time::Duration;

use contract::{Entity, HealthEvent, RecommendedAction, keys};

use crate::worker::SeenGpu;

/// Meaning of an outcome for the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Result {
    /// The check passed, so the pod starts.
    Passed,
    /// The check failed, or a precondition of it was not met: the pod does not start.
    Failed,
    /// Nothing could be tested, for a reason that is no fault of this pod or its GPUs: the pod
    /// starts.
    NotTested,
    /// The settings of the check are invalid.
    Misconfigured,
}

/// Outcome of a check.
#[derive(Clone, Debug)]
pub(crate) struct CheckOutcome {
    pub(crate) result: Result,
    /// Cause in one word, for scripts: a code, or `PASSED`.
    pub(crate) code: String,
    /// Cause in one line, for people.
    pub(crate) text: String,
    /// Events to report about the node.
    pub(crate) findings: Vec<Finding>,
    /// Wait for the gang; `None` if there was none, or if the gang did not form.
    pub(crate) gang_wait: Option<GangWait>,
}

/// Time until all members of a gang were known.
#[derive(Clone, Debug)]
pub(crate) struct GangWait {
    /// Id of the gang.
    pub(crate) gang: String,
    pub(crate) waited: Duration,
}

/// Finding that becomes one event; [`crate::frame`] adds the reporter.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Finding {
    /// Name of the check in events.
    pub(crate) check: String,
    pub(crate) healthy: bool,
    pub(crate) fatal: bool,
    pub(crate) action: RecommendedAction,
    /// Code of the fault; empty if there is none.
    pub(crate) code: String,
    pub(crate) message: String,
    /// Affected devices, as (type, name); empty for the node itself.
    pub(crate) entities: Vec<(&'static str, String)>,
    pub(crate) metadata: Vec<(String, String)>,
}

// === impl CheckOutcome ===

impl CheckOutcome {
    /// Creates the outcome of a pass.
    pub(crate) fn passed(text: String, findings: Vec<Finding>) -> Self {
        Self {
            result: Result::Passed,
            code: "PASSED".to_owned(),
            text,
            findings,
            gang_wait: None,
        }
    }

    /// Creates the outcome of a failure with one finding.
    pub(crate) fn failed(finding: Finding) -> Self {
        Self {
            result: Result::Failed,
            code: finding.code.clone(),
            text: finding.message.clone(),
            findings: vec![finding],
            gang_wait: None,
        }
    }

    /// Appends `text` to the outcome's text and to all messages.
    pub(crate) fn and(mut self, text: &str) -> Self {
        let messages = self.findings.iter_mut().map(|finding| &mut finding.message);
        for line in messages.chain([&mut self.text]) {
            line.push_str("; ");
            line.push_str(text);
        }
        self
    }

    /// Creates the outcome of a check with invalid settings, which tested nothing.
    pub(crate) fn misconfigured(text: String) -> Self {
        Self {
            result: Result::Misconfigured,
            code: "CONFIGURATION".to_owned(),
            text,
            findings: Vec::new(),
            gang_wait: None,
        }
    }
}

// === impl Finding ===

impl Finding {
    /// Creates a finding without a fault.
    pub(crate) fn healthy(check: &str, message: String) -> Self {
        Self {
            check: check.to_owned(),
            healthy: true,
            message,
            ..Self::default()
        }
    }

    /// Creates a finding that is not fatal and recommends no action.
    pub(crate) fn harmless(check: &str, code: &str, message: String) -> Self {
        Self {
            check: check.to_owned(),
            code: code.to_owned(),
            message,
            ..Self::default()
        }
    }

    /// Adds an affected GPU.
    pub(crate) fn about_gpu(mut self, uuid: &str) -> Self {
        self.entities.push((keys::ENTITY_GPU_UUID, uuid.to_owned()));
        self
    }

    /// Adds the affected GPUs, so that a later pass of others does not close the finding.
    pub(crate) fn about_gpus(self, gpus: &[SeenGpu]) -> Self {
        gpus.iter()
            .fold(self, |finding, gpu| finding.about_gpu(&gpu.uuid))
    }

    /// Fills the finding into an event that names the reporter.
    pub(crate) fn into_event(self, blank: HealthEvent) -> HealthEvent {
        let codes = Some(self.code).filter(|code| !code.is_empty());
        let entities = self.entities.into_iter().map(|(kind, name)| Entity {
            entity_type: kind.to_owned(),
            entity_value: name,
        });
        let mut event = HealthEvent {
            check_name: self.check,
            is_healthy: self.healthy,
            is_fatal: self.fatal,
            recommended_action: self.action as i32,
            error_code: codes.into_iter().collect(),
            message: self.message,
            entities_impacted: entities.collect(),
            metadata: self.metadata.into_iter().collect(),
            ..blank
        };
        model::event::not_fatal_without_action(&mut event);
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_asks_for_nothing_is_not_fatal() {
        for (action, is_fatal) in [
            (RecommendedAction::None, false),
            (RecommendedAction::ContactSupport, true),
        ] {
            let finding = Finding {
                fatal: true,
                action,
                ..Finding::harmless("Any", "BAD", "is bad".to_owned())
            };
            let event = finding.into_event(HealthEvent::default());
            assert_eq!(event.is_fatal, is_fatal, "{event:?}");
        }
    }
}
