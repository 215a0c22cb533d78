//! Events for metrics and people, derived from changes of resources.

use jiff::Timestamp;

use super::io::ResourceEvent;
use crate::gpu_reset;
use crate::handover;
use crate::{Maintenance, MaintenanceResource};
use model::resource::ATTEMPT_COMPLETE;

/// Returns the events of a change of a resource. `before` is `None` for a new one, `after` for
/// a deleted one. `active` is the number of running resets of its node after the change.
pub(super) fn events_of(
    before: Option<&MaintenanceResource>,
    after: Option<&MaintenanceResource>,
    active: usize,
    now: Timestamp,
) -> Vec<ResourceEvent> {
    let Some(kind) = after.or(before).map(|one| one.kind) else {
        return Vec::new();
    };
    match (kind, before, after) {
        (Maintenance::Reboot | Maintenance::Terminate, Some(before), Some(after)) => {
            of_signal(before, after)
        }
        (Maintenance::Reset, Some(before), after) => {
            of_reset(before, after, active, now).into_iter().collect()
        }
        (Maintenance::HandOver, before, after) => {
            of_hand_over(before, after, now).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

fn of_signal(before: &MaintenanceResource, after: &MaintenanceResource) -> Vec<ResourceEvent> {
    let (key, node) = (after.key(), after.node.clone());
    let mut events = Vec::new();
    if before.status.start.is_none() && after.status.start.is_some() {
        let (key, node) = (key.clone(), node.clone());
        events.push(ResourceEvent::Begun { key, node });
    }
    if !before.status.has_ended() && after.status.has_ended() {
        let complete = after.status.condition(ATTEMPT_COMPLETE);
        let (outcome, message) = complete
            .map(|one| (one.reason.clone(), one.message.clone()))
            .unwrap_or_default();
        events.push(ResourceEvent::Ended {
            key,
            node,
            outcome,
            message,
            took: (after.status.start.zip(after.status.completion))
                .map(|(start, end)| end.duration_since(start)),
        });
    }
    events
}

fn of_reset(
    before: &MaintenanceResource,
    after: Option<&MaintenanceResource>,
    active: usize,
    now: Timestamp,
) -> Option<ResourceEvent> {
    let node = before.node.clone();
    let was_active = gpu_reset::is_active(before);
    let is_active = after.is_some_and(gpu_reset::is_active);
    if is_active && !was_active {
        return Some(ResourceEvent::ResetBegun { node });
    }
    (was_active && !is_active).then(|| ResourceEvent::ResetEnded {
        node,
        failure: after.map_or_else(|| Some("Deleted".to_owned()), gpu_reset::failure),
        took: before.status.start.map(|at| now.duration_since(at)),
        active,
    })
}

fn of_hand_over(
    before: Option<&MaintenanceResource>,
    after: Option<&MaintenanceResource>,
    now: Timestamp,
) -> Option<ResourceEvent> {
    let request = after.or(before)?;
    let (before, after) = (before.map(handover::phase), after.map(handover::phase));
    let released = request.status.condition(handover::RELEASED);
    (before != after).then(|| ResourceEvent::HandOver {
        name: request.name.clone(),
        node: request.node.clone(),
        action: handover::action(request),
        before,
        after,
        reason: released.map_or_else(String::new, |one| one.reason.clone()),
        age: now.duration_since(request.created),
    })
}
