use std::sync::LazyLock;

use contract::keys;
use jiff::SignedDuration;
use model::journal::EntryKind;
use model::node::NodeView;
use model::ownership::AFTER_BOOT;
use model::ownership::Ownership;
use policy::{DEFAULT_POLICY, Policy, Uncordon};
use serde_json::json;

use crate::session::uncordon::{MOST_UNDONE, UNDONE_WITHIN};
use crate::session::{Intent, Phase};
use crate::stage::validation::tests::{ends, fault, looks, until_made, world as validating};
use crate::world::{Fate, LookEffects, Restart, World, event};
use crate::{CreateAnswer, FleetInput};

const RULES: [Uncordon; 3] = [
    Uncordon::Releases,
    Uncordon::NotDuringRepair,
    Uncordon::Never,
];

/// Event on a faulty node before something uncordons it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    Nothing,
    /// The custom resource of its remediation exists, and its work has not begun.
    RemediationWaits,
    RemediationBegins,
    RemediationSucceeds,
    RemediationFails,
    Validates,
    ValidationFails,
    /// The node boots, so many minutes ago.
    Boots(i64),
    /// The node reports its boot id for the first time.
    SaysItsBoot,
    /// A driver upgrade sets this label.
    Upgrades(&'static str),
}

impl Before {
    /// All events, each with whether machines uncordon at that time.
    const ALL: [(Self, bool); 16] = [
        (Self::Nothing, false),
        (Self::RemediationWaits, false),
        (Self::RemediationBegins, true),
        (Self::RemediationSucceeds, true),
        (Self::RemediationFails, false),
        (Self::Validates, true),
        (Self::ValidationFails, false),
        (Self::Boots(0), true),
        (Self::Boots(9), true),
        (Self::Boots(10), false),
        (Self::SaysItsBoot, false),
        (Self::Upgrades("upgrade-required"), true),
        (Self::Upgrades("validation-required"), true),
        (Self::Upgrades("upgrade-done"), false),
        (Self::Upgrades("upgrade-failed"), false),
        (Self::Upgrades(""), false),
    ];

    fn happens(self, world: &mut World) {
        if self != Self::SaysItsBoot {
            world.boot("boot-1");
        }
        fault(world);
        match self {
            Self::Nothing => looks(world, 4),
            Self::RemediationWaits => drop(until_made(world)),
            Self::RemediationBegins => {
                let open = until_made(world);
                ends(world, &open, "SignalSent");
            }
            Self::RemediationSucceeds => {
                let open = until_made(world);
                ends(world, &open, "NodeReady");
            }
            Self::RemediationFails => {
                let open = until_made(world);
                let object = world.resources.get_mut(&open.name).unwrap();
                let failed = json!({"type": "AttemptComplete", "status": "True",
                                    "reason": "PermanentFailure", "message": "m"});
                object["status"] = json!({"conditions": [failed]});
                world.deliver_resources();
                looks(world, 4);
                assert_eq!(world.phase(), Phase::RemediationFailed);
            }
            Self::Validates | Self::ValidationFails => {
                let open = until_made(world);
                ends(world, &open, "NodeReady");
                world.recovery(0);
                let job = until_made(world);
                assert_eq!(job.resource.kind, "Job");
                if self == Self::ValidationFails {
                    ends(world, &job, "Failed");
                    assert_eq!(world.phase(), Phase::RemediationFailed);
                }
            }
            Self::Boots(minutes) => {
                looks(world, 4);
                world.boot("boot-2");
                world.look(Fate::Made);
                world.now += SignedDuration::from_mins(minutes);
            }
            Self::SaysItsBoot => {
                looks(world, 4);
                world.boot("boot-1");
                looks(world, 2);
            }
            Self::Upgrades(state) => {
                looks(world, 4);
                let label = (keys::DRIVER_UPGRADE_STATE.to_owned(), state.to_owned());
                world["n1"].labels.extend([label]);
            }
        }
        assert!(world["n1"].unschedulable, "{self:?}");
    }
}

