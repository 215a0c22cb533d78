//! Approvals of single actions of the remediation configuration, and of what follows a repair.

use super::*;
use crate::{CreateAnswer, FleetInput};

/// Creates a controller where these actions wait for an approval, and a node without pods.
fn asks_for(actions: &[&str]) -> World {
    let mut config = resets();
    for name in actions {
        config.actions.get_mut(*name).unwrap().approve = true;
    }
    let mut world = world_with("", config);
    world.pods.clear();
    world
}

/// Creates a custom resource, as the API server would, and ends its attempt for this reason.
fn end(world: &mut World, planned: &PlannedResource, reason: &str) {
    let mut object = planned.object.clone();
    object["metadata"]["uid"] = json!(format!("uid-{}", planned.key));
    world.resources.insert(planned.name.clone(), object.clone());
    let (node, key) = ("n1".to_owned(), planned.key.clone());
    let answer = CreateAnswer::There(Box::new(object));
    world.handle(FleetInput::ResourceCreated { node, key, answer });
    look(world);
    let condition = json!({"type": "AttemptComplete", "status": "True", "reason": reason});
    let object = world.resources.get_mut(&planned.name).unwrap();
    object["status"] = json!({"conditions": [condition]});
    world.deliver_resources();
    look(world);
}

#[test]
fn an_action_that_asks_is_proposed_once_the_node_is_drained() {
    let mut world = asks_for(&["RESTART_BM"]);
    fault(&mut world, "GpuMemWatch", "a", REBOOT);
    nothing_happens(&look(&mut world));
    assert_eq!(world.phase(), Phase::Drained, "its drain asks nobody");
    assert_eq!(title(&world), "RESTART_BM");
    let awaits = "a person's approval of RESTART_BM: gpuwarden approve n1";
    assert_eq!(session(&world).awaits, awaits);
    assert_eq!(made(approve(&mut world)).unwrap().action, "RESTART_BM");

    let mut world = asks_for(&["RESTART_BM"]);
    fault(&mut world, "GpuMemWatch", "a", RESET);
    let reset = made(look(&mut world)).unwrap();
    assert_eq!(reset.action, "COMPONENT_RESET", "it does not ask");
}

#[test]
fn a_repair_that_failed_for_now_is_tried_again_and_the_next_one_asks_again() {
    let mut world = asks_for(&["COMPONENT_RESET", "RESTART_BM"]);
    fault(&mut world, "GpuMemWatch", "a", RESET);
    look(&mut world);
    assert_eq!(title(&world), "COMPONENT_RESET GPU-a");
    let first = made(approve(&mut world)).unwrap();
    end(&mut world, &first, "TransientFailure");
    world.now += SignedDuration::from_hours(3);
    world.restart(Restart::Nothing);
    let again = made(look(&mut world)).unwrap();
    assert_eq!(again.action, "COMPONENT_RESET");
    assert_eq!(proposal(&world), None);
    end(&mut world, &again, "PermanentFailure");
    nothing_happens(&look(&mut world));
    assert_eq!(title(&world), "RESTART_BM", "it is another action");
    assert_eq!(made(approve(&mut world)).unwrap().action, "RESTART_BM");
}

#[test]
fn a_repair_that_succeeded_uses_its_approval_up() {
    let mut world = asks_for(&["RESTART_BM"]);
    fault(&mut world, "GpuMemWatch", "a", REBOOT);
    look(&mut world);
    let first = made(approve(&mut world)).unwrap();
    end(&mut world, &first, "Succeeded");
    assert_eq!(proposal(&world), None);
    // A newer fault, within the time of the approval.
    fault(&mut world, "GpuXidError", "b", REBOOT);
    nothing_happens(&look(&mut world));
    assert_eq!(title(&world), "RESTART_BM");
}

#[test]
fn a_route_that_asks_asks_again_for_the_rest_of_the_node() {
    let mut world = world_with("partialDrainEnabled = true", resets());
    fault(&mut world, "Ask", "a", RESET);
    look(&mut world);
    assert!(removed(&approve(&mut world)).contains("a"));
    world.pods.remove("web/a");
    world.deliver_pods();
    let reset = made(look(&mut world)).unwrap();
    end(&mut world, &reset, "PermanentFailure");
    nothing_happens(&look(&mut world));
    assert_eq!(world.phase(), Phase::Drained);
    assert_eq!(title(&world), "drain of the node, RESTART_BM");
    assert!(removed(&approve(&mut world)).contains("b"));
    assert_eq!(made(leave(&mut world)).unwrap().action, "RESTART_BM");
    assert_eq!(proposal(&world), None);
}

#[test]
fn a_repair_that_is_not_configured_asks_a_person_to_repair_and_not_to_approve() {
    let mut world = asks_for(&[]);
    fault(&mut world, "Ask", "a", 5);
    look(&mut world);
    assert_eq!(title(&world), "drain of the node");
    approve(&mut world);
    let awaits = session(&world).awaits;
    let person = awaits.starts_with("a person: no repair is configured for");
    assert!(person, "{awaits}");
    assert_eq!(world.phase(), Phase::RemediationFailed);
}

#[test]
fn a_drain_is_approved_for_the_repair_that_follows_it_and_for_nothing_later() {
    let mut world = world();
    fault(&mut world, "Ask", "a", REBOOT);
    look(&mut world);
    approve(&mut world);
    let reboot = made(leave(&mut world)).unwrap();
    end(&mut world, &reboot, "Succeeded");
    // Another fault keeps the node out, and asks for no drain.
    stays(&mut world);
    world.report("Ask", &[("GPU_UUID", "GPU-a")], false, true);
    look(&mut world);
    assert_eq!(own(&world).mark.drain, None);
    fault(&mut world, "Ask", "b", REBOOT);
    nothing_happens(&look(&mut world));
    assert_eq!(title(&world), "drain of the node, RESTART_BM");
}
