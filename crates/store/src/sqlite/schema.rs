//! Opening of the database file: checks, configuration and schema upgrades.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};

use super::SqliteOpenError;
use crate::directory_lock::{NO_LINK, sync_entry};

/// Steps to the newest schema. `PRAGMA user_version` is the number of steps taken. A released
/// step is never changed: a change becomes a new step.
pub(super) const STEPS: &[&str] = &[STEP_1, STEP_2, STEP_3, STEP_4, STEP_5];

/// Initial schema of the database.
///
/// `body` is the public JSON form of the event; the columns before it are copies for searching.
/// Times are microseconds since 1970.
///
/// `stream` is a hash of node, agent and check. With `fingerprint` it identifies retries; see
/// `append.rs`. `quarantine_finished_at` is the time of the decision in `node_quarantined`.
///
/// `saved_at` tells whether the consumer still exists. `checkpoint_part` holds the parts of a
/// consumer's state that are saved separately, such as a node's share of the fault book.
///
/// `identity` is one row: the id of the store, created here (`SQLite` seeds `randomblob` from
/// the system), and `since`, the last position of the history (`identity.rs`).
const STEP_1: &str = "
    CREATE TABLE event (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        created_at INTEGER NOT NULL,
        node TEXT NOT NULL,
        agent TEXT NOT NULL,
        check_name TEXT NOT NULL,
        healthy INTEGER NOT NULL,
        fatal INTEGER NOT NULL,
        stream INTEGER NOT NULL,
        fingerprint TEXT,
        body TEXT NOT NULL,
        node_quarantined TEXT,
        quarantine_finished_at INTEGER
    ) STRICT;
    CREATE INDEX event_by_node ON event (node, seq);
    CREATE INDEX event_by_stream ON event (stream, healthy, seq);
    CREATE INDEX event_by_fingerprint ON event (fingerprint, seq) WHERE fingerprint IS NOT NULL;

    CREATE TABLE checkpoint (
        consumer TEXT PRIMARY KEY,
        token INTEGER NOT NULL,
        state BLOB NOT NULL,
        saved_at INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE checkpoint_part (
        consumer TEXT NOT NULL,
        part TEXT NOT NULL,
        state BLOB NOT NULL,
        PRIMARY KEY (consumer, part)
    ) STRICT;

    CREATE TABLE journal (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at INTEGER NOT NULL,
        node TEXT NOT NULL,
        session TEXT,
        kind TEXT NOT NULL,
        text TEXT NOT NULL,
        detail TEXT
    ) STRICT;
    CREATE INDEX journal_by_node ON journal (node, seq);

    CREATE TABLE identity (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        id TEXT NOT NULL,
        since INTEGER NOT NULL
    ) STRICT;
    INSERT INTO identity (one, id, since) VALUES (1, lower(hex(randomblob(16))), 0);
";

/// Adds the progress of the eviction of pods from the event's node, and the end of the drain.
const STEP_2: &str = "
    ALTER TABLE event ADD COLUMN pods_eviction TEXT;
    ALTER TABLE event ADD COLUMN pods_eviction_message TEXT NOT NULL DEFAULT '';
    ALTER TABLE event ADD COLUMN drain_finished_at INTEGER;
";

/// Adds the result of the remediation of the event's fault, and the time of the last attempt.
const STEP_3: &str = "
    ALTER TABLE event ADD COLUMN fault_remediated INTEGER;
    ALTER TABLE event ADD COLUMN last_remediation_at INTEGER;
";

/// Adds the session of an event. An event that is part of one belongs to that of the last
/// `Quarantined` event of its node, whose id is the session's.
const STEP_4: &str = "
    ALTER TABLE event ADD COLUMN session TEXT;
    UPDATE event SET session = (SELECT id FROM event AS first WHERE first.seq = part.first)
    FROM (SELECT seq, max(seq) FILTER (WHERE node_quarantined = 'Quarantined')
                      OVER (PARTITION BY node ORDER BY seq) AS first
          FROM event WHERE node_quarantined IN ('Quarantined', 'AlreadyQuarantined')) AS part
    WHERE event.seq = part.seq;
    CREATE INDEX event_by_session ON event (session) WHERE session IS NOT NULL;
";

/// Adds the conclusions that rest on the event, as a JSON list.
const STEP_5: &str = "
    ALTER TABLE event ADD COLUMN analysis TEXT;
";

/// `PRAGMA application_id` of a file of this program: "gpwd" in ASCII.
const APPLICATION_ID: i32 = 0x6770_7764;
/// First bytes of every `SQLite` database.
const MAGIC: &[u8; 16] = b"SQLite format 3\0";
/// Longest wait for another process that holds the file, such as a `sqlite3` shell.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// Prepared statements that a connection caches.
const STATEMENTS: usize = 32;

/// Opens the database for writing, creates it if missing, and upgrades it to the newest schema.
/// The caller holds the directory lock.
///
/// A file that is damaged, newer or of another program is left unchanged.
pub(super) fn open(path: &Path) -> Result<Connection, SqliteOpenError> {
    check_file(path)?;
    let failed = |source| failure(path, source);
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut connection = Connection::open_with_flags(path, flags).map_err(failed)?;
    // Until the file is known to be sound and of this program, not even its write-ahead log is
    // folded into it.
    connection
        .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)
        .map_err(failed)?;
    connection.busy_timeout(BUSY_TIMEOUT).map_err(failed)?;
    let version = check(&connection, path, STEPS.len())?;

    if version == 0 {
        // Takes effect only before the first table exists; lets retention shrink the file.
        connection
            .pragma_update(None, "auto_vacuum", "INCREMENTAL")
            .map_err(failed)?;
    }
    let mode: String = connection
        .pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))
        .map_err(failed)?;
    if mode != "wal" {
        return Err(SqliteOpenError::NoWal {
            path: path.into(),
            mode,
        });
    }
    connection
        .pragma_update(None, "synchronous", "FULL")
        .map_err(failed)?;
    configure(&connection, 4096).map_err(failed)?;
    migrate(&mut connection, STEPS).map_err(failed)?;
    connection
        .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false)
        .map_err(failed)?;
    Ok(connection)
}

