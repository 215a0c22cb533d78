//! Requests to owners by labels: when they end, and that nothing of them stays on the node.

use contract::keys;
use model::node::NodeChange;

use super::label::{LabelRequest, VALUE};
use super::*;

const LABELS: &str = "label: {reboot: example.com/reboot, terminate: example.com/terminate}\n";

fn key(action: Action) -> String {
    format!("example.com/{}", action.name())
}

/// Returns a node without a request.
fn plain(boot_id: &str, ready: bool) -> NodeView {
    let status = if ready { "True" } else { "False" };
    let object = json!({
        "metadata": {"name": NODE, "uid": "uid-of-node", "resourceVersion": "1",
            "labels": {"team": "ml"}},
        "status": {
            "nodeInfo": {"bootID": boot_id},
            "conditions": [{"type": "Ready", "status": status}],
        },
    });
    NodeView::from_object(object).unwrap()
}

/// Returns a node whose owner is asked by the resource `r`.
fn asked(action: Action, boot_id: &str, ready: bool) -> NodeView {
    let request = LabelRequest {
        operation: "uid-of-r".to_owned(),
        boot_id: "boot-1".to_owned(),
        key: key(action),
    };
    plain(boot_id, ready).after(&request.ask())
}

/// Returns the node after its owner has removed the label.
fn done(mut node: NodeView) -> NodeView {
    node.labels.retain(|key, _| key == "team");
    node
}

fn see(scene: &mut Scene, view: &NodeView) {
    let observation = NodeObservation::read(&view.object(), scene.board.config());
    let view = view.clone();
    let update = Box::new(NodeUpdate { observation, view });
    scene.take(Input::Node(NODE.to_owned(), Some(update)));
}

/// Returns a resource whose owner is asked, and the node.
fn pending(action: Action) -> (Scene, NodeView) {
    let mut scene = Scene::new(action, LABELS);
    see(&mut scene, &plain("boot-1", true));
    assert_eq!(scene.asked(), Some(&Question::Send));
    let node = asked(action, "boot-1", true);
    see(&mut scene, &node);
    scene.answer(ProviderAnswer::Sent(Ok("boot-1".to_owned())));
    assert_eq!((&*scene.ended(), &scene.last[..]), ("", &[][..]));
    (scene, node)
}

/// Returns the node after each change that the board asks for.
fn changes(scene: &Scene) -> Vec<NodeView> {
    let changes = scene.last.iter().filter_map(|effect| match effect {
        Effect::Change(None, view, change) => Some(view.after(change)),
        _ => None,
    });
    changes.collect()
}

/// Returns whether the board has stopped watching the node.
fn is_left(scene: &Scene) -> bool {
    scene.last.contains(&Effect::StopWatching(NODE.to_owned()))
}

/// Carries the change out. Nothing of the request stays, and the node is left.
fn take_back(scene: &mut Scene) {
    let [after] = &*changes(scene) else {
        panic!("{:?}", scene.last);
    };
    assert_eq!(after.labels, plain("", true).labels);
    assert_eq!(after.annotations, plain("", true).annotations);
    let changed = Input::Changed(None, NODE.to_owned(), Some(Box::new(after.clone())));
    scene.take(changed);
    assert!(
        is_left(scene) && changes(scene).is_empty(),
        "{:?}",
        scene.last
    );
}

#[test]
fn a_reboot_is_done_once_the_label_is_gone_too() {
    let (mut scene, _) = pending(Action::Reboot);
    // The owner has not said that it is done: another boot may follow.
    let booted = asked(Action::Reboot, "boot-2", true);
    see(&mut scene, &booted);
    assert_eq!((&*scene.ended(), &scene.last[..]), ("", &[][..]));
    see(&mut scene, &done(booted));
    assert_eq!(scene.ended(), "Succeeded");
    take_back(&mut scene);
    // An owner may remove the label before the machine is down.
    let (mut scene, node) = pending(Action::Reboot);
    see(&mut scene, &done(node));
    scene.later(600);
    assert_eq!((&*scene.ended(), &scene.last[..]), ("", &[][..]));
    see(&mut scene, &done(asked(Action::Reboot, "boot-2", true)));
    assert_eq!(scene.ended(), "Succeeded");
}

#[test]
fn a_node_is_deleted_only_after_its_owner_has_removed_the_label() {
    let (mut scene, _) = pending(Action::Terminate);
    let dead = asked(Action::Terminate, "boot-1", false);
    see(&mut scene, &dead);
    assert_eq!((&*scene.ended(), &scene.last[..]), ("", &[][..]));
    see(&mut scene, &done(dead));
    assert!(matches!(scene.last[..], [Effect::DeleteNode { .. }]));
    // The label is set, and not observed yet.
    let mut scene = Scene::new(Action::Terminate, LABELS);
    see(&mut scene, &plain("boot-1", false));
    scene.answer(ProviderAnswer::Sent(Ok("boot-1".to_owned())));
    assert_eq!(scene.says("SignalSent"), "True Succeeded");
    assert_eq!((&*scene.ended(), &scene.last[..]), ("", &[][..]));
    // The owner may delete the node.
    let (mut scene, _) = pending(Action::Terminate);
    scene.node(None);
    assert_eq!(scene.ended(), "Succeeded");
}

