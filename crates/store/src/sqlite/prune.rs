//! Retention: deletion of old rows, and of the oldest rows when the store is too large.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};

use contract::keys;
use rusqlite::{Connection, OptionalExtension, Row};

use super::{number, page};
use crate::{Prune, Pruned, StoreError};

/// Most events, and most journal entries, that one call deletes: writers wait meanwhile.
pub(super) const CHUNK: usize = 2_000;
/// Most pages that one call gives back to the file system.
const PAGES: i64 = 4_096;
/// Selects the events in a range of positions. A pass of a preflight check can only have closed
/// faults of its own stream (node, agent and check): if none of those is stored, it has closed
/// nothing.
const EVENTS: &str = "
    SELECT seq, id, created_at,
           healthy AND substr(agent, 1, length(?3)) = ?3
           AND NOT EXISTS (SELECT 1 FROM event AS fault
                           WHERE fault.stream = event.stream AND fault.healthy = 0)
               AS has_closed_nothing
    FROM event WHERE seq > ?1 AND seq <= ?2 ORDER BY seq";
/// Selects the time of the first event, which stands for the oldest. There is no index by time,
/// and a full scan would block the writers.
const OLDEST_EVENT: &str = "SELECT created_at FROM event ORDER BY seq LIMIT 1";
const OLDEST_ENTRY: &str = "SELECT at FROM journal ORDER BY seq LIMIT 1";
/// Deletes the old ones among the journal entries behind a position. Does not stop at the first
/// young one: after a clock was set back, an entry dated in the future would keep all entries
/// behind it.
const DELETE_ENTRIES: &str = "
    DELETE FROM journal WHERE seq IN (
        SELECT seq FROM (SELECT seq, at FROM journal WHERE seq > ?3 ORDER BY seq LIMIT ?2)
        WHERE at < ?1)";
/// Selects the position of the n-th journal entry behind a position.
const NTH_ENTRY: &str = "SELECT seq FROM journal WHERE seq > ?1 ORDER BY seq LIMIT 1 OFFSET ?2";
/// Bytes that must be writable before the trouble is over.
const PROBE_BYTES: usize = 256 * 1024;

/// Start positions of the next scans for old rows.
///
/// Positions grow with acceptance, so the old rows are the first ones. But a wrong clock may
/// have dated any number of rows in the future, which would protect all rows behind them. Each
/// call therefore also scans a second chunk, which moves round the table.
#[derive(Debug, Default)]
pub(super) struct Round {
    events: AtomicI64,
    entries: AtomicI64,
}

pub(super) fn prune(
    connection: &Connection,
    prune: &Prune,
    round: &Round,
) -> rusqlite::Result<Pruned> {
    let upto = finished_position(connection, prune)?;
    let cutoff = Cutoff {
        since: prune.before.as_microsecond(),
        passes_since: prune.passes_before.as_microsecond(),
    };
    let keep: HashSet<&[u8]> = prune.keep.iter().map(String::as_bytes).collect();
    let mut pruned = Pruned {
        gone_consumers: gone_consumers(connection, prune)?,
        ..Pruned::default()
    };
    if used_bytes(connection)? > prune.max_bytes {
        // Too large: the oldest row goes first, whether event or journal entry.
        let event = oldest_time(connection, OLDEST_EVENT)?;
        let entry = oldest_time(connection, OLDEST_ENTRY)?;
        let entries_first = entry.is_some_and(|entry| event.is_none_or(|event| entry < event));
        if entries_first {
            (pruned.entries, _) = delete_entries(connection, 0, None)?;
        } else {
            (pruned.events, _) = delete_events(connection, 0, upto, None, &keep)?;
            if pruned.events == 0 {
                (pruned.entries, _) = delete_entries(connection, 0, None)?;
            }
        }
        pruned.over = used_bytes(connection)?.saturating_sub(prune.max_bytes);
        pruned.more = pruned.over > 0 && pruned.events + pruned.entries > 0;
    } else {
        pruned.events = in_two_parts(&round.events, |after| {
            delete_events(connection, after, upto, Some(&cutoff), &keep)
        })?;
        pruned.entries = in_two_parts(&round.entries, |after| {
            delete_entries(connection, after, Some(cutoff.since))
        })?;
        pruned.more = pruned.events.max(pruned.entries) >= CHUNK as u64;
    }
    shrink_file(connection)?;
    Ok(pruned)
}

/// Checks whether the disk accepts writes again. Writes a file of some size, since a small
/// write may fit into the existing log, and then rewrites the newest event's row.
pub(super) fn probe(
    connection: &Connection,
    database: &Path,
) -> rusqlite::Result<Result<(), StoreError>> {
    let file = database.with_extension("probe");
    let written = fs::write(&file, vec![0; PROBE_BYTES]);
    let removed = fs::remove_file(&file);
    if let Err(error) = written.and(removed) {
        return Ok(Err(StoreError::Io {
            action: "write to its directory",
            source: Box::new(error),
        }));
    }
    connection.execute(
        "UPDATE event SET node_quarantined = node_quarantined
         WHERE seq = (SELECT max(seq) FROM event)",
        [],
    )?;
    Ok(Ok(()))
}

