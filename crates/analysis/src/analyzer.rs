//! All rules and groups, and the conclusions that are open.
//!
//! What was said about a group, in an event of [`AGENT`], follows from the events too. The
//! analyzer compares it with the conclusion that is open: [`Analyzer::to_say`] returns the events
//! that make both equal, again and again until they are part of the feed or
//! [`Analyzer::said`] reports that they are stored.

mod checkpoint;
mod explain;
mod groups;

use std::collections::{BTreeMap, BTreeSet};

use contract::{HealthEvent, ProcessingStrategy, json, keys};
use diagnosis::fold::Sightings;
use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;
use model::reporter::Authority;

use crate::condition::{ConditionKind, Entry, EntryKey, OtherFault, Report};
use crate::finding::{Finding, Told, said_in};
use crate::group::{Group, GroupKey};
use crate::history::{History, Recorded};
use crate::index::Index;
use crate::rule::{EventView, Rule};

use groups::Groups;

pub use checkpoint::Saved;
pub use explain::GroupView;

pub use contract::keys::ANALYZER_AGENT as AGENT;

/// Most groups of all rules together. Events of further groups are counted as
/// [`Analyzer::refused`], and lead to no conclusion.
pub const MAX_GROUPS: usize = 200_000;
/// Most nodes whose latest healthy event is known. Beyond it the oldest is forgotten, and events
/// before that one are too late for new groups of all nodes.
const MAX_NODES: usize = 20_000;
/// Most that the time of an event may be ahead of its acceptance; a later one counts at the time of
/// acceptance.
const MAX_AHEAD: SignedDuration = SignedDuration::from_mins(5);
/// Error codes that an application can cause itself: a crash of one job is no sign of a bad GPU,
/// however often it is repeated (NVIDIA's catalogue; `examples/policies` has the same).
pub const APPLICATION_CODES: [&str; 8] = ["13", "31", "43", "45", "66", "68", "69", "94"];

/// Key of a group of a rule: the group, and the number of the rule.
type GroupId = (Group, usize);

/// All rules with their groups.
#[derive(Debug, Default)]
pub struct Analyzer {
    rules: Vec<Rule>,
    index: Index,
    groups: Groups,
    /// Times at which groups may change without a further event: never later than they do.
    due: BTreeSet<(Timestamp, GroupId)>,
    /// Last event of a node that new groups of the node do not know.
    unknown: BTreeMap<String, EntryKey>,
    /// Last event that new groups of nodes that are not listed do not know.
    unknown_of_others: Option<EntryKey>,
    /// Conclusions that an event of ours says are open.
    told: BTreeMap<GroupId, Told>,
    /// Recoveries of conclusions whose rules are not there any longer.
    orphans: BTreeMap<Vec<u8>, HealthEvent>,
    /// Groups whose conclusion may differ from what was said.
    unsaid: BTreeSet<GroupId>,
    /// Nodes with events that came too late for their groups.
    late: BTreeSet<String>,
    /// Nodes whose groups have changed since they were saved.
    changed: BTreeSet<String>,
    refused: u64,
    errors: Vec<String>,
}

/// History of a group, and its conclusion.
#[derive(Debug)]
struct GroupState {
    history: History,
    open: Option<Finding>,
    due: Option<Timestamp>,
}

/// Event that is to be stored, so that what is said agrees with what is concluded.
#[derive(Clone, Debug, PartialEq)]
pub struct Saying {
    /// Event of a conclusion, or its recovery.
    pub event: HealthEvent,
    /// Conclusion that the event reports; `None` for a recovery.
    pub finding: Option<Finding>,
    about: About,
}

/// Conclusion that a saying is about.
#[derive(Clone, Debug, PartialEq, Eq)]
enum About {
    Group(GroupId),
    Orphan(Vec<u8>),
}

// === impl Analyzer ===

impl Analyzer {
    /// Creates an analyzer without events.
    pub fn new(rules: Vec<Rule>) -> Self {
        Self {
            index: Index::new(&rules),
            rules,
            ..Self::default()
        }
    }

    /// Returns the rules.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Returns the number of events that led to nothing because there are too many groups.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Returns the number of groups.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Returns the errors of expressions since the last call.
    pub fn take_errors(&mut self) -> Vec<String> {
        std::mem::take(&mut self.errors)
    }

