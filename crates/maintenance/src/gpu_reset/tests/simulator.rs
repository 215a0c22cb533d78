//! Whatever happens, and wherever a process dies, the labels are in the end what they were, but for what
//! others have made of them.

use proptest::prelude::*;

use super::*;

/// Something that happens.
#[derive(Clone, Copy, Debug)]
enum Happens {
    /// The controller does the next thing; with `stale` it decides by what it saw a while ago, as one does
    /// that was cut off, or whose answer was lost.
    Step { stale: bool },
    /// Somebody sets a label, or removes it.
    Edit(usize, Option<&'static str>),
    /// The operator brings its pods in line with the labels.
    Pods,
    /// The Job goes on.
    Job(u8),
    /// Time passes.
    Minutes(i64),
    /// Somebody deletes the request.
    Delete,
    /// Somebody takes it away with its finalizer.
    Vanish,
    /// The node goes, or another comes.
    Node(bool),
}

const LABELS: [&str; 3] = [PLUGIN, DCGM, DCGM_DRA];

fn happens() -> impl Strategy<Value = Happens> {
    let values = prop_oneof![
        Just(None),
        Just(Some("true")),
        Just(Some("false")),
        Just(Some("paused-for-driver-upgrade")),
    ];
    prop_oneof![
        24 => any::<bool>().prop_map(|stale| Happens::Step { stale }),
        2 => (0..LABELS.len(), values).prop_map(|(at, value)| Happens::Edit(at, value)),
        6 => Just(Happens::Pods),
        4 => (0..5_u8).prop_map(Happens::Job),
        2 => (1..12_i64).prop_map(Happens::Minutes),
        1 => Just(Happens::Delete),
        1 => Just(Happens::Vanish),
        1 => any::<bool>().prop_map(Happens::Node),
    ]
}

/// The cluster, and what the controller saw of it a while ago.
struct Story {
    world: World,
    exists: bool,
    /// What each label is to be in the end.
    wanted: BTreeMap<String, String>,
    seen: (Value, Option<NodeView>, ResetSeen),
}

impl Story {
    fn new(labels: &[(&str, &str)]) -> Self {
        let world = World::new(node(labels));
        let wanted = world.node.as_ref().unwrap().labels.clone();
        let seen = (world.object.clone(), world.node.clone(), world.job.clone());
        Self {
            world,
            exists: true,
            wanted,
            seen,
        }
    }

    fn look(&mut self) {
        let world = &self.world;
        self.seen = (world.object.clone(), world.node.clone(), world.job.clone());
    }

    /// Does one thing, as the API server would. Returns whether there was one.
    fn step(&mut self) -> bool {
        let (object, node, job) = self.seen.clone();
        if !self.exists {
            let change = node.as_ref().and_then(|node| left_behind(node, |_| false));
            let Some(change) = change else {
                return false;
            };
            self.change(node.as_ref(), &change);
            return true;
        }
        let decision = decide(&Case {
            request: &Resource::read(Maintenance::Reset, &object).unwrap(),
            node: node.as_ref(),
            pods: Some(&self.world.pods),
            looks_since: self.world.now,
            reset: &job,
            by_provider: self.world.by_provider,
            before: None,
            excluded: false,
            settings: &self.world.settings,
            now: self.world.now,
        });
        let Some(effect) = decision.act else {
            return false;
        };
        match effect {
            // Each names the state that it was decided by.
            Act::Finalizer(_) | Act::Status(_) if object != self.world.object => {}
            Act::Node(change) => self.change(node.as_ref(), &change),
            Act::Make(_) if self.world.job != ResetSeen::Absent => {}
            effect => self.world.apply(effect),
        }
        let gone = self.world.object["metadata"]["deletionTimestamp"].is_string()
            && self.world.object["metadata"]["finalizers"] != json!([FINALIZER]);
        self.exists &= !gone;
        true
    }

