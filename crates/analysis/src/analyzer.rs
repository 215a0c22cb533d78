//! All rules and groups, and the conclusions that are open.
//!
//! What was said about a group, in an event of [`AGENT`], follows from the events too. The
//! analyzer compares it with the conclusion that is open: [`Analyzer::to_say`] returns the events
//! that make both equal, again and again until they are part of the feed or
//! [`Analyzer::said`] reports that they are stored.

mod agenda;
mod checkpoint;
mod explain;
mod facts;
mod groups;
mod members;
mod sizes;

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use contract::{HealthEvent, ProcessingStrategy, json, keys};
use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;
use model::reporter::Authority;

use crate::condition::{ConditionKind, Entry, EntryKey};
use crate::context::Context;
use crate::finding::{Finding, Told, said_in};
use crate::group::{Group, GroupId};
use crate::history::History;
use crate::index::Index;
use crate::rule::{EventView, Rule};
use crate::text::Text;

use agenda::Agenda;
use facts::{Facts, Rows, about_orphan, key_of};
use groups::{Groups, OfRules};

pub use checkpoint::Saved;
pub use explain::GroupView;

pub use contract::keys::ANALYZER_AGENT as AGENT;

/// Most groups of all rules together. Events of further groups are counted as
/// [`Analyzer::refused`], and lead to no conclusion.
pub const MAX_GROUPS: usize = 200_000;
/// Most nodes whose latest healthy event is known. Beyond it the oldest is forgotten, and events
/// before that one are too late for new groups of all nodes.
const MAX_NODES: usize = 20_000;
/// Error codes that an application can cause itself: a crash of one job is no sign of a bad GPU,
/// however often it is repeated (NVIDIA's catalogue; `examples/policies` has the same).
pub const APPLICATION_CODES: [&str; 8] = ["13", "31", "43", "45", "66", "68", "69", "94"];

/// Smallest difference of two times.
const JUST_AFTER: SignedDuration = SignedDuration::from_nanos(1);

/// All rules with their groups.
#[derive(Debug, Default)]
pub struct Analyzer {
    rules: Arc<[Rule]>,
    index: Arc<Index>,
    groups: Groups,
    context: Context,
    agenda: Agenda,
    /// Last event of a node that new groups of the node do not know.
    unknown: BTreeMap<String, EntryKey>,
    /// Last event that new groups of nodes that are not listed do not know.
    unknown_of_others: Option<EntryKey>,
    /// Conclusions that an event of ours says are open.
    told: BTreeMap<GroupId, Told>,
    /// Recoveries of conclusions whose rules are not there any longer.
    orphans: BTreeMap<Vec<u8>, HealthEvent>,
    refused: u64,
    errors: Vec<String>,
}