static POLICY: LazyLock<Policy> = LazyLock::new(|| {
    let text = format!("unhealthy-taint = true\n{DEFAULT_POLICY}");
    Policy::parse(&text, "p").unwrap()
});

fn policy(uncordon: Uncordon) -> Policy {
    Policy {
        uncordon,
        ..POLICY.clone()
    }
}

/// Creates a world that remediates and validates.
fn world(uncordon: Uncordon) -> World {
    let mut world = validating("action = \"VALIDATE\"");
    world.set_policy(&policy(uncordon));
    world
}

/// Creates a world that only takes nodes out of service.
fn plain() -> World {
    World::new(&policy(Uncordon::default()))
}

/// Looks some times; returns the messages for people.
fn asked(world: &mut World) -> Vec<String> {
    let looked = |world: &mut World| -> LookEffects { world.look(Fate::Made) };
    let looked: Vec<LookEffects> = (0..4).map(|_| looked(world)).collect();
    let notes = looked.into_iter().flat_map(|looked| looked.notes);
    let notes = notes.filter(|note| note.kind == EntryKind::Attention);
    notes.map(|note| note.text).collect()
}

fn out(world: &World) -> bool {
    let whole = world["n1"].unschedulable && world["n1"].taints.len() == 1;
    whole && world.phase().is_out()
}

fn released(world: &World) -> bool {
    let marks = [keys::UNCORDONED_MANUALLY, keys::UNTAINTED_MANUALLY];
    let mut marks = marks.iter();
    world.phase() == Phase::Idle && marks.any(|key| world["n1"].annotations.contains_key(*key))
}

#[test]
fn where_it_is_unknown_whether_a_repair_was_made_an_uncordon_may_be_a_machines() {
    // The answer is still missing; it is lost, and the janitor has begun; it is lost, and the
    // resource was not created.
    for [answered, was_made] in [[false, false], [true, true], [true, false]] {
        let mut world = world(Uncordon::default());
        fault(&mut world);
        let mut looked = (0..8).map(|_| world.look(Fate::Made).creations);
        let planned = looked.find(|makes| !makes.is_empty()).unwrap().remove(0);
        drop(looked);
        if was_made {
            let mut object = planned.object;
            object["metadata"]["uid"] = json!("u");
            let begun = json!({"type": "SignalSent", "status": "True"});
            object["status"] = json!({"conditions": [begun]});
            world.resources.insert(planned.name, object);
        }
        if answered {
            let (node, key) = ("n1".to_owned(), planned.key);
            let answer = CreateAnswer::Failed {
                why: "no answer".to_owned(),
                retry_after: None,
            };
            world.handle(FleetInput::ResourceCreated { node, key, answer });
        }
        world["n1"].unschedulable = false;
        let undone = asked(&mut world).concat().contains("it is undone");
        // A resource that was looked for and does not exist is no remediation.
        let may_be = was_made || !answered;
        assert_eq!(undone, may_be, "{answered} {was_made}");
        assert_eq!(out(&world), may_be, "{answered} {was_made}");
    }
}

#[test]
fn an_uncordon_is_undone_at_the_times_of_machines_and_a_persons_word_at_all_others() {
    let restarts = [
        None,
        Some(Restart::All),
        Some(Restart::Events),
        Some(Restart::Nothing),
    ];
    for (before, is_of_machines) in Before::ALL {
        for rule in RULES {
            for restart in restarts {
                for taint in [false, true] {
                    if taint && !matches!(restart, None | Some(Restart::Events)) {
                        continue;
                    }
                    let case = format!("{before:?}, {rule}, {restart:?}, taint: {taint}");
                    let mut world = world(rule);
                    before.happens(&mut world);
                    assert!(out(&world), "{case}");
                    if taint {
                        world["n1"].taints.clear();
                    } else {
                        world["n1"].unschedulable = false;
                    }
                    if let Some(restart) = restart {
                        world.restart(restart);
                    }
                    let asked = asked(&mut world);
                    let undone = match rule {
                        Uncordon::Releases => false,
                        Uncordon::NotDuringRepair => is_of_machines,
                        Uncordon::Never => true,
                    };
                    let messages = asked.iter().filter(|text| text.contains("it is undone"));
                    let messages: Vec<&String> = messages.collect();
                    if !undone {
                        assert!(released(&world) && messages.is_empty(), "{case}: {asked:?}");
                        continue;
                    }
                    assert!(out(&world), "{case}: {:?}", world.phase());
                    assert_eq!(messages.len(), 1, "{case}: {asked:?}");
                    assert!(
                        messages[0].contains("`gpuwarden release n1`"),
                        "{messages:?}"
                    );
                    // A person's release counts at any time.
                    world.annotate(keys::RELEASE, "{}");
                    looks(&mut world, 4);
                    assert!(released(&world) && !world["n1"].unschedulable, "{case}");
                }
            }
        }
    }
}

