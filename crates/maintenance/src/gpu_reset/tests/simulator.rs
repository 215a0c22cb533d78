//! Simulates arbitrary events, and crashes at any point: in the end all labels have their
//! previous values, except those that others have changed.

use proptest::prelude::*;

use super::*;

/// An event of the simulation.
#[derive(Clone, Copy, Debug)]
enum Happens {
    /// The controller takes its next action. With `stale` it decides from an older observation,
    /// like a controller that was disconnected or lost a response.
    Step { stale: bool },
    /// Another party sets or removes a label.
    Edit(usize, Option<&'static str>),
    /// The operator reconciles its pods with the labels.
    Pods,
    /// The Job makes progress.
    Job(u8),
    /// Time passes, in seconds.
    Minutes(i64),
    /// Another party deletes the request.
    Delete,
    /// Another party removes the request together with its finalizer.
    Vanish,
    /// The node disappears, or another one appears.
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

/// The cluster, and an earlier observation of it by the controller.
struct Story {
    world: World,
    exists: bool,
    /// Expected final value of each label.
    wanted: BTreeMap<String, String>,
    observed: (Value, Option<NodeView>, ResetObservation),
}

impl Story {
    fn new(labels: &[(&str, &str)]) -> Self {
        let world = World::new(node(labels));
        let wanted = world.node.as_ref().unwrap().labels.clone();
        let observed = (world.object.clone(), world.node.clone(), world.job.clone());
        Self {
            world,
            exists: true,
            wanted,
            observed,
        }
    }

    fn look(&mut self) {
        let world = &self.world;
        self.observed = (world.object.clone(), world.node.clone(), world.job.clone());
    }

    /// Carries out one action like the API server. Returns whether there was one.
    fn step(&mut self) -> bool {
        let (object, node, job) = self.observed.clone();
        if !self.exists {
            let change = node.as_ref().and_then(|node| left_behind(node, |_| false));
            let Some(change) = change else {
                return false;
            };
            self.change(node.as_ref(), &change);
            return true;
        }
        let decision = decide(&ResetInput {
            request: &MaintenanceResource::read(Maintenance::Reset, &object).unwrap(),
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
            // Each action names the state that it is based on.
            Act::Finalizer(_) | Act::Status(_) if object != self.world.object => {}
            Act::Node(change) => self.change(node.as_ref(), &change),
            Act::Make(_) if self.world.job != ResetObservation::Absent => {}
            effect => self.world.apply(effect),
        }
        let gone = self.world.object["metadata"]["deletionTimestamp"].is_string()
            && self.world.object["metadata"]["finalizers"] != json!([FINALIZER]);
        self.exists &= !gone;
        true
    }

    /// Applies a patch if no field it touches has changed since the observation.
    fn change(&mut self, observed: Option<&NodeView>, change: &NodeChange) {
        let (Some(observed), Some(node)) = (observed, self.world.node.as_ref()) else {
            return;
        };
        let label = |key: &String| observed.labels.get(key) == node.labels.get(key);
        let annotation = |key: &String| observed.annotations.get(key) == node.annotations.get(key);
        if observed.uid == node.uid
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
                    return; // No change, and not observable.
                }
                let stopped = self.world.node.as_ref().and_then(Stopped::read);
                let ours = stopped.is_some_and(|one| one.labels.contains_key(&label));
                if ours && value.as_deref() == Some("false") {
                    return; // Indistinguishable from the reset's own change.
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
            Happens::Job(what) if matches!(self.world.job, ResetObservation::Own(_)) => {
                self.world.job = match what {
                    0 | 1 => ResetObservation::Own(ResetState::Succeeded),
                    2 => ResetObservation::Own(ResetState::Failed("it is held".to_owned())),
                    _ if self.world.by_provider => ResetObservation::Unclear,
                    3 => ResetObservation::Own(ResetState::Deleting),
                    _ => ResetObservation::Absent,
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
        // From here on nothing else happens, and the request runs to its end.
        for _ in 0..200 {
            world.look();
            if !world.step() {
                world.run_pods();
                if world.world.job == ResetObservation::Own(ResetState::Deleting) {
                    world.world.job = ResetObservation::Absent;
                }
                world.world.passes(1);
            }
        }
        prop_assert!(world.world.is_clean(), "{:?}", world.world.node);
        if let Some(node) = &world.world.node {
            prop_assert_eq!(&node.labels, &world.wanted);
        }
        let active = matches!(world.world.job, ResetObservation::Own(ResetState::Active(_)));
        prop_assert!(!active || by_provider || !world.exists, "{:?}", world.world.job);
        // The request has ended.
        if world.exists {
            prop_assert!(world.world.outcome().is_some(), "{}", world.world.object["status"]);
        }
    }
}
