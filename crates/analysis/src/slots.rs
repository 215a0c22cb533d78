//! PCI addresses and UUIDs of the GPUs of a node, as its monitor names them together, so that an event
//! with one of both names counts for the GPU as one with both does.
//!
//! A GPU may be replaced, or move to another address. The pair counts that was named last before an
//! event, else the first one after.

use contract::{Entity, HealthEvent, keys};
use diagnosis::subject::canonical_value;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Most pairs of a node that are known, with their times: those named last.
const MAX_SLOTS: usize = 256;

/// Pairs of a node, in the order of their times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Slots(Vec<Slot>);

/// Pair of names at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Slot {
    pub(crate) at: Timestamp,
    pub(crate) pci: Box<str>,
    pub(crate) uuid: Box<str>,
}

// === impl Slots ===

impl Slots {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a pair. Returns true if an event may have another name by it.
    pub(crate) fn add(&mut self, slot: Slot) -> bool {
        let Err(place) = self.0.binary_search(&slot) else {
            return false;
        };
        let is_known = |known: Option<&Slot>| {
            known.is_some_and(|known| (&known.pci, &known.uuid) == (&slot.pci, &slot.uuid))
        };
        let of_pci = self.as_of(slot.at, |known| known.pci == slot.pci);
        let of_uuid = self.as_of(slot.at, |known| known.uuid == slot.uuid);
        let is_new = !is_known(of_pci) || !is_known(of_uuid);
        self.0.insert(place, slot);
        if self.0.len() > MAX_SLOTS {
            self.0.remove(0);
        }
        is_new
    }

    /// Returns the name that an event of a time lacks, of the one GPU that it names.
    pub(crate) fn missing_name(
        &self,
        event: &HealthEvent,
        at: impl FnOnce() -> Timestamp,
    ) -> Option<Entity> {
        let (kind, entity) = one_name(event)?;
        let name = canonical_value(&entity.entity_type, &entity.entity_value);
        let is_named = |slot: &Slot| {
            let known = if kind == keys::ENTITY_PCI {
                &slot.uuid
            } else {
                &slot.pci
            };
            **known == *name
        };
        let slot = self.as_of(at(), is_named)?;
        let value = if kind == keys::ENTITY_PCI {
            &slot.pci
        } else {
            &slot.uuid
        };
        Some(Entity {
            entity_type: kind.to_owned(),
            entity_value: value.to_string(),
        })
    }

    /// Returns the last one of some pairs up to a time, or else the first one.
    fn as_of(&self, at: Timestamp, is: impl Fn(&Slot) -> bool) -> Option<&Slot> {
        let until = self.0.partition_point(|slot| slot.at <= at);
        let last = self.0.iter().take(until).rfind(|slot| is(slot));
        last.or_else(|| self.0.iter().find(|slot| is(slot)))
    }
}

/// Returns the kind of name that an event lacks for the one GPU that it names, and the name that it has.
fn one_name(event: &HealthEvent) -> Option<(&'static str, &Entity)> {
    let of = |kind: &'static str| {
        let of_kind = move |entity: &&Entity| entity.entity_type == kind;
        event.entities_impacted.iter().filter(of_kind)
    };
    // The address in an event about a switch is that of the switch.
    if of(keys::ENTITY_NVSWITCH).next().is_some() {
        return None;
    }
    let (mut addresses, mut uuids) = (of(keys::ENTITY_PCI), of(keys::ENTITY_GPU_UUID));
    let names = (addresses.next(), uuids.next());
    if addresses.chain(uuids).next().is_some() {
        return None;
    }
    match names {
        (Some(address), None) => Some((keys::ENTITY_GPU_UUID, address)),
        (None, Some(uuid)) => Some((keys::ENTITY_PCI, uuid)),
        _ => None,
    }
}
