//! The journal: what was decided and done, beside the events.

use domain::journal::{Entry, EntryKind};
use jiff::Timestamp;
use rusqlite::Connection;
use serde_json::Value;

use super::query::PAGE_BYTES;
use super::{failure, page};
use crate::{BoxError, StoreError, limits};

/// An entry as its row.
pub(super) struct Row {
    at: i64,
    node: String,
    session: Option<String>,
    kind: String,
    text: String,
    detail: Option<String>,
}

pub(super) fn write(connection: &Connection, rows: &[Row]) -> rusqlite::Result<()> {
    let mut insert = connection.prepare_cached(
        "INSERT INTO journal (at, node, session, kind, text, detail)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?;
    for row in rows {
        insert.execute((
            row.at,
            &row.node,
            &row.session,
            &row.kind,
            &row.text,
            &row.detail,
        ))?;
    }
    Ok(())
}

/// Returns the newest entries about `node`, oldest of them first, and no more once they have so
/// many bytes.
pub(super) fn timeline(
    connection: &Connection,
    node: &str,
    limit: usize,
) -> Result<Vec<Entry>, StoreError> {
    let failed = |error| failure("read the journal", error);
    let mut statement = connection
        .prepare_cached(
            "SELECT at, node, session, kind, text, detail, seq FROM journal
             WHERE node = ?1 ORDER BY seq DESC LIMIT ?2",
        )
        .map_err(failed)?;
    let mut rows = statement.query((node, page(limit))).map_err(failed)?;
    let (mut entries, mut bytes) = (Vec::new(), 0);
    while bytes < PAGE_BYTES
        && let Some(row) = rows.next().map_err(failed)?
    {
        let seq: i64 = row.get(6).map_err(failed)?;
        let corrupt = |source| StoreError::Corrupt {
            what: format!("journal entry {seq}"),
            source,
        };
        let row = Row::read(row).map_err(corrupt)?;
        bytes += row.text.len() + row.detail.as_ref().map_or(0, String::len);
        entries.push(row.entry().map_err(corrupt)?);
    }
    entries.reverse();
    Ok(entries)
}

// === impl Row ===

impl Row {
    pub(super) fn of(entry: &Entry) -> Result<Self, StoreError> {
        let detail = (!entry.detail.is_null()).then(|| entry.detail.to_string());
        limits::entry_size(entry.text.len() + detail.as_ref().map_or(0, String::len))?;
        Ok(Self {
            at: entry.at.as_microsecond(),
            node: entry.node.clone(),
            session: entry.session.clone(),
            kind: entry.kind.name().to_owned(),
            text: entry.text.clone(),
            detail,
        })
    }

    fn read(row: &rusqlite::Row<'_>) -> Result<Self, BoxError> {
        Ok(Self {
            at: row.get(0)?,
            node: row.get(1)?,
            session: row.get(2)?,
            kind: row.get(3)?,
            text: row.get(4)?,
            detail: row.get(5)?,
        })
    }

    fn entry(self) -> Result<Entry, BoxError> {
        let kind: EntryKind = serde_json::from_value(Value::String(self.kind))?;
        let detail = match self.detail {
            None => Value::Null,
            Some(text) => serde_json::from_str(&text)?,
        };
        Ok(Entry {
            at: Timestamp::from_microsecond(self.at)?,
            node: self.node,
            session: self.session,
            kind,
            text: self.text,
            detail,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::schema;
    use super::*;
    use crate::MAX_ENTRY_BYTES;

    #[test]
    fn a_timeline_of_large_entries_ends_early_with_the_newest() {
        let dir = tempfile::TempDir::new().unwrap();
        let connection = schema::open(&dir.path().join("events.db")).unwrap();
        let entry = |text: String| Entry {
            at: Timestamp::UNIX_EPOCH,
            node: "n1".to_owned(),
            session: None,
            kind: EntryKind::Call,
            text,
            detail: Value::Null,
        };
        let large = 2 * PAGE_BYTES / MAX_ENTRY_BYTES;
        let texts = (0..large).map(|_| "x".repeat(MAX_ENTRY_BYTES));
        let texts = texts.chain(["last".to_owned()]);
        let rows: Vec<Row> = texts.map(|text| Row::of(&entry(text)).unwrap()).collect();
        write(&connection, &rows).unwrap();
        let found = timeline(&connection, "n1", 1_000).unwrap();
        assert_eq!(found.len(), 1 + large / 2);
        assert_eq!(found.last().unwrap().text, "last");
    }
}
