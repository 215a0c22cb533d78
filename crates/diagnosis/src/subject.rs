//! The subject of a fault: one device under its several names, or any other resource.
//!
//! A GPU has a PCI address, a UUID and an index, and a monitor lists those that it knows. All
//! name one device: a recovery that knows only one of them closes the fault, and a reset of a
//! GPU closes a fault of an XID line about its GPC or `NVLink`.

use std::fmt;

use contract::{Entity, HealthEvent, keys};
use serde::{Deserialize, Serialize};

/// Entity types that name a device as a whole. A device has at most one of each.
const DEVICE_NAMES: [&str; 5] = [
    keys::ENTITY_PCI,
    keys::ENTITY_GPU_UUID,
    keys::ENTITY_GPU,
    keys::ENTITY_NVSWITCH,
    keys::ENTITY_NIC,
];

/// Names that identify a device: two subjects with different ones are two devices, whatever
/// else they share. An event about the link between a switch and a GPU names both, and the GPU
/// has links to other switches too.
const UNIQUE_NAMES: [&str; 2] = [keys::ENTITY_PCI, keys::ENTITY_NVSWITCH];

/// Entity types that distinguish two faults of one device.
const DISTINGUISHING_PARTS: [&str; 2] = [keys::ENTITY_NVLINK, "NICPort"];

/// Entity types that only describe a fault of a device: registers, units, ids.
const DESCRIPTIONS: [&str; 5] = [keys::ENTITY_PCI_ID, "GPC", "TPC", "SM", "REG"];

/// A broken resource, as (entity type, value) pairs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Subject {
    /// Names of the resource, sorted; empty for the node itself.
    names: Vec<(String, String)>,
}

// === impl Subject ===

impl Subject {
    /// Returns the resources that the entities of an unhealthy event name: one for a device
    /// under several names, one each otherwise, the node itself if there are none.
    pub fn of_entities(entities: &[Entity]) -> Vec<Self> {
        let (devices, others): (Vec<_>, Vec<_>) = entities
            .iter()
            .partition(|entity| is_device_name(&entity.entity_type));
        if devices.is_empty() {
            return match others.as_slice() {
                [] => vec![Self { names: Vec::new() }],
                others => others.iter().map(|entity| Self::new([*entity])).collect(),
            };
        }
        let one_device = DEVICE_NAMES.iter().all(|kind| {
            devices
                .iter()
                .filter(|entity| entity.entity_type == *kind)
                .count()
                <= 1
        });
        let parts = || {
            others
                .iter()
                .copied()
                .filter(|entity| DISTINGUISHING_PARTS.contains(&entity.entity_type.as_str()))
        };
        let mut subjects: Vec<Self> = if one_device {
            vec![Self::new(devices.iter().copied().chain(parts()))]
        } else {
            devices
                .iter()
                .map(|entity| Self::new(std::iter::once(*entity).chain(parts())))
                .collect()
        };
        // An entity that is neither a device nor a part or description of one is a subject of
        // its own.
        subjects.extend(
            others
                .iter()
                .filter(|entity| !belongs_to_device(&entity.entity_type))
                .map(|entity| Self::new([*entity])),
        );
        subjects.dedup();
        subjects
    }

    /// Returns true if `self`, opened by one event, is the subject of another unhealthy event.
    pub fn same(&self, other: &Self) -> bool {
        if self.names.is_empty() || other.names.is_empty() {
            return self.names.is_empty() && other.names.is_empty();
        }
        let contradicts = UNIQUE_NAMES.iter().any(|kind| {
            matches!((self.name(kind), other.name(kind)), (Some(mine), Some(theirs)) if mine != theirs)
        });
        self.parts().eq(other.parts())
            && !contradicts
            && self.whole().any(|name| other.whole().any(|o| o == name))
    }