#[test]
fn a_boot_while_nobody_was_there_is_seen_by_who_comes_next() {
    for restart in [Restart::All, Restart::Events, Restart::Nothing] {
        let mut world = world(Uncordon::default());
        Before::Nothing.happens(&mut world);
        world.boot("boot-2");
        world["n1"].unschedulable = false;
        world.now += SignedDuration::from_hours(5);
        world.restart(restart);
        looks(&mut world, 4);
        assert!(out(&world), "{restart:?}");
        // The rest of the time of machines survives the next restart, and does not begin anew.
        world.now += AFTER_BOOT - SignedDuration::from_mins(1);
        world.restart(restart);
        world["n1"].unschedulable = false;
        looks(&mut world, 4);
        assert!(out(&world), "{restart:?}");
        world.now += SignedDuration::from_mins(1);
        world.restart(restart);
        world["n1"].unschedulable = false;
        looks(&mut world, 4);
        assert!(released(&world), "{restart:?}");
    }
}

/// The answer to the creation shows the resource at that time.
#[test]
fn whether_a_repair_was_begun_is_heard_before_an_uncordon_is_judged() {
    for begun in [false, true] {
        let mut world = world(Uncordon::default());
        fault(&mut world);
        let planned = (0..12)
            .find_map(|_| world.look(Fate::Made).creations.pop())
            .unwrap();
        let mut object = planned.object.clone();
        let (node, key) = ("n1".to_owned(), planned.key);
        let answer = CreateAnswer::There(Box::new(object.clone()));
        if begun {
            let sent = json!({"type": "SignalSent", "status": "True"});
            object["status"] = json!({"conditions": [sent]});
        }
        world.resources.insert(planned.name, object);
        world["n1"].unschedulable = false;
        world.handle(FleetInput::ResourceCreated { node, key, answer });
        looks(&mut world, 5);
        assert_eq!((out(&world), released(&world)), (begun, !begun));
    }
}

/// A machine boots, reports its fault, and loads its driver only then.
#[test]
fn a_boot_just_before_the_fault_counts() {
    let mut world = world(Uncordon::default());
    world.boot("boot-1");
    looks(&mut world, 1);
    world.boot("boot-2");
    looks(&mut world, 1);
    world.now += SignedDuration::from_mins(1);
    fault(&mut world);
    looks(&mut world, 4);
    for restart in [None, Some(Restart::Events)] {
        if let Some(with) = restart {
            world.restart(with);
        }
        world["n1"].unschedulable = false;
        looks(&mut world, 4);
        assert!(out(&world), "{restart:?}");
    }
}

