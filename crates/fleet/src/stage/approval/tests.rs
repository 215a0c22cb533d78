use std::sync::Arc;

use contract::{BehaviourOverrides, keys};
use model::node::NodeView;
use policy::Policy;
use serde_json::{Value, json};

use super::*;
use crate::drain::{DrainConfig, PodView};
use crate::remediation::RemediationConfig;
use crate::session::Phase;
use crate::view::SessionView;
use crate::world::{Fate, LookEffects, Restart, World, event, settings};
use crate::{PlannedResource, Settings};

mod repairs;

/// Faults of the check `Ask` wait for an approval.
const POLICY: &str = r#"
    [[routes]]
    name = "ask"
    drain = "forceful"
    approve = true
    [[routes.match.all]]
    kind = "HealthEvent"
    expression = "event.checkName == 'Ask'"
    [[rule-sets]]
    name = "fatal"
    cordon = { shouldCordon = true }
    [[rule-sets.match.all]]
    kind = "HealthEvent"
    expression = "event.isFatal"
"#;
const REBOOT: i32 = 24;
const RESET: i32 = 2;

/// Creates a controller that drains and remediates, and a node with a pod on each of two GPUs.
fn world_with(drain: &str, remediation: RemediationConfig) -> World {
    let settings = Settings {
        drain: Some(Arc::new(DrainConfig::parse(drain, "d").unwrap())),
        remediation: Some(Arc::new(remediation)),
        ..settings()
    };
    let policy = Policy::parse(POLICY, "p").unwrap();
    let mut world = World::with(settings, &policy, [NodeView::unknown("n1")]);
    for name in ["a", "b"] {
        let pod = PodView {
            namespace: "web".into(),
            name: name.into(),
            uid: format!("uid-{name}"),
            gpus: [format!("GPU-{name}")].into(),
            ..PodView::default()
        };
        world.pods.insert(format!("web/{name}"), pod);
    }
    world.restart(Restart::Nothing);
    world
}

fn world() -> World {
    world_with("", RemediationConfig::builtin())
}

/// Reports a fault of the GPU `GPU-NAME`.
fn fault(world: &mut World, check: &str, name: &str, action: i32) {
    let gpu = format!("GPU-{name}");
    world.tick();
    let mut event = event(check, &[("GPU_UUID", &gpu)], true, false);
    event.recommended_action = action;
    world.store(event, world.now);
}

/// Reports a fault whose sender asks that pods stay.
fn stays(world: &mut World) {
    world.tick();
    let mut stays = event("LookOnly", &[("GPU", "2")], true, false);
    let (force, skip) = (false, true);
    stays.drain_overrides = Some(BehaviourOverrides { force, skip });
    world.store(stays, world.now);
}

fn look(world: &mut World) -> Vec<LookEffects> {
    (0..6).map(|_| world.look(Fate::Made)).collect()
}

fn texts(looked: &[LookEffects]) -> Vec<&str> {
    let notes = looked.iter().flat_map(|one| &one.notes);
    notes.map(|note| note.text.as_str()).collect()
}

fn removed(looked: &[LookEffects]) -> BTreeSet<&str> {
    let removals = looked.iter().flat_map(|one| &one.removals);
    removals.map(|one| one.name.as_str()).collect()
}

fn made(looked: Vec<LookEffects>) -> Option<PlannedResource> {
    let mut made = looked.into_iter().flat_map(|one| one.creations);
    made.next()
}

/// Checks that nothing leaves the node, and nothing is created.
fn nothing_happens(looked: &[LookEffects]) {
    assert_eq!(removed(looked), BTreeSet::new());
    let created = looked.iter().flat_map(|one| &one.creations);
    let created: Vec<&str> = created.map(|one| one.action.as_str()).collect();
    assert_eq!(created, [""; 0]);
}

fn session(world: &World) -> SessionView {
    world.fleet.status("n1").unwrap().session.unwrap()
}

fn own(world: &World) -> Ownership {
    Ownership::read(&world["n1"]).unwrap()
}

