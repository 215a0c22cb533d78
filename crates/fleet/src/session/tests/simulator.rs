//! A small simulator: random faults, people, foreign controllers, restarts, conflicts and
//! failures, against the invariants.

use proptest::prelude::*;

use super::*;

/// A step that concerns a node, its faults or its controller.
#[derive(Clone, Debug)]
enum Happening {
    Fault(u8),
    OtherFault(u8, bool),
    Recovery(u8),
    /// A report about this GPU arrives that was accepted some seconds ago.
    Late(u8, u8),
    Look(Fate),
    Restart(Restart),
    Cordon,
    /// A person uncordons the node, whoever cordoned it.
    Uncordon,
    /// A person removes our taints.
    Untaint,
    /// A person asks for a release.
    AskRelease,
    /// The other policy is loaded.
    Reload,
    ForeignTaint(u8),
    ForeignTaintGone(u8),
    ForeignLabel(u8),
    Later(u16),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        2 => (0_u8..3).prop_map(Happening::Fault),
        2 => (0_u8..3, any::<bool>()).prop_map(|(gpu, fatal)| Happening::OtherFault(gpu, fatal)),
        3 => (0_u8..3).prop_map(Happening::Recovery),
        3 => (0_u8..3, 1_u8..100).prop_map(|(gpu, seconds)| Happening::Late(gpu, seconds)),
        6 => Just(Happening::Look(Fate::Made)),
        1 => Just(Happening::Look(Fate::Conflict)),
        1 => Just(Happening::Look(Fate::Refused)),
        1 => Just(Happening::Look(Fate::Dropped)),
        1 => Just(Happening::Look(Fate::Stripped)),
        1 => restart().prop_map(Happening::Restart),
        1 => Just(Happening::Cordon),
        1 => Just(Happening::Uncordon),
        1 => Just(Happening::Untaint),
        1 => Just(Happening::AskRelease),
        1 => Just(Happening::Reload),
        1 => (0_u8..3).prop_map(Happening::ForeignTaint),
        1 => (0_u8..3).prop_map(Happening::ForeignTaintGone),
        1 => (0_u8..3).prop_map(Happening::ForeignLabel),
        1 => (0_u16..100).prop_map(Happening::Later),
    ]
}

fn restart() -> impl Strategy<Value = Restart> {
    prop_oneof![
        Just(Restart::All),
        Just(Restart::Events),
        Just(Restart::Nothing)
    ]
}

/// Annotations that outlive a session which a person has ended.
const AFTER_A_PERSON: [&str; 4] = [
    keys::UNCORDONED_MANUALLY,
    keys::UNTAINTED_MANUALLY,
    keys::RELEASED_AT,
    keys::RELEASE,
];

/// Marks that people and other controllers have put on the node.
#[derive(Clone, Debug, Default)]
struct Foreign {
    cordon: bool,
    taints: Vec<String>,
    labels: BTreeMap<String, String>,
}

impl Foreign {
    /// Records a patch. A person who removes one of our taints keeps the cordon, which is theirs
    /// from then on.
    fn see(&mut self, patch: &Patch, node: &NodeView) {
        let marked = patch.change.annotations.get(keys::UNTAINTED_MANUALLY);
        if patch.intent == Intent::StandDown && marked.is_some() {
            self.cordon |= node.unschedulable;
        }
    }

    /// Looks once, and checks the effects.
    fn look(&mut self, world: &mut World, fate: Fate) -> Option<Intent> {
        let patch = world.look(fate).patch();
        if let (Some(patch), Fate::Made | Fate::Stripped) = (&patch, fate) {
            self.see(patch, &world["n1"]);
        }
        // A recovery waits ten minutes at most, and a person's change not at all. A cordon that
        // never came through is dropped once nothing wants it.
        if let Some(at) = world.session().waits_until() {
            assert!(at <= world.now + returns::LONGEST_WAIT);
            assert!(!world.session().returns.is_empty());
            let own = Ownership::read(&world["n1"]).unwrap();
            assert!(own.undone_by_hand(&world["n1"]).is_none(), "{own:?}");
            assert!(!world["n1"].annotations.contains_key(keys::RELEASE));
        }
        patch.map(|patch| patch.intent)
    }

    fn settle(&mut self, world: &mut World) {
        for _ in 0..20 {
            if self.look(world, Fate::Made).is_none() {
                let session = world.session();
                match session.not_before.or(session.waits_until()) {
                    Some(at) => world.now = world.now.max(at),
                    None => return,
                }
            }
        }
        panic!("does not settle: {:?}", world.session());
    }
}

/// Times of the decisions about the faults: nothing observed before undoes them.
#[derive(Debug, Default)]
struct Decisions {
    closed: BTreeMap<u8, Timestamp>,
    released: Option<Timestamp>,
}

