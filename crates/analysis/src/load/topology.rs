//! The table `[topology]` of a file of rules.

use std::sync::Arc;

use contract::findings::Findings;
use contract::names;
use serde::Deserialize;

use crate::group::Topology;
use crate::place::{NamedNodes, NodePlaces};

/// Metadata keys of the topology, as in the file. A missing list is the default.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TopologyEntry {
    rack: Option<Vec<String>>,
    nvlink_domain: Option<Vec<String>>,
    zone: Option<Vec<String>>,
    #[serde(default)]
    nodes: Vec<NodesEntry>,
}

/// Places of some nodes, as in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NodesEntry {
    names: Vec<String>,
    rack: Option<String>,
    nvlink_domain: Option<String>,
    zone: Option<String>,
}

// === impl TopologyEntry ===

impl TopologyEntry {
    /// Reads the metadata keys of the topology.
    pub(super) fn read(self, findings: &mut Findings<'_>) -> Topology {
        let mut topology = Topology::default();
        for (key, given, known) in [
            ("rack", self.rack, &mut topology.rack),
            (
                "nvlink_domain",
                self.nvlink_domain,
                &mut topology.nvlink_domain,
            ),
            ("zone", self.zone, &mut topology.zone),
        ] {
            let Some(labels) = given else {
                continue;
            };
            let path = format!("topology.{key}");
            if labels.is_empty() {
                findings.refuse(&path, "write a label of nodes, or leave the key out");
            }
            for (index, label) in labels.iter().enumerate() {
                findings.check(&format!("{path}[{index}]"), names::label_key(label));
            }
            *known = labels;
        }
        topology.nodes = places(&self.nodes, findings);
        topology
    }
}

/// Reads the places of nodes by their names.
fn places(entries: &[NodesEntry], findings: &mut Findings<'_>) -> NodePlaces {
    let mut rack = NamedNodes::default();
    let (mut nvlink_domain, mut zone) = (rack.clone(), rack.clone());
    for (index, entry) in entries.iter().enumerate() {
        let path = format!("topology.nodes[{index}]");
        if entry.names.is_empty() {
            let wanted = "write names of nodes, such as \"gpu-r1-*\"";
            findings.refuse(&format!("{path}.names"), wanted);
        }
        let given = [
            ("rack", &entry.rack, &mut rack),
            ("nvlink_domain", &entry.nvlink_domain, &mut nvlink_domain),
            ("zone", &entry.zone, &mut zone),
        ];
        if given.iter().all(|(_, place, _)| place.is_none()) {
            findings.refuse(&format!("{path}.rack"), "write rack, nvlink_domain or zone");
        }
        for (key, place, nodes) in given {
            let Some(place) = place else {
                continue;
            };
            let at = format!("{path}.{key}");
            if place.is_empty() {
                findings.refuse(&at, "write a name, or leave the key out");
            }
            findings.check(&at, names::label_value(place));
            for (index, name) in entry.names.iter().enumerate() {
                if let Some(before) = nodes.add(name, place) {
                    let what = format!("these nodes have the {key} {before} already");
                    findings.refuse(&format!("{path}.names[{index}]"), what);
                }
            }
        }
        for (index, name) in entry.names.iter().enumerate() {
            let without_wildcards = name.replace(['*', '?'], "x");
            if names::object_name(&without_wildcards).is_err() {
                let wanted = "write the name of a node; * is any text and ? any character";
                findings.refuse(&format!("{path}.names[{index}]"), wanted);
            }
        }
    }
    NodePlaces {
        rack: Arc::new(rack),
        nvlink_domain: Arc::new(nvlink_domain),
        zone: Arc::new(zone),
    }
}