    /// A patch that holds where all that it touches is as it was seen.
    fn change(&mut self, seen: Option<&NodeView>, change: &NodeChange) {
        let (Some(seen), Some(node)) = (seen, self.world.node.as_ref()) else {
            return;
        };
        let label = |key: &String| seen.labels.get(key) == node.labels.get(key);
        let annotation = |key: &String| seen.annotations.get(key) == node.annotations.get(key);
        if seen.uid == node.uid
            && change.labels.keys().all(label)
            && change.annotations.keys().all(annotation)
        {
            self.world.node = Some(node.after(change));
        }
    }

    fn happens(&mut self, one: Happens) {
        match one {
            Happens::Step { stale } => {
                if !stale {
                    self.look();
                }
                self.step();
            }
            Happens::Edit(at, value) => {
                let label = LABELS[at].to_owned();
                let value = value.map(str::to_owned);
                if self.world.label(&label).map(str::to_owned) == value {
                    return; // That is no change, and nobody can see it.
                }
                let stopped = self.world.node.as_ref().and_then(Stopped::read);
                let ours = stopped.is_some_and(|one| one.labels.contains_key(&label));
                if ours && value.as_deref() == Some("false") {
                    return; // Nobody can tell that from what the reset has done.
                }
                match &value {
                    Some(value) => drop(self.wanted.insert(label.clone(), value.clone())),
                    None => drop(self.wanted.remove(&label)),
                }
                let labels = BTreeMap::from([(label, value)]);
                self.world.apply(Act::Node(NodeChange {
                    labels,
                    ..NodeChange::default()
                }));
            }
            Happens::Pods => self.run_pods(),
            Happens::Job(what) if matches!(self.world.job, ResetSeen::Ours(_)) => {
                self.world.job = match what {
                    0 | 1 => ResetSeen::Ours(ResetState::Succeeded),
                    2 => ResetSeen::Ours(ResetState::Failed("it is held".to_owned())),
                    _ if self.world.by_provider => ResetSeen::Unclear,
                    3 => ResetSeen::Ours(ResetState::Deleting),
                    _ => ResetSeen::Absent,
                };
            }
            Happens::Job(_) => {}
            Happens::Minutes(minutes) => self.world.passes(minutes),
            Happens::Delete => {
                let now = json!(self.world.now);
                self.world.object["metadata"]["deletionTimestamp"] = now;
                self.exists &= self.world.object["metadata"]["finalizers"] == json!([FINALIZER]);
            }
            Happens::Vanish => self.exists = false,
            Happens::Node(true) => {
                let mut fresh = node(&[(PLUGIN, "true")]);
                fresh.uid = format!("uid-{}", self.world.now);
                self.wanted.clone_from(&fresh.labels);
                self.world.node = Some(fresh);
            }
            Happens::Node(false) => self.world.node = None,
        }
    }

    fn run_pods(&mut self) {
        let runs = SERVICES
            .iter()
            .filter(|one| self.world.label(one.label) == Some("true"));
        self.world.pods = runs.map(|one| pod(one.app, true)).collect();
    }
}

proptest! {
    #[test]
    fn whatever_happens_the_labels_are_what_they_were(
        first in prop::collection::vec(prop_oneof![Just("true"), Just("false")], 3),
        story in prop::collection::vec(happens(), 1..60),
        by_provider in any::<bool>(),
    ) {
        let labels: Vec<(&str, &str)> = LABELS.iter().copied().zip(first).collect();
        let mut world = Story::new(&labels);
        world.world.by_provider = by_provider;
        for one in story {
            world.happens(one);
        }
        // Then nothing happens any more, and what was asked for takes its course.
        for _ in 0..200 {
            world.look();
            if !world.step() {
                world.run_pods();
                if world.world.job == ResetSeen::Ours(ResetState::Deleting) {
                    world.world.job = ResetSeen::Absent;
                }
                world.world.passes(1);
            }
        }
        prop_assert!(world.world.is_clean(), "{:?}", world.world.node);
        if let Some(node) = &world.world.node {
            prop_assert_eq!(&node.labels, &world.wanted);
        }
        let active = matches!(world.world.job, ResetSeen::Ours(ResetState::Active(_)));
        prop_assert!(!active || by_provider || !world.exists, "{:?}", world.world.job);
        // It has an end.
        if world.exists {
            prop_assert!(world.world.outcome().is_some(), "{}", world.world.object["status"]);
        }
    }
}
