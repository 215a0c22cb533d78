//! Places that a file of rules gives to nodes by their names, for clusters whose nodes have no labels.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::{HealthEvent, keys};
use policy::glob::Glob;

/// Racks, NVLink domains and zones of nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePlaces {
    /// Racks.
    pub rack: Arc<NamedNodes>,
    /// NVLink domains.
    pub nvlink_domain: Arc<NamedNodes>,
    /// Zones.
    pub zone: Arc<NamedNodes>,
}

/// Places of one kind, by the names of their nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedNodes {
    /// Places by the name of a node.
    names: BTreeMap<String, String>,
    /// Places by a pattern with `*` or `?`; the first that matches counts.
    patterns: Vec<(Glob, String)>,
}

// === impl NodePlaces ===

impl NodePlaces {
    /// Returns true if a node of this name has a place.
    pub fn names(&self, node: &str) -> bool {
        let mut kinds = [&self.rack, &self.nvlink_domain, &self.zone].into_iter();
        kinds.any(|nodes| nodes.of(node).is_some())
    }

    /// Returns true if no node has a place.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the places of a node as its labels would say them.
    pub fn labels_of(&self, node: &str) -> BTreeMap<String, String> {
        let [rack, _] = keys::RACK_LABELS;
        let [nvlink_domain, _] = keys::NVLINK_DOMAIN_LABELS;
        let places = [
            (rack, self.rack.of(node)),
            (nvlink_domain, self.nvlink_domain.of(node)),
            (keys::ZONE_LABEL, self.zone.of(node)),
        ];
        let named = places.into_iter();
        named
            .filter_map(|(label, place)| Some((label.to_owned(), place?.to_owned())))
            .collect()
    }

    /// Writes the places of its node into the metadata of an event, before all labels.
    pub fn locate(&self, event: &mut HealthEvent) {
        event.metadata.extend(self.labels_of(&event.node_name));
    }
}

// === impl NamedNodes ===

impl NamedNodes {
    /// Adds the nodes of a name, or of a pattern, to a place. Returns the place that the same text
    /// has already.
    pub(crate) fn add(&mut self, name: &str, place: &str) -> Option<String> {
        if !name.contains(['*', '?']) {
            return self.names.insert(name.to_owned(), place.to_owned());
        }
        let pattern = Glob::from(name);
        let mut known = self.patterns.iter();
        let before = known.find(|(known, _)| *known == pattern);
        let before = before.map(|(_, place)| place.clone());
        self.patterns.push((pattern, place.to_owned()));
        before
    }

    /// Returns the place of a node. The whole name goes before a pattern.
    pub fn of(&self, node: &str) -> Option<&str> {
        let by_pattern = || {
            let mut patterns = self.patterns.iter();
            patterns.find(|(pattern, _)| pattern.matches(node))
        };
        let named = self.names.get(node);
        let place = named.or_else(|| by_pattern().map(|(_, place)| place));
        place.map(String::as_str)
    }
}
