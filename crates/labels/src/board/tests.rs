use std::sync::LazyLock;

use contract::keys;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::classes;
use crate::pod::DcgmVersion;

const CURRENT: &str = "nvsentinel.dgxc.nvidia.com/gpu.count.current";
const EXPECTED: &str = "nvsentinel.dgxc.nvidia.com/gpu.count.expected";
const NICS: &str = "nvsentinel.dgxc.nvidia.com/nic.count.current";

static CLASSES: LazyLock<Vec<Class>> = LazyLock::new(|| classes::built_in().unwrap());

fn config() -> LabelConfig {
    LabelConfig {
        kata_label: None,
        assume_driver: false,
        assume_dcgm: false,
        dcgm_ready_first: true,
        dcgm_version: None,
        classes: CLASSES.clone(),
    }
}

/// Returns a board whose pods are known.
fn board(config: LabelConfig) -> Board {
    let mut board = Board::new(config);
    for role in PodRole::ALL {
        assert!(board.set_known(role) && !board.set_known(role));
    }
    board
}

fn node(name: &str, labels: &[(&str, &str)]) -> NodeView {
    let mut map = json!({"kubernetes.io/hostname": name});
    for (key, value) in labels {
        map[key] = json!(value);
    }
    let object = json!({"metadata": {"name": name, "labels": map}, "status": {"allocatable": {}}});
    NodeView::from_object(object).unwrap()
}

fn pod(node: &str, ready: bool, version: Option<DcgmVersion>) -> Pod {
    let node = node.to_owned();
    Pod {
        node,
        ready,
        version,
    }
}

fn slice(node: &str, driver: &str, generation: i64, kinds: &[&str]) -> Value {
    let device = |kind: &&str| json!({"name": "d", "attributes": {"type": {"string": kind}}});
    let devices: Vec<Value> = kinds.iter().map(device).collect();
    let pool = json!({"name": node, "generation": generation, "resourceSliceCount": 1});
    json!({"spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": devices}})
}

/// Returns the change of a node as `key=value` with the last part of each key, and the node
/// afterwards.
fn look(board: &mut Board, node: &NodeView) -> (String, NodeView) {
    board.learn(node);
    let change = board.change(node);
    let short = |key: &String| key.rsplit_once('/').map_or("", |(_, name)| name).to_owned();
    let entries = change.labels.iter().chain(&change.annotations);
    let shown =
        entries.map(|(key, value)| format!("{}={}", short(key), value.as_deref().unwrap_or("-")));
    let shown: Vec<String> = shown.collect();
    (shown.join(" "), node.after(&change))
}

/// Returns what a node would be changed to.
fn shown(board: &mut Board, node: &NodeView) -> String {
    look(board, node).0
}

#[test]
fn kata_and_the_driver_change_in_the_same_pass() {
    let mut board = board(config());
    board.set_pod(PodRole::Driver, "ns/driver", Some(pod("n", true, None)));
    board.set_pod(
        PodRole::Dcgm,
        "ns/dcgm",
        Some(pod("n", true, Some(DcgmVersion::V4))),
    );
    let (change, after) = look(&mut board, &node("n", &[(keys::KATA_RUNTIME, "Enabled")]));
    let all = "dcgm.version=4.x driver.installed=true kata.enabled=true \
               dcgm-bootstrap-completed=true";
    assert_eq!(change, all);
    assert_eq!(shown(&mut board, &after), "", "nothing differs any more");
}

#[test]
fn a_change_of_allocatable_changes_the_number_of_nics() {
    let mut board = board(config());
    let with = |nics: &str, labels: &BTreeMap<String, String>| {
        let allocatable = json!({"nvidia.com/mlnxnics": nics});
        let object = json!({
            "metadata": {"name": "n", "labels": labels},
            "status": {"allocatable": allocatable},
        });
        NodeView::from_object(object).unwrap()
    };
    let (change, after) = look(&mut board, &with("8", &BTreeMap::new()));
    assert_eq!(
        change,
        "kata.enabled=false nic.count.current=8 nic.count.expected=8"
    );
    let (change, after) = look(&mut board, &with("6", &after.labels));
    assert_eq!(
        change, "nic.count.current=6",
        "the expected number does not fall"
    );
    assert_eq!(after.labels[NICS], "6");
}

