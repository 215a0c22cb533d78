//! Waits of resources and their limits.

use super::*;

#[test]
fn every_wait_has_an_end() {
    // NVSentinel waits for a missing node for ever, holding its lock.
    let mut scene = Scene::new(Action::Reboot, "");
    scene.node(None);
    assert_eq!(scene.ended(), "Cancelled");
    assert_eq!(scene.says("NodeReady"), "False NodeNotFound");
    // A node that never returns, or whose object disappears.
    for gone in [false, true] {
        let mut scene = Scene::sent(Action::Reboot);
        scene.node((!gone).then(|| node("boot-2", false)));
        scene.later(TIMEOUT.as_secs() - 1);
        assert_eq!(scene.ended(), "");
        scene.later(1);
        assert_eq!(scene.ended(), "AmbiguousFailure");
    }
    // While waiting for another try, nothing was done.
    let mut scene = Scene::new(Action::Reboot, "");
    scene.node(Some(node("boot-1", true)));
    scene.now = TIMEOUT.as_secs() - 1;
    scene.answer(ProviderAnswer::Sent(Err(failed(Class::Transient))));
    scene.later(5);
    assert_eq!(scene.ended(), "TransientFailure");
    // A person has a day for the signal, and after it the usual time limit applies.
    let manual = "  manualMode: true\n";
    let mut scene = Scene::new(Action::Reboot, manual);
    scene.node(Some(node("boot-1", true)));
    assert_eq!(scene.says("ManualMode"), "True OutsideActorRequired");
    scene.later(23 * 3600);
    assert_eq!((scene.asked(), &*scene.ended()), (None, ""));
    let mut by_hand = scene.clone();
    by_hand.node(Some(node("boot-2", true)));
    assert_eq!(by_hand.ended(), "Succeeded");
    scene.later(3601);
    assert_eq!(scene.ended(), "AmbiguousFailure");
}

#[test]
fn a_provider_that_names_hours_is_asked_again_after_five_minutes() {
    let mut scene = Scene::new(Action::Reboot, "");
    scene.node(Some(node("boot-1", true)));
    let wait = failed(Class::Transient).after(SignedDuration::from_hours(3));
    scene.answer(ProviderAnswer::Sent(Err(wait)));
    scene.later(299);
    assert_eq!(scene.asked(), None);
    scene.later(1);
    assert_eq!(scene.asked(), Some(&Question::Send));
}
