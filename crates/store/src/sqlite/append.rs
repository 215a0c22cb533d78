//! Insertion of events into the table, each event once.

use contract::json;
use model::event::{content_fingerprint, lacks_own_time};
use rusqlite::{Connection, OptionalExtension, named_params};
use sha2::{Digest, Sha256};

use super::{identity, position, query};
use crate::{Appended, NewEvent, RETRY_WINDOW};

/// Selects the last event with the same content, if the new event can be a retry of it. The
/// cost does not depend on the number of events.
const REPEATED: &str = "
    SELECT seq, id FROM event AS last
    WHERE seq = (SELECT max(seq) FROM event WHERE fingerprint = :fingerprint)
      AND seq > :since
      AND created_at BETWEEN :from AND :to
      AND NOT EXISTS (
          SELECT 1 FROM event WHERE stream = :stream AND healthy = :opposite AND seq > last.seq)";

/// Event in the form of its table row.
pub(super) struct EventRow {
    id: String,
    created_at: i64,
    node: String,
    agent: String,
    check: String,
    healthy: bool,
    fatal: bool,
    stream: i64,
    fingerprint: Option<String>,
    body: String,
}

/// Stores those of `rows` that are not stored yet.
pub(super) fn append(
    connection: &Connection,
    rows: &[EventRow],
) -> rusqlite::Result<Vec<Appended>> {
    let since = identity::since(connection)?;
    rows.iter()
        .map(|row| row.append(connection, since))
        .collect()
}

