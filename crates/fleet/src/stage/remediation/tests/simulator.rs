//! Remediations with crashes, refusals, lost answers, resources that fail, hang or vanish, and
//! people at work.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::SwitchState;

/// Actions that faults recommend: none, a reset, support, reboots, a replacement.
const ACTIONS: [i32; 6] = [0, 2, 5, 15, 24, 25];

/// A step of the simulation.
#[derive(Clone, Debug)]
enum Act {
    /// The controller looks; its patch is made or not.
    Look(bool),
    /// The controller restarts, with all its saved state or with none.
    Restart(bool),
    Fault(u8, usize),
    Recovery(u8),
    /// Creations are: made and answered, made without an answer, failed, or refused.
    Answer(u8),
    /// A custom resource progresses: begun, succeeded, failed in some way.
    Status(u8),
    /// A person deletes a resource.
    Delete,
    Wait(u16),
    Uncordon,
    Release,
    HandOver(bool),
    /// The pause of remediation cannot be read, or there is none.
    Unread(bool),
}

#[derive(Default)]
struct Real {
    making: Vec<PlannedResource>,
    /// Number of creations of each custom resource.
    made: BTreeMap<String, usize>,
    /// Session that each resource was created for.
    sessions: BTreeMap<String, Option<String>>,
    forgot: bool,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        10 => any::<bool>().prop_map(Act::Look),
        1 => any::<bool>().prop_map(Act::Restart),
        3 => (0..3_u8, 0..ACTIONS.len()).prop_map(|(gpu, action)| Act::Fault(gpu, action)),
        1 => (0..3_u8).prop_map(Act::Recovery),
        5 => (0..8_u8).prop_map(Act::Answer),
        4 => (0..8_u8).prop_map(Act::Status),
        1 => Just(Act::Delete),
        2 => (1..3600_u16).prop_map(Act::Wait),
        1 => Just(Act::Uncordon),
        1 => Just(Act::Release),
        1 => any::<bool>().prop_map(Act::HandOver),
        2 => any::<bool>().prop_map(Act::Unread),
    ]
}

impl Real {
    fn look(&mut self, world: &mut World, made: bool) {
        let before = Ownership::read(&world["n1"]);
        let looked = world.look(if made { Fate::Made } else { Fate::Refused });
        for one in looked.creations {
            // A resource is created only for an attempt in the mark of a drained node with an
            // open session.
            let own = before.as_ref().unwrap();
            assert!(world["n1"].unschedulable, "{one:?}");
            let drained = own.mark.drain.is_some_and(|mark| mark.done.is_some());
            assert!(drained, "{one:?}");
            let open = own.mark.remediation.as_ref().unwrap().under_way().unwrap();
            assert_eq!(open.key(), one.key);
            assert!(open.made.is_none(), "{one:?} was made before");
            let twice = self.making.iter().any(|other| other.key == one.key);
            assert!(!twice, "{one:?} is under way");
            self.making.push(one);
        }
        for attempt in looked.withdrawn {
            // As the API server and the janitor would: nothing has begun.
            let begun = |object: &Value| ResourceState::read(object, &attempt.resource).begun;
            if world
                .resources
                .get(&attempt.name)
                .is_some_and(|object| !begun(object))
            {
                world.resources.remove(&attempt.name);
                self.made.remove(&attempt.name);
                world.deliver_resources();
            }
        }
        if world.phase() == Phase::Idle {
            // Work begun for a session that a person has ended may continue.
            self.sessions.clear();
        }
        let attempts = attempts(world);
        assert!(attempts.len() <= 5, "{attempts:?}");
        let open = attempts.iter().filter(|one| one.end.is_none()).count();
        assert!(open <= 1, "{attempts:?}");
        if state(world) == Some("remediation-succeeded") {
            assert!(attempts.last().unwrap().succeeded(), "{attempts:?}");
        }
    }

    /// Creates a custom resource, as the API server would, unless it exists.
    fn create(&mut self, world: &mut World, planned: &PlannedResource) {
        if !world.resources.contains_key(&planned.name) {
            *self.made.entry(planned.name.clone()).or_default() += 1;
            let again = self.made[&planned.name];
            assert!(again == 1, "{} is made {again} times", planned.name);
            // No other resource of the same session has begun and not ended.
            for (other, object) in &world.resources {
                let state = ResourceState::read(object, &planned.kind);
                let goes_on = state.begun && state.end.is_none();
                let same = self.sessions.get(other) == Some(&planned.session);
                assert!(!(goes_on && same), "{} beside {other}", planned.name);
            }
            let session = planned.session.clone();
            self.sessions.insert(planned.name.clone(), session);
        }
    }