#[test]
fn a_request_that_ends_otherwise_leaves_no_label() {
    for action in [Action::Reboot, Action::Terminate] {
        let (mut scene, _) = pending(action);
        scene.later(TIMEOUT.as_secs());
        assert_eq!(scene.ended(), "AmbiguousFailure");
        // The node has changed meanwhile: it is tried again.
        let before = changes(&scene);
        assert_eq!(before.len(), 1);
        scene.take(Input::Changed(None, NODE.to_owned(), None));
        assert_eq!(scene.last, []);
        scene.later(60);
        assert_eq!(changes(&scene), before);
        take_back(&mut scene);
    }
    let (mut scene, _) = pending(Action::Reboot);
    scene.take(Input::Deleted(scene.key()));
    take_back(&mut scene);
}

#[test]
fn a_label_goes_also_after_a_crash_or_if_it_is_set_late() {
    let node = asked(Action::Reboot, "boot-1", true);
    let marked = || Input::NodeMarked(NODE.to_owned());
    // Killed with the request in progress: it goes on.
    let (mut scene, _) = pending(Action::Reboot);
    scene.crash();
    scene.take(marked());
    see(&mut scene, &node);
    assert_eq!((&*scene.ended(), &scene.last[..]), ("", &[][..]));
    // Killed between the end and the change, or deleted while nothing ran.
    scene.later(TIMEOUT.as_secs());
    assert_eq!(scene.ended(), "AmbiguousFailure");
    scene.crash();
    let mut deleted = scene.clone();
    deleted.take(Input::Deleted(scene.key()));
    for mut scene in [scene, deleted] {
        scene.take(marked());
        see(&mut scene, &node);
        take_back(&mut scene);
    }
    // The patch arrives after the request has ended.
    let mut scene = Scene::new(Action::Reboot, LABELS);
    see(&mut scene, &plain("boot-1", true));
    assert_eq!(scene.asked(), Some(&Question::Send));
    scene.later(TIMEOUT.as_secs());
    assert!(is_left(&scene), "{:?}", scene.last);
    scene.take(marked());
    see(&mut scene, &node);
    take_back(&mut scene);
    // Nothing is taken back before all resources are known.
    let mut board = Board::new(config(LABELS), None, "p".to_owned());
    let mut effects = board.handle(marked(), at(0));
    let observation = NodeObservation::read(&node.object(), board.config());
    let view = node.clone();
    let update = Box::new(NodeUpdate { observation, view });
    effects.extend(board.handle(Input::Node(NODE.to_owned(), Some(update)), at(0)));
    assert_eq!(effects, [Effect::WatchNode(NODE.to_owned())]);
}

#[test]
fn an_owner_is_no_longer_asked_once_the_session_has_ended() {
    let mut object = object(Action::Reboot, "r", 0, NODE);
    object["metadata"]["annotations"] = json!({"gpuwarden.dev/attempt": "e1/t"});
    let mut scene = Scene::of(Action::Reboot, object, LABELS);
    let see = |scene: &mut Scene, attempt: Option<&str>, view: NodeView| {
        let observation = NodeObservation {
            permit: Permit {
                attempt: attempt.map(str::to_owned),
                waits: false,
            },
            ..NodeObservation::read(&view.object(), scene.board.config())
        };
        let update = Box::new(NodeUpdate { observation, view });
        scene.take(Input::Node(NODE.to_owned(), Some(update)));
    };
    let node = asked(Action::Reboot, "boot-1", true);
    see(&mut scene, Some("e1/t"), plain("boot-1", true));
    assert_eq!(scene.asked(), Some(&Question::Send));
    see(&mut scene, Some("e1/t"), node.clone());
    scene.answer(ProviderAnswer::Sent(Ok("boot-1".to_owned())));
    assert_eq!(scene.says("SignalSent"), "True Succeeded");
    // An owner that has removed the label has acted, and the boot tells.
    let mut acted = scene.clone();
    see(&mut acted, None, done(node.clone()));
    assert_eq!((&*acted.ended(), changes(&acted).len()), ("", 0));
    see(&mut scene, None, node);
    assert_eq!(scene.ended(), "AmbiguousFailure");
    assert_eq!(scene.says("NodeReady"), "False SessionEnded");
    take_back(&mut scene);
}

#[test]
fn what_others_have_written_stays() {
    let mut node = asked(Action::Reboot, "boot-1", true);
    let change = |node: &NodeView| label::left_behind(node, |_| false);
    assert_eq!(label::left_behind(&node, |one| one == "uid-of-r"), None);
    // The owner's own word for it.
    node.labels
        .insert(key(Action::Reboot), "rebooting".to_owned());
    let after = node.after(&change(&node).unwrap());
    assert_eq!(after.labels[&key(Action::Reboot)], "rebooting");
    assert!(!after.annotations.contains_key(keys::LABEL_REQUEST));
    // A label of the same value without a request, and no request at all.
    let mut theirs = plain("boot-1", true);
    theirs.labels.insert(key(Action::Reboot), VALUE.to_owned());
    assert_eq!(change(&theirs), None);
    // The annotation is no word of gpuwarden.
    for text in ["{}", r#"{"operation": "o", "bootId": "b", "key": "a/b/c"}"#] {
        let text = Some(text.to_owned());
        let wrong = NodeChange {
            annotations: [(keys::LABEL_REQUEST.to_owned(), text)].into(),
            ..NodeChange::default()
        };
        assert_eq!(change(&theirs.after(&wrong)), None);
    }
}
