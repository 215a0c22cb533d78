//! Invariants of the pods that leave a node.

use std::collections::BTreeSet;

use contract::keys;
use fleet::{PlannedCheckpoint, PlannedRemoval};
use jiff::{SignedDuration, Timestamp};
use model::node::NodeView;
use model::ownership::{DrainMark, Ownership};
use model::reporter::is_own_word;

use super::super::super::happening::Broken;
use super::super::super::node::{SimNode, SimPod};
use super::super::super::setup::Route;
use super::super::World;
use super::approval::waits;
use super::devices::faulty;
use super::drain::may_drain;

/// Longest wait for pods of the namespace `later`.
const DELETE_AFTER: SignedDuration = SignedDuration::from_mins(60);
/// Time that an evicted pod has to end, with some slack, before it may be deleted.
const ENDS_WITHIN: SignedDuration = SignedDuration::from_mins(6);
/// Longest time that a pod has to write a checkpoint.
const WRITES_WITHIN: SignedDuration = SignedDuration::from_mins(10);

/// Drain of a gang, or of a pod that is in none.
struct Departure<'a> {
    /// Pods of the gang that are to leave.
    pods: Vec<&'a SimPod>,
    /// Namespace of the gang whose pods are waited for longest.
    gentlest: &'a str,
    /// First time that pods may be evicted; `None`: they are waited for until they end.
    due: Option<Timestamp>,
    /// True if no pod is waited for.
    forced: bool,
    /// Start of the drain.
    since: Timestamp,
}

/// Checks that a pod is removed only from a node that is marked as draining for its session, whose
/// faults are not all routed past the drain, and as its namespace asks.
pub(in crate::simulate) fn removal(world: &World, planned: &PlannedRemoval) -> Result<(), Broken> {
    let title = format!("{}/{}", planned.namespace, planned.name);
    removed(world, planned, &title).map_err(|why| {
        format!(
            "the pod {title} of {} is to be removed: {why}",
            planned.node
        )
    })
}

fn removed(world: &World, planned: &PlannedRemoval, title: &str) -> Result<(), Broken> {
    let (mark, node) = draining(world, &planned.node)?;
    let Some((pod, departure)) = departure(world, node, title, mark)? else {
        return Ok(());
    };
    let now = world.now;
    let Some(due) = departure.due else {
        let gentlest = departure.gentlest;
        return Err(format!(
            "the namespace {gentlest} of its gang is waited for"
        ));
    };
    if now < due {
        return Err(format!("it is to be waited for until {due}"));
    }
    for other in &departure.pods {
        let until = due + departure.writes_within(other);
        if !departure.is_written(other) && now < until {
            let (title, gang) = (other.view.title(), &pod.view.gang);
            return Err(format!(
                "{title} of its gang {gang:?} has time for a checkpoint until {until}"
            ));
        }
    }
    if planned.evict.is_some() {
        return Ok(());
    }
    if departure.gentlest != "later" {
        return Err("without a grace period, against the mode of its namespace".to_owned());
    }
    let waits = departure
        .pods
        .iter()
        .map(|pod| departure.writes_within(pod));
    if now < due + waits.max().unwrap_or_default() + ENDS_WITHIN {
        return Err("without a grace period, before it had the time to end".to_owned());
    }
    Ok(())
}

/// Checks that a pod is asked to write a checkpoint once in a drain, when its eviction is due, and
/// only if it asks for that.
pub(in crate::simulate) fn checkpoint(
    world: &World,
    planned: &PlannedCheckpoint,
) -> Result<(), Broken> {
    let title = format!("{}/{}", planned.namespace, planned.name);
    asked(world, planned, &title)
        .map_err(|why| format!("the pod {title} is to write a checkpoint: {why}"))
}

fn asked(world: &World, planned: &PlannedCheckpoint, title: &str) -> Result<(), Broken> {
    if world.asks_checkpoint(&planned.uid) {
        return Err("it is being asked already".to_owned());
    }
    let (mark, node) = draining(world, &planned.node)?;
    let Some((pod, departure)) = departure(world, node, title, mark)? else {
        return Ok(());
    };
    let Some(checkpoint) = pod.view.checkpoint.filter(|_| !departure.forced) else {
        return Err("it is not waited for".to_owned());
    };
    let due = departure.due.filter(|due| *due <= world.now);
    if due.is_none_or(|due| world.now >= due + departure.writes_within(pod)) {
        return Err("its eviction is not due, or its time is over".to_owned());
    }
    // After the clock was set back, times do not tell the order.
    let requested = checkpoint.requested.filter(|_| !world.put_back);
    match requested.filter(|at| *at >= departure.since) {
        Some(at) => Err(format!("it was asked at {at}")),
        None => Ok(()),
    }
}

