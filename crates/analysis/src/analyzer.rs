//! All rules and groups, and the conclusions that are open.

use std::collections::{BTreeMap, BTreeSet};

use contract::{Entity, HealthEvent, ProcessingStrategy, json};
use diagnosis::fold::Sightings;
use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;
use sha2::{Digest as _, Sha256};

use crate::condition::{Conclusion, ConditionKind, Entry, EntryKey, Report};
use crate::group::{Group, GroupValue};
use crate::history::{History, Recorded};
use crate::rule::Rule;

/// Name of the monitor whose events the conclusions are.
pub const AGENT: &str = "health-events-analyzer";
/// Metadata of a conclusion: ids of the events that it rests on, separated by commas, oldest first.
pub const META_EVIDENCE: &str = "gpuwarden.dev/evidence";
/// Most groups of all rules together. Events of further groups are counted as
/// [`Analyzer::refused`], and lead to no conclusion.
pub const MAX_GROUPS: usize = 200_000;
/// Most that the time of an event may be ahead of its acceptance; a later one counts at the time of
/// acceptance.
const MAX_AHEAD: SignedDuration = SignedDuration::from_mins(5);

/// All rules with their groups.
#[derive(Debug, Default)]
pub struct Analyzer {
    rules: Vec<Rule>,
    /// Groups by node first, so that those of a node are beside each other.
    groups: BTreeMap<(Group, usize), State>,
    /// Times at which conclusions end without a further event.
    ends: BTreeSet<(Timestamp, (Group, usize))>,
    /// Time of the latest healthy event of each node.
    repaired: BTreeMap<String, Timestamp>,
    refused: u64,
}

/// History of a group, and what has been said about it.
#[derive(Debug, Default)]
struct State {
    history: History,
    open: Option<Finding>,
    ends_at: Option<Timestamp>,
}

/// Conclusion of a rule about a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Hash of rule, group and first evidence.
    pub id: String,
    /// Name of the rule.
    pub rule: String,
    /// Group of the events.
    pub group: Group,
    /// Time of the event that met the condition, and the events it rests on.
    pub conclusion: Conclusion,
}

/// Change of the open conclusions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A conclusion is new.
    Opened(Finding),
    /// A conclusion holds no longer.
    Ended(Finding),
    /// The history of this group of this rule has to be built from all its events
    /// ([`Analyzer::rebuild`]): one of them came later than entries are kept.
    TooLate(Group, String),
}

// === impl Analyzer ===

impl Analyzer {
    /// Creates an analyzer without events.
    pub fn new(rules: Vec<Rule>) -> Self {
        Self {
            rules,
            ..Self::default()
        }
    }

    /// Returns the rule of a conclusion.
    pub fn rule_of(&self, finding: &Finding) -> Option<&Rule> {
        self.rules.iter().find(|rule| rule.name == finding.rule)
    }

    /// Returns the number of events that led to nothing because there are too many groups.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Returns the open conclusions.
    pub fn open(&self) -> impl Iterator<Item = &Finding> {
        self.groups.values().filter_map(|state| state.open.as_ref())
    }

    /// Records an event. Conclusions of this program, and events that are only stored, are no
    /// input.
    pub fn record(&mut self, record: &EventRecord) -> Vec<Change> {
        let event = &record.event;
        let stored_only = event.processing_strategy == ProcessingStrategy::StoreOnly as i32;
        if event.agent == AGENT || stored_only {
            return Vec::new();
        }
        let mut changes = Vec::new();
        for (rule, group) in self.concerned(event) {
            self.add(rule, group, record, &mut changes);
        }
        if event.is_healthy {
            let at = time(record);
            let latest = self.repaired.entry(event.node_name.clone()).or_insert(at);
            *latest = at.max(*latest);
        }
        changes
    }

