//! State of an analyzer, in parts: one for each node, and one for the groups of several nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use contract::HealthEvent;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::facts::about_orphan;
use super::{Analyzer, GroupId, GroupState};
use crate::condition::{Conclusion, EntryKey};
use crate::context::Thresholds;
use crate::elsewhere::Elsewhere;
use crate::finding::Told;
use crate::group::{Group, GroupValue};
use crate::history::{History, KnownEntries};
use crate::member::GpusOfNode;
use crate::text::Text;

/// Form of the state. Another one is not read.
const VERSION: u32 = 3;
/// Name of the part of the groups of several nodes; no node has this name.
const SEVERAL_NODES: &str = "*";

/// Saved state of an analyzer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// State beside the parts.
    pub state: Vec<u8>,
    /// Parts by name. An empty one is to be deleted.
    pub parts: BTreeMap<String, Vec<u8>>,
}

#[derive(Serialize, Deserialize)]
struct SavedState {
    version: u32,
    /// Hash of the rules. The state does not fit other ones.
    rules: String,
    unknown_of_others: Option<EntryKey>,
    orphans: Vec<HealthEvent>,
    late: BTreeSet<String>,
    /// Thresholds by which the groups were evaluated.
    thresholds: Thresholds,
    elsewhere: Elsewhere,
}

#[derive(Default, Serialize, Deserialize)]
struct Part {
    unknown: Option<EntryKey>,
    groups: Vec<SavedGroup>,
    told: Vec<SavedTold>,
    #[serde(default, skip_serializing_if = "GpusOfNode::is_empty")]
    gpus: GpusOfNode,
}

#[derive(Serialize, Deserialize)]
struct SavedGroup {
    rule: usize,
    values: Vec<GroupValue>,
    history: History,
}

#[derive(Serialize, Deserialize)]
struct SavedTold {
    rule: usize,
    values: Vec<GroupValue>,
    told: Told,
}

// === impl Analyzer ===

impl Analyzer {
    /// Returns the state, with the parts that have changed since the last call.
    pub fn save(&mut self) -> Saved {
        let state = SavedState {
            version: VERSION,
            rules: self.fingerprint(),
            unknown_of_others: self.unknown_of_others.clone(),
            orphans: self.orphans.values().cloned().collect(),
            late: self.agenda.late.clone(),
            thresholds: self.context.thresholds.clone(),
            elsewhere: self.context.elsewhere.clone(),
        };
        let changed = std::mem::take(&mut self.agenda.changed);
        Saved {
            // The types have no form that JSON lacks.
            state: serde_json::to_vec(&state).unwrap_or_default(),
            parts: changed.iter().map(|node| self.part(node)).collect(),
        }
    }

    /// Saves these parts again, since they could not be written.
    pub fn not_saved(&mut self, parts: impl IntoIterator<Item = String>) {
        let names = parts.into_iter();
        let nodes = names.map(|name| {
            if name == SEVERAL_NODES {
                String::new()
            } else {
                name
            }
        });
        self.agenda.changed.extend(nodes);
    }

    /// Takes over a saved state. The error says why it cannot be used; the analyzer is without events
    /// then.
    pub fn restore(&mut self, saved: &Saved) -> Result<(), String> {
        let restored = self.try_restore(saved);
        if restored.is_err() {
            *self = Self::new(self.rules.to_vec());
        }
        restored
    }

    /// Returns the evidence of fatal conclusions that were said to be open and do not follow from
    /// the recorded events, by group.
    pub fn unconfirmed(&self) -> Vec<(GroupId, Vec<Text>)> {
        let is_open = |id: &GroupId| {
            let group = self.groups.get(id);
            group.is_some_and(|group| group.open.is_some())
        };
        let lasts = |id: &GroupId| {
            let rule = self.rules.get(id.1);
            rule.is_some_and(|rule| rule.condition.until_repaired)
        };
        let told = self.told.iter();
        let unconfirmed = told.filter(|(id, _)| lasts(id) && !is_open(id));
        unconfirmed
            .map(|(id, told)| (id.clone(), told.evidence.clone()))
            .collect()
    }