    /// Adds the names that `other`, the same subject, has and `self` lacks.
    pub fn learn(&mut self, other: &Self) {
        for name in &other.names {
            if !self.names.iter().any(|(kind, _)| *kind == name.0) {
                self.names.push(name.clone());
            }
        }
        self.names.sort();
    }

    /// Returns true if a healthy event with `entities` includes this subject. No entities means
    /// everything of the check.
    pub fn healed_by(&self, entities: &[Entity]) -> bool {
        if entities.is_empty() {
            return true;
        }
        let healed = |(kind, value): &(String, String)| {
            entities
                .iter()
                .any(|entity| entity.entity_type == *kind && canonical(entity).1 == *value)
        };
        // A recovery that names a part (one link) ends faults of that part only.
        let parts_named = entities
            .iter()
            .any(|entity| self.parts().any(|part| part.0 == entity.entity_type));
        self.whole_is_healed(entities, healed) && (!parts_named || self.parts().all(healed))
    }

    /// Returns true if a recovery names this device. If both have a permanent name, that
    /// decides: the index of a GPU may move to another one when a GPU before it is gone.
    fn whole_is_healed(
        &self,
        entities: &[Entity],
        healed: impl Fn(&(String, String)) -> bool,
    ) -> bool {
        let stays = |(kind, _): &&(String, String)| {
            [keys::ENTITY_PCI, keys::ENTITY_GPU_UUID].contains(&kind.as_str())
                && entities.iter().any(|entity| entity.entity_type == *kind)
        };
        let mut staying = self.whole().filter(stays).peekable();
        if staying.peek().is_some() {
            return staying.any(&healed);
        }
        self.whole().any(healed)
    }

    /// Returns the entities that name this subject in an event; empty for the node itself.
    pub fn entities(&self) -> Vec<Entity> {
        self.names
            .iter()
            .map(|(kind, value)| Entity {
                entity_type: kind.clone(),
                entity_value: value.clone(),
            })
            .collect()
    }

    /// Returns true if `entity` is one of the subject's names.
    pub fn is_named_by(&self, entity: &Entity) -> bool {
        self.names.contains(&canonical(entity))
    }

    /// Returns true if `entity`, of an event about this subject, names or describes it.
    pub fn concerns(&self, entity: &Entity) -> bool {
        let describes =
            DESCRIPTIONS.contains(&entity.entity_type.as_str()) || is_register(&entity.entity_type);
        self.names.contains(&canonical(entity))
            || (describes && self.names.iter().any(|(kind, _)| is_device_name(kind)))
    }

    /// Returns the value of the name of type `kind`, if the subject has one.
    pub fn name(&self, kind: &str) -> Option<&str> {
        self.names
            .iter()
            .find(|(name, _)| name == kind)
            .map(|(_, value)| value.as_str())
    }

    fn new<'a>(entities: impl IntoIterator<Item = &'a Entity>) -> Self {
        let mut names: Vec<_> = entities.into_iter().map(canonical).collect();
        names.sort();
        names.dedup();
        Self { names }
    }

    fn parts(&self) -> impl Iterator<Item = &(String, String)> {
        let alone = self.names.len() == 1;
        self.names
            .iter()
            .filter(move |(kind, _)| !alone && DISTINGUISHING_PARTS.contains(&kind.as_str()))
    }

    fn whole(&self) -> impl Iterator<Item = &(String, String)> {
        let alone = self.names.len() == 1;
        self.names
            .iter()
            .filter(move |(kind, _)| alone || !DISTINGUISHING_PARTS.contains(&kind.as_str()))
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.names.is_empty() {
            return f.write_str("the node");
        }
        for (index, (kind, value)) in self.names.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            write!(f, "{separator}{kind} {value}")?;
        }
        Ok(())
    }
}

