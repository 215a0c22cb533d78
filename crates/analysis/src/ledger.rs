//! Ledger of GPUs: a row for each, with its places, faults and repairs, and what a person has said
//! about it. Built from events, and kept for longer than they are.
//!
//! ```text
//! EventRecord -> names: which GPUs -> GpuRow: place, fault, repair, mark -> known_bad: events
//!                                             rma: conclusions that repairs do not help
//!                                  -> NodeRow: fault, repair
//! ```
//!
//! A GPU is known by its serial number, or by its UUID while no event has named one. Only events
//! of monitors and operators count, since any user of a machine can name any GPU. The ledger
//! follows from the set of events; their order matters only where a bound is met, or where one
//! arrives late about a time in which the GPU was elsewhere. Times are those of acceptance where a
//! clock must be wrong.

mod gpu;
mod history;
mod known_bad;
mod marks;
mod names;
mod rma;
mod score;

use std::collections::{BTreeMap, BTreeSet};

use contract::{HealthEvent, keys};
use jiff::Timestamp;
use model::event::{EventRecord, floor_char_boundary};
use model::reporter::{Authority, Reporter};
use serde::{Deserialize, Serialize};

pub use gpu::{
    AT_ONCE, GpuRow, MAX_PLACES, MAX_REASON_BYTES, MAX_UUIDS, Mark, MarkKind, Place, Reported,
};
pub use history::{
    FaultHistory, MAX_KEPT_OF_HISTORY, PastFault, Repair, RepairKind, SAME_FAULT, SAME_REPAIR,
};
pub use marks::{GpuMark, MAX_KEPT_MARKS};
pub use names::{MAX_GPU_NAME_BYTES, MAX_GPUS_OF_EVENT, real as real_name};
pub use rma::RmaCandidacy;
pub use score::{HALF_LIFE, Score, ScoreTerm};

use crate::AGENT;
use names::NamedGpu;

/// Most GPUs. Beyond it, those without a mark make room: first those without a fault, then those
/// seen least recently.
pub const MAX_GPUS: usize = 100_000;
/// Most nodes. Beyond it, those whose last fault is oldest make room.
pub const MAX_NODES: usize = 20_000;
/// Longest name of a node (bytes); faults of others are not counted. The name of a saved part has
/// a limit of its own.
const MAX_NODE_BYTES: usize = 250;
/// Part of the rows that make room at once, so that not every new row looks at all others.
const ROOM: usize = 100;

/// Prefixes of the names of saved parts.
const GPU_PART: &str = "g:";
const NODE_PART: &str = "n:";

/// Rows of all GPUs and nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger {
    /// Rows by serial number or UUID.
    gpus: BTreeMap<String, GpuRow>,
    nodes: BTreeMap<String, NodeRow>,
    /// Key of each row by UUID.
    by_uuid: BTreeMap<String, String>,
    /// GPU that was seen last in each slot of a node, with the time.
    occupants: BTreeMap<(String, String), (Timestamp, String)>,
    /// Keys of the rows with a mark, or with an open fault of [`keys::CHECK_KNOWN_BAD_GPU`].
    watched: BTreeSet<String>,
    /// Number of rows that had to make room.
    left_out: u64,
    /// Names of the parts that have changed since they were saved.
    unsaved: BTreeSet<String>,
}

/// Row of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeRow {
    /// Cloud's id of the node; empty if no event named it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub provider_id: String,
    /// Faults and repairs, of its GPUs and of all else.
    #[serde(flatten)]
    pub history: FaultHistory,
}

// === impl Ledger ===

impl Ledger {
    /// Records an event. An event that was recorded before changes nothing.
    pub fn record(&mut self, record: &EventRecord) {
        let event = &record.event;
        if Authority::of(event) != Authority::Trusted {
            return;
        }
        if event.agent == AGENT && event.check_name == keys::CHECK_REPAIR_NOT_WORKING {
            self.record_unrepaired(record);
        } else if event.agent == AGENT {
            self.record_own(record);
        } else if let Some(mark) = mark(record) {
            for gpu in names::of(event) {
                self.change(&gpu, |row| row.mark(mark.clone()));
            }
        } else {
            self.record_report(record);
        }
    }

