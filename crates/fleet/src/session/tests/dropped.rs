//! Patches that the API server answers with 200 and that an admission policy drops, as a whole
//! or in part.

use super::*;
use crate::PatchAnswer;
use crate::world::stripped;

/// Results of some looks, a second apart.
struct Tried {
    attempts: usize,
    /// Number of messages for people.
    asked: usize,
    /// Journal entries about the answers.
    messages: Vec<String>,
}

fn tried(world: &mut World, fate: Fate, looks: usize) -> Tried {
    let looked: Vec<_> = (0..looks).map(|_| world.look(fate)).collect();
    let notes = |kind| {
        let notes = looked.iter().flat_map(|looked| &looked.notes);
        notes.filter(move |note| note.kind == kind)
    };
    Tried {
        attempts: looked.iter().filter(|one| one.patch().is_some()).count(),
        asked: notes(EntryKind::Attention).count(),
        messages: notes(EntryKind::Answer)
            .map(|note| note.text.clone())
            .collect(),
    }
}

fn missing(world: &World) -> Vec<String> {
    Ownership::read(&world["n1"]).unwrap().mark.missing
}

#[test]
fn a_patch_that_changes_nothing_is_tried_ever_more_slowly_and_a_person_is_asked() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    for intent in [Intent::Quarantine, Intent::Return] {
        let tried = tried(&mut world, Fate::Dropped, 200);
        let attempts = tried.attempts;
        assert!(
            (10..25).contains(&attempts),
            "{intent:?}: {attempts} in 200 s"
        );
        assert_eq!(
            (tried.asked, tried.messages.len()),
            (1, attempts),
            "{intent:?}"
        );
        let message = &tried.messages[0];
        assert!(
            message.contains("an admission webhook or policy drops it"),
            "{message}"
        );
        assert!(
            message.contains("cordon") && message.contains("annotation"),
            "{message}"
        );
        assert!(world.session().awaits(true).contains("a person"));
        assert_eq!(world.settle(), [intent]);
        assert_eq!(world.session().failures, 0);
        world.recovery(0);
    }
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

#[test]
fn what_was_never_seen_on_the_node_has_nobody_undone() {
    for restart in [
        None,
        Some(Restart::All),
        Some(Restart::Events),
        Some(Restart::Nothing),
    ] {
        let mut world = World::new(&PARSED);
        world.fault(0);
        let before = tried(&mut world, Fate::Stripped, 2);
        assert_eq!(before.attempts, 2);
        assert!(
            before.messages[0].contains("cordon, add taint gpu-memory=bad"),
            "{:?}",
            before.messages
        );
        if let Some(with) = restart {
            world.restart(with);
        }
        let tried = tried(&mut world, Fate::Stripped, 200);
        assert!(
            (5..25).contains(&tried.attempts),
            "{restart:?}: {}",
            tried.attempts
        );
        assert_eq!(tried.asked, 1, "{restart:?}");
        assert!(world.phase().is_out() && !world["n1"].unschedulable);
        assert_eq!(missing(&world), ["cordon", "gpu-memory=bad:NoSchedule"]);
        let awaits = world.fleet.status("n1").unwrap().session.unwrap().awaits;
        assert!(awaits.starts_with("a person: "), "{awaits}");
        let mark = |key| world["n1"].annotations.contains_key(key);
        assert!(!mark(keys::UNCORDONED_MANUALLY) && !mark(keys::UNTAINTED_MANUALLY));
        // Once the patch is let through, the change is there, and a person can take it back.
        world.settle();
        assert!(world["n1"].unschedulable && missing(&world).is_empty());
        assert_eq!(taint_keys(&world["n1"]), ["gpu-memory"]);
        world["n1"].unschedulable = false;
        assert_eq!(world.settle(), [Intent::StandDown]);
        assert_eq!(world["n1"].annotations[keys::UNCORDONED_MANUALLY], "True");
    }
}

#[test]
fn a_taint_that_comes_later_and_does_not_arrive_ends_nothing() {
    let mut world = World::new(&PARSED);
    world.event("XidCheck", 0, true, false);
    world.settle();
    world.fault(1);
    let tried = tried(&mut world, Fate::Stripped, 200);
    assert!((10..25).contains(&tried.attempts), "{}", tried.attempts);
    assert!(world["n1"].unschedulable && world.phase().is_out());
    assert_eq!(missing(&world), ["gpu-memory=bad:NoSchedule"]);
    // The part that did arrive can be taken back all the same.
    world["n1"].unschedulable = false;
    world.settle();
    assert_eq!(world.phase(), Phase::Idle);
    assert_eq!(world["n1"].annotations[keys::UNCORDONED_MANUALLY], "True");
}

#[test]
fn a_patch_without_an_answer_of_which_a_part_arrived_is_no_release() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    world.deliver_node("n1");
    let patch = world.decide().patch().unwrap();
    world["n1"] = world["n1"].after(&stripped(patch.change));
    let (node, answer) = ("n1".to_owned(), PatchAnswer::Unknown);
    world.handle(FleetInput::NodePatched { node, answer });
    assert_eq!(world.settle(), [Intent::Update, Intent::Update]);
    assert!(world["n1"].unschedulable && world.phase().is_out());
}

/// After a recovery the node is given back, whatever part of its quarantine arrived.
#[test]
fn what_arrived_in_part_is_given_back_as_a_whole() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    tried(&mut world, Fate::Stripped, 10);
    world.recovery(0);
    assert_eq!(world.settle(), [Intent::Return]);
    assert_eq!(world["n1"], NodeView::unknown("n1"));
}

/// The answer shows the cordon, which is gone before the next look.
#[test]
fn what_only_the_answer_has_shown_was_there() {
    let mut world = World::new(&PARSED);
    world.fault(0);
    assert_eq!(
        world.look(Fate::Made).patch().unwrap().intent,
        Intent::Quarantine
    );
    world["n1"].unschedulable = false;
    assert_eq!(world.settle(), [Intent::StandDown]);
}
