//! The veto on one node ([`crate::veto`]), and its journal entries. The [stages](super::stage)
//! decide what it holds back.

use jiff::Timestamp;
use model::journal::EntryKind;

use crate::session::{JournalNote, Observed};
use crate::stage::Requests;
use crate::state::FleetState;
use crate::status::eviction::{Eviction, Skip};
use crate::veto::Veto;

/// State of the veto on one node.
#[derive(Debug, Default)]
pub(super) struct VetoState {
    /// Veto in force, if any.
    current: Option<Veto>,
    /// Last journal entry about the veto.
    note: Option<String>,
}

impl VetoState {
    /// Updates the veto from the node and the pause, and journals changes.
    pub(super) fn update(
        &mut self,
        observed: &Observed,
        fleet: &FleetState,
        requests: &mut Requests<'_>,
    ) {
        let of_all = of_all(fleet);
        let read = Veto::of(&observed.view, fleet.now).map(|own| own.or(of_all));
        // A node in service has nothing to hold back.
        let read = read.map(|veto| veto.filter(|_| observed.own.is_some()));
        let (veto, note, wrong) = match read {
            Ok(Some(veto)) => {
                let note = format!("held back by {veto}: no drain and no remediation begins");
                (Some(veto), Some(note), false)
            }
            Ok(None) => (None, None, false),
            Err(why) => (None, Some(why), true),
        };
        let unread = fleet.switches.unread.as_deref();
        let unread = unread.filter(|_| observed.own.is_some());
        // The journal says nothing about a pause that cannot be read.
        self.current = veto.or_else(|| unread.map(Veto::while_unread));
        let held = self.note.is_some();
        let is_new = self.note != note;
        self.note.clone_from(&note);
        let text = match note {
            Some(why) if is_new && wrong => return requests.call_attention(why),
            Some(note) if is_new => note,
            None if held && observed.own.is_some() => "the veto has ended".to_owned(),
            _ => return,
        };
        requests.journal(JournalNote::new(EntryKind::Session, text), None);
    }

    /// Returns the current veto.
    pub(super) fn current(&self) -> Option<&Veto> {
        self.current.as_ref()
    }

    /// Returns the note about the veto.
    pub(super) fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Returns when the veto ends by itself.
    pub(super) fn ends_at(&self) -> Option<Timestamp> {
        self.current.as_ref()?.ends_at()
    }

    /// Returns the veto that the drain waits for, given the drain's progress.
    pub(super) fn holding_drain(&self, drain: Option<&Eviction>) -> Option<&Veto> {
        let note = drain?;
        let held = |veto: &&Veto| note.message == Skip::Veto(veto.to_string()).to_string();
        self.current.as_ref().filter(held)
    }
}

/// Returns the veto on all nodes: a pause of remediation.
fn of_all(fleet: &FleetState) -> Option<Veto> {
    let pause = fleet.switches.pause.as_ref();
    let pause = pause.filter(|pause| pause.repairs && pause.holds(fleet.now));
    pause.map(Veto::from)
}

#[cfg(test)]
mod tests;
