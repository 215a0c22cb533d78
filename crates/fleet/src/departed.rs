//! Faults whose machine is gone: another one stands behind the node's name, or the cluster
//! has not had the node for long.
//!
//! They are closed by events of our own in the store, so that whoever reads the events later
//! (a restart, `explain`, another reader) comes to the same book. What tells two machines
//! apart is in `fault/machine.rs`.

use jiff::{SignedDuration, Timestamp};
use model::event::MAX_EVENTS;
use model::fault::MAX_OPEN_FAULTS_PER_NODE;

use super::Purpose;
use super::look::Look;

/// Time for which the cluster must have been without a node, as we have seen it ourselves, before
/// its old faults are dropped: a node object that was deleted comes back with the next start
/// of the kubelet.
const ABSENT: SignedDuration = SignedDuration::from_hours(24);
/// Pause before a second try where the store did not take the events.
const AGAIN: SignedDuration = SignedDuration::from_secs(10);

impl Look<'_> {
    /// Closes the faults of the node that were of a machine which is gone. Returns whether the
    /// node can be looked at: not while faults are open that should not be.
    pub(super) fn close_faults_of_gone_machine(&mut self) -> bool {
        // Fewer are kept of a node than the store takes at once.
        const { assert!(MAX_OPEN_FAULTS_PER_NODE <= MAX_EVENTS) };
        if !self.state.settings.cluster {
            return true;
        }
        let Some(newest) = self.state.book.newest_report(self.name) else {
            return true;
        };
        let (name, now) = (self.name, self.state.now);
        let (closing, why) = if let Some(view) = self.entry.view.clone() {
            if self.state.book.learn_machine(name, &view.machine) {
                self.save();
            }
            let closing = self
                .state
                .book
                .of_replaced_machine(name, &view.machine, now);
            (closing, "the node is another machine now".to_owned())
        } else {
            let absent_since = *self.entry.absent_since.get_or_insert(now);
            let retention = self.state.settings.retention;
            let until = after(newest, retention).max(after(absent_since, ABSENT));
            if now < until {
                self.agenda.wakes.set(name, Some(until));
                return true;
            }
            let why = format!(
                "the cluster has not had the node since {absent_since:.0}, and nothing was \
                 reported of it since {newest:.0}"
            );
            (self.state.book.of_departed_node(name, &why, now), why)
        };
        if closing.is_empty() {
            return true;
        }
        let text = format!("{why}: {} faults of before are closed", closing.len());
        self.in_stages(|_, _, asks| asks.append(closing, Purpose::Close, text));
        false
    }

    /// Has another try made where the store did not take events of ours.
    pub(super) fn append_again_later(&mut self) {
        let at = after(self.state.now, AGAIN);
        self.agenda.wakes.set(self.name, Some(at));
    }
}

fn after(at: Timestamp, pause: SignedDuration) -> Timestamp {
    at.checked_add(pause).unwrap_or(Timestamp::MAX)
}