impl Decisions {
    /// Returns true if a decision about a GPU's faults was made after `seen`.
    fn since(&self, gpu: u8, seen: Timestamp) -> bool {
        self.closed.get(&gpu).is_some_and(|at| seen < *at)
            || self.released.is_some_and(|at| seen <= at)
    }

    fn wanted(world: &World, gpu: u8) -> bool {
        let gpu = gpu.to_string();
        (world.desired().events.iter()).any(|one| {
            let event = &one.event;
            event.check_name == "GpuMemWatch" && event.entities_impacted[0].entity_value == gpu
        })
    }

    /// Returns true if the fleet observes a release at once, and the node lists every known
    /// event.
    fn seen_by_all(world: &World) -> bool {
        let listed = Ownership::read(&world["n1"]).map_or(Vec::new(), |own| own.events);
        let known = |id: &str| listed.iter().any(|event| event.id == id);
        world.session().watched && (world.desired().events.iter()).all(|one| known(&one.event.id))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn whatever_happens_we_take_back_exactly_what_is_ours(
        happenings in proptest::collection::vec(happening(), 0..60),
    ) {
        let mut world = World::new(&PARSED);
        let mut foreign = Foreign::default();
        let mut decisions = Decisions::default();
        for happening in &happenings {
            match happening {
                Happening::Fault(gpu) => world.fault(*gpu),
                Happening::OtherFault(gpu, fatal) => {
                    world.event("XidCheck", *gpu, *fatal, false);
                }
                Happening::Recovery(gpu) => {
                    let open = world.faults();
                    world.recovery(*gpu);
                    if world.faults() < open {
                        decisions.closed.insert(*gpu, world.now);
                    }
                    world.event("XidCheck", *gpu, false, true);
                }
                Happening::Late(gpu, seconds) => {
                    let before = Decisions::wanted(&world, *gpu);
                    world.late(*gpu, *seconds);
                    let seen = world.now - SignedDuration::from_secs(i64::from(*seconds));
                    let acts = !before && Decisions::wanted(&world, *gpu);
                    prop_assert!(!acts || !decisions.since(*gpu, seen), "{happening:?}");
                }
                Happening::Look(fate) => {
                    let seen_by_all = Decisions::seen_by_all(&world);
                    let intent = foreign.look(&mut world, *fate);
                    let arrives = matches!(fate, Fate::Made | Fate::Stripped);
                    let released = intent == Some(Intent::StandDown) && arrives;
                    if released && seen_by_all {
                        decisions.released = Some(world.now);
                    }
                }
                Happening::Restart(with) => {
                    world.restart(*with);
                    if *with == Restart::Nothing {
                        // Faults closed before are unknown from here on.
                        decisions.closed.clear();
                    }
                }
                Happening::Cordon => {
                    // Cordoning a node that we cordoned changes nothing: the cordon is ours,
                    // even if somebody uncordoned it before and nobody looked.
                    let own = Ownership::read(&world["n1"]);
                    let ours = own.is_some_and(|own| own.cordoned && !own.cordon_pre_existing);
                    foreign.cordon |= !world["n1"].unschedulable && !ours;
                    world["n1"].unschedulable = true;
                }
                Happening::Uncordon => {
                    world["n1"].unschedulable = false;
                    foreign.cordon = false;
                }
                Happening::Untaint => {
                    world["n1"].taints.retain(|on| on.taint.key.starts_with("foreign-"));
                }
                Happening::AskRelease => {
                    let at = world.now.to_string();
                    let text = json!({"by": "alice", "reason": "why not", "at": at}).to_string();
                    world.annotate(keys::RELEASE, text);
                }
                Happening::Reload => {
                    let other = world.policy().unhealthy_taint;
                    world.set_policy(if other { &PARSED } else { &OTHER });
                }
                Happening::ForeignTaint(n) => {
                    world.foreign_taint(&format!("foreign-{n}"));
                    foreign.taints.push(format!("foreign-{n}"));
                    foreign.taints.sort();
                    foreign.taints.dedup();
                }
                Happening::ForeignTaintGone(n) => {
                    let key = format!("foreign-{n}");
                    world["n1"].taints.retain(|on| on.taint.key != key);
                    foreign.taints.retain(|taint| *taint != key);
                }
                Happening::ForeignLabel(n) => {
                    world["n1"].labels.insert(format!("foreign-{n}"), "x".into());
                    foreign.labels.insert(format!("foreign-{n}"), "x".into());
                }
                Happening::Later(seconds) => {
                    world.now += SignedDuration::from_secs(i64::from(*seconds));
                }
            }
            let ours: Vec<_> = taint_keys(&world["n1"])
                .into_iter()
                .filter(|key| key.starts_with("foreign-"))
                .map(str::to_owned)
                .collect();
            let mut ours_sorted = ours;
            ours_sorted.sort();
            prop_assert_eq!(&ours_sorted, &foreign.taints);
            prop_assert!(world["n1"].unschedulable || !foreign.cordon);
        }
        // The node converges to the desired state ...
        foreign.settle(&mut world);
        let desired = world.desired();
        prop_assert_eq!(world["n1"].unschedulable, desired.cordon || foreign.cordon);
        let mut ours: Vec<_> = world["n1"].taints.iter().map(|on| on.taint.clone()).collect();
        ours.retain(|taint| !taint.key.starts_with("foreign-"));
        prop_assert_eq!(ours, desired.taints);
        // ... and once all faults are over, to the state that others have made.
        for gpu in 0..3 {
            world.recovery(gpu);
            world.event("XidCheck", gpu, false, true);
        }
        foreign.settle(&mut world);
        prop_assert_eq!(world.phase(), Phase::Idle);
        prop_assert_eq!(world["n1"].unschedulable, foreign.cordon);
        prop_assert_eq!(&world["n1"].labels, &foreign.labels);
        world["n1"].annotations.retain(|key, _| !AFTER_A_PERSON.contains(&key.as_str()));
        prop_assert!(world["n1"].annotations.is_empty(), "{:?}", world["n1"].annotations);
        let mut left: Vec<_> = taint_keys(&world["n1"]).into_iter().map(str::to_owned).collect();
        left.sort();
        prop_assert_eq!(left, foreign.taints);
    }

    #[test]
    fn settled_is_settled(
        happenings in proptest::collection::vec((0_u8..3, any::<bool>(), any::<bool>()), 1..20),
    ) {
        let mut world = World::new(&PARSED);
        for (gpu, fatal, healthy) in happenings {
            world.event("GpuMemWatch", gpu, fatal, healthy);
        }
        world.settle();
        let node = world["n1"].clone();
        // A restart, and any number of further looks, change nothing.
        world.restart(Restart::Events);
        prop_assert_eq!(world.settle(), []);
        prop_assert_eq!(&node, &world["n1"]);
    }

    /// A controller restarted in the midst of a session, with its store or without, continues
    /// like the one before.
    #[test]
    fn a_restart_forgets_nothing_of_a_session(
        happenings in proptest::collection::vec(
            prop_oneof![
                3 => (0_u8..3).prop_map(Happening::Fault),
                4 => (0_u8..3).prop_map(Happening::Recovery),
                6 => Just(Happening::Look(Fate::Made)),
                1 => Just(Happening::Look(Fate::Conflict)),
                1 => Just(Happening::Look(Fate::Stripped)),
                2 => (0_u16..1_000).prop_map(Happening::Later),
            ],
            1..40,
        ),
        with in restart(),
    ) {
        let mut world = World::new(&PARSED);
        for happening in happenings {
            match happening {
                Happening::Fault(gpu) => world.fault(gpu),
                Happening::Recovery(gpu) => world.recovery(gpu),
                Happening::Look(fate) => drop(world.look(fate)),
                Happening::Later(seconds) => {
                    world.now += SignedDuration::from_secs(seconds.into());
                }
                _ => {}
            }
        }
        world.settle_now();
        let essentials = |world: &World| {
            let session = world.session();
            let mut returns = session.returns.clone();
            returns::record(&mut returns, [], world.now);
            let waits = (session.waits_until(), session.wake_at(world.now));
            (session.phase, session.id.clone(), session.since, returns, waits)
        };
        prop_assume!(world.phase() != Phase::Idle);
        // Each look takes a second: a wait that ends in a look after the restart is over,
        // rightly.
        let soon = world.now + SignedDuration::from_secs(10);
        prop_assume!(world.session().waits_until().is_none_or(|at| at > soon));
        let (before, node) = (essentials(&world), world["n1"].clone());
        world.restart(with);
        let done = world.settle_now();
        prop_assert_eq!(essentials(&world), before);
        // Only a listed event is marked as taken over.
        let listed = node.annotations[keys::QUARANTINE_HEALTH_EVENT].clone();
        let again = world["n1"].annotations[keys::QUARANTINE_HEALTH_EVENT].clone();
        prop_assert!(done.is_empty() || with == Restart::Nothing && again != listed);
        world.annotate(keys::QUARANTINE_HEALTH_EVENT, listed);
        prop_assert_eq!((&world["n1"].annotations, &world["n1"].labels), (&node.annotations, &node.labels));
        prop_assert_eq!((&world["n1"].taints, world["n1"].unschedulable), (&node.taints, node.unschedulable));
    }
}
