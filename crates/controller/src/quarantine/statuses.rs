//! Writes the statuses of events that `fleet::status` derives into the records of the events. A
//! queue of its own keeps patches from waiting for it.

use std::sync::Arc;
use std::time::Duration;

use fleet::status::StatusUpdate;
use futures::future::join_all;
use store::{EventStore, StoreError};
use tokio::sync::mpsc;

use super::metrics::QuarantineMetrics;

/// Most statuses that wait for the store: those of a thousand nodes with as many faults each as
/// a node lists. Further ones are dropped, and made up for after a restart if a node lists them.
pub(super) const STATUS_QUEUE: usize = 20_000;
/// Most requests to the store at the same time. The store commits them together.
const BATCH: usize = 250;
/// Pause before a failed request is retried.
const RETRY: Duration = Duration::from_millis(500);

/// Writes statuses to the store.
pub struct StatusWriter {
    pub(super) queue: mpsc::Receiver<StatusUpdate>,
    pub(super) store: Arc<dyn EventStore>,
    pub(super) metrics: QuarantineMetrics,
}

// === impl StatusWriter ===

impl StatusWriter {
    /// Writes statuses until the task has ended and the queue is empty. Temporary failures of
    /// the store are retried without a limit.
    pub async fn run(mut self) {
        let mut batch = Vec::new();
        while self.queue.recv_many(&mut batch, BATCH).await > 0 {
            self.write_all(&batch).await;
            batch.clear();
        }
    }

