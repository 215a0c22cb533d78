//! Records repairs as events, which the analysis counts, and stops repairs that it has found not to
//! help.

use contract::{EVENT_VERSION, Entity, HealthEvent, ProcessingStrategy, json, keys};
use model::attempt::Attempt;
use model::ownership::Ownership;
use model::reporter::{OWN_AGENT, Reporter};
use policy::assess::CountedEvent;

use super::{RemediationState, StageRequests};
use crate::Purpose;
use model::fault::Subject;

// === impl RemediationState ===

impl RemediationState {
    /// Records the repairs of a session that have succeeded, each once. Returns true while the store
    /// has not answered. After a restart they are recorded again; the store has them already then.
    pub(super) fn record_repairs(
        &mut self,
        node: &str,
        own: &Ownership,
        requests: &mut StageRequests<'_>,
    ) -> bool {
        let attempts = own.mark.remediation.iter().flat_map(|mark| &mark.attempts);
        let repairs = attempts.filter(|one| one.remediates() && one.succeeded());
        let new: Vec<&Attempt> = repairs
            .filter(|one| !self.recorded.contains(&one.key()))
            .collect();
        let events: Vec<HealthEvent> = new.iter().map(|one| repaired(node, one)).collect();
        self.recorded.extend(new.iter().map(|one| one.key()));
        let any = !events.is_empty();
        if any {
            requests.append(events, Purpose::Record, None);
        }
        any
    }

    /// Records all repairs again: the store has not taken them.
    pub(crate) fn not_recorded(&mut self) {
        self.recorded.clear();
    }
}

/// Returns the event of a repair that has succeeded. It opens and closes no fault.
fn repaired(node: &str, attempt: &Attempt) -> HealthEvent {
    let at = attempt.end.as_ref().map_or(attempt.since, |end| end.at);
    // Only resets of GPUs name an entity.
    let gpu = Some(&attempt.entity).filter(|entity| !entity.is_empty());
    let mut event = HealthEvent {
        version: EVENT_VERSION,
        agent: OWN_AGENT.to_owned(),
        component_class: "Node".to_owned(),
        check_name: keys::CHECK_REPAIRED.to_owned(),
        is_healthy: true,
        message: attempt.ending(),
        entities_impacted: gpu
            .map(|uuid| Entity {
                entity_type: keys::ENTITY_GPU_UUID.to_owned(),
                entity_value: uuid.clone(),
            })
            .into_iter()
            .collect(),
        metadata: [
            (keys::META_REPAIR.to_owned(), attempt.action.clone()),
            (keys::META_REPAIR_KEY.to_owned(), attempt.key()),
        ]
        .into(),
        generated_timestamp: Some(json::proto_timestamp(at)),
        node_name: node.to_owned(),
        processing_strategy: ProcessingStrategy::StoreAndAnalyse.into(),
        ..HealthEvent::default()
    };
    Reporter::Monitor.note_in(&mut event);
    event
}

/// Returns the name of the conclusion that repairs do not help against a fault; `None` if none of
/// `events` is one.
pub(super) fn not_worked(fault: &HealthEvent, events: &[CountedEvent]) -> Option<String> {
    let check = format!("{}/{}", fault.agent, fault.check_name);
    let is_about = |one: &HealthEvent| {
        let mut subjects = Subject::of_entities(&fault.entities_impacted).into_iter();
        one.agent == keys::ANALYZER_AGENT
            && one.check_name == keys::CHECK_REPAIR_NOT_WORKING
            && one.metadata.get(keys::META_ANALYSED_CHECK) == Some(&check)
            && (one.error_code.is_empty()
                || one
                    .error_code
                    .iter()
                    .any(|code| fault.error_code.contains(code)))
            && subjects.any(|subject| subject.healed_by(&one.entities_impacted))
    };
    let found = events.iter().any(|one| is_about(&one.event));
    found.then(|| keys::CHECK_REPAIR_NOT_WORKING.to_owned())
}
