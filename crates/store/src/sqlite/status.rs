//! Statuses of events: columns beside the event, found by the event's id or its session.
//!
//! The statements follow [`EventStatus::join`] and [`EventStatus::change`].

use jiff::Timestamp;
use model::status::eviction::Eviction;
use model::status::{self, ConclusionNote, EventStatus, SessionChange, SessionEvent};
use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, params_from_iter};

use super::failure;
use crate::StoreError;

pub(super) fn join(connection: &Connection, event: &SessionEvent) -> rusqlite::Result<()> {
    let eviction = event.eviction.as_ref();
    let finished_at = eviction.and_then(|eviction| eviction.finished_at(event.at));
    connection
        .prepare_cached(
            "UPDATE event SET session = ?2, node_quarantined = ?3, quarantine_finished_at = ?4,
                    pods_eviction = coalesce(?5, pods_eviction),
                    pods_eviction_message = coalesce(?6, pods_eviction_message),
                    drain_finished_at = coalesce(?7, drain_finished_at)
             WHERE id = ?1 AND (node_quarantined = 'Cancelled' OR session IS NOT ?2)
               AND coalesce(quarantine_finished_at < ?4, TRUE)",
        )?
        .execute((
            &event.id,
            &event.session,
            event.status.name(),
            event.at.as_microsecond(),
            eviction.map(|one| one.status.name()),
            eviction.map(|one| &one.message),
            finished_at.map(Timestamp::as_microsecond),
        ))?;
    Ok(())
}

pub(super) fn change(
    connection: &Connection,
    node: &str,
    session: &str,
    change: &SessionChange,
) -> rusqlite::Result<()> {
    let (sql, values) = statement(node, session, change);
    let mut statement = connection.prepare_cached(&sql)?;
    statement.execute(params_from_iter(values))?;
    Ok(())
}

/// Returns the statement that changes a session, with its parameters.
fn statement(node: &str, session: &str, change: &SessionChange) -> (String, Vec<Value>) {
    let time = |at: Option<Timestamp>| at.map(Timestamp::as_microsecond).into();
    let (set, condition, changed): (_, _, Vec<Value>) = match change {
        SessionChange::Drain(eviction, at) => (
            "pods_eviction = ?3, pods_eviction_message = ?4,
             drain_finished_at = coalesce(?5, drain_finished_at)",
            "coalesce(pods_eviction, '') NOT IN ('Succeeded', 'AlreadyDrained', 'Cancelled')",
            vec![
                eviction.status.name().to_owned().into(),
                eviction.message.clone().into(),
                time(eviction.finished_at(*at)),
            ],
        ),
        SessionChange::Remediation(progress) => (
            "fault_remediated = coalesce(?3, fault_remediated),
             last_remediation_at = coalesce(?4, last_remediation_at)",
            "created_at <= ?5 AND fault_remediated IS NOT 1",
            vec![
                progress.remediated.into(),
                time(progress.attempted_at),
                time(Some(progress.up_to)),
            ],
        ),
        SessionChange::Cancelled => ("node_quarantined = 'Cancelled'", "TRUE", Vec::new()),
    };
    let mut values = vec![session.to_owned().into(), node.to_owned().into()];
    values.extend(changed);
    let sql = format!(
        "UPDATE event SET {set}
         WHERE session = ?1 AND node = ?2 AND node_quarantined IN ('Quarantined', 'AlreadyQuarantined')
           AND {condition}"
    );
    (sql, values)
}

/// Notes a conclusion with an event.
pub(super) fn note(
    connection: &Connection,
    id: &str,
    note: &ConclusionNote,
) -> rusqlite::Result<()> {
    let known = connection
        .prepare_cached("SELECT analysis FROM event WHERE id = ?1")?
        .query_row([id], |row| row.get::<_, Option<String>>(0))
        .optional()?;
    let Some(known) = known else {
        return Ok(());
    };
    let mut status = EventStatus {
        analysis: notes(known),
        ..EventStatus::default()
    };
    if status.note(note) {
        let text = serde_json::to_string(&status.analysis).unwrap_or_default();
        connection
            .prepare_cached("UPDATE event SET analysis = ?2 WHERE id = ?1")?
            .execute((id, text))?;
    }
    Ok(())
}

/// Returns the conclusions in the column; none if it cannot be read.
fn notes(column: Option<String>) -> Vec<ConclusionNote> {
    let notes = column.and_then(|text| serde_json::from_str(&text).ok());
    notes.unwrap_or_default()
}

pub(super) fn read(connection: &Connection, id: &str) -> Result<Option<EventStatus>, StoreError> {
    connection
        .prepare_cached(
            "SELECT session, node_quarantined, quarantine_finished_at, pods_eviction,
                    pods_eviction_message, drain_finished_at, fault_remediated,
                    last_remediation_at, analysis
             FROM event WHERE id = ?1",
        )
        .and_then(|mut statement| {
            statement
                .query_row([id], |row| {
                    let time = |column: usize| -> rusqlite::Result<Option<Timestamp>> {
                        let micros = row.get::<_, Option<i64>>(column)?;
                        Ok(micros.and_then(|at| Timestamp::from_microsecond(at).ok()))
                    };
                    let text = |column: usize| row.get::<_, Option<String>>(column);
                    let (eviction, message) = (text(3)?, row.get(4)?);
                    let eviction = eviction.and_then(|name| status::parse(&name));
                    Ok(EventStatus {
                        session: row.get(0)?,
                        node_quarantined: text(1)?.and_then(|name| status::parse(&name)),
                        quarantine_finished_at: time(2)?,
                        pods_eviction: eviction.map(|status| Eviction { status, message }),
                        drain_finished_at: time(5)?,
                        fault_remediated: row.get(6)?,
                        last_remediation_at: time(7)?,
                        analysis: notes(text(8)?),
                    })
                })
                .optional()
        })
        .map_err(|error| failure("read an event's status", error))
}

#[cfg(test)]
mod tests {
    use model::attempt::RemediationProgress;
    use model::status::eviction::EvictionStatus;

    use super::super::schema;
    use super::*;

    /// The cost of a change does not depend on the number of stored events.
    #[test]
    fn a_session_is_changed_by_its_index() {
        let dir = tempfile::TempDir::new().unwrap();
        let connection = schema::open(&dir.path().join("events.db")).unwrap();
        let at = Timestamp::UNIX_EPOCH;
        let drain = Eviction::new(EvictionStatus::InProgress, "");
        let progress = RemediationProgress {
            remediated: None,
            attempted_at: None,
            up_to: at,
        };
        for change in [
            SessionChange::Drain(drain, at),
            SessionChange::Remediation(progress),
            SessionChange::Cancelled,
        ] {
            let (sql, values) = statement("node", "session", &change);
            let plan: String = connection
                .query_row(
                    &format!("EXPLAIN QUERY PLAN {sql}"),
                    params_from_iter(values),
                    |row| row.get("detail"),
                )
                .unwrap();
            let expected = "SEARCH event USING INDEX event_by_session (session=?)";
            assert_eq!(plan, expected, "{change:?}");
        }
    }
}