fn proposal(world: &World) -> Option<Proposal> {
    own(world).mark.proposal().cloned()
}

fn title(world: &World) -> String {
    proposal(world).map_or_else(String::new, |one| one.title())
}

/// Returns the approval of the proposal that waits, for this many minutes.
fn approval(world: &World, minutes: i64) -> Value {
    let id = proposal(world).unwrap().id(&own(world).session_id);
    let until = world.now + SignedDuration::from_mins(minutes);
    json!({"proposal": id, "by": "anna", "at": world.now, "until": until})
}

fn approve(world: &mut World) -> Vec<LookEffects> {
    let approval = approval(world, 60).to_string();
    world.annotate(keys::APPROVE, approval);
    look(world)
}

/// Lets all pods leave.
fn leave(world: &mut World) -> Vec<LookEffects> {
    world.pods.clear();
    world.deliver_pods();
    look(world)
}

#[test]
fn a_route_that_asks_waits_for_a_person_with_all_but_the_quarantine() {
    let mut world = world();
    fault(&mut world, "Ask", "a", REBOOT);
    let looked = look(&mut world);
    assert!(world["n1"].unschedulable, "the quarantine waits for nobody");
    assert_eq!(world.phase(), Phase::Quarantined);
    nothing_happens(&looked);
    assert_eq!(title(&world), "drain of the node, RESTART_BM");
    let awaits = "a person's approval of drain of the node, RESTART_BM: gpuwarden approve n1";
    assert_eq!(session(&world).awaits, awaits);
    assert_eq!(session(&world).proposal, proposal(&world));
    let notes = world.fleet.status("n1").unwrap().notes;
    assert_eq!(notes, [format!("waits for {awaits}")]);
    let drain = session(&world).drain.unwrap().to_string();
    let held = "NotStarted: held back by policy route 'ask': it waits for an approval";
    assert_eq!(drain, held);
    let events: Vec<_> = looked.iter().flat_map(|one| &one.waits).collect();
    let says =
        "drain of the node, RESTART_BM waits until a person approves it: gpuwarden approve n1";
    assert_eq!(events, [&("ApprovalNeeded", says.to_owned())]);
    let proposed = "proposed: drain of the node, RESTART_BM; it waits until a person approves it: \
                    gpuwarden approve n1";
    assert_eq!(
        texts(&looked)
            .iter()
            .filter(|one| **one == proposed)
            .count(),
        1
    );
    // However long it takes, and whoever starts anew: it waits, and it is the same proposal.
    let before = proposal(&world);
    for with in [Restart::All, Restart::Events, Restart::Nothing] {
        world.now += SignedDuration::from_hours(30);
        nothing_happens(&look(&mut world));
        world.restart(with);
        let looked = look(&mut world);
        nothing_happens(&looked);
        assert!(texts(&looked).contains(&proposed), "people are told again");
        assert_eq!(proposal(&world), before);
    }
    let looked = approve(&mut world);
    assert_eq!(removed(&looked), ["a", "b"].into());
    let approved = "approved by anna: drain of the node, RESTART_BM";
    assert_eq!(
        texts(&looked)
            .iter()
            .filter(|one| **one == approved)
            .count(),
        1
    );
    assert!(
        !world["n1"].annotations.contains_key(keys::APPROVE),
        "it is taken in"
    );
    let made = made(leave(&mut world)).unwrap();
    assert_eq!(made.action, "RESTART_BM");
    assert_eq!(world.phase(), Phase::Remediating);
}

#[test]
fn what_was_approved_goes_on_whoever_starts_anew_and_however_long_it_takes() {
    for with in [Restart::All, Restart::Events, Restart::Nothing] {
        // As soon as it is written, once it is taken in, and while pods leave.
        for looks in [0, 1, 6] {
            let mut world = world();
            fault(&mut world, "Ask", "a", REBOOT);
            look(&mut world);
            let approval = approval(&world, 60).to_string();
            world.annotate(keys::APPROVE, approval);
            for _ in 0..looks {
                world.look(Fate::Made);
            }
            world.restart(with);
            look(&mut world);
            assert_eq!(world.phase(), Phase::Draining, "{with:?} {looks}");
            world.now += SignedDuration::from_hours(5);
            world.restart(with);
            look(&mut world);
            let made = made(leave(&mut world)).unwrap();
            assert_eq!(made.action, "RESTART_BM", "{with:?} {looks}");
        }
    }
}

