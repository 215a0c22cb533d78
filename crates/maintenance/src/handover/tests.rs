use std::collections::BTreeMap;

use model::node::NodeTaint;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::Maintenance;

const FINALIZER: &str = "nvsentinel.dgxc.nvidia.com/external-remediation-cleanup";

fn node(labels: &[(&str, &str)]) -> NodeView {
    let labels: BTreeMap<&str, &str> = labels.iter().copied().collect();
    let object = json!({
        "metadata": {"name": "n1", "uid": "u", "labels": labels},
        "spec": {"taints": [{"key": "a", "value": "b", "effect": "NoExecute"}]},
    });
    NodeView::from_object(object).unwrap()
}

/// A request and its node.
struct World {
    object: Value,
    node: Option<NodeView>,
    before: Option<String>,
    excluded: bool,
    now: Timestamp,
    /// Number of changes of the node.
    patches: usize,
}

impl World {
    fn new(node: NodeView) -> Self {
        Self {
            object: json!({
                "metadata": {"name": "x1", "uid": "x1-uid"},
                "spec": {"healthEvent": {"nodeName": "n1", "recommendedAction": "RESTART_BM"}},
            }),
            node: Some(node),
            before: None,
            excluded: false,
            now: "2026-11-24T00:00:00Z".parse().unwrap(),
            patches: 0,
        }
    }

    fn request(&self) -> MaintenanceResource {
        MaintenanceResource::read(Maintenance::HandOver, &self.object).unwrap()
    }

    fn decide(&self) -> Option<Act> {
        decide(&HandoverInput {
            request: &self.request(),
            node: self.node.as_ref(),
            before: self.before.as_deref(),
            excluded: self.excluded,
            now: self.now,
        })
    }

    fn apply(&mut self, effect: Act) {
        match effect {
            Act::Finalizer(on) => {
                let list = if on { json!([FINALIZER]) } else { json!([]) };
                self.object["metadata"]["finalizers"] = list;
            }
            Act::Status(status) => self.object["status"] = status.patch(),
            Act::Node(change) => {
                self.patches += 1;
                self.node = self.node.as_ref().map(|node| node.after(&change));
            }
            Act::Make(_) | Act::Stop => panic!("{effect:?}"),
        }
    }

    fn settle(&mut self) {
        for _ in 0..20 {
            let Some(effect) = self.decide() else {
                return;
            };
            self.apply(effect);
        }
        panic!("it never settles: {:?}", self.decide());
    }

    /// The external system reports its progress.
    fn external(&mut self, status: &str) {
        let mut next = self.request().status;
        next.set(EXTERNAL_COMPLETE, status, "Vendor", "", self.now);
        self.object["status"] = next.patch();
    }

    fn node(&self) -> &NodeView {
        self.node.as_ref().unwrap()
    }

    fn released(&self) -> String {
        let status = self.request().status;
        status.condition(RELEASED).unwrap().reason.clone()
    }
}

#[test]
fn what_was_made_for_a_session_that_has_ended_hands_nothing_over() {
    let mut world = World::new(node(&[]));
    world.object["metadata"]["annotations"] = json!({keys::ATTEMPT: "e1/t"});
    world.object["metadata"]["creationTimestamp"] = json!(world.now);
    world.settle();
    let request = world.request();
    let soon = wake_at(&request).unwrap();
    assert_eq!(soon.duration_since(world.now).as_secs(), 10);
    // The node may show the session a moment later.
    assert_eq!((world.decide(), request.status.completion), (None, None));
    world.now = soon;
    world.settle();
    let status = world.request().status;
    let reason = status.condition(RELEASED).map(|one| one.reason.clone());
    assert_eq!(reason.as_deref(), Some("SessionEnded"));
    assert!(status.completion.is_some());
    assert_eq!(world.patches, 0);
}

#[test]
fn a_node_is_handed_over_by_one_patch_and_taken_back_by_one() {
    for before in [
        vec![],
        vec![(keys::HANDED_OVER_LABEL, "true")],
        vec![(keys::HANDED_OVER_LABEL, "false")],
    ] {
        let mut world = World::new(node(&before));
        let was = world.node().clone();
        world.settle();
        assert_eq!(
            (world.patches, world.released().as_str()),
            (1, "ReleaseTaintApplied")
        );
        assert!(world.node().is_handed_over());
        let taints: Vec<String> = world
            .node()
            .taints
            .iter()
            .map(|on| on.taint.to_string())
            .collect();
        let taint = "nvsentinel.dgxc.nvidia.com/external-remediation=x1:NoSchedule";
        assert_eq!(taints, ["a=b:NoExecute", taint]);
        assert_eq!(phase(&world.request()), HandoverPhase::Released);
        world.external("True");
        world.settle();
        assert_eq!(world.patches, 2);
        assert_eq!(phase(&world.request()), HandoverPhase::Closed);
        let now = world.node();
        assert_eq!(
            (&now.labels, &now.annotations, &now.taints),
            (&was.labels, &was.annotations, &was.taints)
        );
    }
}