/// Opens a read-only connection.
pub(super) fn open_reader(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    configure(&connection, 1024)?;
    Ok(connection)
}

/// Takes the steps that the database lacks, each in its own transaction.
fn migrate(connection: &mut Connection, steps: &[&str]) -> rusqlite::Result<()> {
    let before: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    for (version, step) in (1_i64..).zip(steps) {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let taken: i64 = transaction.pragma_query_value(None, "user_version", |row| row.get(0))?;
        if taken < version {
            transaction.execute_batch(step)?;
            transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
            transaction.pragma_update(None, "user_version", version)?;
            transaction.commit()?;
            if before > 0 {
                tracing::info!(version, "event store schema upgraded");
            }
        }
    }
    Ok(())
}

/// Returns the schema version of a database that may be opened. Only reads.
fn check(connection: &Connection, path: &Path, known: usize) -> Result<i64, SqliteOpenError> {
    let failed = |source| failure(path, source);
    let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let version = pragma("user_version").map_err(failed)?;
    let application = pragma("application_id").map_err(failed)?;
    let tables: i64 = connection
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(failed)?;
    let fresh = version == 0 && application == 0 && tables == 0;
    if !fresh && application != i64::from(APPLICATION_ID) {
        return Err(SqliteOpenError::Foreign { path: path.into() });
    }
    if usize::try_from(version).map_or(true, |version| version > known) {
        return Err(SqliteOpenError::Newer {
            path: path.into(),
            found: version,
            known,
        });
    }
    Ok(version)
}

