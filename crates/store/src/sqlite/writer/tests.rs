//! Tests of failing writes, which are provoked through `SQLite` directly.

use rusqlite::Connection;
use tempfile::TempDir;

use super::*;
use crate::NewEvent;
use crate::conformance::event;
use crate::sqlite::{append, schema};

type Answer = oneshot::Receiver<Result<Vec<crate::Appended>, StoreError>>;

struct Bench {
    thread: Thread,
    dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("events.db");
        let connection = schema::open(&path).unwrap();
        connection.busy_timeout(Duration::ZERO).unwrap();
        let wal = crate::sqlite::wal(&path);
        let thread = Thread {
            connection,
            wal,
            fold_at: MAX_WAL_BYTES,
            changes: 0,
            trouble: watch::Sender::new(None),
            latest: watch::Sender::new(Position::START),
            damage: Arc::new(Damage::new(path)),
        };
        Self { thread, dir }
    }

    fn seqs(&self) -> Vec<i64> {
        let mut statement = self
            .thread
            .connection
            .prepare("SELECT seq FROM event")
            .unwrap();
        statement
            .query_map([], |row| row.get(0))
            .unwrap()
            .map(Result::unwrap)
            .collect()
    }
}

type Ran = rusqlite::Result<Result<Vec<crate::Appended>, StoreError>>;

fn request(run: impl FnMut(&Connection) -> Ran + Send + 'static) -> (Box<dyn Job>, Answer) {
    let (reply, answer) = oneshot::channel();
    let call = Call {
        action: "store events",
        run,
        outcome: None,
        reply,
    };
    (Box::new(call), answer)
}

fn append(events: Vec<NewEvent>) -> (Box<dyn Job>, Answer) {
    let rows: Vec<_> = events.into_iter().map(append::EventRow::of).collect();
    request(move |connection| append::append(connection, &rows).map(Ok))
}

fn seq(answer: Answer) -> u64 {
    answer.blocking_recv().unwrap().unwrap()[0].seq.number()
}

fn refusal(answer: Answer) -> StoreError {
    answer.blocking_recv().unwrap().unwrap_err()
}

#[test]
fn a_call_that_fails_takes_no_other_with_it() {
    let mut bench = Bench::new();
    let (first, first_answer) = append(vec![event("n1", 1)]);
    let (poison, poison_answer) = request(|connection| {
        let row = append::EventRow::of(event("n1", 2));
        append::append(connection, &[row])?;
        connection.execute("INSERT INTO event (id) VALUES (NULL)", [])?;
        Ok(Ok(Vec::new()))
    });
    let (refused, refused_answer) = request(|_| Ok(Err(StoreError::Closed)));
    let (last, last_answer) = append(vec![event("n1", 3)]);
    bench.thread.commit(vec![first, poison, refused, last]);

    assert_eq!((seq(first_answer), seq(last_answer)), (1, 2));
    let error = refusal(poison_answer);
    assert!(
        matches!(error, StoreError::Internal { .. }) && !error.is_retryable(),
        "{error}"
    );
    assert!(matches!(refusal(refused_answer), StoreError::Closed));
    assert_eq!(bench.seqs(), [1, 2]);
    assert_eq!(*bench.thread.latest.borrow(), 2.into());
}

#[test]
fn a_full_disk_fails_what_does_not_fit_and_passes() {
    let mut bench = Bench::new();
    let limit = |bench: &Bench, pages: i64| {
        let set = format!("PRAGMA max_page_count = {pages}");
        bench
            .thread
            .connection
            .query_row(&set, [], |row| row.get::<_, i64>(0))
            .unwrap();
    };
    let (request, answer) = append((0..100).map(|n| event("n1", n)).collect());
    bench.thread.commit(vec![request]);
    assert_eq!(seq(answer), 1);

    let pages: i64 = bench
        .thread
        .connection
        .pragma_query_value(None, "page_count", |row| row.get(0))
        .unwrap();
    limit(&bench, pages + 2);
    let (small, small_answer) = append(vec![event("n1", 1_000)]);
    let (large, large_answer) = append((2_000..3_000).map(|n| event("n1", n)).collect());
    let (again, again_answer) = append(vec![event("n1", 1)]);
    bench.thread.commit(vec![small, large, again]);
    assert_eq!(seq(small_answer), 101);
    let error = refusal(large_answer);
    assert!(
        matches!(error, StoreError::Io { .. }) && error.is_retryable(),
        "{error}"
    );
    assert_eq!(seq(again_answer), 2);

    limit(&bench, 1 << 30);
    let (large, large_answer) = append((2_000..3_000).map(|n| event("n1", n)).collect());
    bench.thread.commit(vec![large]);
    assert_eq!(seq(large_answer), 102, "positions without a gap");
    assert!(bench.seqs().into_iter().eq(1..=1_101));
    assert_eq!(*bench.thread.latest.borrow(), 1_101.into());
}

#[test]
fn a_file_held_by_another_process_fails_the_group_and_passes() {
    let mut bench = Bench::new();
    let other = Connection::open(bench.dir.path().join("events.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (first, first_answer) = append(vec![event("n1", 1)]);
    let (second, second_answer) = append(vec![event("n1", 2)]);
    bench.thread.commit(vec![first, second]);
    for answer in [first_answer, second_answer] {
        let error = refusal(answer);
        assert!(error.is_retryable(), "{error}");
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("locked"), "{source}");
    }
    other.execute_batch("ROLLBACK").unwrap();
    let (first, first_answer) = append(vec![event("n1", 1)]);
    bench.thread.commit(vec![first]);
    assert_eq!(seq(first_answer), 1);
}

#[test]
fn a_long_log_is_folded_unless_somebody_reads_it() {
    let mut bench = Bench::new();
    let reader = Connection::open(bench.dir.path().join("events.db")).unwrap();
    let size = |bench: &Bench| bench.thread.wal.metadata().unwrap().len();
    let (request, _answer) = append(vec![event("n1", 1)]);
    bench.thread.commit(vec![request]);
    reader
        .execute_batch("BEGIN; SELECT count(*) FROM event")
        .unwrap();
    let (request, _answer) = append(vec![event("n1", 2)]);
    bench.thread.commit(vec![request]);

    bench.thread.fold();
    assert!(size(&bench) > 0, "shorter than the limit");
    bench.thread.fold_at = 1;
    bench.thread.fold();
    assert_eq!(
        bench.thread.fold_at,
        size(&bench) * 2,
        "put off: a reader is at it"
    );
    bench.thread.fold();

    reader.execute_batch("ROLLBACK").unwrap();
    bench.thread.fold_at = 1;
    bench.thread.fold();
    assert_eq!((size(&bench), bench.thread.fold_at), (0, MAX_WAL_BYTES));
    assert_eq!(bench.seqs(), [1, 2]);
}
