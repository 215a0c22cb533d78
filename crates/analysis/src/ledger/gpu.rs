//! Row of a GPU: its names, its places, its history, and the mark of a person.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::history::FaultHistory;
use super::names::NamedGpu;
use super::rma::{self, RmaCandidacy};

/// Most places of a GPU that are kept: the latest.
pub const MAX_PLACES: usize = 32;
/// Most UUIDs of a serial number: a board may have several GPUs.
pub const MAX_UUIDS: usize = 16;
/// Longest time in which a GPU that is seen on one node, on another, and on the first again
/// counts as on both at the same time. Nobody carries a GPU forth and back within a day, except
/// for a test.
pub const AT_ONCE: SignedDuration = SignedDuration::from_hours(24);
/// Longest reason and name of a person in a mark, and longest id of a provider (bytes); the rest
/// is cut off.
pub const MAX_REASON_BYTES: usize = 1024;

/// Row of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRow {
    /// Serial number of the board; `None` if no event named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// UUIDs.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub uuids: BTreeSet<String>,
    /// Places, ordered by their begin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<Place>,
    /// True if older places are left out, for there are more than [`MAX_PLACES`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub places_are_cut: bool,
    /// Faults and repairs.
    #[serde(flatten)]
    pub history: FaultHistory,
    /// Latest mark of a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<Mark>,
    /// Nodes with an open fault that this GPU is known to be bad.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reported: BTreeMap<String, Reported>,
    /// Open conclusions that repairs do not help, by their ids. With one, the GPU is a candidate for
    /// a return to its vendor.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rma: BTreeMap<String, RmaCandidacy>,
}

/// Stay of a GPU in a slot of a node, from the first time it was seen there to the last.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Place {
    /// Time when the GPU was first seen there.
    pub from: Timestamp,
    /// Time when the GPU was last seen there.
    pub to: Timestamp,
    /// Name of the node.
    pub node: String,
    /// PCI address without function; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub slot: String,
    /// Cloud's id of the node; empty if no event named it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub provider_id: String,
}

/// Mark of a GPU by a person.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mark {
    /// Time of acceptance.
    pub at: Timestamp,
    /// Id of the event. The later of two marks counts, by time and id.
    pub event: String,
    /// Meaning of the mark.
    pub kind: MarkKind,
    /// Reason, for people.
    pub reason: String,
    /// Name of the person.
    pub by: String,
}

/// Meaning of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MarkKind {
    /// The GPU must not be used.
    Bad,
    /// The GPU was, or is to be, returned to its vendor.
    Rma,
    /// The GPU may be used.
    Good,
}

/// Event about a GPU that is known to be bad.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reported {
    /// Time of acceptance.
    pub at: Timestamp,
    /// Id of the event.
    pub event: String,
    /// PCI address of the GPU on that node; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub slot: String,
}

// === impl GpuRow ===

impl GpuRow {
    /// Records names of the GPU.
    pub(super) fn name(&mut self, gpu: &NamedGpu) {
        if self.serial.is_none() {
            self.serial.clone_from(&gpu.serial);
        }
        if self.uuids.len() < MAX_UUIDS {
            self.uuids.extend(gpu.uuid.clone());
        }
    }

    /// Records that the GPU was seen at a place.
    pub(super) fn see(&mut self, seen: Place) {
        let may_be = |place: &&mut Place| {
            let is_slot = place.slot == seen.slot || place.slot.is_empty() || seen.slot.is_empty();
            place.node == seen.node && is_slot
        };
        let elsewhere: Vec<Timestamp> = self
            .places
            .iter()
            .filter(|place| place.node != seen.node)
            .flat_map(|place| [place.from, place.to])
            .collect();
        let stays = |place: &&mut Place| {
            let gap = (place.to.min(seen.to), place.from.max(seen.from));
            !elsewhere.iter().any(|at| gap.0 < *at && *at < gap.1)
        };
        let known = self.places.iter_mut().filter(may_be).filter(stays);
        match known.max_by_key(|place| place.to) {
            Some(place) => place.join(seen),
            None => self.places.push(seen),
        }
        self.cut_places();
    }

    /// Records a mark. An earlier one than the known mark has no effect.
    pub(super) fn mark(&mut self, mark: Mark) {
        self.mark = self.mark.take().max(Some(mark));
    }

    /// Adds another row of the same GPU.
    pub(super) fn merge(&mut self, other: Self) {
        self.serial = self.serial.take().or(other.serial);
        self.uuids.extend(other.uuids);
        while self.uuids.len() > MAX_UUIDS {
            self.uuids.pop_last();
        }
        other.places.into_iter().for_each(|place| self.see(place));
        self.places_are_cut |= other.places_are_cut;
        self.history.merge(other.history);
        self.mark = self.mark.take().max(other.mark);
        self.reported.extend(other.reported);
        self.rma.extend(other.rma);
        rma::cut(&mut self.rma);
    }

    /// Returns the place where the GPU was seen last.
    pub fn latest_place(&self) -> Option<&Place> {
        self.places
            .iter()
            .max_by_key(|place| (place.to, place.from))
    }

    /// Returns the names of two nodes on which the GPU is at the same time; `None` if it is on one.
    /// Its serial number is then not unique, or one of the nodes states a wrong one.
    pub fn on_two_nodes(&self) -> Option<(&str, &str)> {
        let latest = self.latest_place()?.to;
        let spans = self.spans();
        let is_now = |place: &&Place| latest.duration_since(place.to) <= AT_ONCE;
        let now: Vec<&Place> = spans.iter().filter(is_now).collect();
        let mut pairs = now
            .iter()
            .flat_map(|one| now.iter().map(move |other| (one, other)));
        let (one, other) = pairs.find(|(one, other)| {
            one.node < other.node && one.from < other.to && other.from < one.to
        })?;
        let name = |node: &str| {
            let mut names = self.places.iter().map(|place| place.node.as_str());
            names.find(|name| *name == node)
        };
        Some((name(&one.node)?, name(&other.node)?))
    }

    /// Returns the stays on each node; two of them that are no more than [`AT_ONCE`] apart are one.
    fn spans(&self) -> Vec<Place> {
        let mut spans: Vec<Place> = Vec::new();
        for place in &self.places {
            let same = spans.iter_mut().find(|span| {
                span.node == place.node && place.from.duration_since(span.to) <= AT_ONCE
            });
            match same {
                Some(span) => span.to = span.to.max(place.to),
                None => spans.push(place.clone()),
            }
        }
        spans
    }

    fn cut_places(&mut self) {
        self.places.sort();
        while self.places.len() > MAX_PLACES {
            let oldest = self
                .places
                .iter()
                .enumerate()
                .min_by_key(|(_, place)| place.to);
            let Some((index, _)) = oldest else {
                return;
            };
            self.places.remove(index);
            self.places_are_cut = true;
        }
    }
}

// === impl Place ===

impl Place {
    /// Adds a time at which the GPU was seen there.
    fn join(&mut self, seen: Self) {
        if self.slot.is_empty() {
            self.slot = seen.slot;
        }
        if !seen.provider_id.is_empty() && (seen.to >= self.to || self.provider_id.is_empty()) {
            self.provider_id = seen.provider_id;
        }
        self.from = self.from.min(seen.from);
        self.to = self.to.max(seen.to);
    }
}

// === impl MarkKind ===

impl MarkKind {
    /// All meanings.
    pub const ALL: [Self; 3] = [Self::Bad, Self::Rma, Self::Good];

    /// Returns the name in events and commands.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bad => "bad",
            Self::Rma => "rma",
            Self::Good => "good",
        }
    }

    /// Returns the mark with a name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}
