//! Faults whose machine is gone: another one stands behind the node's name, or the cluster
//! has not had the node for long.
//!
//! They are closed by events of our own in the store, so that whoever reads the events later
//! (a restart, `explain`, another reader) comes to the same book. What tells two machines
//! apart is in `domain/src/fault/machine.rs`.

use contract::HealthEvent;
use domain::event::normalise;
use domain::fault::MAX_OPEN_FAULTS_PER_NODE;
use domain::journal::EntryKind;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use store::{MAX_APPEND, NewEvent, StoreError};

use super::Quarantine;

/// How long the cluster must have been without a node, as we have seen it ourselves, before
/// its old faults are dropped: a node object that was deleted comes back with the next start
/// of the kubelet.
const ABSENT: SignedDuration = SignedDuration::from_hours(24);
/// When it is tried again where the store did not take the events.
const AGAIN: SignedDuration = SignedDuration::from_secs(10);

impl Quarantine {
    /// Closes the faults of `name` that were of a machine which is gone. Returns whether the
    /// node can be looked at: not while faults are open that should not be.
    pub(super) async fn part_from_machine(&mut self, name: &str) -> bool {
        if self.cluster.is_none() {
            return true;
        }
        let Some(newest) = self.book.newest_report(name) else {
            return true;
        };
        let now = (self.clock)();
        let view = self.nodes.get(name).and_then(|entry| entry.view.clone());
        let (closing, why) = if let Some(view) = view {
            if self.book.learn_machine(name, &view.machine) {
                self.saving.unsaved.insert(name.to_owned());
            }
            let closing = self.book.of_replaced_machine(name, &view.machine, now);
            (closing, "the node is another machine now".to_owned())
        } else {
            let absent_since = *self.entry(name).absent_since.get_or_insert(now);
            let until = after(newest, self.retention).max(after(absent_since, ABSENT));
            if now < until {
                self.wakes.set(name, Some(until));
                return true;
            }
            let why = format!(
                "the cluster has not had the node since {absent_since:.0}, and nothing was \
                 reported of it since {newest:.0}"
            );
            (self.book.of_departed_node(name, &why, now), why)
        };
        if closing.is_empty() {
            return true;
        }
        let text = format!("{why}: {} faults of before are closed", closing.len());
        if let Err(error) = self.close(closing, now).await {
            tracing::error!(
                node = name,
                err = %error,
                "faults of a machine that is gone could not be closed; it is tried again"
            );
            self.metrics.error("departed_error");
            self.wakes.set(name, Some(after(now, AGAIN)));
            return false;
        }
        tracing::info!(node = name, "{text}");
        self.note(name, None, EntryKind::Attention, text, Value::Null);
        // At once: what follows is decided by what is open then.
        self.take_in().await;
        self.feed_failure.is_none()
    }

    /// Stores the events that close faults of one node, of which fewer are kept than the store
    /// takes at once.
    async fn close(&self, events: Vec<HealthEvent>, now: Timestamp) -> Result<(), StoreError> {
        const { assert!(MAX_OPEN_FAULTS_PER_NODE <= MAX_APPEND) };
        let closing = events.into_iter().map(|mut event| {
            normalise(&mut event, now);
            NewEvent {
                event,
                received_at: now,
            }
        });
        self.store.append(closing.collect()).await.map(drop)
    }
}

fn after(at: Timestamp, pause: SignedDuration) -> Timestamp {
    at.checked_add(pause).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cluster::NodeEvent;
    use domain::node::NodeView;
    use domain::session::Phase;
    use serde_json::json;

    use super::super::look::tests::Bench;
    use super::*;

    const START: i64 = 1_800_000_000;
    const DAY: i64 = 24 * 60 * 60;

    fn day_2() -> Timestamp {
        Timestamp::from_second(START + 2 * DAY).unwrap()
    }

    fn day_31() -> Timestamp {
        Timestamp::from_second(START + 31 * DAY).unwrap()
    }

    fn day_33() -> Timestamp {
        Timestamp::from_second(START + 33 * DAY).unwrap()
    }

    /// The node as an object that was made at `created`, of a machine.
    fn node(uid: &str, machine: &str, created: Timestamp) -> NodeEvent {
        let view = NodeView::from_object(json!({
            "metadata": {"name": "n1", "uid": uid, "creationTimestamp": created.to_string()},
            "status": {"nodeInfo": {"systemUUID": machine, "bootID": "b"}},
        }));
        NodeEvent::Applied(Arc::new(view.unwrap()))
    }

    async fn open_faults(quarantine: &mut Quarantine, event: NodeEvent) -> usize {
        quarantine.node_event(event);
        quarantine.look().await;
        quarantine.book.faults("n1").len()
    }

    #[tokio::test]
    async fn another_machine_under_the_name_does_not_inherit_the_faults() {
        let mut bench = Bench::new().await;
        let quarantine = &mut bench.quarantine;
        let gone = || NodeEvent::Deleted("n1".to_owned());
        let first = Timestamp::from_second(START - 1).unwrap();
        assert_eq!(open_faults(quarantine, node("1", "old", first)).await, 1);
        assert_eq!(quarantine.entry("n1").session.phase, Phase::Quarantining);
        assert_eq!(open_faults(quarantine, gone()).await, 1);
        // The same one joins again.
        quarantine.entry("n1").in_flight = false;
        let again = node("2", "old", day_2());
        assert_eq!(open_faults(quarantine, again).await, 1);
        assert_eq!(quarantine.entry("n1").session.phase, Phase::Quarantining);
        quarantine.entry("n1").in_flight = false;
        assert_eq!(open_faults(quarantine, gone()).await, 1);

        let other = node("3", "new", day_2());
        assert_eq!(open_faults(quarantine, other).await, 0);
        assert_eq!(quarantine.entry("n1").session.phase, Phase::Idle);
        // Whoever reads the events afresh comes to the same.
        quarantine.book = domain::fault::FaultBook::default();
        quarantine.take_in().await;
        assert_eq!(quarantine.book.applied(), 2.into());
        assert!(quarantine.book.faults("n1").is_empty());
    }

    #[tokio::test]
    async fn the_old_faults_of_a_node_that_is_long_gone_are_dropped() {
        let mut bench = Bench::new().await;
        let quarantine = &mut bench.quarantine;
        // Old enough, but gone for a moment only.
        quarantine.clock = day_31;
        let gone = NodeEvent::Deleted("n1".to_owned());
        assert_eq!(open_faults(quarantine, gone).await, 1);
        let due = day_31().checked_add(ABSENT).unwrap();
        assert_eq!(quarantine.wakes.next(), Some(due));
        quarantine.clock = day_33;
        quarantine.dirty.insert("n1".to_owned());
        quarantine.look().await;
        assert!(quarantine.book.faults("n1").is_empty());
    }
}
