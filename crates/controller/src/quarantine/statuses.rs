//! Writes the statuses of events that `fleet::status` derives into the records of the events. A
//! queue of its own keeps patches from waiting for it, and the statuses are written in batches.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fleet::status::{EventStatuses, StatusUpdate};
use jiff::Timestamp;
use model::attempt::RemediationProgress;
use model::event::EventRecord;
use model::status::eviction::Eviction;
use model::status::{EventStatus, NodeQuarantined};
use store::{EventQuery, EventStore, StoreError};
use tokio::sync::mpsc;

use super::metrics::QuarantineMetrics;

/// Most statuses that wait for the store: those of a thousand nodes with as many faults each as
/// a node lists. Further ones are dropped, and made up for after a restart if a node lists them.
pub(super) const STATUS_QUEUE: usize = 20_000;
/// Most statuses in one request to the store.
const BATCH: usize = 500;
/// Events per page when those of a quarantine are searched.
const PAGE: usize = 500;
/// Pause before a failed write is retried.
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
            for part in parts(&batch) {
                match (self.write(part).await, part) {
                    (Ok(()), _) => {}
                    (Err(error), [status]) => log_refused(&error, status),
                    // A refused status must not take others with it.
                    (Err(_), _) => {
                        for status in part {
                            if let Err(error) = self.write(std::slice::from_ref(status)).await {
                                log_refused(&error, status);
                            }
                        }
                    }
                }
            }
            batch.clear();
        }
    }

    /// Writes a part. Retries temporary failures without a limit. Fails if the store refuses the
    /// part; succeeds without a write if the store is closed.
    async fn write(&self, part: &[StatusUpdate]) -> Result<(), StoreError> {
        let store = self.store.as_ref();
        loop {
            let written = match part {
                [StatusUpdate::Cancel { node }] => cancel(store, node).await,
                [StatusUpdate::Drain { node, eviction, at }] => {
                    write_drain(store, node, eviction, *at).await
                }
                [StatusUpdate::RemediationProgress { node, repair }] => {
                    write_repair(store, node, repair).await
                }
                events => write_events(store, events).await,
            };
            let error = match written {
                Ok(()) | Err(StoreError::Closed) => return Ok(()),
                Err(error) => error,
            };
            self.metrics.error("update_quarantine_status_error");
            if !error.is_retryable() {
                return Err(error);
            }
            tracing::warn!(err = %error, "the statuses of events cannot be written; trying again");
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// Splits `batch` into parts that can be retried one by one. An update of a whole session is a
/// part of its own: a retry after later updates would apply to their events as well.
fn parts(batch: &[StatusUpdate]) -> impl Iterator<Item = &[StatusUpdate]> {
    batch.chunk_by(|a, b| !a.is_of_session() && !b.is_of_session())
}

fn log_refused(error: &StoreError, status: &StatusUpdate) {
    tracing::error!(err = %error, "the store refused a status: {status:?}");
}

/// Writes the statuses of single events.
async fn write_events(store: &dyn EventStore, updates: &[StatusUpdate]) -> Result<(), StoreError> {
    let ids: BTreeSet<&String> = updates.iter().flat_map(StatusUpdate::ids).collect();
    let ids: Vec<String> = ids.into_iter().cloned().collect();
    let found = store.statuses(ids.clone()).await?.into_iter();
    let words = found.map(|status| {
        let status = status?;
        Some((status.node_quarantined?, status.quarantine_finished_at))
    });
    let mut known: EventStatuses = (ids.into_iter().zip(words))
        .filter_map(|(id, word)| Some((id, word?)))
        .collect();
    let mut patches = Vec::new();
    for update in updates {
        for status in update.statuses(&known) {
            let patch = EventStatus {
                node_quarantined: Some(status.status),
                quarantine_finished_at: Some(status.at),
                ..(status.eviction.as_ref()).map_or_else(EventStatus::default, |eviction| {
                    drain_patch(eviction, status.at)
                })
            };
            patches.push((status.id.clone(), patch));
            known.insert(status.id, (status.status, Some(status.at)));
        }
    }
    for part in patches.chunks(BATCH) {
        store.update_statuses(part.to_vec()).await?;
    }
    Ok(())
}

/// Writes the progress of the drain of `node` into the records of its newest quarantine, unless
/// a recovery has ended that quarantine.
async fn write_drain(
    store: &dyn EventStore,
    node: &str,
    eviction: &Eviction,
    at: Timestamp,
) -> Result<(), StoreError> {
    let is_open = |status: &EventStatus| {
        let eviction = status.pods_eviction.as_ref();
        eviction.is_none_or(|eviction| !eviction.status.is_final())
    };
    let open: Vec<String> = (of_quarantine(store, node).await?.into_iter())
        .filter(|(_, status)| is_open(status))
        .map(|(record, _)| record.id)
        .collect();
    update_all(store, open, &drain_patch(eviction, at)).await
}

/// Writes the progress of the remediation of `node` into the records of its newest quarantine,
/// unless a recovery has ended that quarantine: into those of events that preceded the
/// remediation and were not remediated before.
async fn write_repair(
    store: &dyn EventStore,
    node: &str,
    repair: &RemediationProgress,
) -> Result<(), StoreError> {
    let open: Vec<String> = (of_quarantine(store, node).await?.into_iter())
        .filter(|(record, status)| {
            record.created_at <= repair.up_to && status.fault_remediated != Some(true)
        })
        .map(|(record, _)| record.id)
        .collect();
    let patch = EventStatus {
        fault_remediated: repair.remediated,
        last_remediation_at: repair.attempted_at,
        ..EventStatus::default()
    };
    update_all(store, open, &patch).await
}

fn drain_patch(eviction: &Eviction, at: Timestamp) -> EventStatus {
    EventStatus {
        drain_finished_at: eviction.finished_at(at),
        pods_eviction: Some(eviction.clone()),
        ..EventStatus::default()
    }
}

/// Marks all events of the newest quarantine of `node` as cancelled, unless a recovery has ended
/// it.
async fn cancel(store: &dyn EventStore, node: &str) -> Result<(), StoreError> {
    let found = of_quarantine(store, node).await?.into_iter();
    let patch = EventStatus {
        node_quarantined: Some(NodeQuarantined::Cancelled),
        ..EventStatus::default()
    };
    let ids = found.map(|(record, _)| record.id).collect();
    update_all(store, ids, &patch).await
}

/// Returns the events of the newest quarantine of `node` with their statuses, newest first; none
/// if a recovery has ended it.
async fn of_quarantine(
    store: &dyn EventStore,
    node: &str,
) -> Result<Vec<(EventRecord, EventStatus)>, StoreError> {
    let mut of_quarantine = Vec::new();
    let mut before = None;
    loop {
        let query = EventQuery {
            node: Some(node.to_owned()),
            before,
            limit: PAGE,
            ..EventQuery::default()
        };
        let page = store.events(query).await?;
        let ids: Vec<String> = page.iter().map(|record| record.id.clone()).collect();
        let oldest = page.last().map(|record| record.seq);
        let is_whole = page.len() == PAGE;
        let statuses = store.statuses(ids).await?;
        for (record, status) in page.into_iter().zip(statuses) {
            let status = status.unwrap_or_default();
            let word = status.node_quarantined;
            if word == Some(NodeQuarantined::UnQuarantined) {
                return Ok(Vec::new()); // Newer events belong to no quarantine.
            }
            if word.is_some_and(NodeQuarantined::is_open) {
                of_quarantine.push((record, status));
            }
            if word == Some(NodeQuarantined::Quarantined) {
                return Ok(of_quarantine);
            }
        }
        match oldest {
            Some(seq) if is_whole => before = Some(seq),
            // The store no longer has the first event of the quarantine.
            _ => return Ok(of_quarantine),
        }
    }
}

async fn update_all(
    store: &dyn EventStore,
    ids: Vec<String>,
    patch: &EventStatus,
) -> Result<(), StoreError> {
    // In parts, the oldest event last: it marks the start of the quarantine for a retry.
    for part in ids.chunks(BATCH) {
        let patches = part.iter().map(|id| (id.clone(), patch.clone())).collect();
        store.update_statuses(patches).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use contract::HealthEvent;
    use fleet::status::Report;
    use model::status::eviction::EvictionStatus;
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
                    node_name: id.split_once('-').unwrap().0.to_owned(),
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

    fn out_at(id: &str, at: i64) -> StatusUpdate {
        StatusUpdate::Event {
            id: id.to_owned(),
            status: NodeQuarantined::Quarantined,
            at: Timestamp::from_nanosecond(at.into()).unwrap(),
            eviction: None,
        }
    }

    fn out(id: &str) -> StatusUpdate {
        out_at(id, 0)
    }

    fn recovered(reports: &[(&str, &str)]) -> StatusUpdate {
        let report = |(id, fault): &(&str, &str)| Report {
            id: (*id).to_owned(),
            healthy: true,
            faults: vec![(*fault).to_owned()],
        };
        StatusUpdate::Recoveries {
            recoveries: reports.iter().map(report).collect(),
            at: Timestamp::UNIX_EPOCH,
        }
    }

    fn cancelled(node: &str) -> StatusUpdate {
        let node = node.to_owned();
        StatusUpdate::Cancel { node }
    }

    #[tokio::test]
    async fn how_far_a_drain_is_stands_with_its_quarantine_only_and_an_end_stays() {
        use EvictionStatus::{AlreadyDrained, InProgress, NotStarted, Succeeded};
        let ids = ["n1-before", "n1-fault", "n1-skips", "n1-none", "n2-other"];
        let bench = Bench::new(&ids).await;
        let with = |id: &str, word| StatusUpdate::Event {
            id: id.to_owned(),
            status: NodeQuarantined::Quarantined,
            at: Timestamp::UNIX_EPOCH,
            eviction: Some(Eviction::new(word, "")),
        };
        let drain = |word| StatusUpdate::Drain {
            node: "n1".to_owned(),
            eviction: Eviction::new(word, "why"),
            at: Timestamp::UNIX_EPOCH,
        };
        let skips = StatusUpdate::Event {
            id: ids[2].to_owned(),
            status: NodeQuarantined::AlreadyQuarantined,
            at: Timestamp::UNIX_EPOCH,
            eviction: Some(Eviction::new(AlreadyDrained, "skipped")),
        };
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
        let already = StatusUpdate::Event {
            id: ids[2].to_owned(),
            status: NodeQuarantined::AlreadyQuarantined,
            at: Timestamp::UNIX_EPOCH,
            eviction: None,
        };
        let all = vec![out(ids[0]), out(ids[1]), already, out(ids[3])];
        bench.write(all).await.unwrap();
        let event = async |id: &str| bench.store.event(id).await.unwrap().unwrap();
        let first = event(ids[1]).await.created_at;
        let last = event(ids[2]).await.created_at;
        bench.sql(&format!(
            "UPDATE event SET created_at = {} WHERE id = 'n1-second'",
            last.as_microsecond() + 1_000_000
        ));
        let repair = |remediated, up_to: Timestamp| StatusUpdate::RemediationProgress {
            node: "n1".to_owned(),
            repair: RemediationProgress {
                remediated,
                attempted_at: Some(first),
                up_to,
            },
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
        let recovered = recovered(&[(ids[1], ids[0])]);
        let statuses = vec![out(ids[0]), cancelled("n1"), recovered];
        bench.write(statuses).await.unwrap();
        assert_eq!(bench.words(&ids).await, ["Cancelled", ""]);
        bench.store.close().await;
    }

    #[tokio::test]
    async fn of_recoveries_the_last_that_counts_has_given_the_node_back() {
        let ids = ["n1-fault", "n1-minor", "n1-first", "n1-last", "n1-other"];
        let bench = Bench::new(&ids).await;
        let recovered = recovered(&[(ids[2], ids[0]), (ids[3], ids[0]), (ids[4], ids[1])]);
        bench.write(vec![out(ids[0]), recovered]).await.unwrap();
        let expected = ["Quarantined", "", "AlreadyQuarantined", "UnQuarantined", ""];
        assert_eq!(bench.words(&ids).await, expected);
        bench.store.close().await;
    }

    #[tokio::test]
    async fn only_a_later_quarantine_takes_a_cancelled_word_back() {
        let ids = ["n1-fault"];
        let bench = Bench::new(&ids).await;
        // A repeat after a restart has the time of the first report.
        let first = out_at(ids[0], 1_500);
        let statuses = vec![first.clone(), cancelled("n1"), first];
        bench.write(statuses).await.unwrap();
        assert_eq!(bench.words(&ids).await, ["Cancelled"]);
        bench.write(vec![out_at(ids[0], 9_000)]).await.unwrap();
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
        let statuses = vec![cancelled("n1"), out(ids[1]), cancelled("n2")];
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
        statuses.extend([cancelled("n3"), out(ids[3])]);
        bench.write(statuses).await.unwrap();
        let expected = ["Quarantined", "", "Cancelled", "Quarantined"];
        assert_eq!(bench.words(&ids).await, expected);
        // A single status is tried once.
        let errors = bench.errors();
        bench.write(vec![out(ids[1])]).await.unwrap();
        assert_eq!(bench.errors(), errors + 1);
        bench.store.close().await;
    }
}
