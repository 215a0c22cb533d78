//! Closing of faults whose machine is gone: another machine has the node's name, or the cluster
//! has been without the node for long.
//!
//! gpuwarden closes them by events of its own in the store, so that every later reader of the
//! feed (a restart, `explain`, another consumer) arrives at the same fault book.
//! `fault/machine.rs` tells two machines apart.

use jiff::{SignedDuration, Timestamp};
use model::event::MAX_EVENTS;
use model::fault::MAX_OPEN_FAULTS_PER_NODE;

use super::Purpose;
use super::look::Look;

/// Minimum absence of a node, as observed by this process, before its old faults are dropped: a
/// deleted node object comes back with the next start of the kubelet.
const MIN_ABSENCE: SignedDuration = SignedDuration::from_hours(24);
/// Wait before a retry where the store did not append the events.
const APPEND_RETRY: SignedDuration = SignedDuration::from_secs(10);

impl Look<'_> {
    /// Closes the faults of a machine that is gone. Returns whether the node can be decided
    /// about; false while such faults are still open.
    pub(super) fn close_faults_of_gone_machine(&mut self) -> bool {
        // All faults of a node fit into one request to the store.
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
            let until = after(newest, retention).max(after(absent_since, MIN_ABSENCE));
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
        self.in_stages(|_, _, requests| requests.append(closing, Purpose::Close, text));
        false
    }

    /// Schedules another attempt after the store did not append events.
    pub(super) fn retry_append(&mut self) {
        let at = after(self.state.now, APPEND_RETRY);
        self.agenda.wakes.set(self.name, Some(at));
    }
}

fn after(at: Timestamp, pause: SignedDuration) -> Timestamp {
    at.checked_add(pause).unwrap_or(Timestamp::MAX)
}
