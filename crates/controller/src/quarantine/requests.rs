//! Requests to the API server that are under way, of all kinds, and their answers.

use tokio::task::JoinError;

use super::apply::Applied;
use super::devices::Changed;
use super::drain::Removed;
use super::remedy::Made;
use super::{Quarantine, ROUND};
use domain::fleet::FleetInput;

/// A request to the API server, with its answer.
pub(super) enum Answered {
    /// The patch of a node.
    Patch(Box<Applied>),
    /// The change of a rule that taints a device.
    Rule(Box<Changed>),
    /// The removal of a pod, or the request that it writes a checkpoint.
    Pod(Removed),
    /// The creation or deletion of a custom resource.
    Resource(Made),
}

impl Quarantine {
    /// Takes an answer, and those that are there beside it: the brake, which goes through all nodes, is asked
    /// once about what comes together.
    pub(super) fn take_answers(&mut self, first: Result<Answered, JoinError>) {
        self.take_answer(first);
        for _ in 1..ROUND {
            let Some(done) = self.requests.try_join_next() else {
                return;
            };
            self.take_answer(done);
        }
    }

    fn take_answer(&mut self, done: Result<Answered, JoinError>) {
        match done {
            Ok(Answered::Patch(applied)) => self.patched(*applied),
            Ok(Answered::Rule(changed)) => self.rule_changed(*changed),
            Ok(Answered::Pod(removed)) => self.pod_removed(removed),
            Ok(Answered::Resource(made)) => self.resource_made(made),
            Err(error) => {
                // A bug. Which node it was is not known: all are looked at again.
                tracing::error!(err = %error, "a request ended without an answer");
                self.metrics.error("patch_panicked");
                self.take(FleetInput::AnswersLost);
            }
        }
    }
}
