//! The veto of a person about a node ([`crate::veto`]): who it holds for, and what its story says of it.
//! What it holds back is decided by the [stages](super::stage).

use jiff::Timestamp;
use model::journal::EntryKind;

use crate::session::{Note, Observed};
use crate::stage::Asks;
use crate::state::FleetState;
use crate::status::eviction::{Eviction, Skip};
use crate::veto::Veto;

/// The veto about one node.
#[derive(Debug, Default)]
pub(super) struct VetoState {
    /// The veto that holds for the node.
    holds: Option<Veto>,
    /// What the story of the node says of the veto.
    says: Option<String>,
}

impl VetoState {
    /// Takes in whether a veto holds for the node, and says what is new about that.
    pub(super) fn take(&mut self, observed: &Observed, fleet: &FleetState, asks: &mut Asks<'_>) {
        let of_all = of_all(fleet);
        let read = Veto::of(&observed.view, fleet.now).map(|own| own.or(of_all));
        // A node in service has nothing that is held back.
        let read = read.map(|veto| veto.filter(|_| observed.own.is_some()));
        let (veto, says, wrong) = match read {
            Ok(Some(veto)) => {
                let says = format!("held back by {veto}: no drain and no repair begins");
                (Some(veto), Some(says), false)
            }
            Ok(None) => (None, None, false),
            Err(why) => (None, Some(why), true),
        };
        let unread = fleet.switched.unread.as_deref();
        let unread = unread.filter(|_| observed.own.is_some());
        // Of what is not known yet its story says nothing.
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

    /// Returns the veto that holds for the node.
    pub(super) fn holds(&self) -> Option<&Veto> {
        self.holds.as_ref()
    }

    /// Returns what the story of the node says of the veto.
    pub(super) fn says(&self) -> Option<&str> {
        self.says.as_deref()
    }

    /// Returns when the veto ends by itself.
    pub(super) fn ends_at(&self) -> Option<Timestamp> {
        self.holds.as_ref()?.ends_at()
    }

    /// Returns the veto for which a drain waits, by how far the drain is.
    pub(super) fn holds_back(&self, drain: Option<&Eviction>) -> Option<&Veto> {
        let says = drain?;
        let held = |veto: &&Veto| says.message == Skip::Veto(veto.to_string()).to_string();
        self.holds.as_ref().filter(held)
    }
}

/// Returns the veto that holds for all nodes: a pause of repairs.
fn of_all(fleet: &FleetState) -> Option<Veto> {
    let pause = fleet.switched.pause.as_ref();
    let pause = pause.filter(|pause| pause.repairs && pause.holds(fleet.now));
    pause.map(Veto::from)
}

#[cfg(test)]
mod tests;
