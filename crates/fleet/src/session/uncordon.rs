//! Whose an uncordon was: a person's, which gives the node back, or a machine's, which is undone.
//!
//! Nothing on a node says who uncordoned it. Programs that load or upgrade drivers uncordon nodes which
//! they have not cordoned, but they do it at known times ([`crate::fleet`] has these); at any other time it was
//! a person. A taint of the session that somebody took away is judged alike.
//!
//! | seen on the node | is |
//! |---|---|
//! | a request to release it | a person's word, whenever it is |
//! | what the session did was never there | a change that has not arrived: it is tried again |
//! | it is gone, at a time of machines | undone, [`MOST_UNDONE`] times within an hour; then a person is asked, and it is undone after the hour |
//! | it is gone, at another time | a person's word: the session ends |
//!
//! Where it was once taken for a machine's, it stays so until the node is out of service again: the time of
//! machines may be over by then. What is remembered for that stands on the node.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use model::node::{NodeView, Taint};
use model::ownership::{ByHand, Ownership, Undone};
use policy::assess::Desired;

use super::{Observed, Phase, Session};

/// Most uncordons that are undone within [`UNDONE_WITHIN`]. A driver that is loaded uncordons its node once or
/// twice, and an hour may have two boots; whatever does it more often would go on for ever.
pub const MOST_UNDONE: usize = 5;
/// Time within which they count.
pub const UNDONE_WITHIN: SignedDuration = SignedDuration::from_hours(1);

/// What is to be said of what is gone, and done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Gone {
    /// Nothing is gone that is wanted.
    Nothing,
    /// A person took it back.
    ByHand(ByHand),
    /// It is to be put where it belongs; with what is to be told, if that is news.
    PutBack(Option<String>),
    /// It stays away until then; with what is to be told, if that is news.
    Left(Timestamp, Option<String>),
}

// === impl Session ===

impl Session {
    /// Takes in what a state of a node tells of the times of machines, and which of what its session did is there,
    /// whether or not anything is decided in that state. Of a session of which nothing is known here, the node says
    /// what was seen before.
    pub fn take_in_view(&mut self, observed: &Observed, now: Timestamp) {
        if let (Some(seen), Some(own)) = (&mut self.seen, &observed.own) {
            let there = own.deeds(&observed.view).filter(|(_, there)| *there);
            seen.extend(there.map(|(deed, _)| deed));
        }
        if let Some(own) = observed.own.as_deref().filter(|own| self.is_new_here(own))
            && !own.mark.machines.is_empty()
        {
            self.machines = own.mark.machines.clone();
            self.machines.clock_put_back(now);
        }
        self.machines.take_in(&observed.view, now);
    }

    /// Returns whether nothing is known here of the session that the node carries.
    pub(super) fn is_new_here(&self, own: &Ownership) -> bool {
        self.id.as_ref() != Some(&own.session_id) || matches!(self.phase, Phase::Idle | Phase::Held)
    }

    /// Returns whether what is gone from the node counts as undone by a machine, whatever the time is now.
    pub fn is_undone(&self) -> bool {
        self.undone.since.is_some()
    }

    /// Takes in what the session did and others can undo: which of it was seen on the node, and what machines have
    /// undone. `own` then says so too.
    pub(super) fn take_in_deeds(&mut self, own: &mut Ownership, node: &NodeView, is_new: bool) {
        let asked: BTreeSet<String> = own.deeds(node).map(|(deed, _)| deed).collect();
        let there = own.deeds(node).filter(|(_, there)| *there);
        let there: BTreeSet<String> = there.map(|(deed, _)| deed).collect();
        // Of one that has come just now nothing was seen before.
        let seen = self.seen.take().filter(|seen| !is_new || seen.is_empty());
        let seen = seen.unwrap_or_else(|| {
            let missing = |deed: &&String| !own.mark.missing.contains(deed);
            asked.iter().filter(missing).cloned().collect()
        });
        let mut seen: BTreeSet<String> = seen.intersection(&asked).cloned().collect();
        seen.extend(there);
        own.mark.missing = asked.difference(&seen).cloned().collect();
        self.seen = Some(seen);
        // What was put back is counted by who has seen it done: on the node, where it has a place.
        if is_new || own.replaced_labels.is_some() {
            self.undone.put_back.clone_from(&own.mark.undone.put_back);
        }
        if is_new {
            self.undone.since = own.mark.undone.since;
        }
        if own.undone_by_hand(node).is_none() {
            self.undone.since = None;
        }
        own.mark.undone.since = self.undone.since;
        own.mark.machines.clone_from(&self.machines);
    }

    /// Returns what is gone of what the session did, and what follows. `machines` says why it was a machine, where
    /// it is the time of one.
    pub(super) fn judge(
        &mut self,
        own: &mut Ownership,
        node: &NodeView,
        desired: &Desired,
        machines: Option<&str>,
        now: Timestamp,
    ) -> Gone {
        let was_left = self.left_until.take().is_some();
        if !desired.wanted() {
            return Gone::Nothing; // Given back as after any recovery.
        }
        let Some(by_hand) = own.undone_by_hand(node) else {
            let missing = !own.mark.missing.is_empty();
            return if missing {
                Gone::PutBack(None)
            } else {
                Gone::Nothing
            };
        };
        if machines.is_none() && !self.is_undone() {
            return Gone::ByHand(by_hand);
        }
        let cordon = own.cordoned && desired.cordon && !node.unschedulable;
        let taint = |taint: &Taint| own.added(taint) && !node.has_taint(taint);
        if !cordon && !desired.taints.iter().any(taint) {
            return Gone::Nothing;
        }
        let is_news = self.undone.since.is_none();
        self.undone.since.get_or_insert(now);
        let mut times = self.undone.put_back.clone();
        times.retain(|at| now.duration_since(*at).abs() < UNDONE_WITHIN);
        times.sort_unstable();
        let what = what_is_gone(by_hand);
        if let Some(oldest) = times.len().checked_sub(MOST_UNDONE) {
            let oldest = times.get(oldest).copied().unwrap_or(now).min(now);
            let until = oldest.checked_add(UNDONE_WITHIN).unwrap_or(Timestamp::MAX);
            self.left_until = Some(until);
            own.mark.undone.since = self.undone.since;
            let text = || {
                let why = machines.unwrap_or_default();
                format!(
                    "{what}{why}, and that was undone {MOST_UNDONE} times within the hour: the node is left so \
                     until {until:.0}, and pods may come to it though its faults are open; find out what does \
                     it; `gpuwarden release {}` ends the session",
                    node.name
                )
            };
            return Gone::Left(until, is_news.then(text));
        }
        times.push(now);
        let is_news = is_news || was_left;
        if own.replaced_labels.is_none() && is_news {
            self.undone.put_back.clone_from(&times);
        }
        own.mark.undone = Undone {
            put_back: times,
            since: None,
        };
        let lets_in = if own.cordon_pre_existing {
            "ends the session; it was cordoned before that, so uncordon it then"
        } else {
            "lets the node in"
        };
        let text = || {
            format!(
                "{what}{}: it is undone; `gpuwarden release {}` {lets_in}",
                machines.unwrap_or_default(),
                node.name
            )
        };
        Gone::PutBack(is_news.then(text))
    }
}

fn what_is_gone(by_hand: ByHand) -> &'static str {
    match by_hand {
        ByHand::Untainted => "something removed a quarantine taint",
        ByHand::Uncordoned | ByHand::Released => "something uncordoned the node",
    }
}
