//! Incidents as shown: open faults that belong together, with the one that is their cause.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use model::proposal::Proposal;
use serde::{Deserialize, Serialize};

use super::{FaultView, NodeState, NodeStatus};

/// An incident.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IncidentView {
    /// Id of the incident.
    pub id: String,
    /// Time of the first observation of its first fault.
    pub since: Timestamp,
    /// Node of the primary.
    pub primary_node: String,
    /// The primary: a fault that explains others before all others, then a fatal one, then the
    /// oldest.
    pub primary: FaultView,
    /// Nodes of the incident, that of the primary first.
    pub nodes: Vec<IncidentNode>,
}

/// A node of an incident.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IncidentNode {
    /// Name of the node.
    pub name: String,
    /// State of the node.
    pub state: NodeState,
    /// Text for people about what the node's session awaits; absent without a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub awaits: Option<String>,
    /// Proposal of the node's session that waits for a person's approval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proposal: Option<Proposal>,
    /// Faults of the node that belong to the incident.
    pub faults: Vec<FaultView>,
}

// === impl IncidentView ===

impl IncidentView {
    /// Returns the incidents with open faults or notices on these nodes, oldest first.
    pub fn all(nodes: &[NodeStatus]) -> Vec<Self> {
        let mut by_id: BTreeMap<&str, Vec<(&NodeStatus, &FaultView)>> = BTreeMap::new();
        for node in nodes {
            let faults = node.faults.iter().chain(&node.notices);
            // An older server names no incidents.
            for fault in faults.filter(|fault| !fault.incident.is_empty()) {
                let faults = by_id.entry(&fault.incident).or_default();
                faults.push((node, fault));
            }
        }
        let all = by_id.into_iter();
        let mut all: Vec<Self> = all
            .filter_map(|(id, faults)| Self::of(id, &faults))
            .collect();
        all.sort_by(|a, b| a.since.cmp(&b.since).then_with(|| a.id.cmp(&b.id)));
        all
    }

    /// Returns the number of faults.
    pub fn faults(&self) -> usize {
        self.nodes.iter().map(|node| node.faults.len()).sum()
    }

    /// Returns the number of faults that another one explains.
    pub fn explained(&self) -> usize {
        let faults = self.nodes.iter().flat_map(|node| &node.faults);
        faults.filter(|fault| fault.explained_by.is_some()).count()
    }

    /// Returns the number of nodes with a proposal that waits for a person's approval.
    pub fn proposals(&self) -> usize {
        let nodes = self.nodes.iter();
        nodes.filter(|node| node.proposal.is_some()).count()
    }

    fn of(id: &str, faults: &[(&NodeStatus, &FaultView)]) -> Option<Self> {
        let causes: BTreeSet<(&str, &str)> = (faults.iter())
            .filter_map(|(_, fault)| fault.explained_by.as_ref())
            .map(|cause| (cause.node.as_str(), cause.fault.as_str()))
            .collect();
        let rank = |(node, fault): &&(&NodeStatus, &FaultView)| {
            let title = fault.title();
            let explains = causes.contains(&(node.name.as_str(), title.as_str()));
            (
                !explains,
                !fault.fatal,
                fault.first_seen,
                node.name.clone(),
                title,
            )
        };
        let (primary_node, primary) = faults.iter().min_by_key(rank)?;
        let mut nodes: Vec<IncidentNode> = Vec::new();
        for (node, fault) in faults {
            match nodes.last_mut().filter(|last| last.name == node.name) {
                Some(last) => last.faults.push((*fault).clone()),
                None => nodes.push(IncidentNode {
                    name: node.name.clone(),
                    state: node.state,
                    awaits: node.session.as_ref().map(|session| session.awaits.clone()),
                    proposal: (node.session.as_ref()).and_then(|session| session.proposal.clone()),
                    faults: vec![(*fault).clone()],
                }),
            }
        }
        nodes.sort_by_key(|node| node.name != primary_node.name);
        Some(Self {
            id: id.to_owned(),
            since: faults.iter().map(|(_, fault)| fault.first_seen).min()?,
            primary_node: primary_node.name.clone(),
            primary: (*primary).clone(),
            nodes,
        })
    }
}
