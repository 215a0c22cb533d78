//! The fate of each pod on a node that is drained.
//!
//! [`partial::fate_of`] decides about each pod from its state, its gang and the configuration for
//! its namespace. So a namespace that waits holds up no other one, and a restart gets the same
//! answer. `stage/drain/pods.rs` keeps track of failed tries.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use model::time::later;

mod config;
mod custom;
mod gang;
pub mod partial;
pub mod plan;

pub use config::DrainConfig;
pub use custom::{CustomDrain, PodsToDrain};
pub use gang::Gangs;

/// Time that a pod may outlast its grace period before it counts as stuck: a busy kubelet
/// reports late.
pub const SLACK: SignedDuration = SignedDuration::from_secs(60);
/// Grace period of a pod that names none, as in Kubernetes.
const DEFAULT_GRACE: SignedDuration = SignedDuration::from_secs(30);

/// A pod of a node, as the drain sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodView {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Uid, which no later pod of the same name has.
    pub uid: String,
    /// Labels of the pod.
    pub labels: BTreeMap<String, String>,
    /// True once all its containers have ended for good (phase `Succeeded` or `Failed`).
    pub finished: bool,
    /// True if a `DaemonSet` owns it, which would recreate it at once.
    pub of_daemon_set: bool,
    /// True if the kubelet runs it from a file of the machine, and the API server has only its
    /// mirror.
    pub is_static: bool,
    /// UUIDs of its GPUs, as far as they are recorded on the pod.
    pub gpus: BTreeSet<String>,
    /// True if it has GPUs, by its requests or by the devices that it was given.
    pub has_gpus: bool,
    /// Grace period (`terminationGracePeriodSeconds`), if it names one.
    pub grace: Option<SignedDuration>,
    /// Deadline of its end, if it is being deleted (`deletionTimestamp`).
    pub ends_by: Option<Timestamp>,
    /// Time since which it is not ready; `None` while it is.
    pub unready_since: Option<Timestamp>,
    /// Gang or job that it belongs to.
    pub gang: Option<String>,
    /// Set if it asks for time to write a checkpoint before it is evicted.
    pub checkpoint: Option<Checkpoint>,
}

/// Checkpoint of a pod that asks for time to write one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Longest time that it takes; `None` for as long as allowed.
    pub takes: Option<SignedDuration>,
    /// Time when it was last asked to write one.
    pub requested: Option<Timestamp>,
    /// Time of the last request that it has answered: that checkpoint is written.
    pub done: Option<Timestamp>,
}

/// Drain mode of the pods of a namespace. The names are NVSentinel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DrainMode {
    /// Evicts them at once.
    Immediate,
    /// Waits until they end by themselves.
    AllowCompletion,
    /// Waits for them until a time, then evicts, and at last deletes them.
    DeleteAfterTimeout,
}

/// A drain that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// Begin of the drain.
    pub since: Timestamp,
    /// True if a sender asks not to wait for any pod (`drainOverrides.force`).
    pub force: bool,
}

/// A decision about a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The pod stays, and the drain does not wait for it.
    Stays(Stay),
    /// The pod leaves in this mode, and this happens next.
    Leaves(DrainMode, Next),
}

/// Reason why a pod stays on a node that is drained. Displayed for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    /// The pod has ended.
    Finished,
    /// A `DaemonSet` owns it.
    DaemonSet,
    /// The kubelet runs it from a file.
    Static,
    /// The pod's namespace is one of the system's.
    System,
    /// The configuration names no mode for it.
    NoMode,
    /// The pod has no GPU, and only pods with GPUs are drained.
    NoGpu,
    /// The pod holds none of the GPUs that are drained.
    OtherGpu,
}

/// Next step of a pod that leaves. Displayed for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The pod is asked to write a checkpoint before its eviction.
    AskCheckpoint,
    /// The pod, or another of its gang, has time to write a checkpoint until then.
    Checkpoint(Timestamp),
    /// The pod is evicted, with this grace period.
    Evict(SignedDuration),
    /// The pod is deleted whatever protects it, without time to end.
    Delete,
    /// The drain waits for the pod until then; with `None` until it has ended.
    Wait(Option<Timestamp>),
    /// The pod is ending, and has time until then.
    Ends(Timestamp),
    /// Nothing happens until it is known which GPUs the pod has.
    Unknown,
    /// The pod has not ended in time. The kubelet does not say that its containers are gone.
    Stuck,
}