/// Checks the file before `SQLite` opens it, and creates an empty one if missing.
///
/// Closing any descriptor of a file drops all locks that the process has on it, so this must
/// not happen while `SQLite` has the file open; the directory lock ensures that.
fn check_file(path: &Path) -> Result<(), SqliteOpenError> {
    let failed = |source: io::Error| SqliteOpenError::File {
        path: path.into(),
        source,
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600) // SQLite gives its other files the mode of this one.
        .custom_flags(NO_LINK)
        .open(path)
        .map_err(failed)?;
    let mut start = Vec::new();
    file.by_ref()
        .take(MAGIC.len() as u64)
        .read_to_end(&mut start)
        .map_err(failed)?;
    if start.is_empty() {
        return sync_entry(path).map_err(failed);
    }
    if start != MAGIC {
        return Err(SqliteOpenError::NotADatabase { path: path.into() });
    }
    Ok(())
}

fn configure(connection: &Connection, cache_kib: i32) -> rusqlite::Result<()> {
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    // Otherwise SQLite compiles a statement anew whenever a bound value might make another plan
    // better, which costs more than the worse plan.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    connection.pragma_update(None, "cache_size", -cache_kib)?;
    connection.pragma_update(None, "temp_store", "MEMORY")
}

/// Classifies an error met while opening. The statements of this program are valid: if one does
/// not fit (`SQLITE_ERROR`, a value of another type), the tables were changed.
pub(super) fn failure(path: &Path, source: rusqlite::Error) -> SqliteOpenError {
    match source.sqlite_error_code() {
        None | Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::Unknown) => {
            SqliteOpenError::Corrupt {
                path: path.into(),
                source,
            }
        }
        _ => SqliteOpenError::Sqlite {
            path: path.into(),
            source,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use jiff::Timestamp;
    use model::status::{NodeQuarantined, SessionChange, SessionEvent};
    use tempfile::TempDir;

    use super::super::status;
    use super::*;

    fn version(connection: &Connection) -> i64 {
        connection
            .pragma_query_value(None, "user_version", |row| row.get(0))
            .unwrap()
    }

    #[test]
    fn a_commit_is_synchronous_and_logged_ahead() {
        let dir = TempDir::new().unwrap();
        let connection = open(&dir.path().join("events.db")).unwrap();
        let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
        assert_eq!(pragma("synchronous").unwrap(), 2, "FULL");
        assert_eq!(pragma("auto_vacuum").unwrap(), 2, "INCREMENTAL");
        assert_eq!(version(&connection), i64::try_from(STEPS.len()).unwrap());
    }

    #[test]
    fn an_older_database_takes_the_missing_steps_and_keeps_its_rows() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, &[STEP_1]).unwrap();
        connection
            .execute_batch(
                "INSERT INTO event VALUES
                     (7, 'e', 0, 'n1', 'a', 'c', 0, 1, 0, NULL, '{}', 'Quarantined', 5)",
            )
            .unwrap();
        for _ in 0..2 {
            migrate(&mut connection, STEPS).unwrap();
            assert_eq!(version(&connection), i64::try_from(STEPS.len()).unwrap());
        }
        let row: (i64, String, Option<String>) = connection
            .query_row(
                "SELECT seq, pods_eviction_message, pods_eviction FROM event",
                [],
                |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
            )
            .unwrap();
        assert_eq!(row, (7, String::new(), None));
    }

    #[test]
    fn open_sessions_of_an_older_database_come_to_their_end() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, &STEPS[..3]).unwrap();
        let rows = [
            ("n1", "AlreadyQuarantined", "Cancelled"), // Its first event was deleted.
            ("n1", "Quarantined", "Quarantined"),
            ("n1", "UnQuarantined", "UnQuarantined"),
            ("n1", "Cancelled", "Cancelled"),
            ("n2", "Quarantined", "Cancelled"),
            ("n1", "Quarantined", "Cancelled"),
            ("n2", "AlreadyQuarantined", "Cancelled"),
            ("n1", "", ""),
            ("n1", "AlreadyQuarantined", "Cancelled"),
        ];
        for (seq, (node, status, _)) in (1..).zip(rows) {
            let row = "INSERT INTO event (seq, id, created_at, node, agent, check_name, healthy,
                                          fatal, stream, body, node_quarantined,
                                          quarantine_finished_at)
                       VALUES (?1, 'e' || ?1, 0, ?2, 'a', 'c', 0, 1, 0, '{}', nullif(?3, ''), 5)";
            connection.execute(row, (seq, node, status)).unwrap();
        }
        migrate(&mut connection, STEPS).unwrap();
        // The controller joins what the nodes list to its session again.
        let listed = SessionEvent {
            id: "e1".to_owned(),
            session: "e6".to_owned(),
            status: NodeQuarantined::AlreadyQuarantined,
            at: Timestamp::constant(1, 0),
            eviction: None,
        };
        status::join(&connection, &listed).unwrap();
        for (node, session) in [("n1", "e6"), ("n2", "e5")] {
            status::change(&connection, node, session, &SessionChange::Cancelled).unwrap();
        }
        for (seq, (_, _, expected)) in (1..).zip(rows) {
            let status = status::read(&connection, &format!("e{seq}"))
                .unwrap()
                .unwrap();
            let name = status.node_quarantined.map_or("", NodeQuarantined::name);
            assert_eq!(name, expected, "e{seq}");
        }
    }

    #[test]
    fn a_step_that_fails_leaves_the_version_before_it() {
        let mut connection = Connection::open_in_memory().unwrap();
        let steps = [STEP_1, "CREATE TABLE half (a); CREATE TABLE event (a)"];
        migrate(&mut connection, &steps).unwrap_err();
        assert_eq!(version(&connection), 1);
        let half: i64 = connection
            .query_row(
                "SELECT count(*) FROM sqlite_schema WHERE name = 'half'",
                [],
                |row| row.get(0),
            )
            .unwrap();
        assert_eq!(half, 0);
    }

    #[test]
    fn what_is_newer_foreign_or_damaged_is_refused_and_left_as_it_is() {
        type Break = fn(&Path);
        let table: [(&str, Break, &str); 5] = [
            (
                "newer",
                |path| {
                    let connection = open(path).unwrap();
                    connection.pragma_update(None, "user_version", 99).unwrap();
                },
                "version 99",
            ),
            (
                "foreign",
                |path| {
                    Connection::open(path)
                        .unwrap()
                        .execute_batch("CREATE TABLE t (a)")
                        .unwrap();
                },
                "another program",
            ),
            (
                "text",
                |path| fs::write(path, "these are my notes, not events\n").unwrap(),
                "SQLite",
            ),
            ("short", |path| fs::write(path, "SQLite").unwrap(), "SQLite"),
            (
                "cut off",
                |path| {
                    drop(open(path).unwrap());
                    let whole = fs::read(path).unwrap();
                    fs::write(path, &whole[..whole.len() / 2]).unwrap();
                },
                "damaged",
            ),
        ];
        for (name, break_it, says) in table {
            let dir = TempDir::new().unwrap();
            let path = dir.path().join("events.db");
            break_it(&path);
            let before = fs::read(&path).unwrap();
            let error = open(&path).unwrap_err().to_string();
            assert!(
                error.contains(says) && error.contains("events.db"),
                "{name}: {error}"
            );
            assert_eq!(fs::read(&path).unwrap(), before, "{name}");
        }
    }

    #[test]
    fn a_start_that_was_cut_short_is_a_start() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("events.db");
        fs::write(&path, "").unwrap();
        drop(open(&path).unwrap());

        let path = dir.path().join("without-tables.db");
        let connection = Connection::open(&path).unwrap();
        connection
            .pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))
            .unwrap();
        drop(connection);
        assert!(open(&path).is_ok());
    }
}