/// Returns the last position that all live consumers have finished. The newest event is
/// excluded, so that the end of the feed stays.
fn finished_position(connection: &Connection, prune: &Prune) -> rusqlite::Result<i64> {
    let newest_but_one: Option<i64> =
        connection.query_row("SELECT max(seq) - 1 FROM event", [], |row| row.get(0))?;
    let slowest: Option<i64> = connection.query_row(
        "SELECT min(token) FROM checkpoint WHERE saved_at >= ?1",
        [prune.gone_before.as_microsecond()],
        |row| row.get(0),
    )?;
    Ok(number(prune.finished)
        .min(newest_but_one.unwrap_or(0))
        .min(slowest.unwrap_or(i64::MAX)))
}

/// Returns the consumers that are gone.
fn gone_consumers(connection: &Connection, prune: &Prune) -> rusqlite::Result<Vec<String>> {
    connection
        .prepare_cached("SELECT consumer FROM checkpoint WHERE saved_at < ?1 ORDER BY consumer")?
        .query_map([prune.gone_before.as_microsecond()], |row| row.get(0))?
        .collect()
}

/// Deletes from the first chunk of rows and, if there are more, from the chunk after `next`.
/// `delete` takes a position, and returns the number of rows deleted behind it and where it
/// stopped. Returns the total number of deleted rows.
fn in_two_parts(
    next: &AtomicI64,
    mut delete: impl FnMut(i64) -> rusqlite::Result<(u64, Option<i64>)>,
) -> rusqlite::Result<u64> {
    let (first, stopped) = delete(0)?;
    let Some(stopped) = stopped else {
        return Ok(first);
    };
    let (second, stopped) = delete(next.load(Ordering::Relaxed).max(stopped))?;
    next.store(stopped.unwrap_or(0), Ordering::Relaxed);
    Ok(first + second)
}

/// Times that separate old rows from those too young to delete.
struct Cutoff {
    since: i64,
    /// Limit for passes of preflight checks that have closed nothing.
    passes_since: i64,
}

// === impl Cutoff ===

impl Cutoff {
    /// Returns true if an event is too young to delete. A damaged row never is.
    fn is_young(&self, row: &Row<'_>) -> bool {
        let has_closed_nothing = || row.get("has_closed_nothing").unwrap_or(false);
        row.get::<_, i64>("created_at")
            .is_ok_and(|at| at >= self.since && (at >= self.passes_since || !has_closed_nothing()))
    }
}

/// Deletes up to [`CHUNK`] events after a position, oldest first, and skips at most as many
/// young ones. Returns the number of deleted events, and where it stopped unless at the end.
fn delete_events(
    connection: &Connection,
    after: i64,
    upto: i64,
    cutoff: Option<&Cutoff>,
    keep: &HashSet<&[u8]>,
) -> rusqlite::Result<(u64, Option<i64>)> {
    let mut select = connection.prepare_cached(EVENTS)?;
    let mut rows = select.query((after, upto, keys::PREFLIGHT_AGENTS))?;
    let (mut found, mut passed_over, mut stopped) = (Vec::new(), 0, None);
    while let Some(row) = rows.next()? {
        let seq = row.get::<_, i64>(0)?;
        if cutoff.is_some_and(|cutoff| cutoff.is_young(row)) {
            passed_over += 1;
        } else if !keep.contains(row.get_ref(1)?.as_bytes()?) {
            // Compared as bytes, so that an event with a damaged id can be deleted too.
            found.push(seq);
        }
        if found.len() == CHUNK || passed_over == CHUNK {
            stopped = Some(seq);
            break;
        }
    }
    let mut delete = connection.prepare_cached("DELETE FROM event WHERE seq = ?1")?;
    for seq in &found {
        delete.execute([seq])?;
    }
    Ok((found.len() as u64, stopped))
}

/// Deletes the old ones among [`CHUNK`] journal entries after a position. Returns the number of
/// deleted entries, and where it stopped unless at the end.
fn delete_entries(
    connection: &Connection,
    after: i64,
    before: Option<i64>,
) -> rusqlite::Result<(u64, Option<i64>)> {
    let stopped = connection
        .prepare_cached(NTH_ENTRY)?
        .query_row((after, page(CHUNK - 1)), |row| row.get(0))
        .optional()?;
    let deleted = connection.prepare_cached(DELETE_ENTRIES)?.execute((
        before.unwrap_or(i64::MAX),
        page(CHUNK),
        after,
    ))?;
    Ok((deleted as u64, stopped))
}

