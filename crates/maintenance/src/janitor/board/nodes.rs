//! Watches of nodes, and changes that deleted resources have left on them.

use std::collections::BTreeSet;

use super::io::Effect;
use super::{Board, NodeEntry};
use crate::janitor::label::{self, LabelRequest};
use crate::janitor::signal::ObservedNode;
use crate::{Maintenance, gpu_reset, handover};

// === impl NodeEntry ===

impl NodeEntry {
    /// Returns whether a resource may have left changes on the node. A request by a label is on
    /// it until that is taken back, and its resource may only have ended.
    pub(super) fn may_have_leftovers(&self) -> bool {
        let request = self.view.as_deref().and_then(LabelRequest::read);
        self.vanished || request.is_some()
    }
}

// === impl Board ===

impl Board {
    /// Starts or stops the watches of a node.
    pub(super) fn update_watches(&mut self, node: &str, effects: &mut Vec<Effect>) {
        let Some(node_entry) = self.nodes.get(node) else {
            return;
        };
        let entries = node_entry
            .keys
            .iter()
            .filter_map(|key| self.entries.get(key));
        let open = entries.filter(|entry| self.is_open(&entry.resource));
        let open: BTreeSet<Maintenance> = open.map(|entry| entry.resource.kind).collect();
        let wanted = !open.is_empty() || node_entry.may_have_leftovers();
        let pods = open.contains(&Maintenance::Reset);
        let Some(node_entry) = self.nodes.get_mut(node) else {
            return;
        };
        if wanted && !node_entry.followed {
            node_entry.followed = true;
            effects.push(Effect::WatchNode(node.to_owned()));
        }
        if pods && !node_entry.follows_pods {
            node_entry.follows_pods = true;
            effects.push(Effect::WatchPods(node.to_owned()));
        }
        if wanted {
            return;
        }
        let keys = std::mem::take(&mut node_entry.keys);
        if node_entry.followed {
            effects.push(Effect::StopWatching(node.to_owned()));
        }
        if keys.is_empty() {
            self.nodes.remove(node);
        } else {
            *node_entry = NodeEntry {
                keys,
                ..NodeEntry::default()
            };
        }
    }

    /// Undoes the changes of disappeared resources on a node.
    pub(super) fn undo_leftovers(&mut self, node: &str, effects: &mut Vec<Effect>) {
        let Some(node_entry) = self.nodes.get(node) else {
            return;
        };
        let may_undo = node_entry.may_have_leftovers() && !node_entry.busy;
        if !may_undo || node_entry.observed == ObservedNode::Unknown {
            return;
        }
        let keys = node_entry.keys.iter();
        let resources = keys.filter_map(|key| self.entries.get(key));
        let resources: Vec<_> = resources.map(|entry| &entry.resource).collect();
        let exists = |uid: &str| resources.iter().any(|one| one.uid == uid);
        let is_open = |operation: &str| {
            let mut open = resources.iter().filter(|one| self.is_open(one));
            open.any(|one| one.operation() == operation)
        };
        let view = node_entry.view.clone();
        let change = view.as_ref().and_then(|view| {
            gpu_reset::left_behind(view, exists)
                .or_else(|| handover::left_behind(view, exists))
                .or_else(|| label::left_behind(view, is_open))
        });
        let Some(node_entry) = self.nodes.get_mut(node) else {
            return;
        };
        let Some((view, change)) = view.zip(change) else {
            if std::mem::take(&mut node_entry.vanished) {
                self.update_watches(node, effects);
            }
            return;
        };
        node_entry.busy = true;
        effects.push(Effect::Change(None, view, change));
    }
}
