//! Passed checks of pods, so that a site may skip a repeated test of the same GPUs.
//!
//! Passes are kept in memory only: a restart forgets all, and a fault forgets those that it
//! concerns. Nothing proves that a check has run: a caller can cause a check to be skipped, and
//! nothing worse.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use contract::{HealthEvent, keys};

/// Most passes that are kept; a further one replaces the oldest.
const MAX_PASSES: usize = 1024;
/// Entity types that belong to one GPU.
const OF_A_GPU: [&str; 3] = [keys::ENTITY_GPU_UUID, keys::ENTITY_GPU, keys::ENTITY_PCI];

/// All passes. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Passes(Arc<Mutex<BTreeMap<Tested, Instant>>>);

/// Check, with the node and the GPUs that it tested.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tested {
    node: String,
    check: String,
    /// UUIDs in lower case.
    gpus: BTreeSet<String>,
}

// === impl Passes ===

impl Passes {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Tested, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a check has passed.
    pub(crate) fn note(&self, tested: Tested, now: Instant) {
        let mut passes = self.lock();
        if passes.len() >= MAX_PASSES && !passes.contains_key(&tested) {
            let oldest = passes.iter().min_by_key(|(_, at)| **at);
            let oldest = oldest.map(|(tested, _)| tested.clone());
            oldest.map(|oldest| passes.remove(&oldest));
        }
        passes.insert(tested, now);
    }

    /// Returns the time since a check passed.
    pub(crate) fn age(&self, tested: &Tested, now: Instant) -> Option<Duration> {
        let at = self.lock().get(tested).copied();
        at.map(|at| now.saturating_duration_since(at))
    }

    /// Forgets passes that a fault makes doubtful: those of the GPUs that it names by UUID, or
    /// all of its node if it names none or other entities.
    pub(crate) fn forget(&self, fault: &HealthEvent) {
        let entities = &fault.entities_impacted;
        let uuids = entities
            .iter()
            .filter(|one| one.entity_type == keys::ENTITY_GPU_UUID);
        let uuids: Vec<String> = uuids.map(|one| small(&one.entity_value)).collect();
        let is_of_gpus = entities
            .iter()
            .all(|one| OF_A_GPU.contains(&&*one.entity_type));
        let is_of_node = uuids.is_empty() || !is_of_gpus;
        self.lock().retain(|tested, _| {
            let is_named = is_of_node || uuids.iter().any(|uuid| tested.gpus.contains(uuid));
            !(is_named && tested.node == fault.node_name)
        });
    }
}

// === impl Tested ===

impl Tested {
    /// Returns the key of a check; `None` if it names no GPU.
    pub(crate) fn new(node: &str, check: &str, gpus: &[String]) -> Option<Self> {
        (!gpus.is_empty()).then(|| Self {
            node: node.to_owned(),
            check: check.to_owned(),
            gpus: gpus.iter().map(|uuid| small(uuid)).collect(),
        })
    }
}

fn small(uuid: &str) -> String {
    uuid.to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use contract::Entity;

    use super::*;

    fn tested(node: &str, check: &str, gpus: &[&str]) -> Tested {
        let gpus: Vec<String> = gpus.iter().map(|uuid| (*uuid).to_owned()).collect();
        Tested::new(node, check, &gpus).unwrap()
    }

    fn fault(node: &str, entities: &[(&str, &str)]) -> HealthEvent {
        let entity = |(kind, value): &(&str, &str)| Entity {
            entity_type: (*kind).to_owned(),
            entity_value: (*value).to_owned(),
        };
        HealthEvent {
            node_name: node.to_owned(),
            entities_impacted: entities.iter().map(entity).collect(),
            ..HealthEvent::default()
        }
    }

    #[test]
    fn a_pass_is_of_its_node_its_check_and_exactly_its_gpus() {
        let (passes, now) = (Passes::default(), Instant::now());
        passes.note(tested("n1", "dcgm-diag", &["GPU-a", "GPU-B"]), now);
        let later = now + Duration::from_secs(60);
        let same = tested("n1", "dcgm-diag", &["gpu-b", "GPU-a", "GPU-a"]);
        assert_eq!(passes.age(&same, later), Some(Duration::from_secs(60)));
        for other in [
            tested("n2", "dcgm-diag", &["GPU-a", "GPU-b"]),
            tested("n1", "nccl-loopback", &["GPU-a", "GPU-b"]),
            tested("n1", "dcgm-diag", &["GPU-a"]),
            tested("n1", "dcgm-diag", &["GPU-a", "GPU-b", "GPU-c"]),
        ] {
            assert_eq!(passes.age(&other, later), None, "{other:?}");
        }
        assert_eq!(Tested::new("n1", "dcgm-diag", &[]), None);
    }

    #[test]
    fn a_fault_forgets_its_gpus_or_its_whole_node() {
        let all = [
            tested("n1", "c", &["GPU-a", "GPU-b"]),
            tested("n1", "c", &["GPU-c"]),
            tested("n2", "c", &["GPU-d"]),
        ];
        let uuid = |uuid| (keys::ENTITY_GPU_UUID, uuid);
        for (fault, left) in [
            (
                fault("n1", &[uuid("gpu-B"), (keys::ENTITY_GPU, "1")]),
                [false, true, true],
            ),
            (fault("n1", &[uuid("GPU-x")]), [true, true, true]),
            (fault("n1", &[]), [false, false, true]),
            (
                fault("n1", &[(keys::ENTITY_GPU, "1")]),
                [false, false, true],
            ),
            (
                fault("n1", &[uuid("GPU-a"), (keys::ENTITY_NVSWITCH, "2")]),
                [false, false, true],
            ),
            (fault("n2", &[uuid("GPU-a")]), [true, true, true]),
        ] {
            let (passes, now) = (Passes::default(), Instant::now());
            for tested in &all {
                passes.note(tested.clone(), now);
            }
            passes.forget(&fault);
            let known = all
                .each_ref()
                .map(|tested| passes.age(tested, now).is_some());
            assert_eq!(known, left, "{fault:?}");
        }
    }

    #[test]
    fn callers_cannot_fill_the_memory() {
        let (passes, now) = (Passes::default(), Instant::now());
        let of = |number: usize| tested("n1", &number.to_string(), &["GPU-a"]);
        for number in 0..=MAX_PASSES {
            let at = now + Duration::from_secs(u64::try_from(number).unwrap());
            passes.note(of(number), at);
        }
        assert_eq!(passes.lock().len(), MAX_PASSES);
        assert_eq!(passes.age(&of(0), now), None);
        assert!(passes.age(&of(1), now).is_some());
    }
}