#[test]
fn the_label_of_dcgm_waits_for_the_first_ready_pod_and_not_for_later_ones() {
    let mut board = board(config());
    let v4 = Some(DcgmVersion::V4);
    let start = node("n", &[(keys::KATA_ENABLED, "false")]);
    board.set_pod(PodRole::Dcgm, "ns/a", Some(pod("n", false, v4)));
    assert_eq!(shown(&mut board, &start), "");
    let eager = LabelConfig {
        dcgm_ready_first: false,
        ..config()
    };
    let mut eager = Board {
        config: eager,
        ..board.clone()
    };
    let first = "dcgm.version=4.x dcgm-bootstrap-completed=true";
    assert_eq!(shown(&mut eager, &start), first);
    board.set_pod(PodRole::Dcgm, "ns/a", Some(pod("n", true, v4)));
    let (change, labelled) = look(&mut board, &start);
    assert_eq!(change, first);
    // An upgrade: the next pod is not ready yet, and the label stays, also from NVSentinel's time
    // before the annotation.
    board.set_pod(PodRole::Dcgm, "ns/a", Some(pod("n", false, v4)));
    assert_eq!(shown(&mut board, &labelled), "");
    let old = node(
        "n",
        &[(keys::KATA_ENABLED, "false"), (keys::DCGM_VERSION, "4.x")],
    );
    assert_eq!(shown(&mut board, &old), "dcgm-bootstrap-completed=true");
    // Without a pod the label goes, and the annotation stays.
    assert_eq!(board.set_pod(PodRole::Dcgm, "ns/a", None), ["n"]);
    let (change, gone) = look(&mut board, &labelled);
    assert_eq!(change, "dcgm.version=-");
    assert_eq!(gone.annotations[keys::DCGM_BOOTSTRAPPED], "true");
    board.set_pod(
        PodRole::Dcgm,
        "ns/b",
        Some(pod("n", false, Some(DcgmVersion::V3))),
    );
    assert_eq!(shown(&mut board, &gone), "dcgm.version=3.x");
    // The ready one of two pods counts.
    board.set_pod(
        PodRole::Dcgm,
        "ns/c",
        Some(pod("n", true, Some(DcgmVersion::V3))),
    );
    board.set_pod(PodRole::Dcgm, "ns/b", Some(pod("n", false, v4)));
    assert_eq!(shown(&mut board, &gone), "dcgm.version=3.x");
}

#[test]
fn a_version_that_no_pod_tells_comes_from_the_setting_or_leaves_the_label_alone() {
    let mut board = board(config());
    board.set_pod(PodRole::Dcgm, "ns/a", Some(pod("n", true, None)));
    let kata = (keys::KATA_ENABLED, "false");
    let start = node("n", &[kata]);
    assert_eq!(shown(&mut board, &start), "");
    let labelled = node("n", &[kata, (keys::DCGM_VERSION, "3.x")]);
    assert_eq!(
        shown(&mut board, &labelled),
        "dcgm-bootstrap-completed=true"
    );
    board.config.dcgm_version = Some(DcgmVersion::V4);
    let expected = "dcgm.version=4.x dcgm-bootstrap-completed=true";
    assert_eq!(shown(&mut board, &start), expected);
    assert_eq!(shown(&mut board, &labelled), expected);
    board.set_pod(PodRole::Dcgm, "ns/a", None);
    assert_eq!(
        shown(&mut board, &start),
        "",
        "the setting labels no node without a pod"
    );
}

#[test]
fn dcgm_outside_of_pods_keeps_a_valid_label_and_a_driver_is_assumed_on_nodes_with_gpus() {
    let kata = (keys::KATA_ENABLED, "false");
    let labelled = |version| node("n", &[kata, (keys::DCGM_VERSION, version)]);
    let gpus = node("n", &[kata, ("nvidia.com/gpu.present", "true")]);
    let mut board = board(LabelConfig {
        assume_dcgm: true,
        assume_driver: true,
        ..config()
    });
    assert_eq!(
        shown(&mut board, &labelled("4.x")),
        "dcgm-bootstrap-completed=true"
    );
    let invalid = "dcgm.version=- dcgm-bootstrap-completed=true";
    assert_eq!(shown(&mut board, &labelled("5")), invalid);
    assert_eq!(shown(&mut board, &gpus), "driver.installed=true");
    assert_eq!(shown(&mut board, &node("n", &[kata])), "");
    board.config.assume_driver = false;
    assert_eq!(shown(&mut board, &gpus), "");
    board.set_pod(PodRole::Installer, "ns/a", Some(pod("n", false, None)));
    assert_eq!(shown(&mut board, &gpus), "");
    board.set_pod(PodRole::Installer, "ns/a", Some(pod("n", true, None)));
    assert_eq!(shown(&mut board, &gpus), "driver.installed=true");
}