#[test]
fn an_approval_sent_twice_does_no_harm_and_one_of_something_else_approves_nothing() {
    let mut world = world();
    fault(&mut world, "Ask", "a", REBOOT);
    look(&mut world);
    let right = approval(&world, 60);
    let mut other_session = right.clone();
    other_session["proposal"] = json!(proposal(&world).unwrap().id("another"));
    let mut earlier = right.clone();
    let id = &own(&world).session_id;
    earlier["proposal"] = json!(format!("{id}/2027-01-15T08:00:00Z"));
    let (expired, long) = (approval(&world, -1), approval(&world, 25 * 60));
    for wrong in [
        other_session,
        earlier,
        expired,
        long,
        json!("yes"),
        json!({}),
    ] {
        world["n1"].annotations.remove(keys::APPROVE);
        look(&mut world);
        world.annotate(keys::APPROVE, wrong.to_string());
        let looked = look(&mut world);
        nothing_happens(&looked);
        let said = texts(&looked)
            .iter()
            .any(|one| one.contains("does not count"));
        assert!(said, "{wrong}: {:?}", texts(&looked));
        let notes = world.fleet.status("n1").unwrap().notes;
        assert!(
            notes.iter().any(|one| one.contains("does not count")),
            "{notes:?}"
        );
        assert_eq!(
            world["n1"].annotations[keys::APPROVE],
            wrong.to_string(),
            "a person's"
        );
    }
    world.annotate(keys::APPROVE, right.to_string());
    assert_eq!(removed(&look(&mut world)), ["a", "b"].into());
    let before = own(&world);
    world.annotate(keys::APPROVE, right.to_string());
    let looked = look(&mut world);
    assert!(texts(&looked).iter().all(|one| !one.contains("approve")));
    assert_eq!(own(&world), before);
    assert!(!world["n1"].annotations.contains_key(keys::APPROVE));
}

#[test]
fn a_veto_holds_what_is_approved_and_an_approval_that_is_not_used_expires() {
    let mut world = world();
    fault(&mut world, "Ask", "a", REBOOT);
    look(&mut world);
    let first = proposal(&world).unwrap();
    let until = world.now + SignedDuration::from_hours(2);
    let veto = json!({"by": "otto", "reason": "later", "until": until}).to_string();
    world.annotate(keys::VETO, veto.clone());
    nothing_happens(&approve(&mut world));
    assert_eq!(proposal(&world), None);
    assert!(
        session(&world)
            .awaits
            .starts_with("the end of the veto of otto")
    );
    // The process looks at the node when the approval ends, and proposes anew.
    world.now = world.fleet.wake_at().unwrap();
    let looked = look(&mut world);
    nothing_happens(&looked);
    let expired = texts(&looked)
        .iter()
        .any(|one| one.starts_with("the approval by anna has expired unused"));
    assert!(expired, "{:?}", texts(&looked));
    let second = proposal(&world).unwrap();
    assert_eq!(second.actions, first.actions);
    assert_ne!(second.since, first.since);
    world.now = until;
    nothing_happens(&look(&mut world));
    // Within its time the end of the veto is enough.
    world.annotate(keys::VETO, veto.replace("otto", "otto2"));
    world.now = until - SignedDuration::from_mins(30);
    approve(&mut world);
    world.now = until;
    assert_eq!(removed(&look(&mut world)), ["a", "b"].into());
}