    fn answer(&mut self, world: &mut World, how: u8) {
        if self.making.is_empty() {
            return;
        }
        let planned = self.making.remove(0);
        let (node, key) = ("n1".to_owned(), planned.key.clone());
        let why = "no".to_owned();
        let answer = match how {
            0 => CreateAnswer::Refused(why),
            1 => CreateAnswer::Failed {
                why,
                retry_after: None,
            },
            2 => {
                // The resource was created, and the answer is lost.
                self.create(world, &planned);
                let mut object = planned.object;
                object["metadata"]["uid"] = json!("u");
                world.resources.entry(planned.name).or_insert(object);
                CreateAnswer::Failed {
                    why,
                    retry_after: None,
                }
            }
            _ => {
                self.create(world, &planned);
                return make(world, &planned);
            }
        };
        world.handle(FleetInput::ResourceCreated { node, key, answer });
    }

    fn act(&mut self, world: &mut World, act: &Act) {
        let open = attempts(world).pop();
        let there = open.filter(|one| world.resources.contains_key(&one.name));
        match act {
            Act::Look(made) => self.look(world, *made),
            Act::Restart(all) => {
                self.making.clear();
                self.forgot |= !all;
                world.restart(if *all { Restart::All } else { Restart::Nothing });
            }
            Act::Fault(gpu, action) => drop(fault(world, *gpu, ACTIONS[*action])),
            Act::Recovery(gpu) => world.recovery(*gpu),
            Act::Answer(how) => self.answer(world, *how),
            Act::Status(how) => {
                let Some(one) = there else { return };
                let object = &world.resources[&one.name];
                if ResourceState::read(object, &one.resource).end.is_some() {
                    return; // an end stays
                }
                let begun = json!({"conditions": [{"type": "SignalSent", "status": "True"}]});
                let status = match how {
                    0 => failed("TransientFailure"),
                    1 => failed("PermanentFailure"),
                    2 => failed("Cancelled"),
                    3 => json!({"completionTime": "2026-11-24T00:00:00Z", "conditions": [
                        {"type": "SignalSent", "status": "False", "reason": "Failed"}]}),
                    4 | 5 => begun,
                    _ if one.resource.kind == "TerminateNode" => begun,
                    _ => done(),
                };
                set(world, &one.name, status);
            }
            Act::Delete => {
                // A resource that vanished after its answer was lost cannot be known.
                if let Some(one) = there.filter(|one| one.made.is_some()) {
                    world.resources.remove(&one.name);
                    world.deliver_resources();
                }
            }
            Act::Wait(seconds) => world.now += SignedDuration::from_secs(i64::from(*seconds)),
            Act::Uncordon => world["n1"].unschedulable = false,
            Act::Release => world.annotate(keys::RELEASE, "{}"),
            Act::Unread(unread) => {
                let unread = unread.then(|| "nobody has answered".to_owned());
                world.handle(FleetInput::Switches(Box::new(SwitchState {
                    unread,
                    ..SwitchState::default()
                })));
            }
            Act::HandOver(over) => {
                let label = keys::HANDED_OVER_LABEL.to_owned();
                world["n1"].labels.remove(&label);
                if *over && world["n1"].unschedulable {
                    world["n1"].labels.insert(label, "false".to_owned());
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_attempt_is_made_twice_and_every_repair_ends(
        acts in prop::collection::vec(act(), 1..160)
    ) {
        let mut world = world();
        let mut real = Real::default();
        for act in &acts {
            real.act(&mut world, act);
        }
        // A node that was remediated as often as allowed is a person's, over all sessions.
        let made: usize = real.made.values().sum();
        prop_assert!(real.forgot || made <= 5, "{made}");
        // From here on all goes well: every resource succeeds, and fixes its fault.
        real.act(&mut world, &Act::HandOver(false));
        real.act(&mut world, &Act::Unread(false));
        let mut ended = false;
        for _ in 0..400 {
            world.now += SignedDuration::from_secs(60);
            real.look(&mut world, true);
            while !real.making.is_empty() {
                real.answer(&mut world, 7);
            }
            if let Some(open) = attempts(&world).pop().filter(|one| one.made.is_some()) {
                if open.end.is_none() && world.resources.contains_key(&open.name) {
                    let mut status = done();
                    status["conditions"][1]["type"] = json!(open.resource.condition);
                    set(&mut world, &open.name, status);
                }
                if open.succeeded() {
                    (0..3).for_each(|gpu| world.recovery(gpu));
                }
            }
            let none = world.desired().events.iter().all(|one| one.event.recommended_action == 0);
            ended = match world.phase() {
                Phase::Idle | Phase::RemediationFailed => true,
                Phase::Drained => none,
                _ => false,
            };
            if ended {
                break;
            }
        }
        prop_assert!(ended, "{:?}, awaits {}", world.phase(), awaits(&world));
    }
}
