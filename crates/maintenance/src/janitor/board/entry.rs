//! A resource on the board, with state that is not in its object.

use jiff::Timestamp;

use super::io::Effect;
use crate::janitor::failure::Class;
use crate::janitor::record::{SIGNAL_SENT, SignalRecord};
use crate::janitor::sending::{ASK_AGAIN, FoundOperation, Memory, ProviderAnswer, Question};
use crate::{Maintenance, MaintenanceResource};

#[derive(Clone, Debug)]
pub(super) struct BoardEntry {
    pub(super) resource: MaintenanceResource,
    pub(super) memory: Memory,
    /// Version of the resource when the pending write to it, its node or its Job was started.
    pub(super) writing: Option<String>,
    /// True while a response of a provider, or of the deletion of a node, is pending.
    pub(super) asking: bool,
    /// Earliest time of the next action.
    pub(super) not_before: Option<Timestamp>,
    /// Version known to be outdated: no write based on it can succeed.
    pub(super) outdated: Option<String>,
    /// Reason for a permanent refusal of its Job.
    pub(super) refused: Option<String>,
    pub(super) wake: Option<Timestamp>,
}

// === impl BoardEntry ===

impl BoardEntry {
    pub(super) fn new(resource: MaintenanceResource) -> Self {
        Self {
            resource,
            memory: Memory::default(),
            writing: None,
            asking: false,
            not_before: None,
            outdated: None,
            refused: None,
            wake: None,
        }
    }

    /// Records the response of a provider.
    pub(super) fn answered(&mut self, answer: ProviderAnswer, now: Timestamp) {
        self.asking = false;
        let memory = &mut self.memory;
        let wait = match &answer {
            ProviderAnswer::Found(Err(failure)) | ProviderAnswer::Ready(Err(failure)) => {
                failure.retry_after
            }
            _ => None,
        };
        let wait = wait.map_or(ASK_AGAIN, |wait| wait.max(ASK_AGAIN));
        match answer {
            ProviderAnswer::Sent(_)
            | ProviderAnswer::Found(Ok(FoundOperation::Sent(_) | FoundOperation::NotSent)) => {
                memory.response = Some(answer);
            }
            ProviderAnswer::Ready(Err(ref failure)) if failure.class == Class::Permanent => {
                memory.response = Some(answer);
            }
            ProviderAnswer::Found(Ok(FoundOperation::CannotTell)) => memory.cannot_tell = true,
            ProviderAnswer::Ready(Ok(ready)) => {
                memory.ready |= ready;
                memory.ask_after = now.checked_add(wait).ok();
            }
            ProviderAnswer::Found(Err(_)) | ProviderAnswer::Ready(Err(_)) => {
                memory.ask_after = now.checked_add(wait).ok();
            }
        }
    }

    /// Returns whether a newer version than the observed one is known to exist.
    pub(super) fn is_outdated(&self) -> bool {
        self.outdated.as_ref() == Some(&self.resource.version)
    }

    /// Records that an effect is being carried out.
    pub(super) fn begins(&mut self, effect: &Effect) {
        match effect {
            Effect::Ask { question, .. } => {
                self.asking = true;
                if *question == Question::Send {
                    let record = SignalRecord::read(&self.resource.status);
                    self.memory.sent = record.map(|record| record.attempt);
                }
            }
            Effect::DeleteNode { .. } => self.asking = true,
            _ => self.writing = Some(self.resource.version.clone()),
        }
    }

    /// Records the state of the resource after a write. A provider that has just accepted a
    /// signal is not asked about it at once.
    pub(super) fn has_written(&mut self, resource: MaintenanceResource, now: Timestamp) {
        self.not_before = None;
        // The failure of a reset is still needed while services are restored.
        let response = self.memory.response.take();
        self.memory.response = response.filter(|answer| matches!(answer, ProviderAnswer::Ready(_)));
        let sent = |of: &MaintenanceResource| of.status.is_true(SIGNAL_SENT);
        let is_asked = resource.kind != Maintenance::Terminate;
        if is_asked && sent(&resource) && !sent(&self.resource) {
            self.memory.ask_after = now.checked_add(ASK_AGAIN).ok();
        }
        // The watch may have delivered a newer state already.
        if !resource.is_older(&self.resource) {
            self.resource = resource;
        }
    }
}
