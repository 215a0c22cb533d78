//! Retention: deletes old events from the store, and bounds its size.
//!
//! Runs beside the quarantine. The events of open faults are kept at any age, since the sessions
//! of the faults refer to them. Passes of preflight checks that have closed no fault are deleted
//! within hours.

use std::sync::Arc;
use std::time::Duration;

use fleet::view::FleetView;
use jiff::{SignedDuration, Timestamp};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use runtime::logging::chain;
use runtime::metrics::Metrics;
use store::{EventStore, Prune, Pruned};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Pause between two runs.
const EVERY: Duration = Duration::from_secs(60);
/// Pause between two runs while the store cannot write, to detect soon that it works again.
const EVERY_IN_TROUBLE: Duration = Duration::from_secs(5);
/// Time without a checkpoint after which a consumer counts as gone: renamed, or disabled. A
/// running one saves every hour at least; a week covers a controller that is away, and a disk
/// that is full for as long.
const GONE: SignedDuration = SignedDuration::from_hours(7 * 24);
/// Age limit of passes of preflight checks that closed no fault: every pod with GPUs sends
/// some. An hour is longer than any sender retries; a later retry would be stored as a
/// new event.
const PASSES: SignedDuration = SignedDuration::from_hours(1);
/// Pause between two parts of a long deletion, for other writes.
const BETWEEN_PARTS: Duration = Duration::from_millis(20);

/// Limits on stored events, and the state that they depend on.
pub struct Retention {
    /// Store that events are deleted from.
    pub store: Arc<dyn EventStore>,
    /// State of all nodes: the open faults, and the read position of the feed.
    pub fleet: watch::Receiver<Arc<FleetView>>,
    /// Longest age of events and journal entries.
    pub age: SignedDuration,
    /// Largest size of the store (bytes).
    pub max_bytes: u64,
    /// Source of the current time.
    pub clock: fn() -> Timestamp,
}

runtime::metrics! {
    /// Metrics of the store.
    pub(crate) struct StoreMetrics {
        /// Events deleted by retention.
        events: Counter = "gpuwarden_store_events_deleted",
        /// Journal entries deleted by retention.
        entries: Counter = "gpuwarden_store_journal_entries_deleted",
        /// Stored events met since the start that cannot be read and are passed over.
        unreadable: Gauge = "gpuwarden_store_unreadable_events",
        /// Size of the store beyond its limit, of data that must not be deleted.
        excess: Gauge = "gpuwarden_store_excess_bytes",
        /// 1 while the store cannot write, such as on a full disk.
        failing: Gauge = "gpuwarden_store_failing",
    }
}

// === impl StoreMetrics ===

impl StoreMetrics {
    fn count(&self, pruned: &Pruned) {
        self.events.inc_by(pruned.events);
        self.entries.inc_by(pruned.entries);
        let excess = if pruned.more { 0 } else { pruned.over };
        self.excess.set(i64::try_from(excess).unwrap_or(i64::MAX));
    }
}

// === impl Retention ===

impl Retention {
    /// Deletes old events until `cancel`.
    pub async fn run(self, metrics: &Metrics, cancel: CancellationToken) {
        let metrics = StoreMetrics::registered(metrics);
        let mut unreadable = self.store.unreadable();
        let mut trouble = self.store.trouble();
        let (mut warned_over, mut warned_gone) = (false, Vec::new());
        loop {
            let met = *unreadable.borrow_and_update();
            metrics
                .unreadable
                .set(i64::try_from(met).unwrap_or(i64::MAX));
            let in_trouble = trouble.borrow_and_update().is_some();
            metrics.failing.set(i64::from(in_trouble));
            let mut pause = if in_trouble { EVERY_IN_TROUBLE } else { EVERY };
            if let Some(prune) = self.prunable() {
                match self.store.prune(prune).await {
                    Ok(pruned) => {
                        metrics.count(&pruned);
                        for consumer in pruned
                            .gone_consumers
                            .iter()
                            .filter(|it| !warned_gone.contains(*it))
                        {
                            tracing::warn!(
                                consumer,
                                "a reader of the stored events has been gone for a week: events that \
                                 it has not read are no longer kept for it"
                            );
                        }
                        warned_gone = pruned.gone_consumers;
                        if pruned.more {
                            pause = BETWEEN_PARTS;
                        } else if pruned.over > 0 && !warned_over {
                            tracing::warn!(
                                over = pruned.over,
                                limit = self.max_bytes,
                                "the event store exceeds its limit, and all its events belong to open \
                                 faults or are not read yet"
                            );
                        }
                        warned_over = pruned.over > 0;
                    }
                    Err(store::StoreError::Closed) => return,
                    Err(error) => {
                        tracing::warn!(err = %chain(&error), "old events could not be deleted");
                    }
                }
            }
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
                // Trouble that has just begun shortens the pause.
                Ok(()) = trouble.changed() => {}
                Ok(()) = unreadable.changed() => {}
            }
        }
    }

    /// Returns the limits of a deletion; `None` until the open faults are known.
    fn prunable(&self) -> Option<Prune> {
        let fleet = Arc::clone(&self.fleet.borrow());
        if !fleet.ready {
            return None;
        }
        let keep = fleet
            .nodes
            .iter()
            .flat_map(|node| &node.faults)
            .map(|fault| fault.event_id.clone())
            .collect();
        let ago = |age| (self.clock)().checked_sub(age).unwrap_or(Timestamp::MIN);
        Some(Prune {
            before: ago(self.age),
            passes_before: ago(PASSES),
            max_bytes: self.max_bytes,
            finished: fleet
                .missed_from
                .map_or(fleet.applied, |from| fleet.applied.min(from.before())),
            gone_before: ago(GONE),
            keep,
        })
    }
}