/// Returns true if a recovery ends what a check of an agent has reported with a code about a
/// subject. The recovery's authority is not considered here.
///
/// The component class is not compared: some monitors report a recovery under another class
/// than the fault.
pub fn heals(
    recovery: &HealthEvent,
    agent: &str,
    check: &str,
    code: &str,
    subject: &Subject,
) -> bool {
    let codes = &recovery.error_code;
    recovery.agent == agent
        && recovery.check_name == check
        && (codes.is_empty() || codes.iter().any(|healed| healed == code))
        && subject.healed_by(&recovery.entities_impacted)
}

/// Normalises a PCI address for comparison: lower case, the domain in four digits if it fits,
/// no function (`00000000:B3:00.0` becomes `0000:b3:00`). Other text is only converted to lower
/// case.
pub fn normalise_pci(address: &str) -> String {
    let lower = address.trim().to_ascii_lowercase();
    let without_function = lower
        .rsplit_once('.')
        .map_or(lower.as_str(), |(device, _)| device);
    let parts: Vec<&str> = without_function.split(':').collect();
    let is_hex = |part: &&str| part.bytes().all(|byte| byte.is_ascii_hexdigit());
    match parts.as_slice() {
        [domain, bus, device] if parts.iter().all(is_hex) => {
            let domain = domain.trim_start_matches('0');
            format!("{domain:0>4}:{bus:0>2}:{device:0>2}")
        }
        [bus, device] if parts.iter().all(is_hex) => format!("0000:{bus:0>2}:{device:0>2}"),
        _ => lower,
    }
}

/// Returns the value of an entity in normalised form.
pub fn canonical_value(kind: &str, value: &str) -> String {
    if kind == keys::ENTITY_PCI {
        normalise_pci(value)
    } else {
        value.to_owned()
    }
}

fn canonical(entity: &Entity) -> (String, String) {
    let (kind, value) = (&entity.entity_type, &entity.entity_value);
    (kind.clone(), canonical_value(kind, value))
}

fn is_device_name(kind: &str) -> bool {
    DEVICE_NAMES.contains(&kind)
}

fn belongs_to_device(kind: &str) -> bool {
    DISTINGUISHING_PARTS.contains(&kind) || DESCRIPTIONS.contains(&kind) || is_register(kind)
}

