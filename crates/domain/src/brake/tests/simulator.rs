//! A simulator: random faults, recoveries, people, crashes and lost answers on a whole
//! cluster and the decisions of production ([`crate::fleet`]), against what the brake promises.

use std::sync::{Arc, LazyLock};

use contract::{BehaviourOverrides, HealthEvent};
use proptest::prelude::*;

use super::*;
use crate::event::{Record, normalise};
use crate::fleet::{Answer, Effect, Fleet, Found, Input, Owns, Planned, Settings, Switched};
use crate::mode::Mode;
use crate::node::{NodeChange, NodeView};
use crate::ownership::Ownership;
use crate::policy::Policy;
use crate::position::Position;
use crate::session::{Intent, Phase};

/// One cheap rule: what matters here is who goes when.
static POLICY: LazyLock<Policy> = LazyLock::new(|| {
    let text = "[[rule-sets]]\nname = \"fatal\"\ncordon = { shouldCordon = true }\n\
                [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n";
    Policy::parse(text, "test").unwrap()
});

/// A whole cluster, and a controller that may crash at any time.
struct World {
    policy: Arc<Policy>,
    /// The controller. What it sees of the nodes may lag behind.
    fleet: Fleet,
    /// What the store has.
    stored: Vec<Record>,
    /// The nodes as they are.
    nodes: BTreeMap<String, NodeView>,
    /// Patches whose answer was lost: they may have been made. Until when that counts.
    uncertain: BTreeMap<String, Timestamp>,
    /// Nodes whose session began by force.
    forced: BTreeSet<String>,
    switched: Switched,
    now: Timestamp,
}

/// What may happen.
#[derive(Clone, Debug)]
enum Happening {
    Fault { node: usize, force: bool },
    Recovery { node: usize },
    Uncordon { node: usize },
    Stop(bool),
    Drop,
    Crash,
    Wait(i64),
}

impl World {
    fn new(count: usize, budgets: Vec<Budget>) -> Self {
        let mut policy = POLICY.clone();
        policy.brake = Brake {
            budgets,
            window: None,
        };
        let nodes = (0..count).map(|n| {
            let name = format!("n{n}");
            let mut node = NodeView::unknown(&name);
            if n % 5 != 4 {
                node.labels.insert(GPU.into(), "true".into());
            }
            if n % 7 != 6 {
                node.labels.insert("rack".into(), (n % 3).to_string());
            }
            (name, node)
        });
        let policy = Arc::new(policy);
        let now = at(1_800_000_000);
        let mut world = Self {
            fleet: controller(&policy, now),
            policy,
            stored: Vec::new(),
            nodes: nodes.collect(),
            uncertain: BTreeMap::new(),
            forced: BTreeSet::new(),
            switched: Switched::default(),
            now,
        };
        world.begin();
        world
    }

    /// Lets the controller begin: what is stored and what is on the nodes is all that it knows.
    fn begin(&mut self) {
        self.fleet = controller(&self.policy, self.now);
        self.uncertain.clear();
        for record in &self.stored {
            self.fleet.record(record, self.now);
        }
        self.take(Input::CaughtUp);
        self.switch();
        self.take(Input::ListBegun);
        let nodes: Vec<NodeView> = self.nodes.values().cloned().collect();
        for node in nodes {
            self.take(Input::Seen(Arc::new(node)));
        }
        self.take(Input::Listed);
    }

    fn take(&mut self, input: Input) {
        self.fleet.take(input, self.now);
    }

    /// Tells the controller what people have set.
    fn switch(&mut self) {
        let switched = Box::new(self.switched.clone());
        self.take(Input::Switched(switched));
    }

    fn stop(&mut self, stop: bool) {
        self.switched.breaker = stop.then_some(Hold::Tripped);
        self.switch();
    }

    /// Makes a node what it is from now on.
    fn put(&mut self, mut node: NodeView) {
        let version: u64 = node.resource_version.parse().unwrap_or_default();
        node.resource_version = (version + 1).to_string();
        self.nodes.insert(node.name.clone(), node);
    }

    fn event(&mut self, node: usize, healthy: bool, force: bool) {
        self.now += SignedDuration::from_secs(1);
        let seq = self.stored.len() as u64 + 1;
        let mut event = HealthEvent {
            agent: "gpu-health-monitor".into(),
            component_class: "GPU".into(),
            check_name: "GpuMemWatch".into(),
            node_name: format!("n{node}"),
            is_fatal: !healthy,
            is_healthy: healthy,
            message: format!("report {seq}"),
            quarantine_overrides: force.then_some(BehaviourOverrides { force, skip: false }),
            ..HealthEvent::default()
        };
        normalise(&mut event, self.now);
        let record = Record {
            seq: seq.into(),
            id: event.id.clone(),
            created_at: self.now,
            event,
        };
        self.fleet.record(&record, self.now);
        self.stored.push(record);
    }

