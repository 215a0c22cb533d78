//! The veto on one node ([`crate::veto`]), and its journal entries. The [stages](super::stage)
//! decide what it holds back.

use std::fmt;

use jiff::Timestamp;
use model::journal::EntryKind;

use crate::session::{JournalNote, ObservedNode};
use crate::stage::StageRequests;
use crate::state::FleetState;
use crate::veto::Veto;

/// State of the veto on one node.
#[derive(Debug, Default)]
pub(super) struct VetoState {
    /// Veto of a person, as last journaled.
    reading: Option<VetoReading>,
    /// Veto on all nodes: a pause of remediation, or one that cannot be read, about which the
    /// journal says nothing.
    of_all: Option<Veto>,
}

/// Veto of a person, as read from the node and the pause. Displayed for people.
#[derive(Debug, PartialEq)]
enum VetoReading {
    /// Veto that holds the node back.
    Holds(Veto),
    /// Reason why the node's annotation does not count.
    Wrong(String),
}

// === impl VetoState ===

impl VetoState {
    /// Updates the veto from the node and the pause, and journals changes.
    pub(super) fn update(
        &mut self,
        observed: &ObservedNode,
        fleet: &FleetState,
        requests: &mut StageRequests<'_>,
    ) {
        // A node in service has nothing to hold back.
        let in_session = observed.own.is_some();
        let pause = of_all(fleet).filter(|_| in_session);
        let reading = match Veto::of(&observed.view, fleet.now) {
            Ok(own) => {
                (own.filter(|_| in_session).or_else(|| pause.clone())).map(VetoReading::Holds)
            }
            Err(why) => Some(VetoReading::Wrong(why)),
        };
        let unread = fleet.switches.unread.as_deref().filter(|_| in_session);
        self.of_all = pause.or_else(|| unread.map(Veto::while_unread));
        if self.reading == reading {
            return;
        }
        self.reading = reading;
        let text = match &self.reading {
            Some(VetoReading::Wrong(why)) => return requests.call_attention(why.clone()),
            Some(holds) => holds.to_string(),
            None if in_session => "the veto has ended".to_owned(),
            None => return,
        };
        requests.journal(JournalNote::new(EntryKind::Session, text), None);
    }

    /// Returns the current veto.
    pub(super) fn current(&self) -> Option<&Veto> {
        match &self.reading {
            Some(VetoReading::Holds(veto)) => Some(veto),
            _ => self.of_all.as_ref(),
        }
    }

    /// Returns the note about the veto.
    pub(super) fn note(&self) -> Option<String> {
        self.reading.as_ref().map(VetoReading::to_string)
    }

    /// Returns when the veto ends by itself.
    pub(super) fn ends_at(&self) -> Option<Timestamp> {
        self.current()?.ends_at()
    }
}

// === impl VetoReading ===

impl fmt::Display for VetoReading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Holds(veto) => {
                write!(f, "held back by {veto}: no drain and no remediation begins")
            }
            Self::Wrong(why) => f.write_str(why),
        }
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
