//! Handlers of the inputs about one node: observed states, and answers of the API server and the
//! store. Answers about the ownership of a session are handled in `claim.rs`.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use model::journal::EntryKind;
use model::node::NodeView;
use model::position::Position;
use model::time::later;

use super::agenda::StoreQuestion;
use super::look::Look;
use super::{CreateAnswer, Effect, Level, PatchAnswer, PodUpdate, RemovalAnswer, ResourceUpdate};
use crate::brake::DOUBT;
use crate::session::{JournalNote, RequestFailure};

/// Longest delay of a view that is part of a list: one page takes up to 30 s, and may wait in
/// the watch's queue.
pub const LIST_DELAY: SignedDuration = SignedDuration::from_secs(60);

/// Wait before a retry where the store did not append the events.
const APPEND_RETRY: SignedDuration = SignedDuration::from_secs(10);

// === impl Look ===

impl Look<'_> {
    /// Handles the answer to a patch.
    pub(super) fn patch_answered(&mut self, answer: PatchAnswer) {
        let now = self.state.now;
        let counted = self.entry.counted(now);
        self.entry.patch.in_flight = false;
        // Without an answer the patch may have been made; every other answer is definite.
        let unknown = matches!(answer, PatchAnswer::Unknown);
        let in_doubt = (self.entry.patch.taking_out && unknown).then(|| now + DOUBT);
        self.entry.patch.in_doubt = in_doubt;
        self.brake.add_doubt(in_doubt);
        let failure = match answer {
            PatchAnswer::Made(view) => {
                self.entry.patch.answered_at = Some(now);
                let dropped = self.entry.patch.change.dropped(&view);
                self.update_view(view, None);
                self.journal_dropped(&dropped);
                (!dropped.is_empty()).then_some(RequestFailure::Error { retry_after: None })
            }
            PatchAnswer::Conflict => Some(RequestFailure::Conflict),
            PatchAnswer::NotFound => {
                self.entry.remove_from_cluster();
                Some(RequestFailure::Error { retry_after: None })
            }
            PatchAnswer::Refused { retry_after } => Some(RequestFailure::Error { retry_after }),
            PatchAnswer::Unknown => Some(RequestFailure::Error { retry_after: None }),
        };
        if let Some(failure) = failure {
            self.entry.session.failed(failure, now);
            self.save_session();
        }
        self.entry.patch.taking_out = false;
        if self.entry.counted(now) != counted {
            self.brake.mark_stale();
        }
        self.set_wake();
        self.agenda.look_again_at(self.name);
    }

    /// Journals that the API server answered a patch as made, and parts of it are missing on the
    /// node.
    fn journal_dropped(&mut self, dropped: &[String]) {
        if dropped.is_empty() {
            return;
        }
        let text = format!(
            "the API server has accepted the change, but the node lacks {}; an admission webhook or \
             policy drops it; it is tried again",
            dropped.join(", ")
        );
        self.journal(JournalNote::new(EntryKind::Answer, text), Some(Level::Warn));
    }

    /// Handles the answer to the change of a rule.
    pub(super) fn rule_answered(&mut self, rule: &str, result: Result<(), RequestFailure>) {
        let taints = &mut self.entry.stages.device_taints;
        taints.change_answered(rule, result, self.state.now);
        self.agenda.look_again_at(self.name);
    }

    /// Handles a change of the node's pods.
    pub(super) fn pods_updated(&mut self, update: PodUpdate) {
        let now = self.state.now;
        if self.entry.stages.drain.update_pods(update, now) {
            self.agenda.look_again_at(self.name);
        }
    }

    /// Handles the answer to the removal of a pod.
    pub(super) fn removal_answered(&mut self, uid: &str, answer: RemovalAnswer) {
        if self
            .in_stages(|stages, _, requests| stages.drain.removal_answered(uid, answer, requests))
        {
            self.agenda.look_again_at(self.name);
        }
    }

    /// Handles a change of the custom resource of the node's drain or remediation.
    pub(super) fn resource_updated(&mut self, resource: &str, update: ResourceUpdate) {
        let is_ours = self.in_stages(|stages, facts, requests| {
            let of_drain = stages
                .drain
                .custom
                .resource_updated(facts, resource, &update, requests);
            of_drain || stages.remediation.resource_updated(resource, update)
        });
        if is_ours {
            self.agenda.look_again_at(self.name);
        }
    }

    /// Handles the answer to the creation of a custom resource.
    pub(super) fn resource_created(&mut self, key: &str, answer: CreateAnswer) {
        let is_ours = self.in_stages(|stages, facts, requests| {
            let of_drain = stages
                .drain
                .custom
                .create_answered(facts, key, &answer, requests);
            of_drain || stages.remediation.create_answered(key, answer, requests)
        });
        if is_ours {
            self.set_wake();
            self.agenda.look_again_at(self.name);
        }
    }

    /// Handles the store's answer to an append of events.
    pub(super) fn events_appended(&mut self, result: Result<Option<Position>, ()>) {
        match (self.entry.claim.question.take(), result) {
            (Some(StoreQuestion::TakeOver { listed }), Ok(up_to)) => {
                // The store has them now, if under another id for some.
                self.entry.claim.stored.extend(listed);
                self.entry.claim.question = up_to.map(StoreQuestion::AwaitFeed);
            }
            (Some(StoreQuestion::AppendOwn { text }), Ok(up_to)) => {
                // The decision follows once the feed has delivered them.
                self.entry.claim.question = up_to.map(StoreQuestion::AwaitFeed);
                if let Some(text) = text {
                    let note = JournalNote::new(EntryKind::Attention, text);
                    let now = self.state.now;
                    (self.agenda).journal(now, self.name, None, note, Some(Level::Info));
                }
            }
            (Some(StoreQuestion::AppendOwn { .. }), Err(())) => {
                self.entry.stages.remediation.not_recorded();
                let at = later(self.state.now, APPEND_RETRY);
                return self.agenda.wakes.set(self.name, Some(at));
            }
            (Some(StoreQuestion::TakeOver { .. }), Err(())) => return self.retry_claim(),
            (other, _) => self.entry.claim.question = other,
        }
        self.agenda.dirty.insert(self.name.to_owned());
    }

    /// Sets the observed state of the node, unless it is outdated: the watch may still deliver
    /// states from before this process's last patch. Returns whether anything that decisions
    /// depend on has changed.
    ///
    /// A state from a list that began at `listing` counts even with a lower version, if no patch
    /// can be newer: after a restore of etcd from a backup, nodes have lower versions than
    /// before.
    pub(super) fn update_view(&mut self, view: Arc<NodeView>, listing: Option<Timestamp>) -> bool {
        let now = self.state.now;
        if self.entry.is_outdated(&view) {
            let patched_at = self.entry.patch.answered_at;
            let patched_before = |began| patched_at.is_none_or(|at| at + LIST_DELAY < began);
            if !listing.is_some_and(patched_before) {
                return false;
            }
            let text = "the API server went back to an older state of the node".to_owned();
            self.agenda.log(Level::Info, Some(self.name), text);
            let name = self.name.to_owned();
            self.agenda.effects.push(Effect::Restored(name));
        }
        let counts_otherwise = self.counts_otherwise(&view);
        let entry = &mut *self.entry;
        let (was_out, since) = (!entry.in_service(), entry.out_since());
        let counted = entry.counted(now);
        let changed = entry.set_view(view);
        if let Some(observed) = &entry.observed {
            entry.session.observe(observed, now);
        }
        let (in_service, counts) = (entry.in_service(), entry.counted(now));
        if was_out && in_service {
            self.agenda.unsaved.recently_out |= self.brake.node_returned(self.name, since);
        } else if changed && counts_otherwise || counts != counted {
            self.brake.mark_stale();
        }
        changed
    }

    /// Returns whether the node is new to the brake, counts in another group than before, or was
    /// cordoned or uncordoned by others.
    fn counts_otherwise(&self, view: &NodeView) -> bool {
        let Some(before) = &self.entry.view else {
            return true;
        };
        let policy = self.state.policy.as_ref();
        let budgets = policy.iter().flat_map(|policy| &policy.brake.budgets);
        std::iter::once(&self.state.settings.gpu_label.key)
            .chain(budgets.filter_map(|budget| budget.per.as_ref()))
            .any(|label| before.labels.get(label) != view.labels.get(label))
            || before.unschedulable != view.unschedulable
                && self.entry.counted(self.state.now).is_none()
    }
}