    /// Writes updates: the change of a session after all before it, and before all behind it.
    async fn write_all(&self, updates: &[StatusUpdate]) {
        let joins = |update: &StatusUpdate| matches!(update, StatusUpdate::Event(_));
        for part in updates.chunk_by(|a, b| joins(a) && joins(b)) {
            let mut unwritten: Vec<&StatusUpdate> = part.iter().collect();
            while !unwritten.is_empty() {
                let answers = join_all(unwritten.iter().map(|update| self.write(update))).await;
                let (mut answers, mut trouble) = (answers.into_iter(), None);
                unwritten.retain(|update| match answers.next() {
                    Some(Err(error)) if error.is_retryable() => {
                        trouble = Some(error);
                        true
                    }
                    Some(Err(error)) if !matches!(error, StoreError::Closed) => {
                        self.metrics.error("update_quarantine_status_error");
                        tracing::error!(err = %error, "the store refused a status: {update:?}");
                        false
                    }
                    _ => false,
                });
                if let Some(error) = trouble {
                    self.metrics.error("update_quarantine_status_error");
                    tracing::warn!(
                        err = %error,
                        "the statuses of events cannot be written; trying again"
                    );
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }

    async fn write(&self, update: &StatusUpdate) -> Result<(), StoreError> {
        match update {
            StatusUpdate::Event(event) => self.store.join_session(event.clone()).await,
            StatusUpdate::Session {
                node,
                session,
                change,
            } => {
                (self.store)
                    .change_session(node, session, change.clone())
                    .await
            }
            StatusUpdate::Ended(end) => {
                let ids = end.ids();
                let found = self.store.statuses(ids.clone()).await?;
                let known = ids.into_iter().zip(found);
                let known = known.filter_map(|(id, status)| Some((id, status?)));
                Box::pin(self.write_all(&end.settle(&known.collect()))).await;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use contract::HealthEvent;
    use fleet::status::{Report, SessionEnd};
    use jiff::Timestamp;
    use model::attempt::RemediationProgress;
    use model::status::eviction::{Eviction, EvictionStatus};
    use model::status::{EventStatus, NodeQuarantined, SessionChange, SessionEvent};
    use runtime::metrics::Metrics;
    use store::sqlite::SqliteStore;
    use store::{EventLog as _, NewEvent, Statuses as _, Upkeep as _};
    use tokio::task::JoinHandle;

    use super::*;

    struct Bench {
        directory: tempfile::TempDir,
        store: Arc<SqliteStore>,
        registry: Metrics,
        metrics: QuarantineMetrics,
    }

    impl Bench {
        /// Creates a store with an event for each of these ids; the node is the part before `-`.
        async fn new(ids: &[&str]) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let store = Arc::new(SqliteStore::open(directory.path()).unwrap());
            let event = |id: &&str| NewEvent {
                event: HealthEvent {
                    id: (*id).to_owned(),
                    node_name: node_of(id).to_owned(),
                    error_code: vec![(*id).to_owned()], // Equal events would be stored once.
                    ..HealthEvent::default()
                },
                received_at: Timestamp::UNIX_EPOCH,
            };
            store.append(ids.iter().map(event).collect()).await.unwrap();
            let registry = Metrics::default();
            Self {
                directory,
                store,
                metrics: QuarantineMetrics::registered(&registry),
                registry,
            }
        }

        fn sql(&self, sql: &str) {
            let path = self.directory.path().join("events.db");
            let connection = rusqlite::Connection::open(path).unwrap();
            connection.execute_batch(sql).unwrap();
        }

        /// Writes `statuses` in one batch.
        fn write(&self, statuses: Vec<StatusUpdate>) -> JoinHandle<()> {
            let (sender, queue) = mpsc::channel(STATUS_QUEUE);
            for status in statuses {
                sender.try_send(status).unwrap();
            }
            let writer = StatusWriter {
                queue,
                store: self.store.clone(),
                metrics: self.metrics.clone(),
            };
            tokio::spawn(writer.run())
        }

        /// Returns the number of failed writes.
        fn errors(&self) -> u32 {
            let text = self.registry.encode();
            let kind = "update_quarantine_status_error";
            let line = text.lines().find(|line| line.contains(kind));
            line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
        }

        async fn words(&self, ids: &[&str]) -> Vec<String> {
            let ids = ids.iter().map(|id| (*id).to_owned()).collect();
            let found = self.store.statuses(ids).await.unwrap().into_iter();
            let word = found.map(|status| status.unwrap().node_quarantined);
            word.map(|word| word.map_or("", NodeQuarantined::name).to_owned())
                .collect()
        }
    }

    /// Returns the node of an event: the part of its id before `-`.
    fn node_of(id: &str) -> &str {
        id.split_once('-').unwrap().0
    }

    /// Returns the event that begins the session of the same id.
    fn beginning(id: &str, at: i64) -> SessionEvent {
        SessionEvent {
            id: id.to_owned(),
            session: id.to_owned(),
            status: NodeQuarantined::Quarantined,
            at: Timestamp::from_nanosecond(at.into()).unwrap(),
            eviction: None,
        }
    }

    fn out_at(id: &str, at: i64) -> StatusUpdate {
        StatusUpdate::Event(beginning(id, at))
    }

    fn out(id: &str) -> StatusUpdate {
        out_at(id, 0)
    }

    /// Returns the end of the session that `fault` has begun, with recoveries of faults.
    fn ended(session: Option<&str>, by_hand: bool, reports: &[(&str, &str)]) -> StatusUpdate {
        let report = |(id, fault): &(&str, &str)| Report {
            id: (*id).to_owned(),
            healthy: true,
            faults: vec![(*fault).to_owned()],
        };
        StatusUpdate::Ended(SessionEnd {
            node: session.map_or("n1", node_of).to_owned(),
            session: session.map(str::to_owned),
            drained: false,
            by_hand,
            reports: reports.iter().map(report).collect(),
            at: Timestamp::from_microsecond(5).unwrap(),
        })
    }

    fn cancelled(session: &str) -> StatusUpdate {
        ended(Some(session), true, &[])
    }

    fn changed(session: &str, change: SessionChange) -> StatusUpdate {
        StatusUpdate::Session {
            node: node_of(session).to_owned(),
            session: session.to_owned(),
            change,
        }
    }

    #[tokio::test]
    async fn how_far_a_drain_is_stands_with_its_quarantine_only_and_an_end_stays() {
        use EvictionStatus::{AlreadyDrained, InProgress, NotStarted, Succeeded};
        let ids = ["n1-before", "n1-fault", "n1-skips", "n1-none", "n2-other"];
        let bench = Bench::new(&ids).await;
        let with = |id: &str, word| {
            StatusUpdate::Event(SessionEvent {
                eviction: Some(Eviction::new(word, "")),
                ..beginning(id, 0)
            })
        };
        let drain = |word| {
            let eviction = Eviction::new(word, "why");
            changed(
                ids[1],
                SessionChange::Drain(eviction, Timestamp::UNIX_EPOCH),
            )
        };
        let skips = StatusUpdate::Event(SessionEvent {
            id: ids[2].to_owned(),
            status: NodeQuarantined::AlreadyQuarantined,
            eviction: Some(Eviction::new(AlreadyDrained, "skipped")),
            ..beginning(ids[1], 0)
        });
        let mut statuses = vec![with(ids[0], InProgress), with(ids[1], NotStarted), skips];
        statuses.push(with(ids[4], NotStarted));
        bench.write(statuses).await.unwrap();
        let evictions = async || {
            let ids = ids.iter().map(|id| (*id).to_owned()).collect();
            let found = bench.store.statuses(ids).await.unwrap().into_iter();
            let of = |status: Option<EventStatus>| {
                let status = status.unwrap();
                let text = status.pods_eviction.map(|one| one.to_string());
                (text.unwrap_or_default(), status.drain_finished_at.is_some())
            };
            found.map(of).collect::<Vec<_>>()
        };
        bench.write(vec![drain(InProgress)]).await.unwrap();
        let expected = [
            "InProgress",
            "InProgress: why",
            "AlreadyDrained: skipped",
            "",
            "NotStarted",
        ];
        let found = evictions().await;
        assert_eq!(
            found.iter().map(|(text, _)| text).collect::<Vec<_>>(),
            expected
        );
        // A repeat after the end changes nothing.
        let statuses = vec![drain(Succeeded), drain(InProgress)];
        bench.write(statuses).await.unwrap();
        let found = evictions().await;
        assert_eq!(found[1], ("Succeeded: why".to_owned(), true));
        assert_eq!(found[4], ("NotStarted".to_owned(), false));
        bench.store.close().await;
    }

    #[tokio::test]
    async fn a_repair_stands_with_the_events_that_came_before_it_and_what_was_mended_stays_so() {
        let ids = ["n1-before", "n1-fault", "n1-second", "n2-other"];
        let bench = Bench::new(&ids).await;
        let already = StatusUpdate::Event(SessionEvent {
            id: ids[2].to_owned(),
            status: NodeQuarantined::AlreadyQuarantined,
            ..beginning(ids[1], 0)
        });
        let all = vec![out(ids[0]), out(ids[1]), already, out(ids[3])];
        bench.write(all).await.unwrap();
        let event = async |id: &str| bench.store.event(id).await.unwrap().unwrap();
        let first = event(ids[1]).await.created_at;
        let last = event(ids[2]).await.created_at;
        bench.sql(&format!(
            "UPDATE event SET created_at = {} WHERE id = 'n1-second'",
            last.as_microsecond() + 1_000_000
        ));
        let repair = |remediated, up_to: Timestamp| {
            let repair = RemediationProgress {
                remediated,
                attempted_at: Some(first),
                up_to,
            };
            changed(ids[1], SessionChange::Remediation(repair))
        };
        let found = async || {
            let ids = ids.iter().map(|id| (*id).to_owned()).collect();
            let found = bench.store.statuses(ids).await.unwrap().into_iter();
            let of = |status: Option<EventStatus>| {
                let status = status.unwrap();
                (status.fault_remediated, status.last_remediation_at)
            };
            found.map(of).collect::<Vec<_>>()
        };
        bench.write(vec![repair(None, last)]).await.unwrap();
        let (none, first) = ((None, None), Some(first));
        assert_eq!(found().await, [none, (None, first), none, none]);
        bench.write(vec![repair(Some(true), last)]).await.unwrap();
        assert_eq!(found().await, [none, (Some(true), first), none, none]);
        let later = last + jiff::SignedDuration::from_secs(2);
        bench.write(vec![repair(Some(false), later)]).await.unwrap();
        let expected = [none, (Some(true), first), (Some(false), first), none];
        assert_eq!(found().await, expected);
        bench.store.close().await;
    }

    #[tokio::test]
    async fn a_recovery_behind_the_end_by_hand_has_given_nothing_back() {
        let ids = ["n1-fault", "n1-recovery"];
        let bench = Bench::new(&ids).await;
        let reports = [(ids[1], ids[0])];
        let by_hand = ended(Some(ids[0]), true, &reports);
        let later = ended(None, false, &reports);
        let statuses = vec![out(ids[0]), by_hand, later];
        bench.write(statuses).await.unwrap();
        assert_eq!(bench.words(&ids).await, ["Cancelled", ""]);
        bench.store.close().await;
    }

    #[tokio::test]
    async fn of_recoveries_the_last_that_counts_has_given_the_node_back() {
        let ids = ["n1-fault", "n1-minor", "n1-first", "n1-last", "n1-other"];
        // The session is known, or a crash has hidden it.
        for session in [Some(ids[0]), None] {
            let bench = Bench::new(&ids).await;
            let reports = [(ids[2], ids[0]), (ids[3], ids[0]), (ids[4], ids[1])];
            let recovered = ended(session, false, &reports);
            bench.write(vec![out(ids[0]), recovered]).await.unwrap();
            let expected = ["Quarantined", "", "AlreadyQuarantined", "UnQuarantined", ""];
            assert_eq!(bench.words(&ids).await, expected);
            bench.store.close().await;
        }
    }

    #[tokio::test]
    async fn only_a_later_quarantine_takes_a_cancelled_word_back() {
        let ids = ["n1-fault"];
        let bench = Bench::new(&ids).await;
        // A repeat after a restart has the time of the first report.
        let first = out_at(ids[0], 1_500);
        let mut statuses = vec![first.clone(), cancelled(ids[0]), first];
        bench.write(statuses.clone()).await.unwrap();
        assert_eq!(bench.words(&ids).await, ["Cancelled"]);
        statuses.push(out_at(ids[0], 9_000));
        bench.write(statuses.split_off(3)).await.unwrap();
        assert_eq!(bench.words(&ids).await, ["Quarantined"]);
        // A repeat of the end does not cancel the later quarantine, though it has the same id.
        bench.write(statuses).await.unwrap();
        assert_eq!(bench.words(&ids).await, ["Quarantined"]);
        bench.store.close().await;
    }

    #[tokio::test]
    async fn what_is_tried_again_cancels_no_later_quarantine() {
        let ids = ["n1-first", "n1-second", "n2-only"];
        let bench = Bench::new(&ids).await;
        bench.write(vec![out(ids[0]), out(ids[2])]).await.unwrap();
        // SQLite reports a table whose last row id is used up as a full disk.
        bench.sql(
            "CREATE TABLE used_up (row INTEGER PRIMARY KEY AUTOINCREMENT);
             INSERT INTO used_up VALUES (9223372036854775807);
             CREATE TRIGGER full BEFORE UPDATE ON event WHEN NEW.node = 'n2'
             BEGIN INSERT INTO used_up VALUES (NULL); END",
        );
        let mut trouble = bench.store.trouble();
        let statuses = vec![cancelled(ids[0]), out(ids[1]), cancelled(ids[2])];
        let writer = bench.write(statuses);
        trouble.wait_for(Option::is_some).await.unwrap();
        bench.sql("DROP TRIGGER full");
        writer.await.unwrap();
        let expected = ["Cancelled", "Quarantined", "Cancelled"];
        assert_eq!(bench.words(&ids).await, expected);
        bench.store.close().await;
    }

    #[tokio::test]
    async fn what_the_store_refuses_costs_no_word_of_others() {
        let ids = ["n1-fault", "n2-fault", "n3-fault", "n4-fault"];
        let bench = Bench::new(&ids).await;
        bench.sql(
            "CREATE TRIGGER refused BEFORE UPDATE ON event WHEN NEW.node = 'n2'
             BEGIN SELECT RAISE(ABORT, 'no'); END",
        );
        let mut statuses: Vec<StatusUpdate> = ids[..3].iter().map(|id| out(id)).collect();
        statuses.extend([cancelled(ids[2]), out(ids[3])]);
        bench.write(statuses).await.unwrap();
        let expected = ["Quarantined", "", "Cancelled", "Quarantined"];
        assert_eq!(bench.words(&ids).await, expected);
        // Each status is tried once.
        let errors = bench.errors();
        bench.write(vec![out(ids[1])]).await.unwrap();
        assert_eq!(bench.errors(), errors + 1);
        bench.store.close().await;
    }
}
