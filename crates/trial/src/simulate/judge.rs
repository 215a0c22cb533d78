//! Invariants of the simulation.

use std::collections::BTreeSet;

use contract::{RecommendedAction, keys};
use fleet::drain::{Drain, DrainConfig, Fate, fate};
use fleet::remediation::validation::Validation;
use fleet::session::Intent;
use fleet::veto::Veto;
use fleet::{Fleet, Planned, PlannedRemoval, PlannedResource};
use jiff::{SignedDuration, Timestamp};
use model::attempt::{Attempt, Outcome, VALIDATION_GROUP};
use model::event::Record;
use model::fault::{Fault, FaultBook};
use model::node::NodeView;
use model::ownership::AFTER_BOOT;
use model::ownership::{Ownership, released_at};

use super::happening::Symptom;
use super::node::{FOREIGN, SimNode, name};

/// Description of a violated invariant.
pub(super) type Broken = String;

/// Longest time until a node is returned after the end of all its faults: the wait of a
/// flapping node, and some failed attempts.
pub(super) const GIVEN_BACK_WITHIN: SignedDuration = SignedDuration::from_mins(25);
/// Annotations by people that remain after a session.
const AFTER_A_PERSON: [&str; 5] = [
    keys::UNCORDONED_MANUALLY,
    keys::UNTAINTED_MANUALLY,
    keys::RELEASED_AT,
    keys::RELEASE,
    keys::VETO,
];

/// Checks that a patch undoes nothing that others did, when the API server applies it.
pub(super) fn patch(node: &SimNode, planned: &Planned) -> Result<(), Broken> {
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
    if planned.patch.intent == Intent::Release && node.view.unschedulable {
        validated(node)?;
    }
    Ok(())
}

/// Checks that all pods have left when the decision is made to call a node drained. Later,
/// somebody may bind another pod before the patch arrives.
pub(super) fn drained(
    node: &SimNode,
    planned: &Planned,
    config: &DrainConfig,
    now: Timestamp,
) -> Result<(), Broken> {
    let (change, name) = (&planned.patch.change, &planned.node);
    let state = change
        .labels
        .get(keys::STATE_LABEL)
        .and_then(Option::as_deref);
    // A cancelled remediation returns a node to its earlier state: drained.
    let own = Ownership::read(&planned.view);
    let was_drained = own.is_some_and(|own| own.mark.drain.is_some_and(|one| one.done.is_some()));
    if state == Some(keys::STATE_DRAINED) && planned.patch.intent == Intent::Update && !was_drained
    {
        let drain = Drain {
            since: now,
            force: false,
        };
        let left = node
            .pods
            .values()
            .find(|pod| matches!(fate(pod, drain, config, now), Fate::Leaves(..)));
        if let Some(pod) = left {
            return Err(format!(
                "{name} is called drained, and {} has not left",
                pod.title()
            ));
        }
    }
    Ok(())
}

/// Checks that a node with a remediation is returned only after a later validation has
/// succeeded.
fn validated(node: &SimNode) -> Result<(), Broken> {
    let own = Ownership::read(&node.view);
    let mark = own.and_then(|own| own.mark.remediation).unwrap_or_default();
    let is_repair = |one: &&Attempt| one.group != VALIDATION_GROUP && one.made.is_some();
    let passed = |one: &&Attempt| {
        let end = one.end.as_ref();
        one.group == VALIDATION_GROUP && end.is_some_and(|end| end.outcome == Outcome::Succeeded)
    };
    let counts = |one: &&Attempt| is_repair(one) || passed(one);
    match mark.attempts.iter().rfind(counts) {
        Some(last) if is_repair(&last) => Err(format!(
            "{} is given back after {}, and was not validated",
            node.view.name,
            last.title()
        )),
        _ => Ok(()),
    }
}

