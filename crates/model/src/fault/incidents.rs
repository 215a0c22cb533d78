//! Incidents: faults that belong together, because they are of one node, NVLink domain, rack or
//! job and were first observed close in time.
//!
//! A fault joins an incident when it opens and stays in it until it closes. Incidents only show
//! what belongs together and decide nothing.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use super::Fault;
use crate::topology::Place;

/// Longest time between the first observations of two neighbouring faults of an incident.
pub(super) const INCIDENT_GAP: SignedDuration = SignedDuration::from_secs(60);

/// Length of an incident's id, in characters of an event id, which is a hash.
const ID_LENGTH: usize = 12;

/// Index of the open faults by incident and place. Derived from the faults, and not saved.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Incidents {
    by_id: BTreeMap<String, Incident>,
    by_place: BTreeMap<Place, BTreeMap<String, usize>>,
}

/// An incident with open faults.
#[derive(Clone, Debug, Default, PartialEq)]
struct Incident {
    /// Numbers of open faults by place.
    places: BTreeMap<Place, usize>,
    /// Numbers of open faults by the time of their first observation.
    seen: BTreeMap<Timestamp, usize>,
}

// === impl Incidents ===

impl Incidents {
    /// Adds a fault, to the incident that it belongs to or to a new one.
    pub(super) fn enter(&mut self, fault: &mut Fault) {
        let places: Vec<Place> = Place::all_of(&fault.event).collect();
        if fault.incident.is_empty() {
            let known = self.incident_of(&places, fault.first_seen);
            let own = || fault.opened_by.chars().take(ID_LENGTH).collect();
            fault.incident = known.cloned().unwrap_or_else(own);
        }
        let incident = self.by_id.entry(fault.incident.clone()).or_default();
        *incident.seen.entry(fault.first_seen).or_default() += 1;
        for place in places {
            let ids = self.by_place.entry(place.clone()).or_default();
            *ids.entry(fault.incident.clone()).or_default() += 1;
            *incident.places.entry(place).or_default() += 1;
        }
    }

    /// Removes a fault, as it was added.
    pub(super) fn leave(&mut self, fault: &Fault) {
        let Some(incident) = self.by_id.get_mut(&fault.incident) else {
            return;
        };
        subtract(&mut incident.seen, &fault.first_seen);
        for place in Place::all_of(&fault.event) {
            subtract(&mut incident.places, &place);
            if let Some(ids) = self.by_place.get_mut(&place) {
                subtract(ids, &fault.incident);
                if ids.is_empty() {
                    self.by_place.remove(&place);
                }
            }
        }
        if incident.seen.is_empty() {
            self.by_id.remove(&fault.incident);
        }
    }

    /// Returns the names of the nodes with an open fault in one of these places.
    pub(super) fn nodes_in(&self, places: &BTreeSet<Place>) -> BTreeSet<String> {
        let ids = places.iter().filter_map(|place| self.by_place.get(place));
        let incidents = ids
            .flat_map(BTreeMap::keys)
            .filter_map(|id| self.by_id.get(id));
        let nodes = incidents.flat_map(Incident::nodes);
        nodes.map(str::to_owned).collect()
    }

    /// Returns the names of the nodes of an incident; none without one of this id.
    pub(super) fn nodes_of(&self, id: &str) -> impl Iterator<Item = &str> {
        self.by_id.get(id).into_iter().flat_map(Incident::nodes)
    }

    /// Returns the incident that a fault of these places joins: the one that began first.
    fn incident_of(&self, places: &[Place], first_seen: Timestamp) -> Option<&String> {
        let ids = places.iter().filter_map(|place| self.by_place.get(place));
        let known = ids
            .flat_map(BTreeMap::keys)
            .filter_map(|id| Some((self.by_id.get(id)?.spans(first_seen)?, id)));
        known.min().map(|(_, id)| id)
    }
}

// === impl Incident ===

impl Incident {
    /// Returns when the incident began, if a fault first observed at `at` is close enough to it.
    fn spans(&self, at: Timestamp) -> Option<Timestamp> {
        let (first, last) = (*self.seen.keys().next()?, *self.seen.keys().next_back()?);
        let before = first.duration_since(at);
        let after = at.duration_since(last);
        (before <= INCIDENT_GAP && after <= INCIDENT_GAP).then_some(first)
    }

    fn nodes(&self) -> impl Iterator<Item = &str> {
        self.places.keys().filter_map(|place| match place {
            Place::Node(name) => Some(name.as_str()),
            _ => None,
        })
    }
}

/// Subtracts one from the number of `key`, which is removed at zero.
fn subtract<K: Ord>(numbers: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(number) = numbers.get_mut(key) {
        *number = number.saturating_sub(1);
        if *number == 0 {
            numbers.remove(key);
        }
    }
}
