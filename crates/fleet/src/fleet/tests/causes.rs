//! Faults that another one explains: who is taken out of service, and who is not.

use std::collections::BTreeSet;

use contract::HealthEvent;
use model::fault::WAIT_FOR_PRIMARY;

use super::*;
use crate::world::Restart;

const DOMAIN: &str = "nvidia.com/gpu.clique";
/// GPUs of an NVL72 rack less eight, one on each node.
const NODES: usize = 64;

/// A controller of a cluster whose nodes are one NVLink domain.
fn rack() -> World {
    let names = (0..NODES).map(name);
    let nodes: Vec<NodeView> = names.map(|name| NodeView::unknown(&name)).collect();
    let mut world = World::with(settings(), &Policy::builtin(), nodes);
    world.restart(Restart::Nothing);
    world
}

fn name(index: usize) -> String {
    format!("gpu-{index:02}")
}

/// Stores the report of an XID, or its recovery.
fn xid(world: &mut World, node: &str, code: &str, healthy: bool) {
    let event = HealthEvent {
        agent: "syslog-health-monitor".into(),
        node_name: node.into(),
        error_code: vec![code.into()],
        recommended_action: 2,
        metadata: [(DOMAIN.to_owned(), "rack-1.0".to_owned())].into(),
        ..event(
            keys::CHECK_XID,
            &[(keys::ENTITY_PCI, "0000:b3:00")],
            true,
            healthy,
        )
    };
    world.store(event, world.now);
}

/// Decides until nothing changes. Patches are made at once.
fn settle(world: &mut World) {
    for _ in 0..20 {
        let patches = world.decide().patches;
        if patches.is_empty() {
            return;
        }
        for planned in patches {
            let node = planned.node;
            world[&node] = world[&node].after(&planned.patch.change);
            let answer = PatchAnswer::Made(world.view(&node));
            world.handle(FleetInput::NodePatched { node, answer });
        }
    }
    panic!("it does not come to rest");
}

/// Returns the names of the nodes out of service.
fn out(world: &World) -> BTreeSet<String> {
    let nodes = world.nodes.iter();
    let out = nodes.filter(|(_, node)| node.unschedulable);
    out.map(|(name, _)| name.clone()).collect()
}

fn wait(world: &mut World, span: SignedDuration) {
    world.now += span;
    settle(world);
}

#[test]
fn a_link_that_dies_takes_one_node_out_of_service_and_not_its_sixty_three_peers() {
    for heard_as in [0, 1, 40, NODES - 1] {
        let mut world = rack();
        let mut peers = (1..NODES).map(name);
        for _ in 0..heard_as {
            xid(
                &mut world,
                &peers.next().unwrap(),
                "145.RLW_SRC_TRACK",
                false,
            );
            settle(&mut world);
        }
        assert_eq!(out(&world), BTreeSet::new());
        world.now += SignedDuration::from_secs(1);
        xid(&mut world, &name(0), "149.NETIR_LINK_EVT", false);
        settle(&mut world);
        // The primary waits for nothing.
        assert_eq!(out(&world), [name(0)].into());
        for peer in peers {
            xid(&mut world, &peer, "145.RLW_SRC_TRACK", false);
        }
        wait(&mut world, WAIT_FOR_PRIMARY);
        wait(&mut world, SignedDuration::from_hours(1));
        assert_eq!(out(&world), [name(0)].into());
        // The followers end with their primary, and no other node follows it out.
        xid(&mut world, &name(0), "149.NETIR_LINK_EVT", true);
        settle(&mut world);
        assert_eq!(out(&world), BTreeSet::new());
        assert_eq!(world.fleet.book().nodes().count(), 0);
    }
}

#[test]
fn a_restart_at_any_step_takes_nobody_else_out() {
    for with in [Restart::All, Restart::Events] {
        let mut world = rack();
        for step in 0..4 {
            match step {
                0 => xid(&mut world, &name(1), "145", false),
                1 => xid(&mut world, &name(0), "149", false),
                2 => xid(&mut world, &name(2), "145", false),
                _ => xid(&mut world, &name(0), "149", true),
            }
            world.restart(with);
            settle(&mut world);
            let expected: BTreeSet<String> = match step {
                0 | 3 => BTreeSet::new(),
                _ => [name(0)].into(),
            };
            assert_eq!(out(&world), expected, "step {step}");
        }
        wait(&mut world, WAIT_FOR_PRIMARY);
        assert_eq!(out(&world), BTreeSet::new());
    }
}

#[test]
fn a_follower_alone_waits_two_seconds_and_goes_out() {
    let mut world = rack();
    xid(&mut world, &name(1), "145", false);
    settle(&mut world);
    assert_eq!(out(&world), BTreeSet::new());
    let until = world.now + WAIT_FOR_PRIMARY;
    assert_eq!(world.fleet.wake_at(), Some(until));
    wait(&mut world, WAIT_FOR_PRIMARY);
    assert_eq!(out(&world), [name(1)].into());
}

