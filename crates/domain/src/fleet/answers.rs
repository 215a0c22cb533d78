//! Taking answers in: of the API server to a patch, and of the store to events that it was to
//! append. Those about whose session a node carries are in `claim.rs`.

use super::entry::Awaits;
use super::{
    Effect, Fleet, Level, MadeAnswer, Mode, PatchAnswer, PodNews, RemovalAnswer, ResourceNews,
};
use crate::brake::DOUBT;
use crate::journal::EntryKind;
use crate::position::Position;
use crate::session::{Failure, Note};

// === impl Fleet ===

impl Fleet {
    /// Takes the answer to a patch in.
    pub(super) fn answered(&mut self, name: &str, answer: PatchAnswer) {
        let now = self.common.now;
        let entry = self.entry(name);
        let counted = entry.counted(now);
        entry.patch.in_flight = false;
        // It may have been made all the same; anything else is a clear answer.
        let unknown = matches!(answer, PatchAnswer::Unknown);
        let in_doubt = (entry.patch.taking_out && unknown).then(|| now + DOUBT);
        entry.patch.in_doubt = in_doubt;
        self.brake.doubt(in_doubt);
        let failure = match answer {
            PatchAnswer::Made(view) => {
                let entry = self.entry(name);
                entry.patch.answered_at = Some(now);
                let dropped = entry.patch.change.dropped(&view);
                self.take_view(view);
                self.note_dropped(name, &dropped);
                (!dropped.is_empty()).then_some(Failure::Error { retry_after: None })
            }
            PatchAnswer::Conflict => Some(Failure::Conflict),
            PatchAnswer::NotFound => {
                self.entry(name).gone();
                Some(Failure::Error { retry_after: None })
            }
            PatchAnswer::Refused { retry_after } => Some(Failure::Error { retry_after }),
            PatchAnswer::Unknown => Some(Failure::Error { retry_after: None }),
        };
        if let Some(failure) = failure {
            self.entry(name).session.failed(failure, now);
            self.session_changed(name);
        }
        let entry = self.entry(name);
        entry.patch.taking_out = false;
        if entry.counted(now) != counted {
            self.brake.mark_stale();
        }
        self.set_wake(name);
        self.look_again_at(name);
    }

    /// Says that a patch has not brought all that it was to, though the API server has answered that it was made.
    fn note_dropped(&mut self, name: &str, dropped: &[String]) {
        if dropped.is_empty() {
            return;
        }
        let session = self.entry(name).session.id.clone();
        let text = format!(
            "the API server has taken the change, and the node does not have it: {}; an admission webhook or \
             policy drops it; it is tried again",
            dropped.join(", ")
        );
        let note = Note::new(EntryKind::Answer, text);
        self.note(name, session.as_deref(), note, Some(Level::Warn));
    }

    /// Takes news of the pods of a node.
    pub(super) fn take_pods(&mut self, node: &str, news: PodNews) {
        let now = self.common.now;
        let looks = self.in_stages(node, |stages, _, _| stages.drain.take_pods(news, now));
        if looks == Some(true) {
            self.look_again_at(node);
        }
    }

    /// Takes the answer to the removal of a pod.
    pub(super) fn removal_answered(&mut self, node: &str, uid: &str, answer: RemovalAnswer) {
        let looks = self.in_stages(node, |stages, _, asks| {
            stages.drain.removal_answered(uid, answer, asks)
        });
        if looks == Some(true) {
            self.look_again_at(node);
        }
    }

    /// Takes news of the custom resource of a node's drain or repair.
    pub(super) fn take_resource(&mut self, node: &str, resource: &str, news: ResourceNews) {
        let looks = self.in_stages(node, |stages, facts, asks| {
            let of_drain = stages.drain.custom.take(facts, resource, &news, asks);
            of_drain || stages.remediation.take(resource, news)
        });
        if looks == Some(true) {
            self.look_again_at(node);
        }
    }

    /// Takes the answer to a custom resource that was to be made.
    pub(super) fn resource_made(&mut self, node: &str, key: &str, answer: MadeAnswer) {
        let looks = self.in_stages(node, |stages, facts, asks| {
            let of_drain = stages.drain.custom.made(facts, key, &answer, asks);
            of_drain || stages.remediation.made(node, key, answer, asks)
        });
        if looks == Some(true) {
            self.set_wake(node);
            self.look_again_at(node);
        }
    }

    /// Starts or stops watching what the stages of a node watch, to match what the last look asked for.
    pub(super) fn settle(&mut self, name: &str) {
        let dry_run = self.common.settings.mode == Mode::DryRun;
        self.in_stages(name, |stages, _, asks| {
            for stage in stages.all_mut() {
                stage.settle(asks);
            }
            let of_drain = stages.drain.custom.follows();
            let resource = of_drain.or_else(|| stages.remediation.wanted_resource());
            if stages.remediation.follow(resource.as_ref()) && !dry_run {
                let node = name.to_owned();
                asks.effect(Effect::Follow { node, resource });
            }
        });
    }

    /// Takes in that something was asked that nobody will answer, and not of which node.
    pub(super) fn answers_lost(&mut self) {
        let until = self.common.now + DOUBT;
        for entry in self.nodes.values_mut() {
            if entry.patch.taking_out {
                entry.patch.in_doubt = Some(until);
            }
            (entry.patch.in_flight, entry.patch.taking_out) = (false, false);
            for stage in entry.stages.all_mut() {
                stage.answers_lost();
            }
            if !matches!(entry.claim.awaits, Some(Awaits::Feed(_))) {
                entry.claim.awaits = None;
            }
        }
        self.brake.doubt(Some(until));
        self.look_again_at_all();
    }

    /// Takes in whether the store has appended events of a node, and up to which position.
    pub(super) fn appended(&mut self, name: &str, result: Result<Option<Position>, ()>) {
        let Some(entry) = self.nodes.get_mut(name) else {
            return;
        };
        match (entry.claim.awaits.take(), result) {
            (Some(Awaits::TakenOver { listed }), Ok(up_to)) => {
                // Stored now, or before, if under another id.
                entry.claim.known.extend(listed);
                entry.claim.awaits = up_to.map(Awaits::Feed);
            }
            (Some(Awaits::OfOurs { text }), Ok(up_to)) => {
                // What follows is decided by what is open then.
                entry.claim.awaits = up_to.map(Awaits::Feed);
                let note = Note::new(EntryKind::Attention, text);
                self.note(name, None, note, Some(Level::Info));
            }
            (Some(Awaits::OfOurs { .. }), Err(())) => return self.append_again_later(name),
            (Some(Awaits::TakenOver { .. }), Err(())) => return self.claim_later(name),
            (other, _) => entry.claim.awaits = other,
        }
        self.agenda.dirty.insert(name.to_owned());
    }
}