    /// Takes a conclusion over that was said to be open, and whose evidence is no longer stored.
    pub fn adopt(&mut self, id: &GroupId) {
        let (Some(told), Some(rule)) = (self.told.get(id), self.rules.get(id.1)) else {
            return;
        };
        let conclusion = Conclusion {
            since: told.since,
            evidence: told.evidence.clone(),
            node: told.node.clone(),
            member: told.member.clone(),
        };
        let key = EntryKey {
            at: told.since,
            id: Text::default(),
        };
        let since = told.since;
        let mut history = History::new(&rule.condition, None);
        history.adopt(&rule.condition, key, conclusion);
        self.forget(id);
        let state = GroupState {
            history,
            open: None,
            due: None,
        };
        self.groups.insert(id.clone(), state);
        self.settle(id, since);
    }

    fn try_restore(&mut self, saved: &Saved) -> Result<(), String> {
        let state: SavedState = read(&saved.state)?;
        if state.version != VERSION {
            return Err(format!("it has the form {}, not {VERSION}", state.version));
        }
        if state.rules != self.fingerprint() {
            return Err("it is of other rules".to_owned());
        }
        self.unknown_of_others = state.unknown_of_others;
        self.agenda.late = state.late;
        self.context.thresholds = state.thresholds;
        self.context.elsewhere = state.elsewhere;
        let mut restored = Vec::new();
        for orphan in state.orphans {
            self.orphans.insert(about_orphan(&orphan), orphan);
        }
        for (name, bytes) in &saved.parts {
            let node = if name == SEVERAL_NODES { "" } else { name };
            let part: Part = Text::shared(|| read(bytes))?;
            let mut known = KnownEntries::new();
            self.context.gpus.restore(node, part.gpus);
            self.unknown
                .extend(part.unknown.map(|key| (node.to_owned(), key)));
            for saved in part.told {
                let id = id(node, saved.values, saved.rule);
                self.agenda.unsaid.insert(id.clone());
                self.told.insert(id, saved.told);
            }
            for saved in part.groups {
                let (mut group, rule) = id(node, saved.values, saved.rule);
                if let Some(known) = self.groups.of(&group) {
                    group = known.group();
                }
                let id = (group, rule);
                let newest = saved.history.newest().map(|key| key.at);
                let state = GroupState {
                    history: saved.history.compact(&mut known),
                    open: None,
                    due: None,
                };
                self.groups.insert(id.clone(), state);
                restored.push((id, newest.unwrap_or(Timestamp::MIN)));
            }
        }
        // The GPUs of all nodes are known now.
        for (id, newest) in restored {
            self.settle(&id, newest);
        }
        self.agenda.changed.clear();
        Ok(())
    }

    /// Returns the name and the state of a node's part.
    fn part(&self, node: &str) -> (String, Vec<u8>) {
        let groups = self.groups.of_node(node).into_iter().filter_map(|id| {
            Some(SavedGroup {
                history: self.groups.get(&id)?.history.clone(),
                rule: id.1,
                values: id.0.values.clone(),
            })
        });
        let first = (Arc::new(Group::of_node(node)), 0);
        let told = self
            .told
            .range(first..)
            .take_while(|(id, _)| id.0.node == node);
        let part = Part {
            unknown: self.unknown.get(node).cloned(),
            groups: groups.collect(),
            told: told
                .map(|(id, told)| SavedTold {
                    rule: id.1,
                    values: id.0.values.clone(),
                    told: told.clone(),
                })
                .collect(),
            gpus: self.context.gpus.saved(node),
        };
        let is_empty = part.unknown.is_none()
            && part.groups.is_empty()
            && part.told.is_empty()
            && part.gpus.is_empty();
        let bytes = if is_empty {
            Vec::new()
        } else {
            serde_json::to_vec(&part).unwrap_or_default()
        };
        let name = if node.is_empty() { SEVERAL_NODES } else { node };
        (name.to_owned(), bytes)
    }

    /// Returns a hash of the rules.
    fn fingerprint(&self) -> String {
        let digest = Sha256::digest(format!("{:?}", self.rules));
        let bytes = digest.iter().take(12);
        bytes
            .map(|byte| format!("{byte:02x}"))
            .collect::<Vec<_>>()
            .concat()
    }
}

fn id(node: &str, values: Vec<GroupValue>, rule: usize) -> GroupId {
    let node = node.to_owned();
    (Arc::new(Group { node, values }), rule)
}

fn read<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, String> {
    serde_json::from_slice(bytes).map_err(|error| format!("it cannot be read: {error}"))
}
