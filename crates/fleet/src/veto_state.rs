//! The veto on one node ([`crate::veto`]), and its journal entries. The [stages](super::stage)
//! decide what it holds back.

use jiff::Timestamp;
use model::journal::EntryKind;

use crate::session::{Note, Observed};
use crate::stage::Asks;
use crate::state::FleetState;
use crate::status::eviction::{Eviction, Skip};
use crate::veto::Veto;

/// State of the veto on one node.
#[derive(Debug, Default)]
pub(super) struct VetoState {
    /// Veto in force, if any.
    holds: Option<Veto>,
    /// Last journal entry about the veto.
    says: Option<String>,
}

impl VetoState {
    /// Updates the veto from the node and the pause, and journals changes.
    pub(super) fn take(&mut self, observed: &Observed, fleet: &FleetState, asks: &mut Asks<'_>) {
        let of_all = of_all(fleet);
        let read = Veto::of(&observed.view, fleet.now).map(|own| own.or(of_all));
        // A node in service has nothing to hold back.
        let read = read.map(|veto| veto.filter(|_| observed.own.is_some()));
        let (veto, says, wrong) = match read {
            Ok(Some(veto)) => {
                let says = format!("held back by {veto}: no drain and no repair begins");
                (Some(veto), Some(says), false)
            }
            Ok(None) => (None, None, false),
            Err(why) => (None, Some(why), true),
        };
        let unread = fleet.switches.unread.as_deref();
        let unread = unread.filter(|_| observed.own.is_some());
        // The journal says nothing about a pause that cannot be read.
        self.holds = veto.or_else(|| unread.map(Veto::while_unread));
        let held = self.says.is_some();
        let news = self.says != says;
        self.says.clone_from(&says);
        let text = match says {
            Some(why) if news && wrong => return asks.call_attention(why),
            Some(says) if news => says,
            None if held && observed.own.is_some() => "the veto has ended".to_owned(),
            _ => return,
        };
        asks.note(Note::new(EntryKind::Session, text), None);
    }

    /// Returns the current veto.
    pub(super) fn holds(&self) -> Option<&Veto> {
        self.holds.as_ref()
    }

    /// Returns the note about the veto.
    pub(super) fn says(&self) -> Option<&str> {
        self.says.as_deref()
    }

    /// Returns when the veto ends by itself.
    pub(super) fn ends_at(&self) -> Option<Timestamp> {
        self.holds.as_ref()?.ends_at()
    }

    /// Returns the veto that the drain waits for, given the drain's progress.
    pub(super) fn holds_back(&self, drain: Option<&Eviction>) -> Option<&Veto> {
        let says = drain?;
        let held = |veto: &&Veto| says.message == Skip::Veto(veto.to_string()).to_string();
        self.holds.as_ref().filter(held)
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