/// Returns a hash of node, agent and check. The hash must stay the same in all versions, since
/// it is stored.
fn stream(node: &str, agent: &str, check: &str) -> i64 {
    let mut hash = Sha256::new();
    for part in [node, agent, check] {
        // The length prefix keeps different lists of parts from hashing to the same bytes.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let digest = hash.finalize();
    digest
        .iter()
        .take(8)
        .fold(0, |stream, byte| (stream << 8) | i64::from(*byte))
}

// === impl EventRow ===

impl EventRow {
    pub(super) fn of(NewEvent { event, received_at }: NewEvent) -> Self {
        Self {
            created_at: received_at.as_microsecond(),
            healthy: event.is_healthy,
            fatal: event.is_fatal,
            stream: stream(&event.node_name, &event.agent, &event.check_name),
            fingerprint: lacks_own_time(&event).then(|| content_fingerprint(&event)),
            body: json::to_string(&event),
            id: event.id,
            node: event.node_name,
            agent: event.agent,
            check: event.check_name,
        }
    }

    fn append(&self, connection: &Connection, since: i64) -> rusqlite::Result<Appended> {
        if let Some(seq) = self.with_same_id(connection)? {
            if seq <= since {
                return self.count_again(connection, seq);
            }
            return Ok(Appended {
                id: self.id.clone(),
                seq: position(seq),
                new: false,
            });
        }
        if let Some(fingerprint) = &self.fingerprint
            && let Some((seq, id)) = self.repeated(connection, fingerprint, since)?
        {
            return Ok(Appended {
                id,
                seq: position(seq),
                new: false,
            });
        }
        let mut insert = connection.prepare_cached(
            "INSERT INTO event (id, created_at, node, agent, check_name, healthy, fatal, stream,
                                fingerprint, body)
             VALUES (:id, :created_at, :node, :agent, :check, :healthy, :fatal, :stream,
                     :fingerprint, :body)",
        )?;
        let seq = insert.insert(named_params! {
            ":id": self.id,
            ":created_at": self.created_at,
            ":node": self.node,
            ":agent": self.agent,
            ":check": self.check,
            ":healthy": self.healthy,
            ":fatal": self.fatal,
            ":stream": self.stream,
            ":fingerprint": self.fingerprint,
            ":body": self.body,
        })?;
        Ok(Appended {
            id: self.id.clone(),
            seq: position(seq),
            new: true,
        })
    }

    /// Moves an event from the history to the end of the feed, with the new content. The time
    /// of receipt and the status stay.
    fn count_again(&self, connection: &Connection, seq: i64) -> rusqlite::Result<Appended> {
        let seq = identity::move_to_end(connection, seq)?;
        connection
            .prepare_cached("UPDATE event SET healthy = ?2, fatal = ?3, body = ?4 WHERE seq = ?1")?
            .execute((seq, self.healthy, self.fatal, &self.body))?;
        Ok(Appended {
            id: self.id.clone(),
            seq: position(seq),
            new: true,
        })
    }

    /// Returns the row of the stored event with this id. An unreadable row is deleted, so that
    /// this event is stored anew and reaches the readers of the feed.
    fn with_same_id(&self, connection: &Connection) -> rusqlite::Result<Option<i64>> {
        let found = connection
            .prepare_cached("SELECT seq, id, created_at, body FROM event WHERE id = ?1")?
            .query_row([&self.id], |row| {
                let same = row.get_ref(3)?.as_bytes()? == self.body.as_bytes();
                Ok((row.get(0)?, same || query::record(row).is_ok()))
            })
            .optional()?;
        match found {
            Some((seq, true)) => Ok(Some(seq)),
            Some((seq, false)) => {
                connection.execute("DELETE FROM event WHERE seq = ?1", [seq])?;
                tracing::info!(
                    seq,
                    event.id = self.id,
                    "an event that could not be read was sent again and replaced"
                );
                Ok(None)
            }
            None => Ok(None),
        }
    }

    /// Returns the event that this one repeats as a retry by its sender: the last event of the
    /// same content, if it was received within the window and the stream's health has not
    /// changed since. (After a change of health, the same content is a new event.)
    fn repeated(
        &self,
        connection: &Connection,
        fingerprint: &str,
        since: i64,
    ) -> rusqlite::Result<Option<(i64, String)>> {
        let window = i64::try_from(RETRY_WINDOW.as_micros()).unwrap_or(i64::MAX);
        connection
            .prepare_cached(REPEATED)?
            .query_row(
                named_params! {
                    ":fingerprint": fingerprint,
                    ":since": since,
                    ":from": self.created_at.saturating_sub(window),
                    ":to": self.created_at.saturating_add(window),
                    ":stream": self.stream,
                    ":opposite": !self.healthy,
                },
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .optional()
    }
}

#[cfg(test)]
mod tests {
    use contract::{BehaviourOverrides, Entity, HealthEvent};
    use jiff::Timestamp;
    use model::event::normalise;
    use proptest::prelude::*;

    use super::*;

    fn any_event() -> impl Strategy<Value = HealthEvent> {
        let text = || ".{0,20}";
        let texts = (text(), text(), text(), text(), text(), text());
        let numbers = any::<(u32, i32, i32, bool, bool)>();
        let lists = (
            prop::collection::vec(text(), 0..4),
            prop::collection::vec((text(), text()), 0..4),
            prop::collection::btree_map(text(), text(), 0..4),
        );
        let overrides = any::<[Option<(bool, bool)>; 2]>();
        let time = prop::option::of((-62_135_596_800_i64..253_402_300_800, 0..1_000_000_000));
        (texts, numbers, lists, overrides, time).prop_map(
            |(texts, numbers, (codes, entities, metadata), overrides, time)| {
                let [quarantine_overrides, drain_overrides] = overrides
                    .map(|pair| pair.map(|(force, skip)| BehaviourOverrides { force, skip }));
                HealthEvent {
                    version: numbers.0,
                    agent: texts.0,
                    component_class: texts.1,
                    check_name: texts.2,
                    is_fatal: numbers.3,
                    is_healthy: numbers.4,
                    message: texts.3,
                    recommended_action: numbers.1,
                    error_code: codes,
                    entities_impacted: entities
                        .into_iter()
                        .map(|(entity_type, entity_value)| Entity {
                            entity_type,
                            entity_value,
                        })
                        .collect(),
                    metadata,
                    generated_timestamp: time
                        .and_then(|(seconds, nanos)| Timestamp::new(seconds, nanos).ok())
                        .map(json::proto_timestamp),
                    node_name: texts.4,
                    quarantine_overrides,
                    drain_overrides,
                    processing_strategy: numbers.2,
                    id: String::new(),
                    custom_recommended_action: texts.5,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn a_row_holds_the_whole_event(mut event in any_event(), second in 0_i64..4_000_000_000) {
            let received_at = Timestamp::from_second(second).unwrap();
            normalise(&mut event, received_at);
            let row = EventRow::of(NewEvent { event: event.clone(), received_at });
            prop_assert_eq!(json::from_str(&row.body).unwrap(), event.clone());
            prop_assert_eq!(row.fingerprint.is_some(), lacks_own_time(&event));
        }
    }

    #[test]
    fn a_repetition_is_looked_up_and_not_searched_for() {
        let dir = tempfile::TempDir::new().unwrap();
        let connection = super::super::schema::open(&dir.path().join("events.db")).unwrap();
        let mut explain = connection
            .prepare(&format!("EXPLAIN QUERY PLAN {REPEATED}"))
            .unwrap();
        let plan = explain
            .query_map([0; 6], |row| row.get::<_, String>("detail"))
            .unwrap();
        let plan = plan.map(Result::unwrap).collect::<Vec<_>>().join("\n");
        assert!(!plan.contains("SCAN "), "{plan}");
        for index in ["PRIMARY KEY", "event_by_fingerprint", "event_by_stream"] {
            assert!(plan.contains(index), "{index}: {plan}");
        }
    }

    #[test]
    fn a_stream_is_told_by_all_its_parts_and_never_changes() {
        // Computed by hand: first 8 bytes, big-endian, of a SHA-256 over the three parts,
        // each behind its length as 8 bytes, little-endian.
        let known = -891_360_235_201_606_986;
        assert_eq!(stream("n1", "gpu-health-monitor", "GpuMemWatch"), known);
        assert_ne!(stream("n", "1a", "c"), stream("n1", "a", "c"));
        assert_ne!(stream("n1", "a", "c"), stream("n1", "a", "d"));
    }
}
