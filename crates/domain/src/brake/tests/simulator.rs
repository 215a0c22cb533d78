//! A simulator: random faults, recoveries, people, crashes and lost answers on a whole
//! cluster, against what the brake promises.

use std::sync::LazyLock;

use contract::{BehaviourOverrides, HealthEvent};
use proptest::prelude::*;

use super::*;
use crate::assess::{Desired, assess};
use crate::event::{Record, normalise};
use crate::fault::FaultBook;
use crate::future::FutureTimes;
use crate::node::NodeView;
use crate::policy::Policy;
use crate::session::ownership::{self, Ownership};
use crate::session::{Failure, Intent, Phase, Session, step};

/// One cheap rule: what matters here is who goes when.
static POLICY: LazyLock<Policy> = LazyLock::new(|| {
    let text = "[[rule-sets]]\nname = \"fatal\"\ncordon = { shouldCordon = true }\n\
                [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n";
    Policy::parse(text, "test").unwrap()
});

/// A whole cluster, and a controller that may crash at any time.
struct World {
    policy: Policy,
    book: FaultBook,
    /// The nodes as they are.
    nodes: BTreeMap<String, NodeView>,
    /// The nodes as the controller has last seen them; may lag behind.
    seen: BTreeMap<String, NodeView>,
    sessions: BTreeMap<String, Session>,
    /// Patches whose answer was lost: they may have been made. Until when that counts.
    uncertain: BTreeMap<String, Timestamp>,
    recent: BTreeMap<String, Timestamp>,
    /// Nodes whose session began by force.
    forced: BTreeSet<String>,
    stop: Option<Hold>,
    dropped_at: Option<Timestamp>,
    now: Timestamp,
    seq: u64,
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
        let nodes: BTreeMap<String, NodeView> = nodes.collect();
        Self {
            policy,
            book: FaultBook::default(),
            seen: nodes.clone(),
            nodes,
            sessions: BTreeMap::new(),
            uncertain: BTreeMap::new(),
            recent: BTreeMap::new(),
            forced: BTreeSet::new(),
            stop: None,
            dropped_at: None,
            now: at(1_800_000_000),
            seq: 0,
        }
    }

    fn event(&mut self, node: usize, healthy: bool, force: bool) {
        self.now += SignedDuration::from_secs(1);
        self.seq += 1;
        let mut event = HealthEvent {
            agent: "gpu-health-monitor".into(),
            component_class: "GPU".into(),
            check_name: "GpuMemWatch".into(),
            node_name: format!("n{node}"),
            is_fatal: !healthy,
            is_healthy: healthy,
            message: format!("report {}", self.seq),
            quarantine_overrides: force.then_some(BehaviourOverrides { force, skip: false }),
            ..HealthEvent::default()
        };
        normalise(&mut event, self.now);
        let record = Record {
            seq: self.seq.into(),
            id: event.id.clone(),
            created_at: self.now,
            event,
        };
        self.book.record(&record);
    }

    fn desired(&self, name: &str) -> Desired {
        let node = &self.seen[name];
        let dismissed = ownership::dismissal(node, self.dropped_at, &FutureTimes::default());
        assess(self.book.faults(name), &self.policy, node, dismissed)
    }

    fn out(&self, name: &str) -> Option<Out> {
        let own = Ownership::read(&self.seen[name]);
        let in_doubt = (self.uncertain.get(name)).is_some_and(|until| self.now < *until);
        own.map(|own| Out {
            since: own.since,
            forced: own.forced(),
        })
        .or(in_doubt.then_some(Out {
            since: Some(self.now),
            forced: false,
        }))
    }

    /// What the watch brings: within [`DOUBT`] everything, and often sooner.
    fn watch(&mut self, luck: &mut impl FnMut() -> u8) {
        for (name, node) in &self.nodes {
            let late = (self.uncertain.get(name)).is_none_or(|until| self.now >= *until);
            if late || luck() > 4 {
                self.seen.insert(name.clone(), node.clone());
            }
        }
    }

    /// One round of the controller: plan, then a step for each node. `luck` says of each
    /// patch whether it is refused, or made or not made without an answer.
    fn round(&mut self, luck: &mut impl FnMut() -> u8) {
        self.now += SignedDuration::from_secs(2);
        self.watch(luck);
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        let candidates = names
            .iter()
            .filter(|name| self.out(name).is_none())
            .filter_map(|name| {
                let desired = self.desired(name);
                Candidate::of(name, &desired, self.sessions.get(name))
            })
            .collect();
        let plan = plan(Question {
            brake: Some(&self.policy.brake),
            gpu_label: &gpu_label(),
            members: names
                .iter()
                .map(|name| Member {
                    name,
                    labels: &self.seen[name].labels,
                    out: self.out(name),
                })
                .collect(),
            recent: &self.recent,
            reset_at: None,
            stop: self.stop.clone(),
            candidates,
            now: self.now,
        });
        for name in &names {
            let session = self
                .sessions
                .remove(name)
                .unwrap_or_else(|| Session::idle(self.now));
            let in_doubt = self.uncertain.contains_key(name);
            // What is in doubt is counted, and tried again only where nothing stops it.
            let hold = (plan.held.get(name)).or(self.stop.as_ref().filter(|_| in_doubt));
            let desired = self.desired(name);
            let seen = &self.seen[name];
            let marks = self.policy.marks();
            let step = step(&session, &desired, Some(seen), &marks, hold, self.now);
            let mut session = step.session;
            if let Some(patch) = step.patch {
                let taking_out = patch.intent == Intent::Quarantine;
                if taking_out && desired.forced_by.is_some() {
                    self.forced.insert(name.clone());
                }
                // A patch holds only where the node is as it was seen.
                let real = &self.nodes[name];
                let fits = Ownership::read(real) == Ownership::read(seen)
                    && real.unschedulable == seen.unschedulable;
                let after = seen.after(&patch.change);
                let luck = luck();
                if !fits || luck == 0 {
                    session.failed(Failure::Conflict, self.now);
                    self.seen.insert(name.clone(), self.nodes[name].clone());
                    self.uncertain.remove(name);
                } else if luck <= 2 {
                    // The answer is lost; with 1 it was made all the same.
                    session.failed(Failure::Error { retry_after: None }, self.now);
                    if luck == 1 {
                        self.nodes.insert(name.clone(), after);
                    }
                    if taking_out {
                        self.uncertain.insert(name.clone(), self.now + DOUBT);
                    }
                } else {
                    self.nodes.insert(name.clone(), after.clone());
                    self.seen.insert(name.clone(), after);
                    self.uncertain.remove(name);
                }
            }
            self.sessions.insert(name.clone(), session);
        }
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
    assert!(Ownership::read(&world.seen["n0"]).is_none());
    world.event(0, true, false);
    world.event(1, false, false);
    world.round(&mut || 3);
    assert_eq!(out(&world), 1, "the room may be taken");
    assert_eq!(world.sessions["n1"].phase, Phase::Held);
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
                    if let Some(node) = world.nodes.get_mut(&format!("n{}", node % nodes)) {
                        node.unschedulable = false;
                    }
                }
                Happening::Stop(stop) => world.stop = stop.then_some(Hold::Tripped),
                Happening::Drop => world.dropped_at = Some(world.now),
                Happening::Crash => {
                    // What is on the nodes is all that stays.
                    world.sessions.clear();
                    world.uncertain.clear();
                    world.seen = world.nodes.clone();
                    world.recent.clear();
                }
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
        world.stop = stopped_at_the_end.then_some(Hold::Tripped);
        for node in 0..nodes {
            world.event(node, true, false);
        }
        for _ in 0..20 {
            world.now += SignedDuration::from_secs(30);
            world.round(&mut || 7);
        }
        for (name, node) in &world.nodes {
            prop_assert!(Ownership::read(node).is_none() && !node.unschedulable, "{name} is kept");
            prop_assert_eq!(world.sessions[name].phase, Phase::Idle);
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