    /// Builds the history of a group from all its events, in any order.
    pub fn rebuild<'a>(
        &mut self,
        group: &Group,
        rule: &str,
        events: impl IntoIterator<Item = &'a EventRecord>,
    ) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut rules = self.rules.iter().enumerate();
        let Some((index, rule)) = rules.find(|(_, one)| one.name == rule) else {
            return changes;
        };
        let entries = events.into_iter().filter(|record| {
            let event = &record.event;
            rule.is_of(group, event)
        });
        let entries = entries.map(|record| entry(rule, record));
        let history = History::of(&rule.condition, entries);
        let key = (group.clone(), index);
        let newest = history.newest().unwrap_or(Timestamp::MIN);
        self.groups.entry(key.clone()).or_default().history = history;
        self.settle(&key, newest, &mut changes);
        changes
    }

    /// Ends the conclusions whose window has passed.
    pub fn time(&mut self, now: Timestamp) -> Vec<Change> {
        let mut changes = Vec::new();
        while let Some((at, key)) = self.ends.first().cloned()
            && at < now
        {
            self.settle(&key, now, &mut changes);
        }
        changes
    }

    /// Returns the groups that an event concerns: those that it counts for, or, if it is healthy,
    /// those that it heals.
    fn concerned(&self, event: &HealthEvent) -> Vec<(usize, Group)> {
        let mut concerned = Vec::new();
        for (index, rule) in self.rules.iter().enumerate() {
            if event.is_healthy {
                continue;
            }
            // An expression that cannot be evaluated admits nothing, as in a policy.
            if rule.matches.counts(event).unwrap_or(false) {
                let groups = rule.groups(event).into_iter();
                concerned.extend(groups.map(|group| (index, group)));
            }
        }
        if event.is_healthy {
            let first = Group {
                node: event.node_name.clone(),
                values: Vec::new(),
            };
            let of_node = self
                .groups
                .range((first, 0)..)
                .take_while(|((group, _), _)| group.node == event.node_name);
            let healed = of_node.filter(|((group, index), _)| {
                self.rules
                    .get(*index)
                    .is_some_and(|rule| rule.is_of(group, event))
            });
            concerned.extend(healed.map(|((group, index), _)| (*index, group.clone())));
        }
        concerned
    }

    fn add(&mut self, index: usize, group: Group, record: &EventRecord, changes: &mut Vec<Change>) {
        let Some(rule) = self.rules.get(index) else {
            return;
        };
        let (key, entry) = entry(rule, record);
        let too_late = Change::TooLate(group.clone(), rule.name.clone());
        let id = (group, index);
        if !self.groups.contains_key(&id) {
            if self.groups.len() >= MAX_GROUPS {
                self.refused += 1;
                return;
            }
            // A new history lacks the repairs so far, so earlier events are too late for it.
            let repaired = self.repaired.get(&record.event.node_name);
            let history = repaired.map_or_else(History::default, |at| History::after(*at));
            self.groups.entry(id.clone()).or_default().history = history;
        }
        let Some(state) = self.groups.get_mut(&id) else {
            return;
        };
        match state.history.record(&rule.condition, key, entry) {
            Recorded::Known => {}
            Recorded::TooOld => changes.push(too_late),
            Recorded::Done => {
                let now = state.history.newest().unwrap_or(Timestamp::MIN);
                self.settle(&id, now, changes);
            }
        }
    }

    /// Compares the conclusion of a group with what has been said about it.
    fn settle(&mut self, id: &(Group, usize), now: Timestamp, changes: &mut Vec<Change>) {
        let (Some(state), Some(rule)) = (self.groups.get_mut(id), self.rules.get(id.1)) else {
            return;
        };
        let conclusion = state.history.conclusion(&rule.condition, now).cloned();
        let found = conclusion.map(|conclusion| Finding::new(rule, &id.0, conclusion));
        let is_same = match (&state.open, &found) {
            (Some(open), Some(found)) => open.id == found.id,
            (None, None) => true,
            _ => false,
        };
        if !is_same {
            changes.extend(state.open.take().map(Change::Ended));
            state.open.clone_from(&found);
            changes.extend(found.map(Change::Opened));
        }
        if let Some(at) = state.ends_at.take() {
            self.ends.remove(&(at, id.clone()));
        }
        if state.open.is_some() {
            state.ends_at = state.history.ends_at(&rule.condition);
            self.ends.extend(state.ends_at.map(|at| (at, id.clone())));
        }
    }
}

// === impl Finding ===

impl Finding {
    /// Returns the event of the conclusion: unhealthy while it holds, healthy as of the time `ended`.
    pub fn event(&self, rule: &Rule, ended: Option<Timestamp>) -> HealthEvent {
        let mut event = HealthEvent {
            version: 1,
            agent: AGENT.to_owned(),
            component_class: rule.component_class.clone(),
            check_name: self.rule.clone(),
            is_healthy: ended.is_some(),
            node_name: self.group.node.clone(),
            generated_timestamp: Some(json::proto_timestamp(
                ended.unwrap_or(self.conclusion.since),
            )),
            ..HealthEvent::default()
        };
        for value in &self.group.values {
            match value {
                GroupValue::Code(code) => event.error_code.push(code.clone()),
                GroupValue::Entity(kind, value) => event.entities_impacted.push(Entity {
                    entity_type: kind.clone(),
                    entity_value: value.clone(),
                }),
            }
        }
        if ended.is_none() {
            event.is_fatal = rule.fatal;
            event.recommended_action = rule.action as i32;
            event.message.clone_from(&rule.message);
            let evidence = self.conclusion.evidence.join(",");
            event.metadata.insert(META_EVIDENCE.to_owned(), evidence);
        }
        event
    }

    fn new(rule: &Rule, group: &Group, conclusion: Conclusion) -> Self {
        let mut hash = Sha256::new();
        let first = conclusion.evidence.first().map_or("", String::as_str);
        let values = group.values.iter().map(GroupValue::text);
        for part in [rule.name.as_str(), &group.node, first]
            .into_iter()
            .chain(values)
        {
            hash.update(part.len().to_le_bytes());
            hash.update(part);
        }
        let digest = hash.finalize();
        let id = digest.iter().take(12).map(|byte| format!("{byte:02x}"));
        Self {
            id: id.collect(),
            rule: rule.name.clone(),
            group: group.clone(),
            conclusion,
        }
    }
}

/// Returns the time of an event: that of its last report, if that is credible.
fn time(record: &EventRecord) -> Timestamp {
    credible(Sightings::of(&record.event, record.created_at).last, record)
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

/// Returns the entry of an event in the histories of a rule.
fn entry(rule: &Rule, record: &EventRecord) -> (EntryKey, Entry) {
    let event = &record.event;
    let seen = Sightings::of(event, record.created_at);
    let key = EntryKey {
        at: credible(seen.last, record),
        id: record.id.clone(),
    };
    if event.is_healthy {
        return (key, Entry::Repair);
    }
    let value = match (&rule.distinct, &rule.condition.kind) {
        (Some(distinct), _) => {
            let mut values = distinct.values(event).into_iter();
            values.next().map(|value| value.text().to_owned())
        }
        (None, ConditionKind::Burst(_)) => event.error_code.first().cloned(),
        (None, _) => None,
    };
    let report = Report {
        first: credible(seen.first, record).min(key.at),
        count: seen.count,
        value: value.unwrap_or_default(),
    };
    (key, Entry::Report(report))
}
