//! Invariants of the simulation.

use std::collections::BTreeSet;

use contract::{RecommendedAction, keys};
use fleet::remediation::validation::Validation;
use fleet::session::Intent;
use fleet::{DRAIN_ACTION, Fleet, Planned, PlannedResource};
use jiff::{SignedDuration, Timestamp};
use model::event::EventRecord;
use model::fault::{Fault, FaultBook};
use model::node::NodeView;
use model::ownership::{AFTER_BOOT, Ownership, released_at};
use model::reporter::is_own_word;

use super::super::happening::{Broken, Symptom};
use super::super::node::{FOREIGN, SimNode, name};
use super::super::setup::Route;
use super::World;
use remediation::{failure_is_told, validated};

mod approval;
mod devices;
mod drain;
mod pods;
mod remediation;

pub(in crate::simulate) use approval::approved;
pub(in crate::simulate) use devices::rule;
pub(in crate::simulate) use drain::drained;
pub(in crate::simulate) use pods::{checkpoint, removal};

/// Longest time until a node is returned after the end of all its faults: the wait of a
/// flapping node, and some failed attempts.
pub(in crate::simulate) const GIVEN_BACK_WITHIN: SignedDuration = SignedDuration::from_mins(25);
/// Annotations by people that remain after a session.
const AFTER_A_PERSON: [&str; 6] = [
    keys::UNCORDONED_MANUALLY,
    keys::UNTAINTED_MANUALLY,
    keys::RELEASED_AT,
    keys::RELEASE,
    keys::VETO,
    keys::APPROVE,
];

/// Checks that a patch undoes nothing that others did, when the API server applies it.
pub(in crate::simulate) fn patch(
    world: &World,
    node: &SimNode,
    planned: &Planned,
) -> Result<(), Broken> {
    let (change, name) = (&planned.patch.change, &planned.node);
    if change.unschedulable == Some(false) && node.cordoned_by_hand {
        return Err(format!(
            "{name} is uncordoned, and somebody else has cordoned it"
        ));
    }
    let of_others = change.remove_taints.iter().map(|taint| &taint.key);
    let of_others = of_others.chain(change.labels.keys());
    if let Some(key) = of_others.into_iter().find(|key| key.starts_with(FOREIGN)) {
        return Err(format!("{name} loses {key}, which is another's"));
    }
    if planned.patch.intent == Intent::Return && node.view.unschedulable {
        validated(world, node)?;
    }
    Ok(())
}

/// Checks that a custom resource is not asked for twice, and is to be created now.
pub(in crate::simulate) fn created(world: &World, planned: &PlannedResource) -> Result<(), Broken> {
    let PlannedResource { name, key, .. } = planned;
    if world.creates(key) {
        return Err(format!("{name} is to be made twice at once"));
    }
    if world.watched.contains_key(name) && world.resources.has(name, key) {
        return Err(format!(
            "{name} is to be made, and the controller sees that it exists"
        ));
    }
    if planned.action == DRAIN_ACTION {
        drain::by_resource(world, planned)
    } else {
        remediation::by_resource(world, planned)
    }
}

/// Checks that no custom resource of a drain outlasts the session that asked for it.
fn withdrawn(world: &World) -> Result<(), Broken> {
    match world.resources.left(&world.nodes) {
        Some(name) => Err(format!(
            "{name} is left, and no session asks for that drain"
        )),
        None => Ok(()),
    }
}

/// Checks that faults which a person has dismissed do not take a node out of service again.
pub(in crate::simulate) fn quarantine(
    fleet: &Fleet,
    planned: &Planned,
    put_back: bool,
) -> Result<(), Broken> {
    // After the clock was set back, times do not tell the order.
    if planned.patch.intent != Intent::Quarantine || put_back {
        return Ok(());
    }
    let faults = fleet.book().faults(&planned.node);
    match released_at(&planned.view) {
        Some(at) if faults.iter().all(|fault| fault.accepted_at <= at) => Err(format!(
            "{} is taken out, and all its faults are older than its release by a person",
            planned.node
        )),
        _ => Ok(()),
    }
}

/// Checks that a machine's uncordon does not return a node to service, when that is decided
/// about the current node. `begun` means that the node's remediation has started. A machine
/// uncordons a node soon after a boot or during a remediation; later the controller cannot
/// recognise it.
pub(in crate::simulate) fn release(
    node: &SimNode,
    planned: &Planned,
    begun: bool,
    now: Timestamp,
) -> Result<(), Broken> {
    let asked = planned.view.annotations.contains_key(keys::RELEASE);
    let uncordoned = planned
        .patch
        .change
        .annotations
        .get(keys::UNCORDONED_MANUALLY);
    let released = planned.patch.intent == Intent::StandDown && uncordoned.is_some() && !asked;
    let booted = node
        .booted
        .is_some_and(|at| now.duration_since(at) < AFTER_BOOT);
    let seen = planned.view.resource_version == node.view.resource_version;
    if released && seen && node.uncordoned_by_machine && (booted || begun) {
        return Err(format!(
            "{} was uncordoned by a machine, and its session ends",
            planned.node
        ));
    }
    Ok(())
}

/// Checks that the open faults are exactly those of the accepted events, however often these
/// were read.
pub(in crate::simulate) fn book(
    fleet: &Fleet,
    stored: &[EventRecord],
    nodes: &[SimNode],
) -> Result<(), Broken> {
    let mut fresh = FaultBook::default();
    for record in stored {
        fresh.record(record);
    }
    for node in nodes {
        let name = &node.view.name;
        // Notices expire after a day.
        let titles = |book: &FaultBook| -> BTreeSet<String> {
            let faults = book.faults(name).iter();
            let lasting = faults.filter(|fault| fault.notice_until().is_none());
            lasting.map(Fault::title).collect()
        };
        let (open, expected) = (titles(fleet.book()), titles(&fresh));
        if open != expected {
            return Err(format!(
                "the open faults of {name} are {open:?}; its events give {expected:?}"
            ));
        }
    }
    Ok(())
}

