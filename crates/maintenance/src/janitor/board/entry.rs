//! A resource on the board, and what is known of it beside its object.

use jiff::Timestamp;

use super::io::Effect;
use crate::janitor::failure::Class;
use crate::janitor::record::{Record, SIGNAL_SENT};
use crate::janitor::sending::{ASK_AGAIN, Answer, Found, Memory, Question};
use crate::{Maintenance, Resource};

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) resource: Resource,
    pub(super) memory: Memory,
    /// The version for which something is done to the resource, its node or its Job, until the answer.
    pub(super) writing: Option<String>,
    /// True while the answer of a provider is awaited, or of a node that is deleted.
    pub(super) asking: bool,
    /// The time before which nothing is done about it.
    pub(super) not_before: Option<Timestamp>,
    /// The version that is not to be written any more: there is a newer one.
    pub(super) outdated: Option<String>,
    /// Why its Job is refused for good.
    pub(super) refused: Option<String>,
    pub(super) wake: Option<Timestamp>,
}

// === impl Entry ===

impl Entry {
    pub(super) fn new(resource: Resource) -> Self {
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

    /// Takes the answer of a provider in.
    pub(super) fn answered(&mut self, answer: Answer, now: Timestamp) {
        self.asking = false;
        let memory = &mut self.memory;
        let wait = match &answer {
            Answer::Found(Err(failure)) | Answer::Ready(Err(failure)) => failure.retry_after,
            _ => None,
        };
        let wait = wait.map_or(ASK_AGAIN, |wait| wait.max(ASK_AGAIN));
        match answer {
            Answer::Sent(_) | Answer::Found(Ok(Found::Sent(_) | Found::NotSent)) => {
                memory.heard = Some(answer);
            }
            Answer::Ready(Err(ref failure)) if failure.class == Class::Permanent => {
                memory.heard = Some(answer);
            }
            Answer::Found(Ok(Found::CannotTell)) => memory.cannot_tell = true,
            Answer::Ready(Ok(ready)) => {
                memory.ready |= ready;
                memory.ask_after = now.checked_add(wait).ok();
            }
            Answer::Found(Err(_)) | Answer::Ready(Err(_)) => {
                memory.ask_after = now.checked_add(wait).ok();
            }
        }
    }

    /// Returns whether it is known that there is a newer version than the one that was seen.
    pub(super) fn is_outdated(&self) -> bool {
        self.outdated.as_ref() == Some(&self.resource.version)
    }

    /// Takes in that an effect is carried out, until its answer.
    pub(super) fn begins(&mut self, effect: &Effect) {
        match effect {
            Effect::Ask { question, .. } => {
                self.asking = true;
                if *question == Question::Send {
                    let record = Record::read(&self.resource.status);
                    self.memory.sent = record.map(|record| record.attempt);
                }
            }
            Effect::DeleteNode { .. } => self.asking = true,
            _ => self.writing = Some(self.resource.version.clone()),
        }
    }

    /// Takes in what the resource is after a write. A provider is not asked at once about a signal that it has
    /// just taken.
    pub(super) fn has_written(&mut self, resource: Resource, now: Timestamp) {
        self.not_before = None;
        // How a reset has failed is still needed while the rest is put back.
        let heard = self.memory.heard.take();
        self.memory.heard = heard.filter(|answer| matches!(answer, Answer::Ready(_)));
        let sent = |of: &Resource| of.status.is_true(SIGNAL_SENT);
        let is_asked = resource.kind != Maintenance::Terminate;
        if is_asked && sent(&resource) && !sent(&self.resource) {
            self.memory.ask_after = now.checked_add(ASK_AGAIN).ok();
        }
        // The watch may have told of a newer one.
        if !resource.is_older(&self.resource) {
            self.resource = resource;
        }
    }
}