/// Checks that faults which a person has dismissed do not take a node out of service again.
pub(super) fn quarantine(fleet: &Fleet, planned: &Planned, put_back: bool) -> Result<(), Broken> {
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

/// Checks that a pod is removed only from a node that is marked as draining for its session.
pub(super) fn removal(
    fleet: &Fleet,
    planned: &PlannedRemoval,
    now: Timestamp,
) -> Result<(), Broken> {
    let title = format!("{}/{} of {}", planned.namespace, planned.name, planned.node);
    let wrong = |why: &str| Err(format!("the pod {title} is to be removed: {why}"));
    let Some(view) = fleet.view(&planned.node) else {
        return wrong("the controller does not know its node");
    };
    if view.labels.get(keys::STATE_LABEL).map(String::as_str) != Some(keys::STATE_DRAINING) {
        return wrong("its node is not being drained");
    }
    if !view.unschedulable {
        return wrong("its node is in service");
    }
    if let Ok(Some(veto)) = Veto::of(view, now) {
        return wrong(&format!("{veto} holds it back"));
    }
    if planned.namespace == "kube-system" {
        return wrong("it is one of the system's");
    }
    if planned.evict.is_none() && planned.namespace != "later" {
        return wrong("without a grace period, against the mode of its namespace");
    }
    Ok(())
}

/// Checks that the custom resource of a remediation is created only for the attempt that its
/// node records, once the node is drained.
pub(super) fn repair(fleet: &Fleet, planned: &PlannedResource) -> Result<(), Broken> {
    let wrong = |why: &str| Err(format!("{} is to be made: {why}", planned.name));
    let Some(view) = fleet.view(&planned.node) else {
        return wrong("the controller does not know its node");
    };
    let Some(own) = Ownership::read(view) else {
        return wrong("its node carries no session");
    };
    if Ownership::permit(view).attempt.as_ref() != Some(&planned.key) {
        return wrong("the session of its node has no such attempt in progress");
    }
    let validates = own
        .mark
        .remediation
        .as_ref()
        .and_then(|mark| mark.under_way());
    let validates = validates.is_some_and(|open| open.group == VALIDATION_GROUP);
    if !validates && own.mark.drain.is_none_or(|mark| mark.done.is_none()) {
        return wrong("its node is not drained");
    }
    Ok(())
}

/// Checks that a machine's uncordon does not return a node to service, when that is decided
/// about the current node. `begun` means that the node's remediation has started. A machine
/// uncordons a node soon after a boot or during a remediation; later the controller cannot
/// recognise it.
pub(super) fn release(
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
pub(super) fn book(fleet: &Fleet, stored: &[Record], nodes: &[SimNode]) -> Result<(), Broken> {
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
pub(super) fn settled(fleet: &Fleet, nodes: &[SimNode]) -> Result<(), Broken> {
    for node in nodes {
        let name = &node.view.name;
        let desired = fleet.desired(name);
        let own = Ownership::read(&node.view);
        if desired.takes_node_out() && own.is_none() {
            return Err(format!(
                "{name} has faults that take it out, and is in service"
            ));
        }
        if !desired.takes_node_out() && own.is_some() {
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
            has_a_way_out(fleet, node)?;
        }
    }
    Ok(())
}

/// Checks that a node out of service does not wait for nothing. This holds once time alone
/// changes nothing: then either a person was asked, or no fault of the node needs a
/// remediation.
fn has_a_way_out(fleet: &Fleet, node: &SimNode) -> Result<(), Broken> {
    let (name, awaits) = (&node.view.name, awaits(fleet, &node.view.name));
    let state = node.view.labels.get(keys::STATE_LABEL).map(String::as_str);
    let desired = fleet.desired(name);
    let mut events = desired.events.iter().map(|one| &one.event);
    let needs_remediation =
        events.any(|event| event.recommended_action() != RecommendedAction::None);
    let moves = [keys::STATE_DRAINING, keys::STATE_REMEDIATING];
    let wrong = match state {
        Some(state) if moves.contains(&state) => "and nothing is in progress",
        Some(keys::STATE_REMEDIATION_FAILED) if !awaits.starts_with("a person: ") => {
            "and no person is asked"
        }
        Some(keys::STATE_REMEDIATION_FAILED) => return Ok(()),
        _ if needs_remediation => "and nothing remediates its fault",
        _ => return Ok(()),
    };
    let state = state.unwrap_or("in no state");
    Err(format!(
        "{name} stays {state}, {wrong}: it waits for {awaits:?}"
    ))
}

/// Checks that each node is as others have left it.
pub(super) fn given_back(fleet: &Fleet, nodes: &[SimNode]) -> Result<(), Broken> {
    for node in nodes {
        let (name, view): (_, &NodeView) = (&node.view.name, &node.view);
        // A failed or unknown validation waits for a person.
        let validates = |fault: &Fault| Validation::of(&fault.event).is_some();
        if fleet.book().faults(name).iter().any(validates)
            && awaits(fleet, name).starts_with("a person: ")
        {
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

/// Returns what a node waits for, in a sentence.
fn awaits(fleet: &Fleet, name: &str) -> String {
    let session = fleet.status(name).and_then(|status| status.session);
    session.map(|session| session.awaits).unwrap_or_default()
}

/// Returns recoveries that end all faults.
pub(super) fn recoveries(fleet: &Fleet) -> Vec<Symptom> {
    let open = |symptom: &Symptom| {
        let faults = fleet.book().faults(&name(symptom.node));
        !faults.is_empty()
    };
    Symptom::all().filter(open).collect()
}
