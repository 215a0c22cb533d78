//! Dismissal of faults by a person who gives a node back.

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use model::future::FutureTimes;
use model::ownership::{Ownership, released_at};
use policy::assess::{CountedEvent, Desired, Dismissal, DismissedBy};

use super::ObservedNode;

/// Returns which faults of a node do not count: those that a person has dismissed by giving the
/// node back, or by dropping at `dropped_at` what the brake had held back. A drop applies to
/// nodes that were in service then: a session that had begun keeps its faults. `times` maps
/// times in the future on the node to those they count as.
pub fn dismissal(
    observed: &ObservedNode,
    dropped_at: Option<Timestamp>,
    times: &FutureTimes,
) -> Option<Dismissal> {
    let released = times.counted(keys::RELEASED_AT, released_at(&observed.view));
    let released = released.map(|up_to| Dismissal {
        up_to,
        by: DismissedBy::Released,
    });
    let dropped = dropped_at
        .filter(|at| {
            observed.own.as_ref().is_none_or(|own| {
                let since = times.counted(keys::SESSION, own.since);
                since.is_some_and(|since| since > *at)
            })
        })
        .map(|up_to| Dismissal {
            up_to,
            by: DismissedBy::Dropped,
        });
    match (released, dropped) {
        (Some(a), Some(b)) => Some(if a.up_to >= b.up_to { a } else { b }),
        (a, b) => a.or(b),
    }
}

/// Returns when the newest report of the faults listed on the node was accepted: a person who
/// ends the session has seen those faults, and dismisses them.
pub(super) fn newest_listed(own: &Ownership, desired: &Desired) -> Option<Timestamp> {
    desired
        .events
        .iter()
        .filter(|counted| own.events.iter().any(|event| event.id == counted.event.id))
        .map(|counted| counted.accepted_at)
        .max()
}

/// Returns the last moment, up to `now`, before the first report of a fault that the node does
/// not list: a person who ends the session cannot have seen that fault.
pub(super) fn before_unlisted(own: &Ownership, desired: &Desired, now: Timestamp) -> Timestamp {
    let listed = |id: &str| own.events.iter().any(|event| event.id == id);
    let unlisted = desired.events.iter().filter(|one| !listed(&one.event.id));
    let before = |one: &CountedEvent| {
        let before = one.accepted_at.checked_sub(SignedDuration::from_micros(1));
        before.unwrap_or(Timestamp::MIN)
    };
    unlisted.map(before).fold(now, Timestamp::min)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use model::node::NodeView;
    use model::ownership::{SessionAnnotation, SessionMark};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn the_later_dismissal_counts_and_a_session_keeps_its_faults() {
        let mut node = NodeView::unknown("n1");
        let times = FutureTimes::default();
        let up_to = |node: &NodeView, dropped| {
            let observed = ObservedNode::of(Arc::new(node.clone()));
            dismissal(&observed, dropped, &times).map(|one| one.up_to)
        };
        assert_eq!(up_to(&node, None), None);
        node.annotations
            .insert(keys::RELEASED_AT.into(), at(50).to_string());
        assert_eq!(up_to(&node, None), Some(at(50)));
        assert_eq!(up_to(&node, Some(at(40))), Some(at(50)));
        assert_eq!(up_to(&node, Some(at(60))), Some(at(60)));
        // The session began at 70, so a drop at 80 concerned other nodes.
        let session = SessionAnnotation {
            id: "s".into(),
            since: at(70),
            mark: SessionMark::default(),
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
        };
        let text = serde_json::to_string(&session).unwrap();
        node.annotations.insert(keys::SESSION.into(), text);
        assert_eq!(up_to(&node, Some(at(60))), Some(at(60)));
        assert_eq!(up_to(&node, Some(at(80))), Some(at(50)));
    }
}
