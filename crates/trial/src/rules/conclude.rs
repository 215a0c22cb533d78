//! Conclusions of rules about events, in the order of their acceptance. They are events again, as
//! those of monitors are.

use std::collections::{BTreeMap, BTreeSet};

use analysis::{Analyzer, GroupView, Rule, Saying};
use contract::keys;
use jiff::{SignedDuration, Timestamp};
use model::event::{EventRecord, event_id};
use model::node::NodeView;
use model::position::Position;
use serde::Serialize;

/// Most conclusions of one event.
const MAX_SAYINGS: usize = 10_000;
/// Time from which a conclusion changes, after the last time at which it does not.
const AFTER: SignedDuration = SignedDuration::from_millis(1);

/// Rules at work on events, and their conclusions so far.
#[derive(Debug)]
pub struct Conclusions {
    analyzer: Analyzer,
    /// Labels that rules group nodes by.
    keys: Vec<String>,
    /// Labels of the known nodes.
    labels: BTreeMap<String, BTreeMap<String, String>>,
    /// Nodes with events that came too late for the rules.
    late: BTreeSet<String>,
    concluded: Vec<Concluded>,
}

/// Conclusion of a rule. Serialized names are part of the output of `rules diff`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Concluded {
    /// Name of the rule.
    pub rule: String,
    /// Node of the conclusion's event.
    pub node: String,
    /// Group of the events, for people.
    pub group: String,
    /// Time of the event that met the condition.
    pub since: Timestamp,
    /// Time of the end; absent while the conclusion is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Timestamp>,
    #[serde(skip)]
    id: String,
}

// === impl Conclusions ===

impl Conclusions {
    /// Starts without events. The labels of `nodes` are added to their events, for rules that group
    /// nodes by a label.
    pub fn new(rules: Vec<Rule>, nodes: &[NodeView]) -> Self {
        let labels = nodes
            .iter()
            .map(|node| (node.name.clone(), node.labels.clone()));
        let keys = rules.iter().flat_map(Rule::labels).cloned().collect();
        let mut analyzer = Analyzer::new(rules);
        let all = nodes.iter().map(|node| (node.name.as_str(), &node.labels));
        analyzer.set_nodes(&all.collect::<Vec<_>>());
        Self {
            keys,
            labels: labels.collect(),
            analyzer,
            late: BTreeSet::new(),
            concluded: Vec::new(),
        }
    }

    /// Returns the number of nodes with events that came too late for the rules.
    pub fn late(&self) -> usize {
        self.late.len()
    }

    /// Returns the conclusions so far, in their order.
    pub fn concluded(&self) -> &[Concluded] {
        &self.concluded
    }

    /// Returns an event with the conclusions before it, by its time, and those that follow from it.
    pub fn take(&mut self, record: EventRecord) -> Vec<EventRecord> {
        let now = record.created_at;
        let mut all = self.until(now);
        self.record(&record);
        // The events are not kept for another look.
        self.late.extend(self.analyzer.late().iter().cloned());
        all.push(record);
        self.analyzer.time(now);
        all.extend(self.say(now));
        all
    }

    /// Returns the conclusions, and their ends, that follow from time alone, up to a time.
    pub fn until(&mut self, now: Timestamp) -> Vec<EventRecord> {
        let mut all = Vec::new();
        while let Some(due) = self.analyzer.next_time().filter(|due| *due < now) {
            let at = due.checked_add(AFTER).map_or(now, |at| at.min(now));
            self.analyzer.time(at);
            all.extend(self.say(at));
        }
        all
    }

    fn say(&mut self, now: Timestamp) -> Vec<EventRecord> {
        let sayings = self.analyzer.to_say(now, MAX_SAYINGS);
        let said = sayings.into_iter().map(|saying| {
            self.analyzer.said(&saying);
            self.note(&saying, now);
            event_of(saying, now)
        });
        said.collect()
    }

    /// Records stored events, which may have conclusions among them. Returns the groups of a rule as
    /// of a time.
    pub fn groups(mut self, rule: &str, records: &[EventRecord], now: Timestamp) -> Vec<GroupView> {
        for record in records {
            self.record(record);
        }
        for node in self.analyzer.late().clone() {
            let of_node = |one: &&EventRecord| node.is_empty() || one.event.node_name == node;
            let labelled: Vec<EventRecord> = (records.iter().filter(of_node))
                .map(|record| self.labelled(record))
                .collect();
            self.analyzer.rebuild(&node, &labelled);
        }
        self.analyzer.time(now);
        self.analyzer.groups_of_rule(rule, now)
    }

    fn record(&mut self, record: &EventRecord) {
        if self.keys.is_empty() || !self.labels.contains_key(&record.event.node_name) {
            self.analyzer.record(record);
            return;
        }
        let labelled = self.labelled(record);
        self.analyzer.record(&labelled);
    }

    /// Returns an event with the labels of its node that rules group by.
    fn labelled(&self, record: &EventRecord) -> EventRecord {
        let mut record = record.clone();
        if let Some(labels) = self.labels.get(&record.event.node_name) {
            for key in &self.keys {
                if let Some(value) = labels.get(key) {
                    let metadata = &mut record.event.metadata;
                    metadata.entry(key.clone()).or_insert_with(|| value.clone());
                }
            }
        }
        record
    }

    fn note(&mut self, saying: &Saying, now: Timestamp) {
        if let Some(finding) = &saying.finding {
            let group = finding.group.to_string();
            // A new conclusion takes the place of one that was open.
            let known = self.concluded.iter_mut();
            for known in known.filter(|it| it.rule == finding.rule && it.group == group) {
                known.ended.get_or_insert(now);
            }
            self.concluded.push(Concluded {
                rule: finding.rule.clone(),
                node: saying.event.node_name.clone(),
                group,
                since: finding.conclusion.since,
                ended: None,
                id: finding.id.clone(),
            });
            return;
        }
        let id = saying.event.metadata.get(keys::META_CONCLUSION);
        let mut open = self.concluded.iter_mut().rev();
        if let Some(known) = open.find(|known| Some(&known.id) == id && known.ended.is_none()) {
            known.ended = Some(now);
        }
    }
}

fn event_of(saying: Saying, now: Timestamp) -> EventRecord {
    EventRecord {
        seq: Position::START, // A replay assigns the position.
        id: event_id(&saying.event),
        created_at: now,
        event: saying.event,
    }
}