/// Returns the fate of `pod` without regard to a gang.
pub fn fate(pod: &PodView, drain: Drain, config: &DrainConfig, now: Timestamp) -> Fate {
    fate_in_gang(pod, &Gangs::default(), drain, config, now)
}

/// Returns the fate of `pod` together with its gang.
fn fate_in_gang(
    pod: &PodView,
    gangs: &Gangs,
    drain: Drain,
    config: &DrainConfig,
    now: Timestamp,
) -> Fate {
    let gang = gangs.gang_of(pod);
    let configured = match stays(pod, config) {
        Err(stay) => return Fate::Stays(stay),
        Ok(mode) => gang.map_or(mode, |gang| gang.mode),
    };
    let mode = if drain.force {
        DrainMode::Immediate
    } else {
        configured
    };
    let pod = gangs.with_gang_readiness(pod);
    let deadline = later(drain.since, config.delete_after);
    let evict = Next::Evict(
        pod.grace
            .unwrap_or(DEFAULT_GRACE)
            .min(config.eviction_grace),
    );
    let deletes = (configured == DrainMode::DeleteAfterTimeout
        && now >= last_resort(&pod, gangs, drain, config))
        || stuck_until(&pod, config).is_some_and(|until| now >= until);
    let idle = pod
        .unready_since
        .is_some_and(|since| now >= later(since, config.unready_after));
    let prepares = checkpoint(&pod, mode, drain, config, now).map(|(next, _)| next);
    let prepares = prepares.or_else(|| gang?.waits(now));
    let next = match (mode, pod.ends_by) {
        _ if deletes => Next::Delete,
        (_, Some(ends_by)) if now < later(ends_by, SLACK) => Next::Ends(later(ends_by, SLACK)),
        (_, Some(_)) => Next::Stuck,
        // A pod that has not been ready for so long does no work worth waiting for.
        (_, None) if idle => evict,
        (DrainMode::AllowCompletion, None) => Next::Wait(None),
        (DrainMode::DeleteAfterTimeout, None) if now < deadline => Next::Wait(Some(deadline)),
        (DrainMode::Immediate | DrainMode::DeleteAfterTimeout, None) => prepares.unwrap_or(evict),
    };
    Fate::Leaves(mode, next)
}

/// Returns when a pod that may be deleted has had its time to end, whether or not its eviction
/// was allowed. `force` waits for that time only.
fn last_resort(pod: &PodView, gangs: &Gangs, drain: Drain, config: &DrainConfig) -> Timestamp {
    let due = if drain.force {
        drain.since
    } else {
        later(drain.since, config.delete_after)
    };
    let asked = later(due, gangs.wait(pod, drain, config));
    later(later(asked, config.eviction_grace), SLACK)
}

/// Returns when a pod that has not ended in time is deleted; `None` if never.
fn stuck_until(pod: &PodView, config: &DrainConfig) -> Option<Timestamp> {
    let (ends_by, after) = pod.ends_by.zip(config.stuck_after)?;
    Some(later(later(ends_by, SLACK), after))
}

/// Returns the drain mode of a pod, or why it stays.
fn stays(pod: &PodView, config: &DrainConfig) -> Result<DrainMode, Stay> {
    if pod.finished {
        return Err(Stay::Finished);
    }
    if pod.is_static {
        return Err(Stay::Static);
    }
    if pod.of_daemon_set {
        return Err(Stay::DaemonSet);
    }
    if config.is_system(&pod.namespace) {
        return Err(Stay::System);
    }
    if config.only_gpu_pods && !pod.has_gpus {
        return Err(Stay::NoGpu);
    }
    config.mode_of(pod).ok_or(Stay::NoMode)
}

