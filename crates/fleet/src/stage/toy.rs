//! A stage for tests: a node that asks for it by an annotation and has been out of service for a
//! day pages a person, once for each session. It records nothing on the node, so another process
//! pages again; a stage of the product has a mark (CONTRIBUTING, "Add a stage").
//!
//! Beside this file it needs a field of [`Stages`](super::Stages) with its places in `all` and
//! `all_mut`, an [`Effect`], and the arm that carries the effect out (`world/look.rs`).

use jiff::{SignedDuration, Timestamp};
use model::time::later;
use policy::assess::Desired;

use super::{Facts, Stage, StageRequests};
use crate::Effect;

/// Annotation of a node whose long sessions page a person.
const PAGE: &str = "test.gpuwarden.dev/page";
/// Time out of service after which a person is paged.
const AFTER: SignedDuration = SignedDuration::from_hours(24);

/// State of the toy stage of one node.
#[derive(Debug, Default)]
pub(crate) struct Toy {
    /// Session that a person was paged about last.
    paged: Option<String>,
    /// Time of the page.
    due: Option<Timestamp>,
}

impl Stage for Toy {
    fn begin(&mut self) {
        self.due = None;
    }

    fn act(&mut self, facts: &Facts<'_>, _desired: &Desired, requests: &mut StageRequests<'_>) {
        let ours = facts.session_on_node();
        let asked = ours.filter(|(observed, _)| observed.view.annotations.contains_key(PAGE));
        let Some((own, since)) = asked.and_then(|(_, own)| Some((own, own.since?))) else {
            return;
        };
        if self.paged.as_ref() == Some(&own.session_id) {
            return;
        }
        let due = later(since, AFTER);
        if requests.now() < due {
            self.due = Some(due);
            return;
        }
        self.paged = Some(own.session_id.clone());
        let node = requests.node().to_owned();
        requests.effect(Effect::Page(node));
    }

    fn wake_at(&self, _now: Timestamp) -> Option<Timestamp> {
        self.due
    }

    fn awaits_answer(&self) -> bool {
        false
    }

    fn awaits(&self) -> Option<&str> {
        self.due.map(|_| "the page of a person")
    }

    fn clock_moved_back(&mut self, _now: Timestamp) {
        self.due = None;
    }

    fn answers_lost(&mut self) {}
}

mod tests {
    use policy::Policy;

    use super::*;
    use crate::world::{Fate, World};

    #[test]
    fn a_stage_wakes_the_fleet_and_acts_once() {
        let mut world = World::new(&Policy::builtin());
        world.annotate(PAGE, "");
        world.fault(0);
        let cordon = world.look(Fate::Made);
        assert_eq!((cordon.patches.len(), cordon.pages.len()), (1, 0));
        world.look(Fate::Made);
        let wake = world.fleet.wake_at();
        assert!(
            wake.is_some_and(|at| at <= later(world.now, AFTER)),
            "{wake:?}"
        );
        world.now = later(world.now, AFTER);
        assert_eq!(world.look(Fate::Made).pages, ["n1"]);
        world.now = later(world.now, AFTER);
        assert_eq!(world.look(Fate::Made).pages, [""; 0]);
    }
}
