//! Maintenances at random: whatever the cloud, the nodes, the clock and restarts do, nothing is
//! lost, doubled or left behind.

use proptest::prelude::*;

use super::*;

/// Something that happens.
#[derive(Clone, Debug)]
enum Step {
    /// The source tells this of a node. `None`: it tells nothing.
    Tells(usize, Option<Told>),
    /// The source cannot be understood for a node, or again.
    Unseen(usize, bool),
    Node(usize, Option<(bool, u8)>),
    Released(usize),
    Passes(i64),
    Restart,
}

#[derive(Clone, Debug)]
struct Told {
    phase: Phase,
    event: bool,
    /// Start in minutes from now.
    start: Option<i64>,
    emergency: bool,
    kind: Kind,
}

fn told() -> impl Strategy<Value = Told> {
    let phase = prop_oneof![
        3 => Just(Phase::Scheduled),
        2 => Just(Phase::Ongoing),
        1 => Just(Phase::Completed),
        1 => Just(Phase::Cancelled),
    ];
    let start = proptest::option::weighted(0.8, -30_i64..150);
    let kind = proptest::sample::select(Kind::ALL.to_vec());
    (
        phase,
        any::<bool>(),
        start,
        proptest::bool::weighted(0.1),
        kind,
    )
        .prop_map(|(phase, event, start, emergency, kind)| Told {
            phase,
            event,
            start,
            emergency,
            kind,
        })
}

fn step() -> impl Strategy<Value = Step> {
    let name = 0_usize..2;
    prop_oneof![
        4 => (name.clone(), proptest::option::weighted(0.7, told()))
            .prop_map(|(node, told)| Step::Tells(node, told)),
        1 => (name.clone(), any::<bool>()).prop_map(|(node, unseen)| Step::Unseen(node, unseen)),
        2 => (name.clone(), proptest::option::weighted(0.9, (any::<bool>(), 0_u8..3)))
            .prop_map(|(node, state)| Step::Node(node, state)),
        1 => name.prop_map(Step::Released),
        6 => (0_i64..40).prop_map(Step::Passes),
        1 => Just(Step::Restart),
    ]
}

impl World {
    fn happens(&mut self, step: Step) {
        let name = |node: usize| format!("n{node}");
        match step {
            Step::Tells(node, told) => {
                let name = name(node);
                let Some(told) = told else {
                    self.notices.retain(|notice| notice.node != name);
                    return;
                };
                let event = if told.event { "e" } else { "" }.to_owned();
                self.notices
                    .retain(|one| one.node != name || one.event != event);
                self.notices.push(Notice {
                    event,
                    node: name,
                    kind: told.kind,
                    emergency: told.emergency,
                    ..notice(told.phase, told.start.map(|start| start + self.now))
                });
            }
            Step::Unseen(node, true) => {
                self.unseen.insert(name(node));
            }
            Step::Unseen(node, false) => {
                self.unseen.remove(&name(node));
            }
            Step::Node(at, state) => {
                let is_out = self.nodes.get(&name(at)).is_some_and(|node| node.is_out);
                match state {
                    None => drop(self.nodes.remove(&name(at))),
                    Some((ready, boot)) => {
                        let state = node(ready, &format!("b{boot}"));
                        self.nodes.insert(name(at), NodeState { is_out, ..state });
                    }
                }
            }
            Step::Released(node) => {
                // A person dismisses the fault.
                if let Some(node) = self.nodes.get_mut(&name(node)) {
                    node.is_out = false;
                }
            }
            Step::Passes(minutes) => self.now += minutes,
            Step::Restart => self.restart(),
        }
    }

    /// Checks what holds after every look.
    fn check(&self) {
        for record in self.book.records() {
            let open: Vec<bool> = (self.open.iter())
                .filter(|((node, _), _)| *node == record.node)
                .map(|(_, fatal)| *fatal)
                .collect();
            let of_node = |one: &&Record| one.node == record.node && !one.state.is_last();
            let mut left = self.book.records().iter().filter(of_node).peekable();
            let is_told = left.peek().is_some();
            let is_out = left.any(|record| record.out_since.is_some());
            assert_eq!(
                open,
                if is_told { vec![is_out] } else { Vec::new() },
                "{record:?}"
            );
            if let Some(since) = record.out_since {
                assert!(since <= at(self.now));
            }
        }
    }
}

proptest! {
    #[test]
    fn nothing_is_lost_doubled_or_left_behind(
        steps in proptest::collection::vec(step(), 1..60),
        restarts in any::<bool>(),
    ) {
        let mut world = World::new();
        world.nodes = [0, 1].map(|number| (format!("n{number}"), node(true, "b0"))).into();
        for step in steps {
            world.happens(step);
            let notices = world.notices.clone();
            world.look(world.now);
            world.check();
            if restarts {
                world.restart();
            }
            // A repetition in another order says and changes nothing, once the node is seen.
            prop_assert_eq!(world.look(world.now), Vec::<String>::new());
            let before = world.book.clone();
            world.notices.reverse();
            prop_assert_eq!(world.look(world.now), Vec::<String>::new());
            prop_assert_eq!(&world.book, &before);
            world.notices = notices;
        }
        // In the end all is over, and each node has shown that it is well.
        world.notices.clear();
        world.unseen.clear();
        world.nodes = [0, 1].map(|number| (format!("n{number}"), node(true, "last"))).into();
        for _ in 0..10 {
            world.look(world.now + 61);
        }
        prop_assert!(world.open.is_empty(), "{:?}", world.open);
        for record in world.book.records() {
            prop_assert!(record.state.is_last(), "{:?}", record);
        }
    }

    /// A node leaves no earlier than its maintenance asks for.
    #[test]
    fn no_node_leaves_too_early(start in 0_i64..300, looks in proptest::collection::vec(1_i64..20, 1..40)) {
        let mut world = World::new();
        world.notices = vec![notice(Phase::Scheduled, Some(start))];
        for minutes in looks {
            world.look(world.now + minutes);
            let is_fatal = world.open.values().any(|fatal| *fatal);
            prop_assert_eq!(is_fatal, world.now >= start - 30);
        }
    }
}
