//! Event as rules and groups read it.

use std::sync::Arc;

use contract::{HealthEvent, keys};
use diagnosis::fold::Sightings;
use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;

use super::APPLICATION_CODES;
use crate::condition::{ConditionKind, Entry, EntryKey, OtherFault, Report};
use crate::group::{Group, GroupKey};
use crate::rule::Rule;
use crate::text::Text;

/// Most that the time of an event may be ahead of its acceptance; a later one counts at the time of
/// acceptance.
const MAX_AHEAD: SignedDuration = SignedDuration::from_mins(5);

/// Event with what all rules read of it.
pub(super) struct Facts<'a> {
    pub(super) event: &'a HealthEvent,
    /// Key of the event in all histories.
    pub(super) key: EntryKey,
    /// Report for a rule that counts nothing but reports.
    report: Report,
    /// First code.
    code: Text,
    node: Text,
}

/// Entries for groups with the same values: many rules have the same keys.
#[derive(Default)]
pub(super) struct Rows<'a>(pub(super) Vec<Row<'a>>);

/// Entries of rules with the same keys.
pub(super) struct Row<'a> {
    keys: &'a [GroupKey],
    pub(super) groups: Vec<Group>,
    /// Entry for each rule, by its number.
    pub(super) entries: Vec<(usize, Arc<Entry>)>,
}

// === impl Facts ===

impl<'a> Facts<'a> {
    pub(super) fn new(record: &'a EventRecord) -> Self {
        let event = &record.event;
        let seen = Sightings::of(event, record.created_at);
        let last = credible(seen.last, record);
        let by_application = |code: &String| APPLICATION_CODES.contains(&code.as_str());
        let may_be_job = event.error_code.iter().any(by_application);
        let job = event.metadata.get(keys::META_JOB);
        Self {
            event,
            key: EntryKey {
                at: last,
                id: record.id.as_str().into(),
            },
            report: Report {
                first: credible(seen.first, record).min(last),
                count: seen.count,
                value: Text::default(),
                job: job.filter(|_| may_be_job).map(|job| job.as_str().into()),
                steps: 1,
                node: None,
                only_counts: event.metadata.contains_key(keys::META_EARLIER_IN_BOOT),
                members: Vec::new(),
            },
            code: event
                .error_code
                .first()
                .map_or_else(Text::default, |code| code.as_str().into()),
            node: event.node_name.as_str().into(),
        }
    }

    /// Returns the event as a report for a rule.
    pub(super) fn report(&self, rule: &Rule, steps: u32) -> Report {
        let value = match &rule.condition.kind {
            ConditionKind::Burst(_) => self.code.clone(),
            _ if rule.distinct.is_empty() => Text::default(),
            _ => {
                let values = rule.distinct.iter().map(|key| {
                    let mut values = key.values(self.event).into_iter();
                    values.next().map(|value| value.text()).unwrap_or_default()
                });
                values.collect::<Vec<_>>().join("\n").as_str().into()
            }
        };
        Report {
            value,
            steps,
            members: rule.members(self.event),
            node: (!rule.is_of_one_node()).then(|| self.node.clone()),
            ..self.report.clone()
        }
    }

    /// Returns the event as another fault of a group, or its recovery.
    pub(super) fn other(&self) -> Entry {
        let event = self.event;
        Entry::Other(OtherFault {
            check: format!("{}/{}", event.agent, event.check_name)
                .as_str()
                .into(),
            codes: event
                .error_code
                .iter()
                .map(|code| code.as_str().into())
                .collect(),
            is_healthy: event.is_healthy,
        })
    }
}

// === impl Rows ===

impl<'a> Rows<'a> {
    /// Adds an entry of a rule.
    pub(super) fn add(
        &mut self,
        (number, rule): (usize, &'a Rule),
        event: &HealthEvent,
        entry: Arc<Entry>,
    ) {
        // The codes of a group depend on the rule.
        let is_own = rule.group_by.contains(&GroupKey::Code);
        let known = self.0.iter_mut().find(|row| row.keys == rule.group_by);
        match known.filter(|_| !is_own) {
            Some(row) => row.entries.push((number, entry)),
            None => self.0.push(Row {
                keys: &rule.group_by,
                groups: rule.groups(event),
                entries: vec![(number, entry)],
            }),
        }
    }
}

/// Returns the key of an event in all histories.
pub(super) fn key_of(record: &EventRecord) -> EntryKey {
    let seen = Sightings::of(&record.event, record.created_at);
    EntryKey {
        at: credible(seen.last, record),
        id: record.id.as_str().into(),
    }
}

/// Returns what two events about a conclusion of an unknown rule have in common.
pub(super) fn about_orphan(event: &HealthEvent) -> Vec<u8> {
    let about = HealthEvent {
        node_name: event.node_name.clone(),
        check_name: event.check_name.clone(),
        error_code: event.error_code.clone(),
        entities_impacted: event.entities_impacted.clone(),
        ..HealthEvent::default()
    };
    prost::Message::encode_to_vec(&about)
}

/// Returns a time of an event, or the time of its acceptance if the time is too far ahead of that.
fn credible(time: Timestamp, record: &EventRecord) -> Timestamp {
    let ahead = time.duration_since(record.created_at);
    if ahead > MAX_AHEAD {
        record.created_at
    } else {
        time
    }
}