#[test]
fn a_fault_that_asks_nobody_is_acted_on_beside_one_that_does() {
    let mut world = world_with("partialDrainEnabled = true", resets());
    fault(&mut world, "Ask", "a", RESET);
    look(&mut world);
    assert_eq!(title(&world), "drain of GPU-a, COMPONENT_RESET GPU-a");
    fault(&mut world, "GpuMemWatch", "b", RESET);
    let looked = look(&mut world);
    assert_eq!(world.phase(), Phase::Draining);
    assert_eq!(own(&world).mark.drain_gpus, ["GPU-b"]);
    assert!(!removed(&looked).contains("a"));
    assert_eq!(title(&world), "drain of GPU-a, COMPONENT_RESET GPU-a");
    let awaits = session(&world).awaits;
    let beside = "gpuwarden approve n1; beside that, a pod to leave";
    assert!(awaits.contains(beside), "{awaits}");
    let looked = approve(&mut world);
    assert!(removed(&looked).contains("a"));
    assert_eq!(own(&world).mark.drain_gpus, ["GPU-a", "GPU-b"]);
}

#[test]
fn a_senders_force_and_a_release_wait_for_no_approval() {
    let mut world = world();
    world.tick();
    let mut forced = event("Ask", &[("GPU", "0")], true, false);
    let (force, skip) = (true, false);
    forced.drain_overrides = Some(BehaviourOverrides { force, skip });
    forced.recommended_action = REBOOT;
    world.store(forced, world.now);
    assert_eq!(removed(&look(&mut world)), ["a", "b"].into());
    nothing_happens(&leave(&mut world)); // Its repair is not forced.
    assert_eq!(title(&world), "RESTART_BM");
    world.annotate(keys::APPROVE, json!({}).to_string());
    world.annotate(
        keys::RELEASE,
        json!({"by": "anna", "reason": "r"}).to_string(),
    );
    look(&mut world);
    assert_eq!(world.phase(), Phase::Idle);
    let annotations = &world["n1"].annotations;
    let left = [keys::APPROVE, keys::SESSION].map(|key| annotations.contains_key(key));
    assert_eq!(left, [false, false], "{annotations:?}");
}

#[test]
fn a_proposal_that_changes_is_another_one_and_ends_with_its_faults() {
    let mut world = world_with("partialDrainEnabled = true", resets());
    fault(&mut world, "Ask", "a", RESET);
    look(&mut world);
    let of_one = approval(&world, 60);
    fault(&mut world, "Ask", "b", RESET);
    look(&mut world);
    let both = "drain of GPU-a, drain of GPU-b, COMPONENT_RESET GPU-a, COMPONENT_RESET GPU-b";
    assert_eq!(title(&world), both);
    world.annotate(keys::APPROVE, of_one.to_string());
    nothing_happens(&look(&mut world));
    world["n1"].annotations.remove(keys::APPROVE);
    // What was approved and not begun is for the faults of then.
    let until = world.now + SignedDuration::from_hours(1);
    let veto = json!({"by": "otto", "until": until}).to_string();
    world.annotate(keys::VETO, veto);
    approve(&mut world);
    assert_eq!(own(&world).mark.proposals.len(), 1);
    stays(&mut world);
    for name in ["GPU-a", "GPU-b"] {
        world.report("Ask", &[("GPU_UUID", name)], false, true);
    }
    look(&mut world);
    assert_eq!(own(&world).mark.proposals, []);
    world["n1"].annotations.remove(keys::VETO);
    fault(&mut world, "Ask", "a", RESET);
    let looked = look(&mut world);
    assert!(proposal(&world).is_some(), "{:?}", texts(&looked));
}

/// Returns a configuration that resets single GPUs, and else reboots.
fn resets() -> RemediationConfig {
    RemediationConfig::parse(RESETS, "t", |_| Err(String::new())).unwrap()
}

const RESETS: &str = r#"
[remediationActions.COMPONENT_RESET]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "GPUReset"
completeConditionType = "Complete"
templateFileName = "t"
equivalenceGroup = "reset"
impactedEntityScope = "GPU_UUID"

[remediationActions.RESTART_BM]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "RebootNode"
completeConditionType = "NodeReady"
templateFileName = "t"
equivalenceGroup = "restart"

[templates]
t = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata:
  name: maintenance-{{ .NodeName }}-{{ .HealthEventID }}
"""
"#;
