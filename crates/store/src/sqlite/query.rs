//! Queries for events and statistics.

use jiff::Timestamp;
use model::event::EventRecord;
use model::position::Position;
use rusqlite::types::Value;
use rusqlite::{Connection, Params, Row, params_from_iter};

use super::unreadable::Unreadable;
use super::{count, failure, newest, number, page, position};
use crate::{BoxError, EventQuery, MAX_PAGE, Stats, StoreError};

/// Size that ends a page of the feed, or a timeline (bytes; the last item may exceed it). A
/// thousand of the largest events would take more than a gigabyte.
pub(super) const PAGE_BYTES: usize = 8 * 1024 * 1024;

pub(super) fn feed(
    connection: &Connection,
    unreadable: &Unreadable,
    after: Position,
    limit: usize,
) -> Result<Vec<EventRecord>, StoreError> {
    let sql = "SELECT seq, id, created_at, body FROM event WHERE seq > ?1 ORDER BY seq";
    records(
        connection,
        unreadable,
        sql,
        [number(after)],
        limit,
        PAGE_BYTES,
    )
}

/// Counts at most a page of rows, since counting costs time in proportion to the count.
pub(super) fn behind(connection: &Connection, after: Position) -> Result<u64, StoreError> {
    let behind = || -> rusqlite::Result<u64> {
        let counted: i64 = connection
            .prepare_cached("SELECT count(*) FROM (SELECT 1 FROM event WHERE seq > ?1 LIMIT ?2)")?
            .query_row((number(after), page(MAX_PAGE)), |row| row.get(0))?;
        if counted < page(MAX_PAGE) {
            return Ok(count(counted));
        }
        Ok(newest(connection)?.number().saturating_sub(after.number()))
    };
    behind().map_err(|error| failure("count the events", error))
}

pub(super) fn events(
    connection: &Connection,
    unreadable: &Unreadable,
    query: &EventQuery,
) -> Result<Vec<EventRecord>, StoreError> {
    let mut sql = "SELECT seq, id, created_at, body FROM event WHERE TRUE".to_owned();
    let mut values = Vec::new();
    let conditions = [
        (" AND node = ?", query.node.clone().map(Value::from)),
        (" AND id = ?", query.id.clone().map(Value::from)),
        (" AND seq < ?", query.before.map(number).map(Value::from)),
        (" AND seq > ?", query.after.map(number).map(Value::from)),
    ];
    for (condition, value) in conditions {
        if let Some(value) = value {
            sql.push_str(condition);
            values.push(value);
        }
    }
    sql.push_str(" ORDER BY seq DESC");
    let values = params_from_iter(values);
    records(
        connection,
        unreadable,
        &sql,
        values,
        query.limit,
        usize::MAX,
    )
}

pub(super) fn event(
    connection: &Connection,
    unreadable: &Unreadable,
    id: &str,
) -> Result<Option<EventRecord>, StoreError> {
    let sql = "SELECT seq, id, created_at, body FROM event WHERE id = ?1";
    Ok(records(connection, unreadable, sql, [id], 1, usize::MAX)?.pop())
}

/// Returns all figures except the size on disk.
pub(super) fn stats(connection: &Connection) -> Result<Stats, StoreError> {
    let time = |micros: Option<i64>| micros.and_then(|at| Timestamp::from_microsecond(at).ok());
    connection
        .query_row(
            "SELECT (SELECT count(*) FROM event),
                    (SELECT created_at FROM event ORDER BY seq LIMIT 1),
                    (SELECT created_at FROM event ORDER BY seq DESC LIMIT 1),
                    (SELECT user_version FROM pragma_user_version)",
            [],
            |row| {
                Ok(Stats {
                    events: count(row.get(0)?),
                    oldest: time(row.get(1)?),
                    newest: time(row.get(2)?),
                    bytes: 0,
                    schema_version: row.get(3)?,
                })
            },
        )
        .map_err(|error| failure("count the events", error))
}

/// Returns the first `limit` readable rows, fewer once they exceed `max_bytes`. Unreadable rows
/// are skipped: one of them must not block all that come after it.
fn records(
    connection: &Connection,
    unreadable: &Unreadable,
    sql: &str,
    params: impl Params,
    limit: usize,
    max_bytes: usize,
) -> Result<Vec<EventRecord>, StoreError> {
    let failed = |error| failure("read events", error);
    let mut statement = connection.prepare_cached(sql).map_err(failed)?;
    let mut rows = statement.query(params).map_err(failed)?;
    let (mut records, mut bytes) = (Vec::new(), 0);
    while records.len() < limit.min(MAX_PAGE)
        && (records.is_empty() || bytes < max_bytes)
        && let Some(row) = rows.next().map_err(failed)?
    {
        bytes += row
            .get_ref(3)
            .and_then(|body| Ok(body.as_str()?.len()))
            .unwrap_or_default();
        match record(row) {
            Ok(record) => records.push(record),
            Err(error) => unreadable.note(row, error.as_ref()),
        }
    }
    Ok(records)
}

/// Reads a row of `seq, id, created_at, body`.
pub(super) fn record(row: &Row<'_>) -> Result<EventRecord, BoxError> {
    Ok(EventRecord {
        seq: position(row.get(0)?),
        id: row.get(1)?,
        created_at: Timestamp::from_microsecond(row.get(2)?)?,
        event: contract::json::from_str(row.get_ref(3)?.as_str()?)?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::schema;
    use super::*;

    #[test]
    fn few_events_are_counted_and_many_are_told_by_their_positions() {
        let dir = tempfile::TempDir::new().unwrap();
        let connection = schema::open(&dir.path().join("events.db")).unwrap();
        let last = MAX_PAGE + 100;
        let fill = format!(
            "WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {last})
             INSERT INTO event (id, created_at, node, agent, check_name, healthy, fatal, stream,
                                body)
             SELECT n, n, 'n', 'a', 'c', 0, 0, 0, '' FROM n;
             DELETE FROM event WHERE seq = {last} - 5"
        );
        connection.execute_batch(&fill).unwrap();
        let position = |back: usize| Position::from((last - back) as u64);
        for (back, expected) in [(0, 0), (10, 9), (MAX_PAGE, 9_999), (last, last as u64)] {
            assert_eq!(behind(&connection, position(back)).unwrap(), expected);
        }
    }
}