    /// What the watch brings: within [`DOUBT`] everything, and often sooner.
    fn watch(&mut self, luck: &mut impl FnMut() -> u8) {
        let nodes: Vec<NodeView> = self.nodes.values().cloned().collect();
        for node in nodes {
            let doubt = self.uncertain.get(&node.name);
            let late = doubt.is_none_or(|until| self.now >= *until);
            if late || luck() > 4 {
                self.take(Input::Seen(Arc::new(node)));
            }
        }
    }

    /// One round of the controller. `luck` says of each patch whether it is refused, or made or
    /// not made without an answer.
    fn round(&mut self, luck: &mut impl FnMut() -> u8) {
        self.now += SignedDuration::from_secs(2);
        self.watch(luck);
        // What it has asked of the store it decides about in the same round.
        for _ in 0..2 {
            for effect in self.fleet.decide(self.now) {
                match effect {
                    Effect::Patch(planned) => self.patch(*planned, luck()),
                    Effect::LookUp { node, ids } => {
                        let found = ids.into_iter().map(|id| (id, Found::Current)).collect();
                        let found = Some(found);
                        self.take(Input::Found { node, found });
                    }
                    Effect::Append { node, .. } => panic!("{node} lists what nobody has stored"),
                    _ => {}
                }
            }
        }
        let wake = self.fleet.wake_at();
        assert!(
            wake.is_none_or(|at| at > self.now),
            "looked at for ever: {wake:?}"
        );
    }

    fn patch(&mut self, planned: Planned, luck: u8) {
        let node = planned.node;
        let taking_out = planned.patch.intent == Intent::Quarantine;
        if taking_out && self.fleet.desired(&node).forced_by.is_some() {
            self.forced.insert(node.clone());
        }
        // A patch holds only where the node is as it was seen.
        let (real, seen) = (self.nodes[&node].clone(), planned.view);
        let fits = Ownership::read(&real) == Ownership::read(&seen)
            && real.unschedulable == seen.unschedulable;
        let after = real.after(&planned.patch.change);
        let answer = if !fits || luck == 0 {
            self.uncertain.remove(&node);
            self.take(Input::Seen(Arc::new(real)));
            Answer::Conflict
        } else if luck <= 2 {
            // The answer is lost; with 1 it was made all the same.
            if luck == 1 {
                self.put(after);
            }
            if taking_out {
                self.uncertain.insert(node.clone(), self.now + DOUBT);
            }
            Answer::Unknown
        } else {
            self.put(after);
            self.uncertain.remove(&node);
            Answer::Made(Arc::new(self.nodes[&node].clone()))
        };
        self.take(Input::Answered { node, answer });
    }

    fn phase(&self, name: &str) -> Phase {
        let session = self.fleet.session(name);
        session.map_or(Phase::Idle, |session| session.phase)
    }

    /// Nodes out of service and allowed, and forced ones, for each group of each budget.
    fn counts(&self) -> Vec<(String, usize, usize, usize)> {
        let mut counts = Vec::new();
        for budget in &self.policy.brake.budgets {
            let mut groups: BTreeMap<(bool, Option<&String>), (usize, usize, usize)> =
                BTreeMap::new();
            for (name, node) in &self.nodes {
                let value = budget.per.as_ref().and_then(|key| node.labels.get(key));
                let group = groups
                    .entry((node.labels.contains_key(GPU), value))
                    .or_default();
                let out = Ownership::read(node).is_some();
                group.0 += usize::from(out);
                group.1 += usize::from(out && self.forced.contains(name));
                group.2 += 1;
            }
            counts.extend(groups.into_iter().map(|(group, (out, forced, of))| {
                let name = format!("{budget} {group:?}");
                (name, out, forced, budget.max.of(of))
            }));
        }
        counts
    }
}

/// A controller that knows nothing yet.
fn controller(policy: &Arc<Policy>, now: Timestamp) -> Fleet {
    let settings = Settings {
        mode: Mode::Quarantine,
        owns: Owns::All,
        cluster: true,
        store: "store".to_owned(),
        since: Position::START,
        brake: true,
        gpu_label: gpu_label(),
        retention: SignedDuration::MAX,
        returns_wait: true,
    };
    Fleet::new(settings, Some(Arc::clone(policy)), now)
}

fn happening(nodes: usize) -> impl Strategy<Value = Happening> {
    prop_oneof![
        8 => (0..nodes).prop_map(|node| Happening::Fault { node, force: false }),
        1 => (0..nodes).prop_map(|node| Happening::Fault { node, force: true }),
        4 => (0..nodes).prop_map(|node| Happening::Recovery { node }),
        1 => (0..nodes).prop_map(|node| Happening::Uncordon { node }),
        1 => any::<bool>().prop_map(Happening::Stop),
        1 => Just(Happening::Drop),
        1 => Just(Happening::Crash),
        2 => (1..100_i64).prop_map(Happening::Wait),
    ]
}

