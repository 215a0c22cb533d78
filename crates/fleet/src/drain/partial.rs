//! The drain of single GPUs: only the pods that hold one of them leave.

use std::collections::BTreeSet;

use super::{Drain, DrainConfig, Fate, Gangs, Next, PodView, Stay, fate_in_gang};

use jiff::Timestamp;

/// Prefix of the UUID of a part of a GPU.
const PART: &str = "MIG-";

/// GPUs of a node whose pods leave, and the pods that hold GPUs by a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainedGpus {
    /// UUIDs of the GPUs and of their parts.
    pub uuids: BTreeSet<String>,
    /// Pods that hold one of them by a claim, as `NAMESPACE/NAME`.
    pub holders: BTreeSet<String>,
    /// Pods that hold any GPU of the node by a claim.
    pub claimed: BTreeSet<String>,
}

// === impl DrainedGpus ===

impl DrainedGpus {
    /// Returns whether a pod holds one of them; `None` if that is not known.
    pub fn holds(&self, pod: &PodView) -> Option<bool> {
        let title = pod.title();
        let is_one = |uuid: &String| self.uuids.iter().any(|one| one.eq_ignore_ascii_case(uuid));
        if self.holders.contains(&title) || pod.gpus.iter().any(is_one) {
            return Some(true);
        }
        // The GPU of a part may be unknown.
        let part = |uuid: &String| uuid.get(..PART.len()).is_some_and(|one| one == PART);
        let known = !pod.gpus.is_empty() && !pod.gpus.iter().any(part);
        (known || !pod.has_gpus || self.claimed.contains(&title)).then_some(false)
    }
}

/// Returns the fate of `pod` together with its gang. With `gpus`, only pods that hold one of
/// these leave.
pub fn fate_of(
    pod: &PodView,
    gangs: &Gangs,
    drain: Drain,
    gpus: Option<&DrainedGpus>,
    config: &DrainConfig,
    now: Timestamp,
) -> Fate {
    let fate = fate_in_gang(pod, gangs, drain, config, now);
    let Some(gpus) = gpus else {
        return fate;
    };
    match (fate, gpus.holds(pod)) {
        (Fate::Leaves(..), Some(false)) => Fate::Stays(Stay::OtherGpu),
        // Evicting the wrong pod would cost work on a healthy GPU.
        (Fate::Leaves(mode, _), None) => Fate::Leaves(mode, Next::Unknown),
        (fate, _) => fate,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain::DrainMode;

    fn pod(name: &str, gpus: &[&str], has_gpus: bool) -> PodView {
        PodView {
            namespace: "a".to_owned(),
            name: name.to_owned(),
            gpus: gpus.iter().map(|one| (*one).to_owned()).collect(),
            has_gpus,
            ..PodView::default()
        }
    }

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|one| (*one).to_owned()).collect()
    }

    #[test]
    fn only_who_holds_one_of_the_gpus_leaves_and_of_whom_it_is_not_known_nobody_guesses() {
        let gpus = DrainedGpus {
            uuids: set(&["GPU-1", "MIG-1a"]),
            holders: set(&["a/claims-it"]),
            claimed: set(&["a/claims-it", "a/claims-another"]),
        };
        let leaves = Fate::Leaves(DrainMode::AllowCompletion, Next::Wait(None));
        let unknown = Fate::Leaves(DrainMode::AllowCompletion, Next::Unknown);
        let stays = Fate::Stays(Stay::OtherGpu);
        for (pod, expected) in [
            (pod("a", &["GPU-0", "gpu-1"], true), leaves),
            (pod("a", &["GPU-0"], true), stays),
            (pod("a", &[], false), stays),
            (pod("a", &[], true), unknown),
            (pod("a", &["MIG-1a"], true), leaves),
            (pod("a", &["MIG-2a"], true), unknown),
            // By a claim, also one that stands for an extended resource.
            (pod("claims-it", &[], true), leaves),
            (pod("claims-another", &[], true), stays),
            (
                PodView {
                    finished: true,
                    ..pod("a", &["GPU-1"], true)
                },
                Fate::Stays(Stay::Finished),
            ),
        ] {
            let drain = Drain {
                since: Timestamp::UNIX_EPOCH,
                force: false,
            };
            let config = DrainConfig::default();
            let gangs = Gangs::default();
            let now = Timestamp::UNIX_EPOCH;
            let found = fate_of(&pod, &gangs, drain, Some(&gpus), &config, now);
            assert_eq!(found, expected, "{pod:?}");
        }
    }
}