#[test]
fn what_is_put_aside_stays_handed_over_and_may_yet_be_done() {
    let mut world = World::new(node(&[]));
    world.settle();
    world.external("False");
    world.settle();
    assert_eq!(
        (world.patches, phase(&world.request())),
        (1, HandoverPhase::Parked)
    );
    assert!(world.node().is_handed_over());
    world.external("True");
    world.settle();
    assert!(!world.node().is_handed_over());
    assert_eq!(phase(&world.request()), HandoverPhase::Closed);
}

#[test]
fn whoever_deletes_it_gets_the_node_back_first() {
    for step in 0..6 {
        let mut world = World::new(node(&[]));
        let was = world.node().clone();
        for _ in 0..step {
            if let Some(effect) = world.decide() {
                world.apply(effect);
            }
        }
        world.object["metadata"]["deletionTimestamp"] = json!(world.now);
        world.settle();
        assert_ne!(
            world.object["metadata"]["finalizers"],
            json!([FINALIZER]),
            "{step}"
        );
        assert_eq!(
            (&world.node().labels, &world.node().taints),
            (&was.labels, &was.taints),
            "{step}"
        );
    }
}

#[test]
fn without_a_node_it_ends() {
    let mut world = World::new(node(&[]));
    world.node = None;
    world.settle();
    assert_eq!(world.released(), "NodeNotFound");
    assert_eq!(phase(&world.request()), HandoverPhase::Closed);
    world.object["metadata"]["deletionTimestamp"] = json!(world.now);
    world.settle();
    assert_eq!(world.object["metadata"]["finalizers"], json!([]));
}

#[test]
fn an_excluded_node_is_left_alone() {
    let mut world = World::new(node(&[]));
    world.excluded = true;
    world.settle();
    assert_eq!(
        (world.patches, world.released().as_str()),
        (0, "NodeExcluded")
    );
    assert_eq!(phase(&world.request()), HandoverPhase::Closed);
}

#[test]
fn one_at_a_time_has_a_node() {
    let mut world = World::new(node(&[]));
    world.before = Some("RebootNode b".to_owned());
    world.settle();
    assert_eq!(
        (world.patches, world.released().as_str()),
        (0, "ResourceContention")
    );
    world.before = None;
    let other = taint("x2");
    let raw = json!(other);
    world
        .node
        .as_mut()
        .unwrap()
        .taints
        .push(NodeTaint { taint: other, raw });
    world.settle();
    assert_eq!(
        (world.patches, world.released().as_str()),
        (0, "ResourceContention")
    );
    world.node.as_mut().unwrap().taints.pop();
    world.settle();
    assert_eq!(
        (world.patches, world.released().as_str()),
        (1, "ReleaseTaintApplied")
    );
}

#[test]
fn a_node_that_nvsentinel_handed_over_is_taken_back_too() {
    let mut world = World::new(node(&[(keys::HANDED_OVER_LABEL, "false")]));
    let taint = taint("x1");
    let raw = json!({"key": taint.key, "value": "x1", "effect": "NoSchedule", "timeAdded": "2026-11-24T00:00:00Z"});
    world
        .node
        .as_mut()
        .unwrap()
        .taints
        .push(NodeTaint { taint, raw });
    world.settle();
    assert_eq!(
        (world.patches, world.released().as_str()),
        (0, "ReleaseTaintApplied")
    );
    world.external("True");
    world.settle();
    assert_eq!(world.patches, 1);
    assert!(world.node().labels.is_empty());
    assert_eq!(world.node().taints.len(), 1);
}

#[test]
fn a_node_whose_request_vanished_is_taken_back() {
    let mut world = World::new(node(&[(keys::HANDED_OVER_LABEL, "true")]));
    let was = world.node().clone();
    world.settle();
    assert_eq!(left_behind(world.node(), |uid| uid == "x1-uid"), None);
    let change = left_behind(world.node(), |_| false).unwrap();
    let now = world.node().after(&change);
    assert_eq!(
        (now.labels, now.taints, now.annotations),
        (was.labels, was.taints, was.annotations)
    );
}

proptest! {
    #[test]
    fn in_whatever_order_it_goes_the_node_is_in_the_end_as_it_was(
        before in prop_oneof![Just(None), Just(Some("true")), Just(Some("false"))],
        story in prop::collection::vec(0..6_u8, 0..30),
    ) {
        let labels: Vec<(&str, &str)> = before.map(|value| (keys::HANDED_OVER_LABEL, value)).into_iter().collect();
        let mut world = World::new(node(&labels));
        let was = world.node().clone();
        for one in story {
            match one {
                0 => world.external("True"),
                1 => world.external("False"),
                2 => world.before = Some("RebootNode b".to_owned()),
                3 => world.before = None,
                _ => if let Some(effect) = world.decide() {
                    world.apply(effect);
                },
            }
        }
        world.before = None;
        world.settle();
        world.object["metadata"]["deletionTimestamp"] = json!(world.now);
        world.settle();
        let now = world.node();
        prop_assert_eq!((&now.labels, &now.annotations, &now.taints), (&was.labels, &was.annotations, &was.taints));
    }
}