fn budgets() -> impl Strategy<Value = Vec<Budget>> {
    let amount = prop_oneof![
        // Small ones: only a limit that is reached can be exceeded.
        3 => (0..3_u32).prop_map(Amount::Nodes),
        1 => (1..=100_u8).prop_map(Amount::Percent)
    ];
    let per = prop_oneof![Just(None), Just(Some("rack".to_owned()))];
    prop::collection::vec((amount, per), 1..3).prop_map(|budgets| {
        let budgets = budgets.into_iter();
        budgets.map(|(max, per)| Budget { max, per }).collect()
    })
}

/// The worst that can happen to an answer, step by step: the property finds it only where
/// chance has it.
#[test]
fn a_lost_answer_counts_until_it_is_known_even_if_the_fault_recovers_meanwhile() {
    let budget = Budget {
        max: Amount::Nodes(1),
        per: None,
    };
    let mut world = World::new(3, vec![budget]);
    let out = |world: &World| {
        let nodes = world.nodes.values();
        nodes.filter(|node| Ownership::read(node).is_some()).count()
    };
    world.event(0, false, false);
    // Made, and neither the answer nor the watch tells of it.
    world.round(&mut || 1);
    assert_eq!((out(&world), world.uncertain.len()), (1, 1));
    assert!(Ownership::read(world.fleet.view("n0").unwrap()).is_none());
    world.event(0, true, false);
    world.event(1, false, false);
    world.round(&mut || 3);
    assert_eq!(out(&world), 1, "the room may be taken");
    assert_eq!(world.phase("n1"), Phase::Held);
    // Once it is seen it is given back, and the next one goes.
    world.now += DOUBT;
    for _ in 0..3 {
        world.round(&mut || 7);
    }
    assert!(Ownership::read(&world.nodes["n0"]).is_none());
    assert!(Ownership::read(&world.nodes["n1"]).is_some());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever happens: no budget is exceeded but by what senders force; and once nothing
    /// is broken any more, every node is given back, be the brake tripped or not.
    #[test]
    fn budgets_hold_and_recovery_is_never_blocked(
        nodes in 1..12_usize,
        budgets in budgets(),
        happenings in prop::collection::vec(happening(12), 1..40),
        luck in prop::collection::vec(0..8_u8, 512),
        stopped_at_the_end in any::<bool>(),
    ) {
        let mut world = World::new(nodes, budgets);
        let mut luck = luck.into_iter().cycle();
        let mut luck = || luck.next().unwrap_or(7);
        for happening in happenings {
            match happening {
                Happening::Fault { node, force } => world.event(node % nodes, false, force),
                Happening::Recovery { node } => world.event(node % nodes, true, false),
                Happening::Uncordon { node } => {
                    let uncordon = NodeChange {
                        unschedulable: Some(false),
                        ..NodeChange::default()
                    };
                    let node = world.nodes[&format!("n{}", node % nodes)].after(&uncordon);
                    world.put(node);
                }
                Happening::Stop(stop) => world.stop(stop),
                Happening::Drop => {
                    world.switched.dropped_at = Some(world.now);
                    world.switch();
                }
                Happening::Crash => world.begin(),
                Happening::Wait(seconds) => world.now += SignedDuration::from_secs(seconds),
            }
            let before = world.counts();
            // While nobody knows whether the forced patch was made, a further try is the same
            // decision, also where the fault was reported again without force.
            let over = |name: &String| {
                Ownership::read(&world.nodes[name]).is_none() && !world.uncertain.contains_key(name)
            };
            let ended: Vec<_> = world.forced.iter().filter(|name| over(name)).cloned().collect();
            world.forced.retain(|name| !ended.contains(name));
            world.round(&mut luck);
            for ((name, out, forced, allowed), (_, before, ..)) in world.counts().iter().zip(before) {
                prop_assert!(
                    *out <= (allowed + forced).max(before),
                    "{name}: {out} are out, {allowed} may be, {forced} forced, {before} before"
                );
            }
        }
        world.stop(stopped_at_the_end);
        for node in 0..nodes {
            world.event(node, true, false);
        }
        for _ in 0..20 {
            world.now += SignedDuration::from_secs(30);
            world.round(&mut || 7);
        }
        for (name, node) in &world.nodes {
            prop_assert!(Ownership::read(node).is_none() && !node.unschedulable, "{name} is kept");
            prop_assert_eq!(world.phase(name), Phase::Idle);
        }
    }

    /// With room for all nothing is held, and a held node goes on when there is room again.
    #[test]
    fn what_is_held_goes_on_when_there_is_room(nodes in 1..8_usize, allowed in 1..4_u32) {
        let budget = Budget { max: Amount::Nodes(allowed), per: None };
        let mut world = World::new(nodes, vec![budget]);
        for node in 0..nodes {
            world.event(node, false, false);
        }
        let mut seen = BTreeSet::new();
        // Each round gives back what is out; within as many rounds all have had their turn.
        for _ in 0..3 * nodes {
            world.round(&mut || 7);
            let out: Vec<usize> = (0..nodes)
                .filter(|n| Ownership::read(&world.nodes[&format!("n{n}")]).is_some())
                .collect();
            for node in out {
                seen.insert(node);
                world.event(node, true, false);
            }
        }
        prop_assert_eq!(seen.len(), nodes);
    }
}
