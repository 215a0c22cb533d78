//! Pods of one gang or job on a node are one decision: a training that is asked to leave in parts ends as a
//! whole, and what its parts would have saved is lost.
//!
//! All of them leave in the gentlest mode of any of them, none is taken for idle while another works, and
//! none is evicted before all that ask for the time to write a checkpoint have had it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::partial::Gpus;
use super::{Drain, DrainConfig, DrainMode, Next, PodView, checkpoint, stays};

/// The gangs of a node of which pods are to leave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gangs(BTreeMap<String, Together>);

/// What the pods of a gang on one node have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Together {
    /// The mode in which they leave.
    pub(super) mode: DrainMode,
    /// Since when none of them is ready; `None` while one is.
    unready_since: Option<Timestamp>,
    /// The longest time that one of them gets to write its checkpoint.
    wait: SignedDuration,
    /// Until when one of them has to write its checkpoint; `None` where none has.
    checkpoint: Option<Timestamp>,
}

// === impl Gangs ===

impl Gangs {
    /// Returns the gangs of those of `pods` that are to leave; of some GPUs only, where these are given.
    pub fn of<'a>(
        pods: impl Iterator<Item = &'a PodView>,
        drain: Drain,
        gpus: Option<&Gpus>,
        config: &DrainConfig,
        now: Timestamp,
    ) -> Self {
        let pods: Vec<(&String, &PodView, DrainMode)> = pods
            .filter_map(|pod| {
                let spared = gpus.is_some_and(|gpus| gpus.holds(pod) == Some(false));
                let mode = stays(pod, config).ok().filter(|_| !spared)?;
                Some((pod.gang.as_ref()?, pod, mode))
            })
            .collect();
        let mut gangs: BTreeMap<String, Together> = BTreeMap::new();
        for (gang, pod, mode) in &pods {
            let one = gangs.entry((*gang).clone()).or_insert(Together {
                mode: *mode,
                unready_since: pod.unready_since,
                wait: SignedDuration::ZERO,
                checkpoint: None,
            });
            one.mode = one.mode.gentler(*mode);
            one.unready_since = one
                .unready_since
                .zip(pod.unready_since)
                .map(|(a, b)| a.max(b));
            one.wait = one.wait.max(pod.checkpoint_wait(drain, config));
        }
        for (gang, pod, _) in pods {
            if let Some(one) = gangs.get_mut(gang) {
                let own = checkpoint(pod, one.mode, drain, config, now);
                one.checkpoint = one.checkpoint.max(own.map(|(_, until)| until));
            }
        }
        Self(gangs)
    }

    /// Returns what the gang of a pod has in common.
    pub(super) fn together(&self, pod: &PodView) -> Option<&Together> {
        self.0.get(pod.gang.as_ref()?)
    }

    /// Returns the time that a pod, or another of its gang, gets to write a checkpoint.
    pub fn wait(&self, pod: &PodView, drain: Drain, config: &DrainConfig) -> SignedDuration {
        let own = pod.checkpoint_wait(drain, config);
        self.together(pod).map_or(own, |gang| own.max(gang.wait))
    }

    /// Returns a pod as its gang is: idle only where that is.
    pub fn as_one<'a>(&self, pod: &'a PodView) -> Cow<'a, PodView> {
        match self.together(pod) {
            Some(gang) if gang.unready_since != pod.unready_since => Cow::Owned(PodView {
                unready_since: gang.unready_since,
                ..pod.clone()
            }),
            _ => Cow::Borrowed(pod),
        }
    }
}

// === impl Together ===

impl Together {
    /// Returns what its pods wait for before they are evicted.
    pub(super) fn waits(&self, now: Timestamp) -> Option<Next> {
        let until = self.checkpoint.filter(|until| now < *until)?;
        Some(Next::Checkpoint(until))
    }
}

#[cfg(test)]
mod tests;
