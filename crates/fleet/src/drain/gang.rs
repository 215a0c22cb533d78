//! Gangs: pods of one gang or job on a node share one decision, because a training that is asked
//! to leave in parts ends as a whole, and the work that its parts would have saved is lost.
//!
//! All of them leave in the gentlest mode of any of them, none counts as idle while another
//! works, and none is evicted before all that ask for time to write a checkpoint have had it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use super::partial::DrainedGpus;
use super::{Drain, DrainConfig, DrainMode, Next, PodView, checkpoint, stays};

/// Gangs on a node with pods that are to leave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gangs(BTreeMap<String, GangState>);

/// Shared state of a gang's pods on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GangState {
    /// Drain mode of all of them.
    pub(super) mode: DrainMode,
    /// Time since which none of them is ready; `None` while one is.
    unready_since: Option<Timestamp>,
    /// Longest time that one of them gets to write its checkpoint.
    wait: SignedDuration,
    /// Time until which one of them may write its checkpoint; `None` if none may.
    checkpoint: Option<Timestamp>,
}

// === impl Gangs ===

impl Gangs {
    /// Returns the gangs of those of `pods` that are to leave; with `gpus`, only of pods that
    /// may hold these.
    pub fn of<'a>(
        pods: impl Iterator<Item = &'a PodView>,
        drain: Drain,
        gpus: Option<&DrainedGpus>,
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
        let mut gangs: BTreeMap<String, GangState> = BTreeMap::new();
        for (gang, pod, mode) in &pods {
            let one = gangs.entry((*gang).clone()).or_insert(GangState {
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

    /// Returns the shared state of a pod's gang.
    pub(super) fn gang_of(&self, pod: &PodView) -> Option<&GangState> {
        self.0.get(pod.gang.as_ref()?)
    }

    /// Returns the time that a pod, or another of its gang, gets to write a checkpoint.
    pub fn wait(&self, pod: &PodView, drain: Drain, config: &DrainConfig) -> SignedDuration {
        let own = pod.checkpoint_wait(drain, config);
        self.gang_of(pod).map_or(own, |gang| own.max(gang.wait))
    }

    /// Returns the pod with the readiness of its gang: idle only if the whole gang is.
    pub fn with_gang_readiness<'a>(&self, pod: &'a PodView) -> Cow<'a, PodView> {
        match self.gang_of(pod) {
            Some(gang) if gang.unready_since != pod.unready_since => Cow::Owned(PodView {
                unready_since: gang.unready_since,
                ..pod.clone()
            }),
            _ => Cow::Borrowed(pod),
        }
    }
}

// === impl GangState ===

impl GangState {
    /// Returns what the pods of the gang wait for before they are evicted.
    pub(super) fn waits(&self, now: Timestamp) -> Option<Next> {
        let until = self.checkpoint.filter(|until| now < *until)?;
        Some(Next::Checkpoint(until))
    }
}

#[cfg(test)]
mod tests;