#[test]
fn kata_has_a_label_of_its_own_too() {
    let mut board = board(LabelConfig {
        kata_label: Some("example.com/kata".to_owned()),
        ..config()
    });
    for (key, value, expected) in [
        (keys::KATA_RUNTIME, "YES", "true"),
        (keys::KATA_RUNTIME, "1", "true"),
        (keys::KATA_RUNTIME, "on", "false"),
        ("example.com/kata", "true", "true"),
        ("example.com/other", "true", "false"),
    ] {
        let change = shown(&mut board, &node("n", &[(key, value)]));
        assert_eq!(change, format!("kata.enabled={expected}"), "{key}={value}");
    }
}

#[test]
fn what_cannot_be_read_and_nodes_that_are_handed_over_are_left_alone() {
    let old = node(
        "n",
        &[
            (keys::KATA_ENABLED, "false"),
            (keys::DRIVER_INSTALLED, "true"),
            (keys::DCGM_VERSION, "4.x"),
            (CURRENT, "8"),
            (EXPECTED, "8"),
        ],
    );
    // Nothing is known of pods, and there are no slices.
    let mut blind = Board::new(config());
    assert_eq!(shown(&mut blind, &old), "dcgm-bootstrap-completed=true");
    let skipped = blind.learn(&old).skipped;
    assert_eq!(skipped[1], ("gpu-dra".to_owned(), Skip::MissingSource));
    blind.set_known(PodRole::Driver);
    assert_eq!(shown(&mut blind, &old), "dcgm-bootstrap-completed=true");
    let mut seeing = board(config());
    let gone = "dcgm.version=- driver.installed=- dcgm-bootstrap-completed=true";
    assert_eq!(shown(&mut seeing, &old), gone);
    let mut handed_over = old.clone();
    let label = (keys::HANDED_OVER_LABEL.to_owned(), "false".to_owned());
    handed_over.labels.extend([label]);
    assert_eq!(shown(&mut seeing, &handed_over), "");
}

#[test]
fn gpus_are_counted_from_slices_of_one_driver_without_feature_discovery() {
    let mut board = board(config());
    let start = node("n", &[(keys::KATA_ENABLED, "false")]);
    // Another driver's slices are no source of GPUs.
    board.set_slice("nics", Some(&slice("n", "nic.example.com", 1, &["gpu"])));
    assert_eq!(shown(&mut board, &start), "");
    let kinds = ["gpu", "gpu", "mig"];
    let changed = board.set_slice("gpus", Some(&slice("n", "gpu.nvidia.com", 1, &kinds)));
    assert_eq!(changed, ["n"]);
    let (change, after) = look(&mut board, &start);
    assert_eq!(change, "gpu.count.current=2 gpu.count.expected=2");
    board.set_slice("gpus", Some(&slice("n", "gpu.nvidia.com", 2, &["gpu"])));
    assert_eq!(shown(&mut board, &after), "gpu.count.current=1");
    board.set_slice("gpus", None);
    assert_eq!(
        shown(&mut board, &after),
        "",
        "no source leaves the labels alone"
    );
}

#[test]
fn the_expected_number_is_learned_from_the_group_and_never_falls() {
    let kata = (keys::KATA_ENABLED, "false");
    let of = |name: &str, kind: &str, count: &str| {
        let kind = ("node.kubernetes.io/instance-type", kind);
        node(name, &[kata, kind, ("nvidia.com/gpu.count", count)])
    };
    let mut board = board(config());
    let (a, b, other) = (of("a", "p5", "7"), of("b", "p5", "8"), of("c", "g4", "4"));
    board.learn(&a);
    let learned = board.learn(&b);
    assert_eq!(learned.peers, ["a", "b"].map(str::to_owned).into());
    assert!(matches!(&learned.skipped[1], (class, Skip::Evaluation(_)) if class == "nic"));
    board.learn(&other);
    let (change, labelled) = look(&mut board, &a);
    assert_eq!(change, "gpu.count.current=7 gpu.count.expected=8");
    assert_eq!(
        shown(&mut board, &other),
        "gpu.count.current=4 gpu.count.expected=4"
    );
    // The larger node leaves; the label of the other one remembers it.
    board.learn(&labelled);
    assert_eq!(board.forget("b"), BTreeSet::new());
    assert_eq!(shown(&mut board, &labelled), "");
    let counted = board.counted(&labelled);
    assert_eq!((counted[0].current, counted[0].expected), (7, 8));
    // A number in the file counts before what was learned.
    board.config.classes[0].overrides.push(classes::Override {
        labels: [(
            "node.kubernetes.io/instance-type".to_owned(),
            "p5".to_owned(),
        )]
        .into(),
        count: 6,
    });
    assert_eq!(shown(&mut board, &labelled), "gpu.count.expected=6");
}

