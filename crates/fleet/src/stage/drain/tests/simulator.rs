//! Drains with crashes, refusals, late watch events and people at work.

use proptest::prelude::*;

use super::*;

/// A step of the simulation.
#[derive(Clone, Debug)]
enum Act {
    /// The controller looks; its patch is made or not.
    Look(bool),
    /// The controller restarts, with all its saved state or with none.
    Restart(bool),
    Fault(u8),
    Recovery(u8),
    /// A pod comes to the node.
    Comes(u8),
    /// A pod ends by itself.
    Ends(u8),
    /// A removal is answered: taken, gone, held, or failed.
    Answer(u8),
    /// The watch delivers a new list.
    List,
    Wait(u16),
    Uncordon,
}

/// Removals that are in flight.
#[derive(Default)]
struct Real {
    under_way: Vec<PlannedRemoval>,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => any::<bool>().prop_map(Act::Look),
        1 => any::<bool>().prop_map(Act::Restart),
        2 => (0..2_u8).prop_map(Act::Fault),
        1 => (0..2_u8).prop_map(Act::Recovery),
        3 => (0..8_u8).prop_map(Act::Comes),
        2 => (0..8_u8).prop_map(Act::Ends),
        4 => (0..4_u8).prop_map(Act::Answer),
        1 => Just(Act::List),
        2 => (1..2000_u16).prop_map(Act::Wait),
        1 => Just(Act::Uncordon),
    ]
}

fn title(index: u8) -> String {
    let namespaces = ["now", "late", "jobs", "kube-system"];
    format!("{}/p{index}", namespaces[usize::from(index % 4)])
}

impl Real {
    fn look(&mut self, world: &mut World, made: bool) {
        let before = state(world).map(str::to_owned);
        let fate = if made {
            PatchFate::Made
        } else {
            PatchFate::Refused
        };
        let looked = world.look(fate);
        for one in &looked.removals {
            // Pods leave only a node that is out and whose mark says that it is being drained.
            assert_eq!(before.as_deref(), Some("draining"), "{one:?}");
            assert!(world["n1"].unschedulable, "{one:?}");
            assert_ne!(one.namespace, "kube-system");
            assert!(one.evict.is_some() || one.namespace == "late", "{one:?}");
            let twice = self.under_way.iter().any(|other| other.uid == one.uid);
            assert!(!twice, "{one:?} is under way");
        }
        self.under_way.extend(looked.removals);
        if state(world) == Some("drain-succeeded") && before.as_deref() != Some("drain-succeeded") {
            let mut left = world
                .pods
                .values()
                .filter(|pod| pod.namespace != "kube-system");
            assert_eq!(left.next(), None, "not all have left");
        }
    }

    fn act(&mut self, world: &mut World, act: &Act) {
        match act {
            Act::Look(made) => self.look(world, *made),
            Act::Restart(all) => {
                self.under_way.clear();
                world.restart(if *all { Restart::All } else { Restart::Nothing });
            }
            Act::Fault(gpu) => world.fault(*gpu),
            Act::Recovery(gpu) => world.recovery(*gpu),
            // No pod is bound to a node that is out.
            Act::Comes(_) if world["n1"].unschedulable => {}
            Act::Comes(index) => {
                add(world, &title(*index));
                let pod = world.pods[&title(*index)].clone();
                world.deliver_pod_update(PodUpdate::Observed(Box::new(pod)));
            }
            Act::Ends(index) => gone(world, &title(*index)),
            Act::Answer(how) => {
                let Some(one) = self.under_way.pop() else {
                    return;
                };
                let why = "no".to_owned();
                let removal = match how {
                    0 => RemovalAnswer::Taken,
                    1 => RemovalAnswer::Gone,
                    2 => RemovalAnswer::Held {
                        why,
                        retry_after: None,
                    },
                    _ => RemovalAnswer::Failed {
                        why,
                        retry_after: None,
                    },
                };
                if *how < 2 {
                    gone(world, &format!("{}/{}", one.namespace, one.name));
                }
                answer(world, &one.name, removal);
            }
            Act::List => world.deliver_pods(),
            Act::Wait(seconds) => world.now += SignedDuration::from_secs(i64::from(*seconds)),
            Act::Uncordon => world["n1"].unschedulable = false,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn only_a_node_in_drain_loses_pods_and_every_drain_ends(
        acts in prop::collection::vec(act(), 1..120)
    ) {
        let mut world = world(&["now/p0", "jobs/p2"]);
        let mut real = Real::default();
        for act in &acts {
            real.act(&mut world, act);
        }
        // From here on all goes well: pods leave when asked to, or have ended by themselves.
        for index in 0..8 {
            if title(index).starts_with("jobs") {
                gone(&mut world, &title(index));
            }
        }
        let mut ended = false;
        for _ in 0..1000 {
            world.now += SignedDuration::from_secs(4);
            real.look(&mut world, true);
            while !real.under_way.is_empty() {
                real.act(&mut world, &Act::Answer(0));
            }
            let wanted = world.desired().wanted();
            let end = if wanted { Phase::Drained } else { Phase::Idle };
            ended = world.phase() == end;
            if ended {
                break;
            }
        }
        prop_assert!(ended, "{:?}, awaits {}", world.phase(), awaits(&world));
        real.look(&mut world, true);
        prop_assert!(!world.watches_pods);
    }
}