#[test]
fn a_new_node_that_is_to_be_validated_is_not_let_in_by_what_loads_its_driver() {
    let created = jiff::Timestamp::from_second(1_800_000_000).unwrap();
    let new = json!({
        "metadata": {"name": "n1", "uid": "u", "labels": {"pool": "gpu"},
                     "creationTimestamp": created.to_string()},
        "spec": {}, "status": {},
    });
    for (minutes, held) in [(9, true), (10, false)] {
        let keys = "action = \"VALIDATE\"\nnewNodesSince = \"2026-01-01T00:00:00Z\"\n\
                    newNodesSelector = \"pool=gpu\"";
        let mut world = crate::stage::validation::tests::world_of(
            keys,
            NodeView::from_object(new.clone()).unwrap(),
        );
        looks(&mut world, 4);
        assert!(world["n1"].unschedulable);
        world.now += SignedDuration::from_mins(minutes) - SignedDuration::from_secs(10);
        world["n1"].unschedulable = false;
        world.now += SignedDuration::from_secs(10);
        looks(&mut world, 2);
        assert_eq!(world["n1"].unschedulable, held, "{minutes}");
    }
}

#[test]
fn what_is_undone_again_and_again_asks_a_person_and_is_undone_after_the_hour() {
    for restart in [None, Some(Restart::All), Some(Restart::Events)] {
        let mut world = world(Uncordon::default());
        Before::Boots(0).happens(&mut world);
        for _ in 0..MOST_UNDONE {
            world["n1"].unschedulable = false;
            assert_eq!(asked(&mut world).len(), 1);
            assert!(out(&world));
            if let Some(with) = restart {
                world.restart(with);
            }
        }
        let first = world.now;
        world["n1"].unschedulable = false;
        let messages = asked(&mut world);
        assert_eq!(messages.len(), 1, "{messages:?}");
        assert!(
            messages[0].contains("the node is left so until"),
            "{messages:?}"
        );
        // The verdict stays, also once the time of machines is over, and nothing begins on the
        // node.
        for _ in 0..3 {
            if let Some(with) = restart {
                world.restart(with);
            }
            assert_eq!(asked(&mut world), Vec::<String>::new());
            assert!(!world["n1"].unschedulable && world.phase().is_out());
            let awaits = world.fleet.status("n1").unwrap().session.unwrap().awaits;
            assert!(
                awaits.starts_with("a person: something uncordons"),
                "{awaits}"
            );
            assert!(Ownership::permit(&world.view("n1")).waits);
            world.now += AFTER_BOOT;
        }
        // The fleet wakes by itself an hour after the first time.
        let wakes = world.fleet.wake_at().unwrap();
        assert!(wakes <= first + UNDONE_WITHIN, "{wakes}");
        world.now = first + UNDONE_WITHIN;
        looks(&mut world, 2);
        assert!(out(&world), "{restart:?}");
        let undone = Ownership::read(&world["n1"]).unwrap().mark.undone;
        assert!(undone.put_back.len() <= MOST_UNDONE && undone.since.is_none());
        // Then an uncordon is a person's again.
        world["n1"].unschedulable = false;
        looks(&mut world, 4);
        assert!(released(&world), "{restart:?}");
    }
}

#[test]
fn what_does_not_get_through_at_once_stays_what_it_was_taken_for() {
    let mut world = world(Uncordon::default());
    Before::Boots(0).happens(&mut world);
    world["n1"].unschedulable = false;
    for _ in 0..40 {
        world.look(Fate::Refused);
        world.now += SignedDuration::from_secs(30);
    }
    assert!(world.phase().is_out() && !world["n1"].unschedulable);
    world.now += SignedDuration::from_mins(1);
    looks(&mut world, 2);
    assert!(out(&world));
    let undone = Ownership::read(&world["n1"]).unwrap().mark.undone;
    assert_eq!(undone.put_back.len(), 1, "what failed counts once");
}

#[test]
fn a_recovery_gives_back_what_a_machine_has_uncordoned() {
    let mut world = plain();
    Before::Boots(0).happens(&mut world);
    world["n1"].unschedulable = false;
    world.recovery(0);
    let released = (0..4).filter_map(|_| world.look(Fate::Made).patch());
    let released: Vec<Intent> = released.map(|patch| patch.intent).collect();
    assert_eq!(released, [Intent::Return]);
    assert!(
        !world["n1"]
            .annotations
            .contains_key(keys::UNCORDONED_MANUALLY)
    );
}