#[cfg(test)]
mod tests {
    use contract::HealthEvent;
    use fleet::view::{FaultView, NodeState, NodeStatus};
    use model::event::{EventRecord, normalise};
    use model::fault::FaultBook;
    use store::sqlite::SqliteStore;
    use store::{EventLog as _, EventQuery, NewEvent};

    use super::*;

    const DAY: i64 = 86_400;

    fn at(days: i64) -> Timestamp {
        Timestamp::from_second(days * DAY).unwrap()
    }

    /// An event of the given check, received on a day.
    fn event(check: &str, day: i64) -> NewEvent {
        let mut event = HealthEvent {
            agent: "a".to_owned(),
            check_name: check.to_owned(),
            node_name: "n1".to_owned(),
            is_fatal: true,
            ..HealthEvent::default()
        };
        normalise(&mut event, at(day));
        NewEvent {
            event,
            received_at: at(day),
        }
    }

    #[test]
    fn passes_that_closed_nothing_go_sooner() {
        let dir = tempfile::tempdir().unwrap();
        let (_fleet, view) = watch::channel(Arc::new(FleetView {
            ready: true,
            ..FleetView::default()
        }));
        let retention = Retention {
            store: Arc::new(SqliteStore::open(dir.path()).unwrap()),
            fleet: view,
            age: SignedDuration::from_hours(30 * 24),
            max_bytes: u64::MAX,
            clock: || at(60),
        };
        let prune = retention.prunable().unwrap();
        assert_eq!(prune.before, at(30));
        assert_eq!(prune.passes_before, at(60) - PASSES);
    }

    #[tokio::test]
    async fn old_events_go_but_not_those_of_open_faults() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(SqliteStore::open(dir.path()).unwrap());
        let events = vec![
            event("open", 1),
            event("closed", 2),
            event("new", 50),
            event("newer", 51),
        ];
        store.append(events.clone()).await.unwrap();
        let mut book = FaultBook::default();
        book.record(&EventRecord {
            seq: 1.into(),
            id: events[0].event.id.clone(),
            created_at: at(1),
            event: events[0].event.clone(),
        });
        let faults = book.faults("n1").iter().map(FaultView::of).collect();
        let (fleet, view) = watch::channel(Arc::new(FleetView::default()));
        let metrics = Metrics::default();
        let cancel = CancellationToken::new();
        let retention = Retention {
            store: Arc::clone(&store) as Arc<dyn EventStore>,
            fleet: view,
            age: SignedDuration::from_hours(30 * 24),
            max_bytes: u64::MAX,
            clock: || at(60),
        };
        assert_eq!(
            retention.prunable(),
            None,
            "nothing before the faults are known"
        );
        fleet.send_replace(Arc::new(FleetView {
            ready: true,
            applied: 4.into(),
            nodes: vec![NodeStatus {
                name: "n1".to_owned(),
                state: NodeState::Unhealthy,
                session: None,
                in_cluster: None,
                unschedulable: None,
                faults,
                notices: vec![],
                devices: vec![],
                notes: Vec::new(),
            }],
            ..FleetView::default()
        }));
        let (running, until) = (metrics.clone(), cancel.clone());
        let task = tokio::spawn(async move { retention.run(&running, until).await });
        let checks = loop {
            let left = store.events(EventQuery::default()).await.unwrap();
            if left.len() < 4 {
                break left
                    .into_iter()
                    .map(|one| one.event.check_name)
                    .collect::<Vec<_>>();
            }
            tokio::task::yield_now().await;
        };
        assert_eq!(checks, ["newer", "new", "open"]);
        cancel.cancel();
        task.await.unwrap();
        assert!(
            metrics
                .encode()
                .contains("gpuwarden_store_events_deleted_total 1")
        );
    }
}
