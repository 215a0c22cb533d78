//! Journal: decisions and actions, recorded beside the events.

use jiff::Timestamp;
use model::journal::JournalEntry;
use rusqlite::Connection;
use serde_json::Value;

use super::query::PAGE_BYTES;
use super::{failure, page};
use crate::{BoxError, StoreError, limits};

/// Journal entry in the form of its table row.
pub(super) struct EntryRow {
    at: i64,
    node: String,
    session: Option<String>,
    kind: String,
    text: String,
    detail: Option<String>,
}

pub(super) fn write(connection: &Connection, rows: &[EntryRow]) -> rusqlite::Result<()> {
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

/// Returns the newest entries about `node`, oldest first. Stops early once the entries exceed
/// [`PAGE_BYTES`].
pub(super) fn timeline(
    connection: &Connection,
    node: &str,
    limit: usize,
) -> Result<Vec<JournalEntry>, StoreError> {
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
        let (entry, size) = read(row).map_err(corrupt)?;
        bytes += size;
        entries.push(entry);
    }
    entries.reverse();
    Ok(entries)
}

/// Returns the entry in a row, and the size of its text and detail (bytes).
fn read(row: &rusqlite::Row<'_>) -> Result<(JournalEntry, usize), BoxError> {
    let (kind, text): (String, String) = (row.get(3)?, row.get(4)?);
    let detail: Option<String> = row.get(5)?;
    let bytes = text.len() + detail.as_ref().map_or(0, String::len);
    let entry = JournalEntry {
        at: Timestamp::from_microsecond(row.get(0)?)?,
        node: row.get(1)?,
        session: row.get(2)?,
        kind: serde_json::from_value(Value::String(kind))?,
        text,
        detail: detail.map_or(Ok(Value::Null), |text| serde_json::from_str(&text))?,
    };
    Ok((entry, bytes))
}

// === impl EntryRow ===

impl EntryRow {
    pub(super) fn of(entry: &JournalEntry) -> Result<Self, StoreError> {
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
}

#[cfg(test)]
mod tests {
    use model::journal::EntryKind;

    use super::super::schema;
    use super::*;
    use crate::MAX_ENTRY_BYTES;

    #[test]
    fn a_timeline_of_large_entries_ends_early_with_the_newest() {
        let dir = tempfile::TempDir::new().unwrap();
        let connection = schema::open(&dir.path().join("events.db")).unwrap();
        let entry = |text: String| JournalEntry {
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
        let rows: Vec<EntryRow> = texts
            .map(|text| EntryRow::of(&entry(text)).unwrap())
            .collect();
        write(&connection, &rows).unwrap();
        let found = timeline(&connection, "n1", 1_000).unwrap();
        assert_eq!(found.len(), 1 + large / 2);
        assert_eq!(found.last().unwrap().text, "last");
    }
}
