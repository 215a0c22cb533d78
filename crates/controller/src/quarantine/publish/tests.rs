use std::path::Path;

use cluster::{Cluster, ConnectOptions, NodeEvent};
use contract::{HealthEvent, keys};
use domain::brake::NodeLabel;
use domain::event::normalise;
use domain::node::NodeView;
use domain::policy::Policy;
use domain::view::NodeState;
use jiff::Timestamp;
use runtime::metrics::Metrics;
use runtime::sources::Sources;
use serde_json::json;
use store::NewEvent;
use store::sqlite::SqliteStore;
use tokio::sync::watch;

use super::super::{Config, Handles, Mode, Owns};
use super::*;

const NODES: u32 = 10;

/// What happens, to which nodes, whether they are well; and then: how many nodes the cluster
/// has, are shown, are held.
type Step<'a> = (&'a str, Vec<NodeEvent>, &'a [&'a str], bool, [usize; 3]);

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn node(name: &str, version: u32) -> NodeEvent {
    let metadata = json!({"name": name, "uid": name, "resourceVersion": version.to_string()});
    applied(&json!({"metadata": metadata}))
}

fn applied(object: &serde_json::Value) -> NodeEvent {
    NodeEvent::Applied(Arc::new(NodeView::from_object(object.clone()).unwrap()))
}

fn event(node: &str, is_healthy: bool, reports: u64) -> NewEvent {
    let mut event = HealthEvent {
        agent: "a".into(),
        component_class: "GPU".into(),
        check_name: "Check".into(),
        node_name: node.into(),
        is_fatal: !is_healthy,
        is_healthy,
        message: reports.to_string(),
        ..HealthEvent::default()
    };
    normalise(&mut event, now());
    let received_at = now();
    NewEvent { event, received_at }
}

/// A quarantine of [`NODES`] nodes that only pretends, so that nobody has to answer.
async fn quarantine(directory: &Path) -> (Quarantine, Handles) {
    let kubeconfig = directory.join("kubeconfig");
    let text = "{current-context: c, users: [{name: u, user: {}}], \
                clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}], \
                contexts: [{name: c, context: {cluster: c, user: u}}]}";
    std::fs::write(&kubeconfig, text).unwrap();
    let options = ConnectOptions {
        kubeconfig: Some(kubeconfig),
        ..ConnectOptions::default()
    };
    let config = Config {
        store: Arc::new(SqliteStore::open(directory).unwrap()),
        cluster: Some(Arc::new(Cluster::connect(options).await.unwrap())),
        policy: watch::channel(Some(Arc::new(Policy::builtin()))).1,
        mode: Mode::DryRun,
        owns: Owns::All,
        sources: Sources::default(),
        brake: true,
        gpu_label: NodeLabel::parse("gpu=true").unwrap(),
        namespace: "gpuwarden".to_owned(),
        board: None,
        retention: jiff::SignedDuration::from_hours(30 * 24),
        clock: now,
    };
    let (mut quarantine, handles) = Quarantine::new(config, &Metrics::default());
    quarantine.take_in().await;
    quarantine.node_event(NodeEvent::Restarted);
    for number in 0..NODES {
        quarantine.node_event(node(&format!("n{number}"), 1));
    }
    quarantine.node_event(NodeEvent::Listed);
    (quarantine, handles)
}

async fn report(quarantine: &mut Quarantine, nodes: &[&str], is_healthy: bool) {
    // Each says something else: what is told twice is one event.
    let reports = quarantine.book.applied().number();
    let events = nodes.iter().map(|node| event(node, is_healthy, reports));
    let events = events.collect();
    quarantine.store.append(events).await.unwrap();
    quarantine.take_in().await;
}

/// One turn of the loop, and what is published then.
async fn turn(quarantine: &mut Quarantine) -> Arc<FleetView> {
    // What a dry run pretends is looked at again.
    while !quarantine.dirty.is_empty() {
        quarantine.look().await;
    }
    quarantine.publish();
    Arc::clone(&quarantine.publishing.view.borrow())
}

fn states(view: &FleetView) -> Vec<(&str, NodeState)> {
    let nodes = view.nodes.iter();
    nodes.map(|node| (node.name.as_str(), node.state)).collect()
}