#[test]
fn a_node_that_went_out_before_its_primary_was_heard_is_given_back() {
    let mut world = rack();
    xid(&mut world, &name(1), "145", false);
    wait(&mut world, SignedDuration::from_secs(5));
    assert_eq!(out(&world), [name(1)].into());
    xid(&mut world, &name(0), "149", false);
    wait(&mut world, SignedDuration::from_secs(1));
    assert_eq!(out(&world), [name(0)].into());
    // What it reports after the primary has recovered counts.
    xid(&mut world, &name(0), "149", true);
    settle(&mut world);
    wait(&mut world, SignedDuration::from_mins(20));
    xid(&mut world, &name(1), "145", false);
    wait(&mut world, WAIT_FOR_PRIMARY);
    assert_eq!(out(&world), [name(1)].into());
}

#[test]
fn a_follower_whose_primary_was_evicted_asks_again_until_the_primary_is_read_again() {
    let mut world = rack();
    for index in 0..NODES {
        let labels = &mut world[&name(index)].labels;
        labels.insert(DOMAIN.to_owned(), "rack-1.0".to_owned());
    }
    world.list();
    let report =
        |world: &mut World, node: &str, check: &str, code: &str, edit: fn(&mut HealthEvent)| {
            let mut event = HealthEvent {
                agent: "syslog-health-monitor".into(),
                node_name: node.into(),
                error_code: vec![code.into()],
                recommended_action: 2,
                ..event(check, &[(keys::ENTITY_PCI, "0000:b3:00")], true, false)
            };
            edit(&mut event);
            world.store(event, world.now);
        };
    report(&mut world, &name(0), keys::CHECK_XID, "149", |_| ());
    report(&mut world, &name(1), keys::CHECK_XID, "145", |_| ());
    for code in 1..MAX_OPEN_FAULTS_PER_NODE {
        report(&mut world, &name(0), "Check", &code.to_string(), |_| ());
    }
    wait(&mut world, WAIT_FOR_PRIMARY);
    assert_eq!(out(&world), [name(0)].into());
    // Another reporter, which has few faults, gets room.
    report(&mut world, &name(0), "Check", "other", |event| {
        Reporter::Pod("training/a".into()).note_in(event);
    });
    settle(&mut world);
    assert_eq!(world.fleet.book().missed(&name(0)), 1, "the primary");
    assert_eq!(out(&world), [name(0), name(1)].into());

    for code in 1..MAX_OPEN_FAULTS_PER_NODE / 2 {
        report(&mut world, &name(0), "Check", &code.to_string(), |event| {
            (event.is_healthy, event.is_fatal) = (true, false);
        });
    }
    // The report that had evicted it finds no room in the first reading.
    while let Some(mut reading) = world.fleet.book().read_again("") {
        let after = reading.read_up_to();
        for record in world.stored.iter().filter(|record| record.seq > after) {
            reading.record(record);
        }
        world.handle(FleetInput::Reread(Box::new(reading)));
    }
    settle(&mut world);
    assert_eq!(world.fleet.book().missed(&name(0)), 0);
    assert_eq!(out(&world), [name(0)].into());
}

#[test]
fn an_incident_of_several_nodes_makes_one_event_on_the_node_of_its_first_fault() {
    let mut world = rack();
    let events = |world: &mut World| -> Vec<(&'static str, String)> {
        let looked = world.decide();
        looked.waits
    };
    xid(&mut world, &name(0), "149", false);
    world.now += SignedDuration::from_secs(1);
    xid(&mut world, &name(1), "145", false);
    xid(&mut world, &name(2), "145", false);
    assert_eq!(events(&mut world), []);
    settle(&mut world);
    world.now += SignedDuration::from_secs(10);
    let incident = world.fleet.book().faults(&name(0))[0].incident.clone();
    let message = format!(
        "incident {incident}: faults of several nodes belong together, the first is SysLogsXIDError \
         149 on PCI 0000:b3:00 of this node; gpuwarden incidents {incident} shows them"
    );
    assert_eq!(events(&mut world), [("Incident", message)]);
    xid(&mut world, &name(3), "145", false);
    world.now += SignedDuration::from_secs(60);
    assert_eq!(events(&mut world), []);
}

#[test]
fn an_incident_shows_its_cause_first() {
    let mut world = rack();
    xid(&mut world, &name(5), "145", false);
    xid(&mut world, &name(3), "149", false);
    settle(&mut world);
    let nodes = world.fleet.show(&[], world.now);
    let incidents = crate::view::IncidentView::all(&nodes);
    let [incident] = incidents.as_slice() else {
        panic!("one incident: {incidents:?}");
    };
    assert_eq!(incident.primary_node, name(3));
    assert_eq!(incident.primary.code, "149");
    assert_eq!(
        (
            incident.nodes.len(),
            incident.faults(),
            incident.explained()
        ),
        (2, 2, 1)
    );
    assert_eq!(incident.nodes[0].name, name(3));
    assert_eq!(incident.nodes[1].state.name(), "degraded");
}
