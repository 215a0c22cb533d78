//! Folding of repeated events into one timeline entry: a fault that is reported every second
//! becomes one line, not a thousand.
//!
//! An event is a repeat if its content equals an earlier one's and it does not change the open
//! faults. Repeats are counted together until the next decision, since the journal entry after
//! a report may be its consequence.

use std::collections::HashMap;

use contract::HealthEvent;
use jiff::Timestamp;
use model::event::EventRecord;
use model::fault::{FaultChange, Ignored};
use model::journal::JournalEntry;
use model::position::Position;
use serde_json::json;

use super::{effect, title};
use crate::api::{TimelineEntry, TimelineKind};

/// Repeats among the events of a node.
pub(super) struct Folds<'a> {
    /// Times of the journal entries, sorted.
    decisions: Vec<Timestamp>,
    /// True if all events of the node are known.
    complete: bool,
    /// Distinct events, each with its repeats since the last decision.
    distinct: HashMap<Key<'a>, Option<Run<'a>>>,
    /// Runs that a decision or a change has ended.
    ended: Vec<Run<'a>>,
}

/// Repeats between two decisions.
struct Run<'a> {
    first: &'a EventRecord,
    last: &'a EventRecord,
    count: u64,
    /// Reason why they do not affect the open faults, if so.
    ignored: Option<String>,
    /// Number of earlier journal entries.
    decisions: usize,
}

/// Content of an event without its time and message.
#[derive(PartialEq, Eq, Hash)]
struct Key<'a> {
    agent: &'a str,
    check: &'a str,
    codes: &'a [String],
    entities: Vec<(&'a str, &'a str)>,
    healthy: bool,
    fatal: bool,
    action: (i32, &'a str),
    /// Reason why the event does not affect the open faults, if so.
    ignored: Option<Ignored>,
}

// === impl Folds ===

impl<'a> Folds<'a> {
    pub(super) fn new(journal: &[JournalEntry], complete: bool) -> Self {
        let mut decisions: Vec<Timestamp> = journal.iter().map(|entry| entry.at).collect();
        decisions.sort_unstable();
        Self {
            decisions,
            complete,
            distinct: HashMap::new(),
            ended: Vec::new(),
        }
    }

    /// Records an event. Returns true if it is a repeat and needs no entry of its own.
    pub(super) fn is_repeat(&mut self, record: &'a EventRecord, changes: &[FaultChange]) -> bool {
        let decisions = self.decisions.partition_point(|at| *at < record.created_at);
        let is_new = changes.iter().any(|change| {
            matches!(
                change,
                FaultChange::Opened(_) | FaultChange::Escalated(_) | FaultChange::Closed(_)
            )
        });
        let key = Key::of(&record.event, changes);
        match self.distinct.get_mut(&key) {
            Some(Some(run)) if !is_new && run.decisions == decisions => {
                run.last = record;
                run.count += 1;
                true
            }
            Some(slot) if !is_new => {
                let run = Run {
                    first: record,
                    last: record,
                    count: 1,
                    ignored: key
                        .ignored
                        .map(|one| effect(&FaultChange::Ignored(one), false, self.complete)),
                    decisions,
                };
                self.ended.extend(slot.replace(run));
                true
            }
            _ => {
                self.ended.extend(self.distinct.insert(key, None).flatten());
                false
            }
        }
    }

    /// Returns an entry for each run, with the feed position of its first event.
    pub(super) fn entries(self) -> impl Iterator<Item = (Position, TimelineEntry)> {
        let runs = self
            .ended
            .into_iter()
            .chain(self.distinct.into_values().flatten());
        runs.map(|run| (run.first.seq, run.entry()))
    }
}

// === impl Run ===

impl Run<'_> {
    fn entry(&self) -> TimelineEntry {
        let Self {
            first,
            last,
            count,
            ignored,
            ..
        } = self;
        let until = last.created_at;
        let title = title(&first.event);
        let text = if *count == 1 {
            format!("accepted as #{}: {title}, again", first.seq)
        } else {
            format!("... and {count} more until {until:.0}: {title}, again")
        };
        let text = match ignored {
            Some(why) => format!("{text}; {why}"),
            None => text,
        };
        TimelineEntry {
            at: first.created_at,
            kind: TimelineKind::Event,
            text,
            detail: json!({
                "repeats": count,
                "firstSeq": first.seq,
                "lastSeq": last.seq,
                "until": until,
            }),
            session: None,
        }
    }
}

// === impl Key ===

impl<'a> Key<'a> {
    fn of(event: &'a HealthEvent, changes: &[FaultChange]) -> Self {
        Self {
            agent: &event.agent,
            check: &event.check_name,
            codes: &event.error_code,
            entities: event
                .entities_impacted
                .iter()
                .map(|entity| (entity.entity_type.as_str(), entity.entity_value.as_str()))
                .collect(),
            healthy: event.is_healthy,
            fatal: event.is_fatal,
            action: (event.recommended_action, &event.custom_recommended_action),
            ignored: ignored(changes),
        }
    }
}

/// Returns why an event with these effects does not affect the open faults; `None` if it does.
fn ignored(changes: &[FaultChange]) -> Option<Ignored> {
    let mut why = None;
    for change in changes {
        let FaultChange::Ignored(one) = change else {
            return None;
        };
        why = why.or(Some(*one));
    }
    why
}