/// Checks that every node is as its open faults require, and waits only where it may.
pub(in crate::simulate) fn settled(world: &World) -> Result<(), Broken> {
    let fleet = &world.fleet;
    for node in &world.nodes {
        let name = &node.view.name;
        let desired = fleet.desired(name);
        let own = Ownership::read(&node.view);
        if desired.wanted() && own.is_none() {
            return Err(format!(
                "{name} has faults that take it out, and is in service"
            ));
        }
        if !desired.wanted() && own.is_some() {
            return Err(format!(
                "{name} has no fault that takes it out, and is not given back: it waits for {:?}",
                awaits(fleet, name)
            ));
        }
        let cordon = node.cordoned_by_hand || own.is_some() && desired.cordon;
        if node.view.unschedulable != cordon {
            let is = if cordon { "not cordoned" } else { "cordoned" };
            return Err(format!("{name} is {is}, against what is wanted"));
        }
        if own.is_some() {
            failure_is_told(node, &awaits(fleet, name))?;
            has_a_way_out(world, node)?;
        }
        devices::settled(world, name)?;
    }
    withdrawn(world)
}

/// Checks that a node out of service does not wait for nothing. This holds once time alone
/// changes nothing: then either a person was asked, or no fault of the node needs a
/// remediation.
fn has_a_way_out(world: &World, node: &SimNode) -> Result<(), Broken> {
    let fleet = &world.fleet;
    let (name, awaits) = (&node.view.name, awaits(fleet, &node.view.name));
    let state = node.view.labels.get(keys::STATE_LABEL).map(String::as_str);
    let desired = fleet.desired(name);
    let mut events = desired.events.iter().map(|one| &one.event);
    let needs_remediation = events.any(|event| {
        event.recommended_action() != RecommendedAction::None
            && Route::remediates(world.setup.route(&event.check_name))
    });
    let own = Ownership::read(&node.view);
    let drain = own.and_then(|own| own.mark.drain);
    let drains = drain.is_some_and(|mark| mark.done.is_none());
    let moves = [keys::STATE_DRAINING, keys::STATE_REMEDIATING];
    let wrong = match state {
        Some(state) if moves.contains(&state) => "and nothing is in progress",
        Some(keys::STATE_REMEDIATION_FAILED) if !asks_a_person(&awaits) => "and no person is asked",
        Some(keys::STATE_REMEDIATION_FAILED) => return Ok(()),
        None if drains => "and its drain is not done",
        _ if awaits.starts_with("a person's approval of ") => return Ok(()),
        // A device that alone is out of service is not remediated.
        _ if !desired.takes_node_out() => return Ok(()),
        _ if needs_remediation => "and nothing remediates its fault",
        _ => return Ok(()),
    };
    let state = state.unwrap_or("in no state");
    Err(format!(
        "{name} stays {state}, {wrong}: it waits for {awaits:?}"
    ))
}

/// Checks that each node is as others have left it.
pub(in crate::simulate) fn given_back(world: &World) -> Result<(), Broken> {
    let fleet = &world.fleet;
    devices::given_back(world)?;
    withdrawn(world)?;
    for node in &world.nodes {
        let (name, view): (_, &NodeView) = (&node.view.name, &node.view);
        failure_is_told(node, &awaits(fleet, name))?;
        // A failed or unknown validation waits for a person.
        let validates = |fault: &Fault| Validation::of(&fault.event).is_some();
        if fleet.book().faults(name).iter().any(validates) && asks_a_person(&awaits(fleet, name)) {
            continue;
        }
        if view.unschedulable != node.cordoned_by_hand {
            return Err(format!(
                "{name} is not given back: its cordon is {}, and it waits for {:?}",
                view.unschedulable,
                awaits(fleet, name)
            ));
        }
        let ours = view.taints.iter().map(|on| &on.taint.key);
        let labels = view
            .labels
            .keys()
            .filter(|key| !key.starts_with("nvidia.com/"));
        let mut ours = ours.chain(labels).filter(|key| !key.starts_with(FOREIGN));
        let mut notes = view.annotations.keys();
        let note = notes.find(|key| !AFTER_A_PERSON.contains(&key.as_str()));
        if let Some(left) = ours.next().or(note) {
            return Err(format!("{name} is given back, and {left} is left on it"));
        }
    }
    Ok(())
}

/// Returns the routes of the faults that keep a node out of service, without those that
/// gpuwarden reports itself.
fn routes(world: &World, name: &str) -> Vec<Option<Route>> {
    let events = world.fleet.desired(name).events;
    let reported = events.iter().filter(|one| !is_own_word(&one.event));
    reported
        .map(|one| world.setup.route(&one.event.check_name))
        .collect()
}

/// Returns what a node waits for, in a sentence.
fn awaits(fleet: &Fleet, name: &str) -> String {
    let session = fleet.status(name).and_then(|status| status.session);
    session.map(|session| session.awaits).unwrap_or_default()
}

/// Returns true if a node waits for a person, beside an approval or not.
fn asks_a_person(awaits: &str) -> bool {
    let person = "a person: ";
    awaits.starts_with(person) || awaits.contains(&format!("; beside that, {person}"))
}

/// Returns recoveries that end all faults.
pub(in crate::simulate) fn recoveries(fleet: &Fleet) -> Vec<Symptom> {
    let open = |symptom: &Symptom| {
        let faults = fleet.book().faults(&name(symptom.node));
        !faults.is_empty()
    };
    Symptom::all().filter(open).collect()
}