#[tokio::test]
async fn what_is_published_is_as_if_all_nodes_were_gone_over() {
    let directory = tempfile::tempdir().unwrap();
    let (mut quarantine, _handles) = quarantine(directory.path()).await;
    let labelled = |label: &str, value: &str, version: u32| {
        let labels = json!({label: value});
        applied(&json!({"metadata": {
            "name": "n1", "uid": "n1", "resourceVersion": version.to_string(), "labels": labels,
        }}))
    };
    let deleted = |name: &str| NodeEvent::Deleted(name.to_owned());
    let listed = |names: &[&str]| -> Vec<NodeEvent> {
        let nodes = names.iter().map(|name| node(name, 9));
        let begun = [NodeEvent::Restarted].into_iter();
        begun.chain(nodes).chain([NodeEvent::Listed]).collect()
    };
    let steps: [Step<'_>; 10] = [
        ("nothing", vec![], &[], false, [10, 0, 0]),
        (
            "two may go, of four",
            vec![],
            &["n1", "n2", "n3", "n4"],
            false,
            [10, 4, 2],
        ),
        (
            "heartbeats",
            vec![node("n5", 2), node("n1", 2)],
            &[],
            false,
            [10, 4, 2],
        ),
        (
            "a label",
            vec![labelled("zone", "a", 3)],
            &[],
            false,
            [10, 4, 2],
        ),
        ("one recovers", vec![], &["n1"], true, [10, 3, 1]),
        (
            "one opts out",
            vec![labelled(keys::MANAGED_LABEL, "false", 4)],
            &["n1"],
            false,
            [10, 4, 1],
        ),
        (
            "who was healthy is gone",
            vec![deleted("n5")],
            &[],
            false,
            [9, 4, 1],
        ),
        (
            "who was not is gone",
            vec![deleted("n2")],
            &[],
            false,
            [8, 4, 0],
        ),
        ("who is gone recovers", vec![], &["n2"], true, [8, 3, 0]),
        (
            "a list",
            listed(&["n1", "n3", "n6", "n7", "n8", "n9"]),
            &[],
            false,
            [6, 3, 0],
        ),
    ];
    for (what, events, nodes, is_healthy, expected) in steps {
        for event in events {
            quarantine.node_event(event);
        }
        report(&mut quarantine, nodes, is_healthy).await;
        let view = turn(&mut quarantine).await;
        let (sight, mode) = (quarantine.sight(), quarantine.mode);
        let entries = quarantine.nodes.iter();
        let all: Vec<NodeStatus> = entries
            .filter_map(|(name, entry)| {
                let faults = quarantine.book.faults(name);
                entry.status(name, faults, mode, sight, None, now())
            })
            .collect();
        assert_eq!(view.nodes, all, "{what}");
        let entries = || quarantine.nodes.values();
        let in_cluster = entries().filter(|entry| entry.view.is_some()).count();
        let held = entries().filter(|entry| entry.hold.is_some()).count();
        assert_eq!(
            [in_cluster, all.len(), held],
            expected,
            "{what}: {:?}",
            states(&view)
        );
        let (cluster, brake) = (view.cluster.as_ref().unwrap(), view.brake.as_ref().unwrap());
        assert_eq!([cluster.nodes, brake.held], [in_cluster, held], "{what}");
    }
    // Who is neither there nor faulty is not kept.
    let kept: Vec<&str> = quarantine.nodes.keys().map(String::as_str).collect();
    assert_eq!(kept, ["n1", "n3", "n4", "n6", "n7", "n8", "n9"]);
}

#[tokio::test]
async fn only_nodes_that_something_happened_to_are_shown_anew() {
    let directory = tempfile::tempdir().unwrap();
    let (mut quarantine, _handles) = quarantine(directory.path()).await;
    report(&mut quarantine, &["n1", "n2"], false).await;
    let before = turn(&mut quarantine).await;
    assert_eq!(before.nodes.len(), 2);
    assert!(quarantine.publishing.unshown.is_empty());
    quarantine.node_event(node("n3", 2));
    assert!(quarantine.publishing.unshown.is_empty(), "a heartbeat");

    // Behind everybody's back: it would show if they were gone over.
    for name in ["n1", "n2"] {
        quarantine.entry(name).session.failures = 7;
    }
    quarantine.entry("n3").view = None;
    report(&mut quarantine, &["n4"], false).await;
    quarantine.publish();
    let view = Arc::clone(&quarantine.publishing.view.borrow());
    assert_eq!(view.nodes.get(..2), Some(before.nodes.as_slice()));
    assert_eq!(states(&view).last(), Some(&("n4", NodeState::Unhealthy)));
    assert!(quarantine.nodes.contains_key("n3"));

    for name in ["n2", "n3"] {
        quarantine.touch(name);
    }
    quarantine.publish();
    let view = Arc::clone(&quarantine.publishing.view.borrow());
    let failures = |name: &str| {
        let node = view.nodes.iter().find(|node| node.name == name);
        node.and_then(|node| node.session.as_ref())
            .map(|session| session.failures)
    };
    assert_eq!((failures("n1"), failures("n2")), (Some(0), Some(7)));
    assert!(!quarantine.nodes.contains_key("n3"));
}