/// History of a group, and its conclusion.
#[derive(Debug)]
struct GroupState {
    history: History,
    open: Option<Box<Finding>>,
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
            index: Arc::new(Index::new(&rules)),
            rules: rules.into(),
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
        let open = self.groups.all(|_, state| state.open.as_deref());
        open.into_iter().map(|(_, finding)| finding)
    }

    /// Records an event. Conclusions of this program, and events that are only stored, are no
    /// input.
    pub fn record(&mut self, record: &EventRecord) {
        let sent = &record.event;
        let missing = self.context.gpus.missing_name(sent, || key_of(record).at);
        let Some(missing) = missing else {
            self.record_named(record, sent);
            return;
        };
        let mut named = record.clone();
        named.event.entities_impacted.push(missing);
        self.record_named(&named, sent);
    }

    /// Records an event with all known names of its GPU; `sent` is the event without those added.
    fn record_named(&mut self, record: &EventRecord, sent: &HealthEvent) {
        let event = &record.event;
        if event.agent == AGENT {
            self.record_own(record, sent);
            return;
        }
        if event.check_name == keys::CHECK_GPU_INVENTORY {
            self.record_gpus(record);
        }
        if event.processing_strategy == ProcessingStrategy::StoreOnly as i32 {
            return;
        }
        let facts = Facts::new(record);
        if event.is_healthy {
            self.record_healthy(&facts);
        } else {
            self.record_fault(&facts);
        }
    }

    /// Returns the names of the nodes with an event that came later than entries are kept: their
    /// groups have to be built from all events ([`Self::rebuild`]). An empty name stands for the
    /// groups of several nodes.
    pub fn late(&self) -> &BTreeSet<String> {
        &self.agenda.late
    }

    /// Builds the groups of a node, or of several nodes if `node` is empty, from all their events.
    pub fn rebuild<'a>(&mut self, node: &str, events: impl IntoIterator<Item = &'a EventRecord>) {
        let ids = self.groups.of_node(node);
        for id in &ids {
            self.forget(id);
        }
        self.context.elsewhere.forget(node);
        let mut sorted: Vec<(EntryKey, &EventRecord)> =
            events.into_iter().map(|one| (key_of(one), one)).collect();
        sorted.sort_by(|(a, _), (b, _)| a.cmp(b));
        // The other groups know these events.
        let others = std::mem::take(&mut self.groups);
        let due = std::mem::take(&mut self.agenda.due);
        let unknown = std::mem::take(&mut self.unknown);
        let of_others = self.unknown_of_others.take();
        let late = std::mem::take(&mut self.agenda.late);
        for (_, record) in sorted {
            self.record(record);
        }
        let rebuilt = std::mem::replace(&mut self.groups, others).take_node(node);
        let agenda = &mut self.agenda;
        agenda.due.retain(|(_, id)| id.0.node == node);
        agenda.due.extend(due);
        agenda.late = late;
        agenda.late.remove(node);
        agenda.unsaid.extend(ids);
        agenda.note_changed(node);
        for (id, state) in rebuilt {
            self.groups.insert(id, state);
        }
        let known = self.unknown.remove(node);
        self.unknown = unknown;
        self.unknown.remove(node);
        self.unknown.extend(known.map(|key| (node.to_owned(), key)));
        self.unknown_of_others = of_others;
    }

    /// Ends what ends with time, and forgets groups without anything that counts.
    pub fn time(&mut self, now: Timestamp) {
        while let Some((at, _)) = self.agenda.due.first()
            && *at < now
            && let Some((_, id)) = self.agenda.due.pop_first()
        {
            let Some(state) = self.groups.get_mut(&id) else {
                continue;
            };
            state.due = None;
            self.settle(&id, now);
            let Some(state) = self.groups.get(&id) else {
                continue;
            };
            // Nothing counts any longer: what is open has a later time, or none. An event up to then
            // that comes late would need what is forgotten.
            if let Some(due) = state.due.filter(|due| *due < now) {
                let at = due.checked_add(JUST_AFTER).unwrap_or(Timestamp::MAX);
                let key = EntryKey {
                    at,
                    id: Text::default(),
                };
                self.knows_not_before(&id.0.node, Some(key));
                self.forget(&id);
            }
        }
    }

    /// Returns the time of the next change without an event.
    pub fn next_time(&self) -> Option<Timestamp> {
        self.agenda.due.first().map(|(at, _)| *at)
    }

    /// Returns the events that report what changed, at most `limit`.
    pub fn to_say(&mut self, now: Timestamp, limit: usize) -> Vec<Saying> {
        let mut sayings: Vec<Saying> = Vec::new();
        let mut agreed = Vec::new();
        for id in &self.agenda.unsaid {
            let state = self.groups.get(id);
            let open = state.and_then(|state| state.open.as_deref());
            let told = self.told.get(id);
            let Some(rule) = self.rules.get(id.1) else {
                continue;
            };
            // The end of a conclusion about another member, or on another node, comes before the one
            // that follows it.
            let open = open.filter(|open| told.is_none_or(|told| told.is_replaced_by(open)));
            let event = match (open, told) {
                (Some(open), Some(told)) if told.is(&open.conclusion) => None,
                (Some(open), _) => Some(open.event(rule)),
                (None, Some(told)) => Some(Finding::recovery(rule, &id.0, told, now)),
                (None, None) => None,
            };
            let Some(event) = event else {
                agreed.push(id.clone());
                continue;
            };
            if sayings.len() >= limit {
                break;
            }
            sayings.push(Saying {
                event,
                finding: open.cloned(),
                about: About::Group(id.clone()),
            });
        }
        for id in agreed {
            self.agenda.unsaid.remove(&id);
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
                self.agenda.note_changed(&id.0.node);
                match &saying.finding {
                    Some(finding) => drop(self.told.insert(id.clone(), Told::of(finding))),
                    None => drop(self.told.remove(id)),
                }
            }
        }
    }

    /// Records an event of this program: what was said, or the repair of a conclusion.
    fn record_own(&mut self, record: &EventRecord, sent: &HealthEvent) {
        let event = &record.event;
        let index = self
            .rules
            .iter()
            .position(|rule| rule.name == event.check_name);
        let said = said_in(event, index.and_then(|index| self.rules.get(index)));
        let Some(index) = index else {
            let key = about_orphan(sent);
            if event.is_healthy {
                self.orphans.remove(&key);
            } else if said.is_some() {
                self.orphans.insert(key, Finding::recovery_of(sent));
            }
            return;
        };
        if let (Some(said), false) = (&said, event.is_healthy) {
            // A conclusion was about the group that it names.
            for id in self.groups_of(index, sent) {
                self.agenda.note_changed(&id.0.node);
                self.agenda.unsaid.insert(id.clone());
                self.told.insert(id, said.clone());
            }
        }
        if !event.is_healthy {
            return;
        }
        let is_about = |id: &GroupId| self.covers(id, event) || self.covers(id, sent);
        let closed: Vec<GroupId> = (self.told.iter())
            .filter(|(id, told)| id.1 == index && is_about(id) && told.is_in(event))
            .map(|(id, _)| id.clone())
            .collect();
        for id in closed {
            self.told.remove(&id);
            self.agenda.note_changed(&id.0.node);
            self.agenda.unsaid.insert(id);
        }
        // Others may close a conclusion: a person, or gpuwarden for a machine that is gone.
        if said.is_none() && Authority::of(event) == Authority::Trusted {
            let key = key_of(record);
            let ids: Vec<GroupId> = (self.groups.of_rule(index).into_iter())
                .map(|(group, _)| (group.clone(), index))
                .filter(|id| self.covers(id, event))
                .collect();
            let entry = self.rules.get(index).map(|rule| rule.repair(event));
            let entry = Arc::new(entry.unwrap_or(Entry::Repair));
            for id in ids {
                self.add(&id.0, &key, &[(index, entry.clone())]);
            }
            let is_of_several = self
                .rules
                .get(index)
                .is_some_and(|rule| rule.is_for_groups_of_nodes(event));
            if is_of_several {
                self.knows_not_before("", Some(key.clone()));
            }
            self.knows_not_before(&event.node_name, Some(key));
        }
    }

    fn record_healthy(&mut self, facts: &Facts<'_>) {
        let event = facts.event;
        let index = Arc::clone(&self.index);
        let view = EventView::with_fields(event, index.fields());
        let rules = Arc::clone(&self.rules);
        let mut steps: BTreeMap<usize, u32> = BTreeMap::new();
        for number in index.healthy() {
            let rule = rules.get(*number);
            let bits = rule.map_or(0, |rule| rule.steps_of(&view, &mut self.errors));
            if bits != 0 {
                steps.insert(*number, bits);
            }
        }
        let of_event = Arc::new(Group::of_node(&event.node_name));
        for number in steps.keys() {
            // The event names no device, so it can begin a group of the node only.
            let rule = rules.get(*number);
            if rule.is_some_and(|rule| rule.group_by.is_empty()) {
                self.create((of_event.clone(), *number));
            }
        }
        let other = LazyCell::new(|| Arc::new(facts.other()));
        let of_node = self.groups.of_node(&event.node_name).into_iter();
        for id in of_node.chain(self.groups.of_node("")) {
            let Some(rule) = rules.get(id.1).filter(|rule| rule.covers(&id.0, event)) else {
                continue;
            };
            let entry = if rule.is_repaired_by(event) && Authority::of(event) == Authority::Trusted
            {
                Arc::new(rule.repair(event))
            } else if let Some(bits) = steps.get(&id.1) {
                Arc::new(Entry::Report(facts.report(rule, *bits)))
            } else if rule.needs_others() {
                other.clone()
            } else {
                continue;
            };
            self.add(&id.0, &facts.key, &[(id.1, entry)]);
        }
        let mut of_several = index
            .of_several_nodes()
            .iter()
            .filter_map(|number| rules.get(*number).map(|rule| (number, rule)));
        let is_trusted = Authority::of(event) == Authority::Trusted;
        if of_several.any(|(number, rule)| {
            let matters = steps.contains_key(number)
                || rule.needs_others()
                || (is_trusted && rule.is_repaired_by(event));
            matters && rule.is_for_groups_of_nodes(event)
        }) {
            self.knows_not_before("", Some(facts.key.clone()));
        }
        self.knows_not_before(&event.node_name, Some(facts.key.clone()));
    }

    fn record_fault(&mut self, facts: &Facts<'_>) {
        let event = facts.event;
        let index = Arc::clone(&self.index);
        let view = EventView::with_fields(event, index.fields());
        let rules = Arc::clone(&self.rules);
        let mut rows = Rows::default();
        let candidates = index.candidates(event);
        let mut counted: Vec<usize> = Vec::new();
        let mut exclusive = Vec::new();
        for number in candidates {
            let Some(rule) = rules.get(number) else {
                continue;
            };
            let bits = rule.steps_of(&view, &mut self.errors);
            if bits != 0 {
                counted.push(number);
                let report = facts.report(rule, bits);
                if let ConditionKind::Exclusive { .. } = rule.condition.kind {
                    if report.value.trim().is_empty() {
                        continue;
                    }
                    exclusive.push((number, report.value.clone(), rule.groups(event)));
                }
                rows.add((number, rule), event, Arc::new(Entry::Report(report)));
            }
        }
        let other = LazyCell::new(|| Arc::new(facts.other()));
        for number in index.solo() {
            let rule = rules.get(*number).filter(|_| !counted.contains(number));
            if let Some(rule) = rule {
                rows.add((*number, rule), event, other.clone());
            }
        }
        for row in rows.0 {
            for group in &row.groups {
                self.add(group, &facts.key, &row.entries);
            }
        }
        self.record_values(facts.key.at, exclusive);
    }

    /// Adds an entry of each rule to the rule's group. A group that is missing is created, if there are
    /// not too many.
    fn add(&mut self, group: &Group, key: &EntryKey, entries: &[(usize, Arc<Entry>)]) {
        if self.add_to_known(group, key, entries) {
            return;
        }
        let known = self.groups.of(group).map(OfRules::group);
        let shared = known.unwrap_or_else(|| Arc::new(group.clone()));
        for (rule, _) in entries {
            self.create((shared.clone(), *rule));
        }
        // What was added above is not added again.
        self.add_to_known(group, key, entries);
    }

    /// Adds entries to the groups that there are. Returns false if one is missing.
    fn add_to_known(
        &mut self,
        group: &Group,
        key: &EntryKey,
        entries: &[(usize, Arc<Entry>)],
    ) -> bool {
        let Some(of_rules) = self.groups.of_mut(group) else {
            return false;
        };
        let group = of_rules.group();
        let (mut has_all, mut has_changed) = (true, false);
        for (number, entry) in entries {
            let (Some(state), Some(rule)) = (of_rules.get_mut(*number), self.rules.get(*number))
            else {
                has_all = false;
                continue;
            };
            let id = (group.clone(), *number);
            has_changed |= self
                .agenda
                .add(&self.context, &id, state, rule, key, entry.clone());
        }
        if has_changed {
            self.agenda.note_changed(&group.node);
        }
        has_all
    }

    /// Creates a group that is missing, if there are not too many.
    fn create(&mut self, id: GroupId) {
        if self.groups.get(&id).is_some() {
            return;
        }
        let Some(rule) = self.rules.get(id.1) else {
            return;
        };
        if self.groups.len() >= MAX_GROUPS {
            self.refused += 1;
            return;
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
        self.groups.insert(id, state);
    }

    /// Determines the conclusion of a group as of a time.
    fn settle(&mut self, id: &GroupId, now: Timestamp) {
        if let (Some(state), Some(rule)) = (self.groups.get_mut(id), self.rules.get(id.1)) {
            self.agenda.settle(&self.context, id, state, rule, now);
        }
    }

    /// Forgets a group.
    fn forget(&mut self, id: &GroupId) {
        if let Some(state) = self.groups.remove(id) {
            self.agenda.note_changed(&id.0.node);
            if let Some(at) = state.due {
                self.agenda.due.remove(&(at, id.clone()));
            }
        }
    }

    /// Notes that new groups of a node do not know the events up to this one.
    fn knows_not_before(&mut self, node: &str, key: Option<EntryKey>) {
        let Some(key) = key else {
            return;
        };
        self.agenda.note_changed(node);
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

    /// Returns the groups of a rule that an event of this program names.
    fn groups_of(&self, index: usize, event: &HealthEvent) -> Vec<GroupId> {
        let groups = self.rules.get(index).map(|rule| rule.groups(event));
        let groups = groups.unwrap_or_default().into_iter();
        groups.map(|group| (Arc::new(group), index)).collect()
    }

    fn covers(&self, id: &GroupId, event: &HealthEvent) -> bool {
        let rule = self.rules.get(id.1);
        rule.is_some_and(|rule| rule.covers(&id.0, event))
    }
}
