//! The outcome of a check: what it means for the pod, and the health events for the node.

use std::time::Duration;

use contract::{Entity, HealthEvent, RecommendedAction, keys};

use crate::worker::SeenGpu;

/// The meaning of an outcome for the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Result {
    /// The check passed.
    Passed,
    /// The check failed, or what it needs did not come about: the pod does not start.
    Failed,
    /// Nothing could be tested, for a reason that is no fault of this pod or its GPUs: it starts.
    NotTested,
    /// What the check was given cannot be meant.
    Misconfigured,
}

/// The end of a check.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) result: Result,
    /// The cause in one word, for scripts: a code, or `PASSED`.
    pub(crate) code: String,
    /// The cause in one line, for people.
    pub(crate) text: String,
    /// The news for the node.
    pub(crate) findings: Vec<Finding>,
    /// The wait for the gang; `None` where there was none, or where it did not form.
    pub(crate) gang_wait: Option<GangWait>,
}

/// The time until all members of a gang were known.
#[derive(Clone, Debug)]
pub(crate) struct GangWait {
    /// The id of the gang.
    pub(crate) gang: String,
    pub(crate) waited: Duration,
}

/// One event of a check; [`crate::frame`] adds who it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Finding {
    /// The name of the check on the wire.
    pub(crate) check: String,
    pub(crate) healthy: bool,
    pub(crate) fatal: bool,
    pub(crate) action: RecommendedAction,
    /// The code of what is wrong; empty where all is well.
    pub(crate) code: String,
    pub(crate) message: String,
    /// The devices that it is about, as (type, name); none: the node.
    pub(crate) entities: Vec<(&'static str, String)>,
    pub(crate) metadata: Vec<(String, String)>,
}

// === impl Outcome ===

impl Outcome {
    /// Returns a pass.
    pub(crate) fn passed(text: String, findings: Vec<Finding>) -> Self {
        Self {
            result: Result::Passed,
            code: "PASSED".to_owned(),
            text,
            findings,
            gang_wait: None,
        }
    }

    /// Returns a failure for one reason.
    pub(crate) fn failed(finding: Finding) -> Self {
        Self {
            result: Result::Failed,
            code: finding.code.clone(),
            text: finding.message.clone(),
            findings: vec![finding],
            gang_wait: None,
        }
    }

    /// Says more, after what it says already.
    pub(crate) fn and(mut self, text: &str) -> Self {
        let messages = self.findings.iter_mut().map(|finding| &mut finding.message);
        for told in messages.chain([&mut self.text]) {
            told.push_str("; ");
            told.push_str(text);
        }
        self
    }

    /// Returns that nothing was tested, by a setting that cannot be meant.
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
    /// Returns that all is well.
    pub(crate) fn healthy(check: &str, message: String) -> Self {
        Self {
            check: check.to_owned(),
            healthy: true,
            message,
            ..Self::default()
        }
    }

    /// Returns a finding that stops nothing and asks for nothing.
    pub(crate) fn harmless(check: &str, code: &str, message: String) -> Self {
        Self {
            check: check.to_owned(),
            code: code.to_owned(),
            message,
            ..Self::default()
        }
    }

    /// Names a GPU that it is about.
    pub(crate) fn about_gpu(mut self, uuid: &str) -> Self {
        self.entities.push((keys::ENTITY_GPU_UUID, uuid.to_owned()));
        self
    }

    /// Names the GPUs that it is about: a later pass of others ends nothing of it.
    pub(crate) fn about_gpus(self, gpus: &[SeenGpu]) -> Self {
        gpus.iter()
            .fold(self, |finding, gpu| finding.about_gpu(&gpu.uuid))
    }

    /// Writes it into an event that says who reports it.
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
