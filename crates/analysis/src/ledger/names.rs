//! Names of the GPUs in an event.

use std::collections::BTreeSet;

use contract::{Entity, HealthEvent, keys};
use diagnosis::subject::normalise_pci;

/// Longest name of a GPU or slot (bytes). An event with a longer one names no GPU.
pub const MAX_GPU_NAME_BYTES: usize = 128;
/// Most GPUs of one event. An event beyond it is about the first ones.
pub const MAX_GPUS_OF_EVENT: usize = 64;

/// Texts by which drivers and monitors say that they know no name, in lower case.
const PLACEHOLDERS: [&str; 11] = [
    "",
    "n/a",
    "na",
    "none",
    "null",
    "unknown",
    "unspecified",
    "not supported",
    "not available",
    "not specified",
    "to be filled by o.e.m.",
];

/// Names of one GPU in an event; at least one of `serial` and `uuid` is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NamedGpu {
    pub(super) serial: Option<String>,
    pub(super) uuid: Option<String>,
    /// PCI address without function; empty if unknown.
    pub(super) slot: String,
}

/// Returns the GPUs that an event names.
pub(super) fn of(event: &HealthEvent) -> Vec<NamedGpu> {
    let metadata = |key| event.metadata.get(key).and_then(|name| real(name));
    let own_uuid = metadata(keys::META_GPU_UUID).filter(|uuid| is_uuid(uuid));
    let serial = metadata(keys::META_GPU_SERIAL);
    let uuids: BTreeSet<String> = values(event, keys::ENTITY_GPU_UUID)
        .filter_map(real)
        .filter(|uuid| is_uuid(uuid))
        .chain(own_uuid.clone())
        .collect();
    let slot = slot(event).unwrap_or_default();
    if uuids.len() > 1 {
        let names = |uuid: String| NamedGpu {
            serial: serial.clone().filter(|_| own_uuid.as_ref() == Some(&uuid)),
            uuid: Some(uuid),
            slot: String::new(),
        };
        return uuids
            .into_iter()
            .map(names)
            .take(MAX_GPUS_OF_EVENT)
            .collect();
    }
    let uuid = uuids.into_iter().next();
    if serial.is_none() && uuid.is_none() {
        return Vec::new();
    }
    vec![NamedGpu { serial, uuid, slot }]
}

/// Returns the PCI address of the GPU that an event names, without function; `None` if it names none or
/// several.
pub(super) fn slot(event: &HealthEvent) -> Option<String> {
    let mut slots = values(event, keys::ENTITY_PCI).filter_map(real);
    // The address beside a switch is that of the switch.
    let has_switch = values(event, keys::ENTITY_NVSWITCH).next().is_some();
    let slot = slots.next()?;
    (!has_switch && slots.next().is_none()).then(|| normalise_pci(&slot))
}

/// Returns a name without surrounding blanks; `None` for a placeholder, and for a text that is no
/// name of a device.
pub fn real(name: &str) -> Option<String> {
    let name = name.trim();
    let plain = name.trim_matches(['[', ']', '(', ')']).to_ascii_lowercase();
    let is_placeholder = PLACEHOLDERS.contains(&plain.as_str());
    // Zeros, alone or between separators, also those of a UUID; and a number with all bits set.
    let digits = plain.trim_start_matches("gpu-");
    let is_blank = digits
        .bytes()
        .all(|byte| matches!(byte, b'0' | b'-' | b':' | b'.' | b'x'));
    let is_full = digits.len() >= 8 && digits.bytes().all(|byte| byte == b'f');
    let is_printable =
        name.len() <= MAX_GPU_NAME_BYTES && name.bytes().all(|b| b.is_ascii_graphic());
    (is_printable && !is_placeholder && !is_blank && !is_full).then(|| name.to_owned())
}

/// Returns true for the UUID of a GPU, as opposed to that of a partition.
fn is_uuid(name: &str) -> bool {
    name.starts_with("GPU-")
}

fn values<'a>(event: &'a HealthEvent, kind: &str) -> impl Iterator<Item = &'a str> {
    let of_kind = move |entity: &&Entity| entity.entity_type == kind;
    let entities = event.entities_impacted.iter().filter(of_kind);
    entities.map(|entity| entity.entity_value.as_str())
}