fn oldest_time(connection: &Connection, sql: &str) -> rusqlite::Result<Option<i64>> {
    connection
        .prepare_cached(sql)?
        .query_row([], |row| row.get(0))
        .optional()
}

/// Returns the size in use (bytes). Freed pages do not count, since they are reused.
fn used_bytes(connection: &Connection) -> rusqlite::Result<u64> {
    let pragma = |name| connection.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let pages = pragma("page_count")? - pragma("freelist_count")?;
    Ok((pages * pragma("page_size")?).unsigned_abs())
}

fn shrink_file(connection: &Connection) -> rusqlite::Result<()> {
    let mut vacuum = connection.prepare(&format!("PRAGMA incremental_vacuum({PAGES})"))?;
    let mut rows = vacuum.query([])?;
    // Each row stands for a freed page.
    while rows.next()?.is_some() {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use rusqlite::StatementStatus;
    use tempfile::TempDir;

    use super::super::schema;
    use super::*;

    /// Returns a database with `rows` events and entries, one per microsecond.
    fn filled(dir: &TempDir, rows: usize) -> Connection {
        let connection = schema::open(&dir.path().join("events.db")).unwrap();
        let numbers = format!(
            "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {rows})"
        );
        connection
            .execute_batch(&format!(
                "INSERT INTO event (id, created_at, node, agent, check_name, healthy, fatal, stream,
                                    body)
                 {numbers} SELECT n, n, 'n', 'a', 'c', 0, 0, 0, '' FROM n;
                 INSERT INTO journal (at, node, kind, text) {numbers} SELECT n, 'n', 'k', '' FROM n;"
            ))
            .unwrap();
        connection
    }

    #[test]
    fn what_is_oldest_is_known_without_looking_at_all() {
        let dir = TempDir::new().unwrap();
        let connection = filled(&dir, 4 * CHUNK);
        for sql in [OLDEST_EVENT, OLDEST_ENTRY] {
            let mut statement = connection.prepare(sql).unwrap();
            let at: i64 = statement.query_row([], |row| row.get(0)).unwrap();
            assert_eq!(at, 1);
            let steps = statement.get_status(StatementStatus::VmStep);
            assert!(steps < 100, "{sql}: {steps} steps");
        }
        let mut statement = connection.prepare(DELETE_ENTRIES).unwrap();
        let deleted = statement.execute((0, page(CHUNK), 0)).unwrap();
        let read = statement.get_status(StatementStatus::FullscanStep);
        assert_eq!(deleted, 0, "nothing is old");
        let read = usize::try_from(read).unwrap();
        assert!(read <= 2 * CHUNK, "{read} rows were read");
    }

    /// Returns limits that delete rows older than `at`, without exceptions.
    fn older_than(at: i64) -> Prune {
        Prune {
            before: jiff::Timestamp::from_microsecond(at).unwrap(),
            passes_before: jiff::Timestamp::MIN,
            max_bytes: u64::MAX,
            finished: (i64::MAX as u64).into(),
            gone_before: jiff::Timestamp::MIN,
            keep: Vec::new(),
        }
    }

    /// Any number of rows dated in the future protects no other row.
    #[test]
    fn rows_of_the_future_keep_only_themselves() {
        let dir = TempDir::new().unwrap();
        let rows = 5 * CHUNK;
        let connection = filled(&dir, rows);
        let future = 3 * CHUNK;
        connection
            .execute_batch(&format!(
                "UPDATE event SET created_at = 1000000000 WHERE seq <= {future} AND seq % 7;
                 UPDATE journal SET at = 1000000000 WHERE seq <= {future} AND seq % 7;"
            ))
            .unwrap();
        let round = Round::default();
        let mut gone = Pruned::default();
        for _ in 0..10 {
            let pruned = prune(&connection, &older_than(page(rows) - 9), &round).unwrap();
            assert!(pruned.events.max(pruned.entries) <= 2 * CHUNK as u64);
            gone.events += pruned.events;
            gone.entries += pruned.entries;
        }
        let dated = (future - future / 7) as u64;
        let young = 10;
        assert_eq!(gone.events, rows as u64 - dated - young);
        assert_eq!(gone.entries, rows as u64 - dated - young);
    }

    /// A call that finds nothing old at first does not scan the whole table.
    #[test]
    fn a_look_is_bounded() {
        let dir = TempDir::new().unwrap();
        let connection = filled(&dir, 3 * CHUNK);
        let old = "UPDATE event SET created_at = 0 WHERE seq = (SELECT max(seq) - 1 FROM event)";
        connection.execute(old, []).unwrap();
        let round = Round::default();
        let looks: Vec<u64> = (0..3)
            .map(|_| prune(&connection, &older_than(1), &round).unwrap().events)
            .collect();
        assert_eq!(looks, [0, 1, 0], "2 x {CHUNK} rows a look");
    }
}