/// A change of an object. Numbers choose a node, an object and its state.
#[derive(Clone, Debug)]
enum Event {
    Node(u8, Option<(u8, u8)>),
    Pod(u8, Option<(u8, bool)>),
    Slice(u8, Option<(u8, i64)>),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let node = (0..3_u8, proptest::option::of((0..3_u8, 0..2_u8)));
    let pod = (0..4_u8, proptest::option::of((0..3_u8, any::<bool>())));
    let slice = (0..3_u8, proptest::option::of((0..3_u8, 1..3_i64)));
    let event = prop_oneof![
        node.prop_map(|(node, state)| Event::Node(node, state)),
        pod.prop_map(|(pod, state)| Event::Pod(pod, state)),
        slice.prop_map(|(slice, state)| Event::Slice(slice, state)),
    ];
    proptest::collection::vec(event, 0..40)
}

/// A board, the nodes, and the last change of each node that the board told to look at.
struct World {
    board: Board,
    nodes: BTreeMap<String, NodeView>,
    changes: BTreeMap<String, NodeChange>,
}

impl World {
    fn new() -> Self {
        Self {
            board: board(config()),
            nodes: BTreeMap::new(),
            changes: BTreeMap::new(),
        }
    }

    fn apply(&mut self, event: &Event) {
        let affected = match event {
            Event::Node(at, Some((kind, count))) => {
                let (name, count) = (format!("n{at}"), count.to_string());
                let kind = if *kind == 0 { "p5" } else { "g4" };
                let kind = ("node.kubernetes.io/instance-type", kind);
                let view = node(&name, &[kind, ("nvidia.com/gpu.count", &count)]);
                self.nodes.insert(name.clone(), view);
                vec![name]
            }
            Event::Node(at, None) => {
                let name = format!("n{at}");
                self.nodes.remove(&name);
                vec![name]
            }
            Event::Pod(at, state) => {
                let role = PodRole::ALL[usize::from(*at % 3)];
                let version = Some(DcgmVersion::V4).filter(|_| *at > 0);
                let state = state.map(|(on, ready)| (format!("n{on}"), ready));
                let state = state.map(|(on, ready)| pod(&on, ready, version));
                self.board.set_pod(role, &format!("ns/{at}"), state)
            }
            Event::Slice(at, state) => {
                let object = state.map(|(on, generation)| {
                    let kinds = vec!["gpu"; usize::from(*at) + 1];
                    slice(&format!("n{on}"), "gpu.nvidia.com", generation, &kinds)
                });
                self.board.set_slice(&format!("s{at}"), object.as_ref())
            }
        };
        let mut affected: BTreeSet<String> = affected.into_iter().collect();
        for name in affected.clone() {
            affected.extend(match self.nodes.get(&name) {
                Some(view) => self.board.learn(view).peers,
                None => self.board.forget(&name),
            });
        }
        for name in affected {
            match self.nodes.get(&name) {
                Some(view) => self.changes.insert(name, self.board.change(view)),
                None => self.changes.remove(&name),
            };
        }
    }
}

proptest! {
    #[test]
    fn the_change_of_a_node_follows_from_the_objects_in_whatever_order_they_came(
        events in events(), turn in any::<prop::sample::Index>(),
    ) {
        let mut world = World::new();
        for event in &events {
            world.apply(event);
        }
        // The last event of each object, in another order.
        let mut last: BTreeMap<String, Event> = BTreeMap::new();
        for event in events {
            let key = match &event {
                Event::Node(at, _) => format!("node {at}"),
                Event::Pod(at, _) => format!("pod {at}"),
                Event::Slice(at, _) => format!("slice {at}"),
            };
            last.insert(key, event);
        }
        let mut last: Vec<Event> = last.into_values().collect();
        if !last.is_empty() {
            let at = turn.index(last.len());
            last.rotate_left(at);
        }
        let mut fresh = World::new();
        for event in &last {
            fresh.apply(event);
        }
        prop_assert_eq!(&world.changes, &fresh.changes);
        for (name, change) in &world.changes {
            prop_assert_eq!(change, &fresh.board.change(&fresh.nodes[name]), "{}", name);
        }
    }
}
