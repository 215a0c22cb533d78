//! Resources of a session start only while the node permits it.

use super::*;

#[test]
fn what_was_made_for_a_session_begins_only_while_that_permits_it() {
    let made = || {
        let mut object = object(Action::Reboot, "r", 0, NODE);
        object["metadata"]["annotations"] = json!({"gpuwarden.dev/attempt": "e1/t"});
        Scene::of(Action::Reboot, object, "")
    };
    let permits = |attempt: &str| NodeObservation {
        permit: Permit {
            attempt: Some(attempt.to_owned()),
            waits: false,
        },
        ..node("boot-1", true)
    };
    let mut scene = made();
    scene.node(Some(permits("e1/t")));
    assert_eq!(scene.asked(), Some(&Question::Send));
    // The session's permission may be observed later.
    for update in [node("boot-1", true), permits("e2/t")] {
        let mut scene = made();
        scene.node(Some(update));
        assert_eq!((scene.asked(), &*scene.ended()), (None, ""));
        let mut late = scene.clone();
        late.node(Some(permits("e1/t")));
        assert_eq!(late.asked(), Some(&Question::Send));
        scene.later(11);
        assert_eq!((scene.asked(), &*scene.ended()), (None, "Cancelled"));
        assert_eq!(scene.says("SignalSent"), "False SessionEnded");
    }
    // Also not while the session's changes are undone: the session may turn out to have ended.
    let mut scene = made();
    let undone = |waits| NodeObservation {
        permit: Permit {
            attempt: Some("e1/t".to_owned()),
            waits,
        },
        ..node("boot-1", true)
    };
    scene.node(Some(undone(true)));
    scene.later(600);
    assert_eq!((scene.asked(), &*scene.ended()), (None, ""));
    scene.node(Some(undone(false)));
    assert_eq!(scene.asked(), Some(&Question::Send));
    // A signal that was not sent is not sent again either, in any process.
    let begun = || {
        let mut scene = made();
        scene.node(Some(permits("e1/t")));
        scene
    };
    let mut refused = begun();
    refused.answer(ProviderAnswer::Sent(Err(failed(Class::Transient))));
    refused.node(Some(node("boot-1", true)));
    refused.later(600);
    let mut another = begun();
    another.crash();
    another.answer(ProviderAnswer::Found(Ok(FoundOperation::NotSent)));
    assert_eq!(another.asked(), None, "the node was not observed yet");
    another.node(Some(node("boot-1", true)));
    for scene in [refused, another] {
        assert_eq!((scene.asked(), &*scene.ended()), (None, "Cancelled"));
        assert_eq!(scene.says("SignalSent"), "False SessionEnded");
    }
}