    /// Returns the open conclusions.
    pub fn open(&self) -> impl Iterator<Item = &Finding> {
        self.groups.states().filter_map(|state| state.open.as_ref())
    }

    /// Records an event. Conclusions of this program, and events that are only stored, are no
    /// input.
    pub fn record(&mut self, record: &EventRecord) {
        let event = &record.event;
        if event.agent == AGENT {
            self.record_own(record);
            return;
        }
        if event.processing_strategy == ProcessingStrategy::StoreOnly as i32 {
            return;
        }
        let key = key_of(record);
        if event.is_healthy {
            self.record_healthy(record, &key);
        } else {
            self.record_fault(record, &key);
        }
    }

    /// Returns the names of the nodes with an event that came later than entries are kept: their
    /// groups have to be built from all events ([`Self::rebuild`]). An empty name stands for the
    /// groups of several nodes.
    pub fn late(&self) -> &BTreeSet<String> {
        &self.late
    }

    /// Builds the groups of a node, or of several nodes if `node` is empty, from all their events.
    pub fn rebuild<'a>(&mut self, node: &str, events: impl IntoIterator<Item = &'a EventRecord>) {
        let ids: Vec<GroupId> = self.of_node(node).collect();
        for id in &ids {
            self.forget(id);
        }
        let mut sorted: Vec<(EntryKey, &EventRecord)> =
            events.into_iter().map(|one| (key_of(one), one)).collect();
        sorted.sort_by(|(a, _), (b, _)| a.cmp(b));
        // The other groups know these events.
        let others = std::mem::take(&mut self.groups);
        let due = std::mem::take(&mut self.due);
        let unknown = std::mem::take(&mut self.unknown);
        let of_others = self.unknown_of_others.take();
        let late = std::mem::take(&mut self.late);
        for (_, record) in sorted {
            self.record(record);
        }
        let rebuilt = std::mem::replace(&mut self.groups, others).take_node(node);
        self.due.retain(|(_, id)| id.0.node == node);
        for (id, state) in rebuilt {
            self.groups.insert(id, state);
        }
        self.due.extend(due);
        let known = self.unknown.remove(node);
        self.unknown = unknown;
        self.unknown.remove(node);
        self.unknown.extend(known.map(|key| (node.to_owned(), key)));
        self.unknown_of_others = of_others;
        self.late = late;
        self.late.remove(node);
        self.unsaid.extend(ids);
        self.changed.insert(node.to_owned());
    }

    /// Ends what ends with time, and forgets groups without anything that counts.
    pub fn time(&mut self, now: Timestamp) {
        while let Some((at, id)) = self.due.first().cloned()
            && at < now
        {
            self.due.pop_first();
            if let Some(state) = self.groups.get_mut(&id) {
                state.due = None;
            }
            self.settle(&id, now);
            let Some(state) = self.groups.get(&id) else {
                continue;
            };
            // Nothing counts any longer: what is open has a later time, or none.
            if state.due.is_some_and(|due| due < now) {
                let newest = state.history.newest().cloned();
                self.knows_not_before(&id.0.node, newest);
                self.forget(&id);
            }
        }
    }

    /// Returns the time of the next change without an event.
    pub fn next_time(&self) -> Option<Timestamp> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Returns the events that report what changed, at most `limit`.
    pub fn to_say(&mut self, now: Timestamp, limit: usize) -> Vec<Saying> {
        let mut sayings: Vec<Saying> = Vec::new();
        let mut agreed = Vec::new();
        for id in &self.unsaid {
            let open = self.groups.get(id).and_then(|state| state.open.as_ref());
            let told = self.told.get(id);
            let Some(rule) = self.rules.get(id.1) else {
                continue;
            };
            // The id follows from the first evidence, in a way that may change.
            let of_open = open.map(|open| open.conclusion.evidence.first());
            if of_open == told.map(|told| told.evidence.first()) {
                agreed.push(id.clone());
                continue;
            }
            if sayings.len() >= limit {
                break;
            }
            let event = match (open, told) {
                (Some(open), _) => open.event(rule),
                (None, Some(told)) => Finding::recovery(rule, &id.0, told, now),
                (None, None) => continue,
            };
            sayings.push(Saying {
                event,
                finding: open.cloned(),
                about: About::Group(id.clone()),
            });
        }
        for id in agreed {
            self.unsaid.remove(&id);
        }
        let orphans = self
            .orphans
            .iter()
            .take(limit.saturating_sub(sayings.len()));
        sayings.extend(orphans.map(|(key, recovery)| {
            let mut event = recovery.clone();
            event.generated_timestamp = Some(json::proto_timestamp(now));
            Saying {
                event,
                finding: None,
                about: About::Orphan(key.clone()),
            }
        }));
        sayings
    }

    /// Notes that an event is stored.
    pub fn said(&mut self, saying: &Saying) {
        match &saying.about {
            About::Orphan(key) => drop(self.orphans.remove(key)),
            About::Group(id) => {
                self.changed.insert(id.0.node.clone());
                match &saying.finding {
                    Some(finding) => drop(self.told.insert(id.clone(), Told::of(finding))),
                    None => drop(self.told.remove(id)),
                }
            }
        }
    }

    /// Records an event of this program: what was said, or the repair of a conclusion.
    fn record_own(&mut self, record: &EventRecord) {
        let event = &record.event;
        let said = said_in(event);
        let index = self
            .rules
            .iter()
            .position(|rule| rule.name == event.check_name);
        let Some(index) = index else {
            let key = about_orphan(event);
            if event.is_healthy {
                self.orphans.remove(&key);
            } else if said.is_some() {
                self.orphans.insert(key, Finding::recovery_of(event));
            }
            return;
        };
        if let (Some(said), false) = (&said, event.is_healthy) {
            for id in self.groups_of(index, event) {
                self.changed.insert(id.0.node.clone());
                self.unsaid.insert(id.clone());
                self.told.insert(id, said.clone());
            }
        }
        if !event.is_healthy {
            return;
        }
        let closed: Vec<GroupId> = (self.told.keys())
            .filter(|id| id.1 == index && self.covers(id, event))
            .cloned()
            .collect();
        for id in closed {
            self.told.remove(&id);
            self.changed.insert(id.0.node.clone());
            self.unsaid.insert(id);
        }
        // Others may close a conclusion: a person, or gpuwarden for a machine that is gone.
        if said.is_none() && Authority::of(event) == Authority::Trusted {
            let key = key_of(record);
            let ids = self.groups.of_rule(index).map(|(group, _)| (group, index));
            let ids: Vec<GroupId> = ids.filter(|id| self.covers(id, event)).collect();
            for id in ids {
                self.add(&id, &key, Entry::Repair);
            }
            self.knows_not_before(&event.node_name, Some(key));
        }
    }

    fn record_healthy(&mut self, record: &EventRecord, key: &EntryKey) {
        let event = &record.event;
        let view = EventView::new(event);
        let mut errors = Vec::new();
        let mut steps: BTreeMap<usize, u32> = BTreeMap::new();
        let mut begun = Vec::new();
        for number in self.index.healthy() {
            let rule = self.rules.get(*number);
            let bits = rule.map_or(0, |rule| rule.steps_of(&view, &mut errors));
            if bits != 0 {
                steps.insert(*number, bits);
                // The event names no device, so it can begin a group of the node only.
                let of_node = rule.is_some_and(|rule| rule.group_by.is_empty());
                begun.extend(of_node.then_some(*number));
            }
        }
        for number in begun {
            self.create(&(Group::of_node(&event.node_name), number));
        }
        let mut entries: Vec<(GroupId, Entry)> = Vec::new();
        for id in self.of_node(&event.node_name).chain(self.of_node("")) {
            let Some(rule) = self.rules.get(id.1).filter(|_| self.covers(&id, event)) else {
                continue;
            };
            let entry = if rule.is_repaired_by(event) && Authority::of(event) == Authority::Trusted
            {
                Entry::Repair
            } else if let Some(bits) = steps.get(&id.1) {
                Entry::Report(report(rule, record, *bits))
            } else if rule.needs_others() {
                Entry::Other(other(event))
            } else {
                continue;
            };
            entries.push((id, entry));
        }
        for (id, entry) in entries {
            self.add(&id, key, entry);
        }
        self.errors.append(&mut errors);
        self.knows_not_before(&event.node_name, Some(key.clone()));
    }

    fn record_fault(&mut self, record: &EventRecord, key: &EntryKey) {
        let event = &record.event;
        let view = EventView::new(event);
        let mut errors = Vec::new();
        let mut entries: Vec<(GroupId, Entry)> = Vec::new();
        let candidates = self.index.candidates(event);
        let mut known = KnownGroups::default();
        let mut counted: BTreeSet<usize> = BTreeSet::new();
        for number in candidates {
            let Some(rule) = self.rules.get(number) else {
                continue;
            };
            let bits = rule.steps_of(&view, &mut errors);
            if bits == 0 {
                continue;
            }
            counted.insert(number);
            let report = report(rule, record, bits);
            let groups = known.of(rule, event).into_iter();
            entries.extend(groups.map(|group| ((group, number), Entry::Report(report.clone()))));
        }
        for number in self.index.solo() {
            let rule = self
                .rules
                .get(*number)
                .filter(|_| !counted.contains(number));
            let groups = rule.map(|rule| known.of(rule, event)).unwrap_or_default();
            let entry = || Entry::Other(other(event));
            entries.extend(groups.into_iter().map(|group| ((group, *number), entry())));
        }
        for (id, entry) in entries {
            if self.create(&id) {
                self.add(&id, key, entry);
            }
        }
        self.errors.append(&mut errors);
    }

    /// Creates a group that is missing. Returns false if there are too many.
    fn create(&mut self, id: &GroupId) -> bool {
        if self.groups.get(id).is_some() {
            return true;
        }
        let Some(rule) = self.rules.get(id.1) else {
            return false;
        };
        if self.groups.len() >= MAX_GROUPS {
            self.refused += 1;
            return false;
        }
        // A new group lacks the repairs so far, so earlier events are too late for it.
        let unknown = self
            .unknown
            .get(&id.0.node)
            .max(self.unknown_of_others.as_ref());
        let state = GroupState {
            history: History::new(&rule.condition, unknown.cloned()),
            open: None,
            due: None,
        };
        self.groups.insert(id.clone(), state);
        true
    }

    /// Adds an entry to a group.
    fn add(&mut self, id: &GroupId, key: &EntryKey, entry: Entry) {
        let (Some(state), Some(rule)) = (self.groups.get_mut(id), self.rules.get(id.1)) else {
            return;
        };
        match state.history.record(&rule.condition, key.clone(), entry) {
            Recorded::Known => return,
            Recorded::TooOld => {
                self.late.insert(id.0.node.clone());
                return;
            }
            Recorded::Done => {}
        }
        let now = state.history.newest().map_or(Timestamp::MIN, |key| key.at);
        if !self.changed.contains(&id.0.node) {
            self.changed.insert(id.0.node.clone());
        }
        self.settle(id, now);
    }

    /// Determines the conclusion of a group as of a time.
    fn settle(&mut self, id: &GroupId, now: Timestamp) {
        let (Some(state), Some(rule)) = (self.groups.get_mut(id), self.rules.get(id.1)) else {
            return;
        };
        let conclusion = state.history.conclusion(&rule.condition, now);
        let known = state.open.as_ref().map(|open| &open.conclusion);
        if known != conclusion.as_deref() {
            let conclusion = conclusion.map(std::borrow::Cow::into_owned);
            state.open = conclusion.map(|it| Finding::new(rule, &id.0, it));
            self.unsaid.insert(id.clone());
            self.changed.insert(id.0.node.clone());
        }
        let newest = state.history.newest().map(|key| key.at);
        let forgotten = newest.and_then(|at| at.checked_add(rule.condition.window).ok());
        let due = state.history.changes_after(&rule.condition, now);
        let due = due.or(forgotten.filter(|_| state.open.is_none()));
        // Most reports only move the time back, which is seen when it has come.
        if let Some(due) = due
            && state.due.is_none_or(|known| due < known)
        {
            if let Some(known) = state.due.replace(due) {
                self.due.remove(&(known, id.clone()));
            }
            self.due.insert((due, id.clone()));
        }
    }

    /// Forgets a group.
    fn forget(&mut self, id: &GroupId) {
        if let Some(state) = self.groups.remove(id) {
            self.changed.insert(id.0.node.clone());
            if let Some(at) = state.due {
                self.due.remove(&(at, id.clone()));
            }
        }
    }

    /// Notes that new groups of a node do not know the events up to this one.
    fn knows_not_before(&mut self, node: &str, key: Option<EntryKey>) {
        let Some(key) = key else {
            return;
        };
        self.changed.insert(node.to_owned());
        match self.unknown.get_mut(node) {
            Some(known) if *known >= key => {}
            Some(known) => *known = key,
            None => drop(self.unknown.insert(node.to_owned(), key)),
        }
        if self.unknown.len() > MAX_NODES
            && let Some((oldest, key)) = self.unknown.iter().min_by_key(|(_, key)| *key)
        {
            let (oldest, key) = (oldest.clone(), key.clone());
            self.unknown.remove(&oldest);
            self.unknown_of_others = self.unknown_of_others.take().max(Some(key));
        }
    }

    fn of_node<'a>(&'a self, node: &'a str) -> impl Iterator<Item = GroupId> + 'a {
        self.groups.of_node(node)
    }

    /// Returns the groups of a rule that an event of this program names.
    fn groups_of(&self, index: usize, event: &HealthEvent) -> Vec<GroupId> {
        let groups = self.rules.get(index).map(|rule| rule.groups(event));
        let groups = groups.unwrap_or_default().into_iter();
        groups.map(|group| (group, index)).collect()
    }

    fn covers(&self, id: &GroupId, event: &HealthEvent) -> bool {
        let rule = self.rules.get(id.1);
        rule.is_some_and(|rule| rule.covers(&id.0, event))
    }
}