fn is_register(kind: &str) -> bool {
    kind.strip_prefix("REG")
        .is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entities(list: &[(&str, &str)]) -> Vec<Entity> {
        list.iter()
            .map(|(kind, value)| Entity {
                entity_type: (*kind).to_owned(),
                entity_value: (*value).to_owned(),
            })
            .collect()
    }

    fn titles(list: &[(&str, &str)]) -> Vec<String> {
        Subject::of_entities(&entities(list))
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn entities_become_subjects() {
        assert_eq!(titles(&[]), ["the node"]);
        assert_eq!(
            titles(&[("PCI", "0000:B3:00.0"), ("GPU_UUID", "GPU-1")]),
            ["GPU_UUID GPU-1, PCI 0000:b3:00"]
        );
        assert_eq!(titles(&[("GPU", "0"), ("GPU", "1")]), ["GPU 0", "GPU 1"]);
        // Some monitors put the UUID there.
        assert_eq!(titles(&[("GPU", "GPU-1")]), ["GPU GPU-1"]);
        assert_eq!(
            titles(&[
                ("PCI", "0000:b3:00"),
                ("GPC", "1"),
                ("REG0", "01"),
                ("PCI_ID", "10de:2330")
            ]),
            ["PCI 0000:b3:00"]
        );
        assert_eq!(
            titles(&[("PCI", "0000:b3:00"), ("NVLINK", "3")]),
            ["NVLINK 3, PCI 0000:b3:00"]
        );
        assert_eq!(
            titles(&[("v1/Pod", "a/b"), ("v1/Pod", "a/c")]),
            ["v1/Pod a/b", "v1/Pod a/c"]
        );
    }

    #[test]
    fn one_device_under_several_names_is_the_same() {
        let subject = |list: &[(&str, &str)]| Subject::of_entities(&entities(list)).remove(0);
        let by_pci = subject(&[("PCI", "0000:b3:00")]);
        let mut both = subject(&[("PCI", "00000000:B3:00.0"), ("GPU_UUID", "GPU-1")]);
        assert!(by_pci.same(&both) && both.same(&by_pci));
        assert!(!by_pci.same(&subject(&[("PCI", "0000:b4:00")])));
        assert!(!by_pci.same(&subject(&[])));
        assert!(subject(&[]).same(&subject(&[])));
        let link = subject(&[("PCI", "0000:b3:00"), ("NVLINK", "3")]);
        assert!(!link.same(&by_pci) && link.same(&link.clone()));
        // Two switches may each have a link of the same number to one GPU.
        let of_switch = |number, pci| {
            subject(&[
                ("NVSWITCH", number),
                ("PCI", pci),
                ("NVLINK", "3"),
                ("GPU", "4"),
                ("GPU_UUID", "GPU-1"),
            ])
        };
        let first = of_switch("0", "0000:c1:00");
        assert!(first.same(&of_switch("0", "0000:C1:00.0")));
        assert!(!first.same(&of_switch("1", "0000:c2:00")));
        assert!(first.same(&subject(&[("PCI", "0000:c1:00"), ("NVLINK", "3")])));
        both.learn(&subject(&[("PCI", "0000:b3:00"), ("GPU", "4")]));
        assert_eq!(both.to_string(), "GPU 4, GPU_UUID GPU-1, PCI 0000:b3:00");
    }

    #[test]
    fn recovery_by_any_name_heals_the_device_and_by_a_part_only_the_part() {
        let subject = |list: &[(&str, &str)]| Subject::of_entities(&entities(list)).remove(0);
        let link = subject(&[
            ("PCI", "0000:b3:00"),
            ("GPU_UUID", "GPU-1"),
            ("NVLINK", "3"),
        ]);
        for (heals, by) in [
            (true, &[][..]),
            (true, &[("PCI", "0000:B3:00.0")]),
            (true, &[("GPU_UUID", "GPU-1")]),
            (true, &[("PCI", "0000:b3:00"), ("NVLINK", "3")]),
            (false, &[("PCI", "0000:b3:00"), ("NVLINK", "4")]),
            (false, &[("NVLINK", "3")]),
            (false, &[("PCI", "0000:b4:00")]),
            (false, &[("GPU_UUID", "GPU-2"), ("PCI", "0000:b4:00")]),
        ] {
            assert_eq!(link.healed_by(&entities(by)), heals, "{by:?}");
        }
        // The index of a GPU that is gone is reused.
        let named = [("GPU", "3"), ("PCI", "0000:b3:00"), ("GPU_UUID", "GPU-1")];
        let gpu = subject(&named);
        for (heals, by) in [
            (true, &named[..]),
            (true, &[("GPU", "3")]),
            (true, &[("GPU", "2"), ("GPU_UUID", "GPU-1")]),
            (false, &[("GPU", "3"), ("PCI", "0000:b4:00")]),
            (false, &[("GPU", "3"), ("GPU_UUID", "GPU-2")]),
        ] {
            assert_eq!(gpu.healed_by(&entities(by)), heals, "{by:?}");
        }
        let node = subject(&[]);
        assert!(node.healed_by(&[]));
        assert!(!node.healed_by(&entities(&[("GPU", "0")])));
    }

    #[test]
    fn pci_addresses_have_one_form() {
        for (given, form) in [
            ("0000:B3:00.0", "0000:b3:00"),
            ("00000000:b3:00.0", "0000:b3:00"),
            ("b3:00.0", "0000:b3:00"),
            ("00010000:01:00", "10000:01:00"),
            ("0008:01:00", "0008:01:00"),
            ("weird", "weird"),
            ("", ""),
        ] {
            assert_eq!(normalise_pci(given), form, "{given}");
        }
    }
}