    /// Returns the events of [`keys::CHECK_KNOWN_BAD_GPU`] that are due and were not recorded yet.
    /// They are the same until then.
    pub fn due(&self) -> Vec<HealthEvent> {
        let rows = self.watched.iter().filter_map(|key| {
            let row = self.gpus.get(key)?;
            Some((key, row))
        });
        let due = rows.flat_map(|(key, row)| {
            let place = row.latest_place();
            let place =
                place.filter(|place| self.successor(key, &place.node, &place.slot).is_none());
            let found = place.and_then(|place| known_bad::found(row, place));
            let over = row.reported.iter().filter_map(move |(node, reported)| {
                let (why, at) = self.end_of(key, row, node, reported)?;
                Some(known_bad::over(row, node, &reported.slot, &why, at))
            });
            over.chain(found)
        });
        due.collect()
    }

    /// Returns the key and the row of the GPU with this serial number or UUID.
    pub fn gpu(&self, name: &str) -> Option<(&str, &GpuRow)> {
        let key = self.by_uuid.get(name).map_or(name, String::as_str);
        let (key, row) = self.gpus.get_key_value(key)?;
        Some((key, row))
    }

    /// Returns the rows of all GPUs, by serial number or UUID.
    pub fn gpus(&self) -> impl ExactSizeIterator<Item = (&str, &GpuRow)> {
        self.gpus.iter().map(|(key, row)| (key.as_str(), row))
    }

    /// Returns the row of a node.
    pub fn node(&self, name: &str) -> Option<&NodeRow> {
        self.nodes.get(name)
    }

    /// Returns the rows of all nodes, by name.
    pub fn nodes(&self) -> impl Iterator<Item = (&str, &NodeRow)> {
        self.nodes.iter().map(|(name, row)| (name.as_str(), row))
    }

    /// Returns the number of rows that had to make room for others.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Returns true if the GPU of this row was the last one seen in a place.
    pub fn is_in(&self, key: &str, place: &Place) -> bool {
        self.successor(key, &place.node, &place.slot).is_none()
    }

    /// Returns true if there is something to save.
    pub fn is_unsaved(&self) -> bool {
        !self.unsaved.is_empty()
    }