/// Groups of one event, by the keys of the rules: many rules have the same.
#[derive(Default)]
struct KnownGroups<'a>(Vec<(&'a [GroupKey], Vec<Group>)>);

// === impl KnownGroups ===

impl<'a> KnownGroups<'a> {
    /// Returns the groups that an event counts for in a rule.
    fn of(&mut self, rule: &'a Rule, event: &HealthEvent) -> Vec<Group> {
        // The codes of a group depend on the rule.
        if rule.group_by.contains(&GroupKey::Code) {
            return rule.groups(event);
        }
        let known = self.0.iter().find(|(keys, _)| *keys == rule.group_by);
        if let Some((_, groups)) = known {
            return groups.clone();
        }
        let groups = rule.groups(event);
        self.0.push((&rule.group_by, groups.clone()));
        groups
    }
}

/// Returns what two events about a conclusion of an unknown rule have in common.
fn about_orphan(event: &HealthEvent) -> Vec<u8> {
    let about = HealthEvent {
        node_name: event.node_name.clone(),
        check_name: event.check_name.clone(),
        error_code: event.error_code.clone(),
        entities_impacted: event.entities_impacted.clone(),
        ..HealthEvent::default()
    };
    prost::Message::encode_to_vec(&about)
}

/// Returns the key of an event in all histories.
fn key_of(record: &EventRecord) -> EntryKey {
    EntryKey {
        at: time(record),
        id: record.id.clone(),
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

/// Returns what an event reports for a rule.
fn report(rule: &Rule, record: &EventRecord, steps: u32) -> Report {
    let event = &record.event;
    let seen = Sightings::of(event, record.created_at);
    let values = rule.distinct.iter().map(|key| {
        let mut values = key.values(event).into_iter();
        values.next().map(|value| value.text()).unwrap_or_default()
    });
    let value = match &rule.condition.kind {
        ConditionKind::Burst(_) => event.error_code.first().cloned().unwrap_or_default(),
        _ => values.collect::<Vec<_>>().join("\n"),
    };
    let by_application = |code: &String| APPLICATION_CODES.contains(&code.as_str());
    let may_be_job = event.error_code.iter().any(by_application);
    Report {
        first: credible(seen.first, record).min(time(record)),
        count: seen.count,
        value,
        job: event
            .metadata
            .get(keys::META_JOB)
            .filter(|_| may_be_job)
            .cloned(),
        steps,
        node: (!rule.is_of_one_node()).then(|| event.node_name.clone()),
        only_counts: event.metadata.contains_key(keys::META_EARLIER_IN_BOOT),
    }
}

/// Returns an event as another fault of a group, or its recovery.
fn other(event: &HealthEvent) -> OtherFault {
    OtherFault {
        check: format!("{}/{}", event.agent, event.check_name),
        codes: event.error_code.clone(),
        is_healthy: event.is_healthy,
    }
}