/// Returns what precedes the eviction of a pod that asks for time to write a checkpoint, and
/// until when; `None` if it has had that time, or does not ask.
fn checkpoint(
    pod: &PodView,
    mode: DrainMode,
    drain: Drain,
    config: &DrainConfig,
    now: Timestamp,
) -> Option<(Next, Timestamp)> {
    let own = pod.checkpoint.filter(|_| pod.ends_by.is_none())?;
    let due = match mode {
        DrainMode::AllowCompletion => return None,
        DrainMode::Immediate => drain.since,
        DrainMode::DeleteAfterTimeout => drain.since.checked_add(config.delete_after).ok()?,
    };
    // The time counts from when the eviction is due, whenever the request is made: the owner of
    // the pod cannot put it off.
    let until = due.checked_add(pod.checkpoint_wait(drain, config)).ok()?;
    if now >= until {
        return None;
    }
    // A request of an earlier drain does not count.
    match own.requested.filter(|at| *at >= drain.since) {
        None => Some((Next::AskCheckpoint, until)),
        Some(at) if own.done.is_some_and(|done| done >= at) => None,
        Some(_) => Some((Next::Checkpoint(until), until)),
    }
}

/// Returns when to ask [`fate`] again about `pod` if nothing happens. `gangs` are those of its
/// node.
pub fn wake_at(
    pod: &PodView,
    next: Next,
    gangs: &Gangs,
    drain: Drain,
    config: &DrainConfig,
) -> Option<Timestamp> {
    let pod = gangs.with_gang_readiness(pod);
    let idle = pod
        .unready_since
        .map(|since| later(since, config.unready_after));
    match next {
        Next::Wait(until) => [until, idle].into_iter().flatten().min(),
        Next::Ends(until) | Next::Checkpoint(until) => Some(until),
        // The last resort applies to one mode; for the others time alone changes nothing.
        Next::AskCheckpoint | Next::Evict(_) | Next::Stuck => {
            let last = last_resort(&pod, gangs, drain, config);
            stuck_until(&pod, config).into_iter().chain([last]).min()
        }
        Next::Delete | Next::Unknown => None,
    }
}

// === impl PodView ===

impl PodView {
    /// Returns the name with its namespace: `NAMESPACE/NAME`.
    pub fn title(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Returns the time that the pod gets to write a checkpoint: zero if the drain waits for no
    /// pod.
    fn checkpoint_wait(&self, drain: Drain, config: &DrainConfig) -> SignedDuration {
        let limit = config.checkpoint_limit;
        let own = self.checkpoint.filter(|_| !drain.force);
        own.map_or(SignedDuration::ZERO, |own| {
            own.takes.unwrap_or(limit).min(limit)
        })
    }
}

// === impl DrainMode ===

impl DrainMode {
    /// All modes that can be configured.
    pub const ALL: [Self; 3] = [
        Self::Immediate,
        Self::AllowCompletion,
        Self::DeleteAfterTimeout,
    ];

    /// Returns the mode of the two that waits longer.
    fn gentler(self, other: Self) -> Self {
        let rank = |mode: Self| match mode {
            Self::Immediate => 0,
            Self::DeleteAfterTimeout => 1,
            Self::AllowCompletion => 2,
        };
        if rank(other) > rank(self) {
            other
        } else {
            self
        }
    }

    /// Returns the mode's name, as NVSentinel writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Immediate => "Immediate",
            Self::AllowCompletion => "AllowCompletion",
            Self::DeleteAfterTimeout => "DeleteAfterTimeout",
        }
    }
}

// === impl Stay ===

impl fmt::Display for Stay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Finished => "it has ended",
            Self::DaemonSet => "a DaemonSet owns it",
            Self::Static => "the kubelet runs it from a file",
            Self::System => "its namespace is one of the system's",
            Self::NoMode => "the configuration names no mode for it",
            Self::NoGpu => "it has no GPU, and only pods with GPUs are drained",
            Self::OtherGpu => "it holds none of the GPUs that are drained",
        })
    }
}

// === impl Next ===

impl fmt::Display for Next {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AskCheckpoint => f.write_str("is asked to write a checkpoint"),
            Self::Checkpoint(until) => {
                write!(
                    f,
                    "is waited for until its checkpoint is written, or {until:.0}"
                )
            }
            Self::Evict(grace) => write!(f, "is evicted, with {} s to end", grace.as_secs()),
            Self::Delete => f.write_str("is deleted, without time to end"),
            Self::Wait(None) => f.write_str("is waited for until it has ended"),
            Self::Wait(Some(until)) => write!(f, "is waited for until {until:.0}"),
            Self::Ends(until) => write!(f, "is ending, until {until:.0}"),
            Self::Unknown => f.write_str("is left alone until it is known which GPUs it has"),
            Self::Stuck => f.write_str("has not ended in its time"),
        }
    }
}

#[cfg(test)]
mod tests;
