//! The veto of a person about a node ([`crate::veto`]): who it holds for, and what its story says of it.
//! What it holds back is decided by the [stages](super::stage).

use super::entry::NodeEntry;
use super::look::Look;
use crate::journal::EntryKind;
use crate::session::{Note, Observed, Phase};
use crate::status::eviction::Skip;
use crate::veto::Veto;

impl Look<'_> {
    /// Takes in whether a veto holds for a node, and says what is new about that.
    pub(super) fn take_in_veto(&mut self, observed: &Observed) {
        let of_all = self.veto_on_all();
        let read = Veto::of(&observed.view, self.common.now).map(|own| own.or(of_all));
        // Who is in service has nothing that is held back.
        let read = read.map(|veto| veto.filter(|_| observed.own.is_some()));
        let (veto, says, wrong) = match read {
            Ok(Some(veto)) => {
                let says = format!("held back by {veto}: no drain and no repair begins");
                (Some(veto), Some(says), false)
            }
            Ok(None) => (None, None, false),
            Err(why) => (None, Some(why), true),
        };
        let unread = self.common.switched.unread.clone();
        let unread = unread.filter(|_| observed.own.is_some());
        let entry = &mut *self.entry;
        let held = entry.noted.veto.is_some();
        // Of what is not known yet its story says nothing.
        entry.veto = veto.or_else(|| unread.map(|why| Veto::while_unread(&why)));
        let news = entry.noted.veto != says;
        entry.noted.veto.clone_from(&says);
        let text = match says {
            Some(why) if news && wrong => return self.call_attention(why),
            Some(says) if news => says,
            None if held && observed.own.is_some() => "the veto has ended".to_owned(),
            _ => return,
        };
        let note = Note::new(EntryKind::Session, text);
        self.note(note, None);
    }

    /// Returns the veto that holds for all nodes: a pause of repairs.
    fn veto_on_all(&self) -> Option<Veto> {
        let pause = self.common.switched.pause.as_ref();
        let pause = pause.filter(|pause| pause.repairs && pause.holds(self.common.now));
        pause.map(Veto::from)
    }
}

impl NodeEntry {
    /// Returns the veto for which the drain of the node waits.
    pub(super) fn held_back_by(&self) -> Option<&Veto> {
        let says = self.stages.drain.eviction()?;
        let held = |veto: &&Veto| says.message == Skip::Veto(veto.to_string()).to_string();
        let quarantined = self.session.phase == Phase::Quarantined;
        self.veto.as_ref().filter(|_| quarantined).filter(held)
    }
}

#[cfg(test)]
mod tests;
