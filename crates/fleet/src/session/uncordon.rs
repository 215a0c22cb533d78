//! Verdict on an uncordon: a person's gives the node back, a machine's is undone.
//!
//! Nothing on a node says who uncordoned it. Programs that load or upgrade drivers uncordon
//! nodes that they have not cordoned, but they do so at known times ([`crate::Fleet`] knows
//! these); at any other time it was a person. The removal of a quarantine taint is judged alike.
//!
//! | observed on the node | verdict |
//! |---|---|
//! | a request to release it | a person's, at any time |
//! | the session's change was never observed | the change has not arrived: it is retried |
//! | the change is gone, at a time of machines | undone, [`MOST_UNDONE`] times within an hour; then a person is asked, and it is undone after the hour |
//! | the change is gone, at another time | a person's: the session ends |
//!
//! An uncordon that was once judged a machine's stays so until the node is out of service again,
//! since the time of machines may be over by then. The state needed for that is recorded on the
//! node.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use model::node::{NodeView, Taint};
use model::ownership::{ByHand, Ownership, Undone};
use policy::assess::Desired;

use super::{ObservedNode, Phase, Session};

/// Most uncordons undone within [`UNDONE_WITHIN`]. Loading a driver uncordons its node once or
/// twice, and an hour may have two boots; anything more frequent would never stop.
pub const MOST_UNDONE: usize = 5;
/// Time within which undone uncordons count.
pub const UNDONE_WITHIN: SignedDuration = SignedDuration::from_hours(1);

/// Verdict on the changes of a session that are gone from the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UndoneVerdict {
    /// No wanted change is gone.
    Intact,
    /// A person took the change back.
    ByHand(ByHand),
    /// The change is restored; with a message on the first occasion.
    PutBack(Option<String>),
    /// The change stays undone until then; with a message on the first occasion.
    LeftUndone(Timestamp, Option<String>),
}

// === impl Session ===

impl Session {
    /// Records what an observed state says about the times of machines, and which changes of the
    /// session are present, whether or not anything is decided in that state. For a session that
    /// this process does not know, the node says what was observed before.
    pub fn observe(&mut self, observed: &ObservedNode, now: Timestamp) {
        if let (Some(deeds), Some(own)) = (&mut self.observed_deeds, &observed.own) {
            let there = own.deeds(&observed.view).filter(|(_, there)| *there);
            deeds.extend(there.map(|(deed, _)| deed));
        }
        if let Some(own) = observed.own.as_deref().filter(|own| self.is_unknown(own))
            && !own.mark.machines.is_empty()
        {
            self.machines = own.mark.machines.clone();
            self.machines.clock_put_back(now);
        }
        self.machines.take_in(&observed.view, now);
    }

    /// Returns whether this process does not know the session that the node carries.
    pub(super) fn is_unknown(&self, own: &Ownership) -> bool {
        self.id.as_ref() != Some(&own.session_id) || matches!(self.phase, Phase::Idle | Phase::Held)
    }

    /// Returns whether the missing change counts as undone by a machine, whatever the time is
    /// now.
    pub fn is_undone(&self) -> bool {
        self.undone.since.is_some()
    }

    /// Updates which changes of the session were observed on the node, and what machines have
    /// undone, in the session and in `own`.
    pub(super) fn update_deeds(&mut self, own: &mut Ownership, node: &NodeView, is_new: bool) {
        let asked: BTreeSet<String> = own.deeds(node).map(|(deed, _)| deed).collect();
        let there = own.deeds(node).filter(|(_, there)| *there);
        let there: BTreeSet<String> = there.map(|(deed, _)| deed).collect();
        // For a session that has just begun nothing was observed before.
        let deeds = self
            .observed_deeds
            .take()
            .filter(|deeds| !is_new || deeds.is_empty());
        let deeds = deeds.unwrap_or_else(|| {
            let missing = |deed: &&String| !own.mark.missing.contains(deed);
            asked.iter().filter(missing).cloned().collect()
        });
        let mut deeds: BTreeSet<String> = deeds.intersection(&asked).cloned().collect();
        deeds.extend(there);
        own.mark.missing = asked.difference(&deeds).cloned().collect();
        self.observed_deeds = Some(deeds);
        // The count of restored changes on the node is authoritative, if it has a place for one:
        // the patch that restores a change also counts it.
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

    /// Returns the verdict on the missing changes of the session. `machines` says why it counts
    /// as a machine's, at the times of machines.
    pub(super) fn judge(
        &mut self,
        own: &mut Ownership,
        node: &NodeView,
        desired: &Desired,
        machines: Option<&str>,
        now: Timestamp,
    ) -> UndoneVerdict {
        let was_left = self.left_until.take().is_some();
        if !desired.wanted() {
            return UndoneVerdict::Intact; // The node is given back as after any recovery.
        }
        let Some(by_hand) = own.undone_by_hand(node) else {
            let missing = !own.mark.missing.is_empty();
            return if missing {
                UndoneVerdict::PutBack(None)
            } else {
                UndoneVerdict::Intact
            };
        };
        if machines.is_none() && !self.is_undone() {
            return UndoneVerdict::ByHand(by_hand);
        }
        let cordon = own.cordoned && desired.cordon && !node.unschedulable;
        let taint = |taint: &Taint| own.added(taint) && !node.has_taint(taint);
        if !cordon && !desired.taints.iter().any(taint) {
            return UndoneVerdict::Intact;
        }
        let is_first = self.undone.since.is_none();
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
            return UndoneVerdict::LeftUndone(until, is_first.then(text));
        }
        times.push(now);
        let is_first = is_first || was_left;
        if own.replaced_labels.is_none() && is_first {
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
        UndoneVerdict::PutBack(is_first.then(text))
    }
}

fn what_is_gone(by_hand: ByHand) -> &'static str {
    match by_hand {
        ByHand::Untainted => "something removed a quarantine taint",
        ByHand::Uncordoned | ByHand::Released => "something uncordoned the node",
    }
}