    /// Returns the names of the parts that have changed, and considers them saved.
    pub fn take_unsaved(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.unsaved)
    }

    /// Marks parts as changed, because they could not be saved.
    pub fn still_unsaved(&mut self, parts: BTreeSet<String>) {
        self.unsaved.extend(parts);
    }

    /// Returns a part as JSON; empty if its row is gone.
    pub fn part(&self, name: &str) -> serde_json::Result<Vec<u8>> {
        let gpu = name
            .strip_prefix(GPU_PART)
            .and_then(|key| self.gpus.get(key));
        let node = name
            .strip_prefix(NODE_PART)
            .and_then(|key| self.nodes.get(key));
        match (gpu, node) {
            (Some(row), _) => serde_json::to_vec(row),
            (None, Some(row)) => serde_json::to_vec(row),
            (None, None) => Ok(Vec::new()),
        }
    }

    /// Takes over a saved part.
    pub fn restore(&mut self, name: &str, part: &[u8]) -> serde_json::Result<()> {
        if let Some(key) = name.strip_prefix(GPU_PART) {
            self.gpus
                .insert(key.to_owned(), serde_json::from_slice(part)?);
            self.index(key);
        } else if let Some(node) = name.strip_prefix(NODE_PART) {
            self.nodes
                .insert(node.to_owned(), serde_json::from_slice(part)?);
        }
        Ok(())
    }

    /// Takes over the number of rows that had to make room.
    pub fn restore_left_out(&mut self, left_out: u64) {
        self.left_out = left_out;
    }

    fn record_report(&mut self, record: &EventRecord) {
        let event = &record.event;
        let tells = history::is_fault(event) || history::repair(record).is_some();
        let is_seen = shows_gpu(event);
        let provider_id = event.metadata.get(keys::META_PROVIDER_ID);
        let provider_id = provider_id.map(|id| shortened(id)).unwrap_or_default();
        let node = &event.node_name;
        if tells && node.len() <= MAX_NODE_BYTES {
            self.make_room_for_node(node);
            let row = self.nodes.entry(node.clone()).or_default();
            row.history.record(record);
            if !provider_id.is_empty() {
                row.provider_id.clone_from(&provider_id);
            }
            self.unsaved.insert(format!("{NODE_PART}{node}"));
        }
        if !tells && !is_seen {
            return;
        }
        for gpu in names::of(event) {
            let seen = is_seen.then(|| Place {
                from: record.created_at,
                to: record.created_at,
                node: node.clone(),
                slot: gpu.slot.clone(),
                provider_id: provider_id.clone(),
            });
            self.change(&gpu, |row| {
                if let Some(seen) = seen {
                    row.see(seen);
                }
                row.history.record(record);
            });
        }
    }

    /// Records an event that [`due`](Self::due) returned, once it is in the feed.
    fn record_own(&mut self, record: &EventRecord) {
        let event = &record.event;
        // A fault that was closed with its machine was reported all the same.
        let is_own = Reporter::of(event) == Some(Reporter::Monitor)
            && !event.metadata.contains_key(keys::META_GONE_AFTER);
        if event.check_name != keys::CHECK_KNOWN_BAD_GPU || !is_own {
            return;
        }
        let node = event.node_name.clone();
        for gpu in names::of(event) {
            let reported = Reported {
                at: record.created_at,
                event: record.id.clone(),
                slot: gpu.slot.clone(),
            };
            self.change(&gpu, |row| {
                if event.is_healthy {
                    row.reported.remove(&node);
                } else {
                    row.reported.insert(node.clone(), reported);
                }
            });
        }
    }

    /// Changes the row of a GPU.
    fn change(&mut self, gpu: &NamedGpu, change: impl FnOnce(&mut GpuRow)) {
        let Some(key) = self.key(gpu) else {
            return;
        };
        self.make_room_for_gpu(&key);
        let row = self.gpus.entry(key.clone()).or_default();
        row.name(gpu);
        let before = row.places.clone();
        change(row);
        self.vacate(&key, before);
        self.index(&key);
        self.unsaved.insert(format!("{GPU_PART}{key}"));
    }

    /// Returns the key of a GPU's row. Once its serial number is known, the row that has only its
    /// UUID becomes part of the row with the number.
    fn key(&mut self, gpu: &NamedGpu) -> Option<String> {
        let known = gpu.uuid.as_ref().and_then(|uuid| self.by_uuid.get(uuid));
        let Some(serial) = &gpu.serial else {
            return known.or(gpu.uuid.as_ref()).cloned();
        };
        if let Some(uuid) = &gpu.uuid
            && known == Some(uuid)
            && uuid != serial
            && let Some(row) = self.gpus.remove(uuid)
        {
            self.watched.remove(uuid);
            self.vacate(uuid, row.places.clone());
            self.unsaved.insert(format!("{GPU_PART}{uuid}"));
            self.gpus.entry(serial.clone()).or_default().merge(row);
            self.by_uuid.insert(uuid.clone(), serial.clone());
            self.index(serial);
        }
        Some(serial.clone())
    }

    /// Updates what is derived from a row.
    fn index(&mut self, key: &str) {
        let Some(row) = self.gpus.get(key) else {
            return;
        };
        for uuid in &row.uuids {
            let known = self.by_uuid.entry(uuid.clone());
            known.or_insert_with(|| key.to_owned());
        }
        for place in row.places.iter().filter(|place| !place.slot.is_empty()) {
            let seen = (place.to, key.to_owned());
            let slot = (place.node.clone(), place.slot.clone());
            let occupant = self.occupants.entry(slot).or_insert_with(|| seen.clone());
            *occupant = occupant.clone().max(seen);
        }
        if row.mark.is_some() || !row.reported.is_empty() {
            self.watched.insert(key.to_owned());
        } else {
            self.watched.remove(key);
        }
    }

    /// Removes a GPU from the places that its row no longer has.
    fn vacate(&mut self, key: &str, places: Vec<Place>) {
        let row = self.gpus.get(key);
        for place in places {
            let mut kept = row.iter().flat_map(|row| &row.places);
            if kept.any(|one| (&one.node, &one.slot) == (&place.node, &place.slot)) {
                continue;
            }
            let slot = (place.node, place.slot);
            if self
                .occupants
                .get(&slot)
                .is_some_and(|(_, occupant)| occupant == key)
            {
                self.occupants.remove(&slot);
            }
        }
    }

    /// Returns the key of the GPU that was seen later in the same slot, and the time.
    fn successor(&self, key: &str, node: &str, slot: &str) -> Option<(&str, Timestamp)> {
        let occupant = self.occupants.get(&(node.to_owned(), slot.to_owned()))?;
        let (at, other) = (occupant.0, occupant.1.as_str());
        (other != key).then_some((other, at))
    }

    /// Returns the reason and time for which a GPU is no longer known to be bad on a node. That it
    /// was seen elsewhere is none: that node may state a wrong serial number.
    fn end_of(
        &self,
        key: &str,
        row: &GpuRow,
        node: &str,
        reported: &Reported,
    ) -> Option<(String, Timestamp)> {
        if let Some(mark) = row.mark.as_ref().filter(|mark| mark.kind == MarkKind::Good) {
            let why = format!(
                "This GPU was marked as good by {}: {}",
                mark.by, mark.reason
            );
            return Some((why, mark.at));
        }
        let (other, at) = self.successor(key, node, &reported.slot)?;
        if at <= reported.at {
            return None;
        }
        // Since when, which stays the same while it is seen there.
        let places = self.gpus.get(other).map(|row| row.places.as_slice());
        let mut places = places.unwrap_or_default().iter();
        let since = places.rfind(|place| place.node == node && place.slot == reported.slot);
        let why = format!("Another GPU, {other}, is in its slot");
        Some((why, since.map_or(at, |place| place.from)))
    }

    fn make_room_for_gpu(&mut self, key: &str) {
        if self.gpus.len() < MAX_GPUS || self.gpus.contains_key(key) {
            return;
        }
        let unmarked = self
            .gpus
            .iter()
            .filter(|(key, _)| !self.watched.contains(*key));
        let order = |row: &GpuRow| {
            let seen = row.latest_place().map(|place| place.to);
            (!row.history.faults.is_empty(), seen)
        };
        let rows = unmarked.map(|(key, row)| (order(row), key.clone()));
        for key in first(rows, MAX_GPUS / ROOM) {
            let Some(row) = self.gpus.remove(&key) else {
                continue;
            };
            let is_own = |uuid: &&String| self.by_uuid.get(*uuid) == Some(&key);
            let uuids: Vec<&String> = row.uuids.iter().filter(is_own).collect();
            for uuid in uuids {
                self.by_uuid.remove(uuid);
            }
            self.vacate(&key, row.places);
            self.left_out += 1;
            self.unsaved.insert(format!("{GPU_PART}{key}"));
        }
    }

    fn make_room_for_node(&mut self, name: &str) {
        if self.nodes.len() < MAX_NODES || self.nodes.contains_key(name) {
            return;
        }
        let latest = |row: &NodeRow| row.history.faults.last().map(|fault| fault.last);
        let rows = self
            .nodes
            .iter()
            .map(|(name, row)| (latest(row), name.clone()));
        for name in first(rows, MAX_NODES / ROOM) {
            self.nodes.remove(&name);
            self.left_out += 1;
            self.unsaved.insert(format!("{NODE_PART}{name}"));
        }
    }
}

