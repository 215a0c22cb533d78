//! Check `KnownBadGPU`: a GPU that a person has marked as bad, or as returned to its vendor, and
//! that is in use again.

use contract::{EVENT_VERSION, Entity, HealthEvent, RecommendedAction, json, keys};
use jiff::Timestamp;

use super::gpu::{GpuRow, MarkKind, Place};
use crate::AGENT;

/// Returns the event that a marked GPU is in use on a node: it was seen after the mark at `place`,
/// where it was seen last. The same mark and place give the same event.
///
/// Returns `None` if it is not, if that is reported already, or if the GPU is on two nodes at the
/// same time.
pub(super) fn found(row: &GpuRow, place: &Place) -> Option<HealthEvent> {
    let mark = row.mark.as_ref()?;
    let is_bad = mark.kind != MarkKind::Good;
    let is_reported = row.reported.contains_key(&place.node);
    if !is_bad || place.to <= mark.at || is_reported || row.on_two_nodes().is_some() {
        return None;
    }
    let word = match mark.kind {
        MarkKind::Rma => "to be returned to its vendor",
        MarkKind::Bad | MarkKind::Good => "bad",
    };
    Some(HealthEvent {
        is_fatal: true,
        recommended_action: RecommendedAction::ContactSupport as i32,
        message: format!(
            "This GPU was marked as {word} at {} by {}: {}",
            mark.at, mark.by, mark.reason
        ),
        ..event(row, &place.node, &place.slot, mark.at.max(place.from))
    })
}

/// Returns the event that a marked GPU is no longer in use on a node, as of a time.
pub(super) fn over(row: &GpuRow, node: &str, slot: &str, why: &str, at: Timestamp) -> HealthEvent {
    HealthEvent {
        is_healthy: true,
        message: why.to_owned(),
        ..event(row, node, slot, at)
    }
}

fn event(row: &GpuRow, node: &str, slot: &str, at: Timestamp) -> HealthEvent {
    let uuid = row.uuids.iter().next().filter(|_| row.uuids.len() == 1);
    let slot = Some(slot.to_owned()).filter(|slot| !slot.is_empty());
    let entities = [
        (keys::ENTITY_PCI, slot),
        (keys::ENTITY_GPU_UUID, uuid.cloned()),
    ];
    let entity = |(kind, value): (&str, Option<String>)| {
        Some(Entity {
            entity_type: kind.to_owned(),
            entity_value: value?,
        })
    };
    let names = [
        (keys::META_GPU_SERIAL, row.serial.clone()),
        (keys::META_GPU_UUID, uuid.cloned()),
    ];
    let names = names
        .into_iter()
        .filter_map(|(key, name)| Some((key.to_owned(), name?)));
    HealthEvent {
        version: EVENT_VERSION,
        agent: AGENT.to_owned(),
        component_class: keys::COMPONENT_GPU.to_owned(),
        check_name: keys::CHECK_KNOWN_BAD_GPU.to_owned(),
        entities_impacted: entities.into_iter().filter_map(entity).collect(),
        metadata: names.collect(),
        generated_timestamp: Some(json::proto_timestamp(at)),
        node_name: node.to_owned(),
        ..HealthEvent::default()
    }
}