/// Returns the drain in progress of a node, whose pods may leave.
fn draining<'a>(world: &'a World, name: &str) -> Result<(DrainMark, &'a SimNode), Broken> {
    let Some((view, node)) = world.fleet.view(name).zip(world.node(name)) else {
        return Err("the controller does not know its node".to_owned());
    };
    let Some(own) = Ownership::read(view) else {
        return Err("its node has no session".to_owned());
    };
    if own.takes_node_out() {
        if own.mark.drain.is_none_or(|mark| mark.done.is_some()) {
            return Err("its node is not being drained".to_owned());
        }
        // Pods leave for a further fault also while a remediation of single GPUs goes on.
        let state = view.labels.get(keys::STATE_LABEL).map(String::as_str);
        if !world.setup.partial && state != Some(keys::STATE_DRAINING) {
            return Err("its node does not say that it is being drained".to_owned());
        }
        if !view.unschedulable {
            return Err("its node is in service".to_owned());
        }
    } else if !world.setup.partial {
        return Err("its node is in service".to_owned());
    }
    if world.setup.drains_by_resource(view) {
        return Err("another operator drains its node".to_owned());
    }
    may_drain(world, view)?;
    match own.mark.drain {
        Some(mark) => Ok((mark, node)),
        None => Err("the session of its node has no drain".to_owned()),
    }
}

/// Returns a pod, and what is to become of its gang. `None` if the pod has ended, or the controller
/// may not know all pods of the node.
fn departure<'a>(
    world: &World,
    node: &'a SimNode,
    title: &str,
    mark: DrainMark,
) -> Result<Option<(&'a SimPod, Departure<'a>)>, Broken> {
    let Some(pod) = node.pods.get(title).filter(|_| !node.hidden) else {
        return Ok(None);
    };
    let name = &node.view.name;
    let view: &NodeView = world.fleet.view(name).map_or(&node.view, |view| view);
    // On a node in service only the pods of single GPUs leave, also where all were to before.
    let own = Ownership::read(view);
    let single = own.is_some_and(|own| !own.takes_node_out() || !own.mark.drain_gpus.is_empty());
    if single {
        holds_a_faulty_gpu(world, name, pod)?;
    }
    let faulty = drained_gpus(world, name);
    let leaves = |other: &&SimPod| {
        let concerned = other.gpu.as_ref().is_some_and(|gpu| faulty.contains(gpu));
        let spared = single && other.is_known() && !concerned;
        !spared && other.view.namespace != "kube-system"
    };
    let of_gang = |other: &&SimPod| {
        let same = other.view.gang.is_some() && other.view.gang == pod.view.gang;
        other.view.uid == pod.view.uid || same
    };
    let pods: Vec<&SimPod> = node.pods.values().filter(of_gang).filter(leaves).collect();
    let gentlest = ["jobs", "later", "now"]
        .into_iter()
        .find(|namespace| pods.iter().any(|pod| pod.view.namespace == *namespace));
    let Some(gentlest) = gentlest else {
        return Err("its namespace is not drained".to_owned());
    };
    let events = world.fleet.desired(name).events;
    let forced = events.iter().map(|one| &one.event).any(|event| {
        let route = world.setup.route(&event.check_name);
        !is_own_word(event) && route == Some(Route::Forceful) && !waits(world, name, event)
    });
    // The clock may have been set back since the drain began.
    let since = mark.since.min(world.now);
    let due = match gentlest {
        _ if forced => Some(since),
        "now" => Some(since),
        "later" => Some(since + DELETE_AFTER),
        _ => None,
    };
    let departure = Departure {
        pods,
        gentlest,
        due,
        forced,
        since,
    };
    Ok(Some((pod, departure)))
}

// === impl Departure ===

impl Departure<'_> {
    /// Returns the time that a pod has to write a checkpoint.
    fn writes_within(&self, pod: &SimPod) -> SignedDuration {
        let own = pod.view.checkpoint.filter(|_| !self.forced);
        own.map_or(SignedDuration::ZERO, |own| {
            own.takes.unwrap_or(WRITES_WITHIN).min(WRITES_WITHIN)
        })
    }

    /// Returns true if a pod does not hold up its gang: it asks for no checkpoint, has written it, or
    /// is ending.
    fn is_written(&self, pod: &SimPod) -> bool {
        let Some(own) = pod.view.checkpoint else {
            return true;
        };
        let requested = own.requested.filter(|at| *at >= self.since);
        let written = requested.is_some_and(|at| own.done.is_some_and(|done| done >= at));
        written || pod.view.ends_by.is_some()
    }
}

/// Returns the UUIDs of the faulty GPUs of a node, without those whose routes skip the drain, or wait
/// for an approval.
fn drained_gpus(world: &World, node: &str) -> BTreeSet<String> {
    faulty(world, node, |event| {
        let route = world.setup.route(&event.check_name);
        route != Some(Route::Stays) && !waits(world, node, event)
    })
}

/// Checks that a pod is known to hold a GPU with a fault.
fn holds_a_faulty_gpu(world: &World, node: &str, pod: &SimPod) -> Result<(), Broken> {
    if !pod.is_known() {
        return Err("nobody says which GPU it holds".to_owned());
    }
    let faulty = drained_gpus(world, node);
    match &pod.gpu {
        Some(gpu) if faulty.contains(gpu) => Ok(()),
        gpu => Err(format!(
            "it holds {gpu:?}, and the faulty GPUs are {faulty:?}"
        )),
    }
}