/// Returns the keys of the first rows in their order.
fn first<O: Ord>(rows: impl Iterator<Item = (O, String)>, number: usize) -> Vec<String> {
    let mut rows: Vec<(O, String)> = rows.collect();
    rows.sort();
    rows.into_iter().take(number).map(|(_, key)| key).collect()
}

/// Returns the mark that an event states.
fn mark(record: &EventRecord) -> Option<Mark> {
    let event = &record.event;
    if event.check_name != keys::CHECK_LEDGER_MARK {
        return None;
    }
    let kind = MarkKind::parse(event.metadata.get(keys::META_LEDGER_MARK)?)?;
    let by = event.metadata.get(keys::META_LEDGER_BY);
    Some(Mark {
        at: record.created_at,
        event: record.id.clone(),
        kind,
        reason: shortened(&event.message),
        by: by.map(|by| shortened(by)).unwrap_or_default(),
    })
}

/// Returns true if an event shows that its GPUs are in the node. A healthy event may be about a
/// GPU that was replaced, and the report of a lost GPU is about one that is not there.
fn shows_gpu(event: &HealthEvent) -> bool {
    let has = |key| event.metadata.contains_key(key);
    if event.is_healthy {
        return event.check_name == keys::CHECK_GPU_INVENTORY;
    }
    let is_lost = event.check_name == keys::CHECK_GPU_PCIE
        && event
            .error_code
            .iter()
            .any(|code| code == keys::CODE_GPU_LOST);
    !is_lost && !has(keys::META_EARLIER_IN_BOOT) && !has(keys::META_TAKEN_OVER)
}

/// Returns a text without what is beyond [`MAX_REASON_BYTES`].
fn shortened(text: &str) -> String {
    let end = floor_char_boundary(text, MAX_REASON_BYTES);
    text.get(..end).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
