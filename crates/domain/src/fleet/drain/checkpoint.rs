//! The handshake before an eviction: a pod that asks for it is told to write a checkpoint, and has time for
//! it. What it answers, and until when it is waited for, says [`crate::drain`].

use jiff::Timestamp;

use crate::drain::{Next, PodView};
use crate::fleet::{Effect, Fleet, Level, Mode};
use crate::journal::EntryKind;
use crate::session::Note;

/// A pod to be told that it may write a checkpoint.
#[derive(Clone, Debug)]
pub struct PlannedCheckpoint {
    /// The node.
    pub node: String,
    /// The session that it belongs to.
    pub session: Option<String>,
    /// Namespace of the pod.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// The time of the request, which the pod repeats when it is done.
    pub at: Timestamp,
}

impl Fleet {
    /// Tells a pod that it may write a checkpoint, where it is time; in a dry run goes on as if it had left.
    pub(super) fn ask_for_checkpoint(&mut self, name: &str, pod: &PodView) {
        let now = self.common.now;
        let session = self.entry(name).session.id.clone();
        let text = format!("pod {} {}", pod.title(), Next::AskCheckpoint);
        if self.common.settings.mode == Mode::DryRun {
            let text = format!("dry run: {text}");
            self.log(Level::Info, Some(name), text.clone());
            let note = Note::new(EntryKind::DryRun, text);
            self.note(name, session.as_deref(), note, None);
            self.drain_mut(name).pretended.insert(pod.uid.clone());
            self.agenda.dirty.insert(name.to_owned());
            return;
        }
        if !self.drain_mut(name).begins_try(pod, now) {
            return;
        }
        let note = Note::new(EntryKind::Session, text);
        self.note(name, session.as_deref(), note, None);
        self.agenda
            .effects
            .push(Effect::Checkpoint(Box::new(PlannedCheckpoint {
                node: name.to_owned(),
                session,
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                at: now,
            })));
    }
}