/// The recovery arrives with the uncordon: the node is validated all the same.
#[test]
fn what_was_repaired_is_validated_though_a_machine_has_uncordoned_it() {
    let mut world = world(Uncordon::default());
    Before::RemediationSucceeds.happens(&mut world);
    world["n1"].unschedulable = false;
    world.recovery(0);
    assert_eq!(until_made(&mut world).resource.kind, "Job");
    assert!(world["n1"].unschedulable);
}

/// A program that upgrades a driver uncordons the node, and then says that the upgrade is over.
#[test]
fn the_uncordon_at_the_end_of_an_upgrade_is_a_machines_though_its_end_is_seen_with_it() {
    for restart in [None, Some(Restart::All), Some(Restart::Events)] {
        for (seconds, undone) in [(0, true), (50, true), (70, false)] {
            let mut world = world(Uncordon::default());
            Before::Upgrades("uncordon-required").happens(&mut world);
            looks(&mut world, 2);
            if let Some(with) = restart {
                world.restart(with);
            }
            let label = (
                keys::DRIVER_UPGRADE_STATE.to_owned(),
                "upgrade-done".to_owned(),
            );
            world["n1"].labels.extend([label]);
            if seconds > 0 {
                looks(&mut world, 1);
            }
            world.now += SignedDuration::from_secs(seconds);
            world["n1"].unschedulable = false;
            looks(&mut world, 3);
            assert_eq!(out(&world), undone, "{restart:?} {seconds}");
        }
    }
}

/// NVSentinel's sessions have no place to record it.
#[test]
fn of_a_session_in_nvsentinels_form_the_same_is_remembered_by_the_process() {
    let mut world = world(Uncordon::default());
    world.boot("boot-1");
    let node = &mut world["n1"];
    node.unschedulable = true;
    let event = event("GpuMemWatch", &[("GPU", "0")], true, false);
    let id = world.store(event, world.now);
    let listed = json!([{"id": id, "checkName": "GpuMemWatch", "nodeName": "n1"}]).to_string();
    world.annotate(keys::QUARANTINE_HEALTH_EVENT, listed);
    world.annotate(keys::QUARANTINE_IS_CORDONED, "True");
    looks(&mut world, 3);
    world.boot("boot-2");
    looks(&mut world, 1);
    for time in 0..=MOST_UNDONE {
        world["n1"].unschedulable = false;
        looks(&mut world, 2);
        assert_eq!(world["n1"].unschedulable, time < MOST_UNDONE, "{time}");
    }
    assert!(!world["n1"].annotations.contains_key(keys::SESSION));
}

/// The rule is about changes of others to the session's cordon, whoever had cordoned before.
#[test]
fn a_cordon_of_before_is_put_back_and_stays_in_the_end() {
    let mut world = plain();
    world.boot("boot-1");
    world["n1"].unschedulable = true;
    fault(&mut world);
    looks(&mut world, 4);
    world.boot("boot-2");
    world["n1"].unschedulable = false;
    let text = asked(&mut world).concat();
    assert!(
        text.contains("it was cordoned before that, so uncordon it then"),
        "{text}"
    );
    looks(&mut world, 4);
    assert!(out(&world));
    world.recovery(0);
    looks(&mut world, 4);
    assert_eq!(world.phase(), Phase::Idle);
    assert!(world["n1"].unschedulable);
}

/// Another taint of this key has taken its place: there is nothing to restore.
#[test]
fn a_taint_in_whose_place_there_is_another_is_let_be() {
    let mut world = plain();
    Before::Boots(0).happens(&mut world);
    let key = world["n1"].taints[0].taint.key.clone();
    world["n1"].taints.clear();
    world.taint(&key, "theirs");
    looks(&mut world, 6);
    assert!(world["n1"].unschedulable && world.phase().is_out());
    world.recovery(0);
    looks(&mut world, 4);
    let left: Vec<&str> = (world["n1"].taints.iter())
        .map(|on| on.taint.value.as_str())
        .collect();
    assert_eq!(left, ["theirs"]);
}
