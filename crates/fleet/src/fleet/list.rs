//! A list of the nodes, and the warnings that follow from a complete one.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use crate::Owns;
use crate::agenda::Agenda;
use crate::brake::MOST_ALONE;
use crate::entry::NodeEntry;
use crate::io::Level;

/// A list of the nodes that is being delivered.
#[derive(Debug)]
pub(super) struct NodeList {
    /// Names of the nodes listed so far.
    pub(super) listed: BTreeSet<String>,
    pub(super) began: Timestamp,
}

// === impl NodeList ===

impl NodeList {
    /// Begins a list. Nodes were not watched before it, so changes that people made meanwhile may
    /// have happened at any time.
    pub(super) fn begin(nodes: &mut BTreeMap<String, NodeEntry>, now: Timestamp) -> Self {
        for entry in nodes.values_mut() {
            entry.session.watched = false;
        }
        Self {
            listed: BTreeSet::new(),
            began: now,
        }
    }
}

/// Warns if the cluster lacks the node that this process acts for, or too many nodes act for
/// themselves.
pub(super) fn warn(owns: &Owns, nodes: &BTreeMap<String, NodeEntry>, agenda: &mut Agenda) {
    let Some(own) = owns.node() else {
        return;
    };
    let in_cluster = |entry: &NodeEntry| entry.view.is_some();
    if !nodes.get(own).is_some_and(in_cluster) {
        let text = "the cluster has no node of this name: its faults cannot be acted on until \
                    it appears; --node-name sets the name";
        agenda.log(Level::Warn, Some(own), text.to_owned());
    }
    let count = nodes.values().filter(|entry| in_cluster(entry)).count();
    if count > MOST_ALONE {
        let text = format!(
            "each node acts for itself, and budgets do not hold what fails at the same \
             moment: in a cluster of more than {MOST_ALONE} nodes run `gpuwarden agent` on \
             them, and one `gpuwarden controller`; this one has {count}"
        );
        agenda.log(Level::Warn, None, text);
    }
}
