//! Conclusions about groups, and their events.

use contract::{EVENT_VERSION, HealthEvent, ProcessingStrategy, json, keys};
use jiff::Timestamp;
use model::status::ConclusionNote;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::condition::Conclusion;
use crate::group::Group;
use crate::rule::Rule;

/// Conclusion of a rule about a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Hash of rule, group and first evidence.
    pub id: String,
    /// Name of the rule.
    pub rule: String,
    /// Group of the events.
    pub group: Group,
    /// Time of the event that met the condition, and the events that the conclusion rests on.
    pub conclusion: Conclusion,
}

/// Conclusion that an event of ours says is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) id: String,
    pub(crate) since: Timestamp,
    pub(crate) evidence: Vec<String>,
    pub(crate) node: Option<String>,
}

// === impl Finding ===

impl Finding {
    pub(crate) fn new(rule: &Rule, group: &Group, conclusion: Conclusion) -> Self {
        let mut hash = Sha256::new();
        let first = conclusion.evidence.first().cloned().unwrap_or_default();
        let values = group.values.iter().map(|value| format!("{value:?}"));
        let parts = [rule.name.clone(), group.node.clone(), first].into_iter();
        for part in parts.chain(values) {
            hash.update(part.len().to_le_bytes());
            hash.update(part);
        }
        let digest = hash.finalize();
        let id = digest.iter().take(12).map(|byte| format!("{byte:02x}"));
        Self {
            id: id.collect(),
            rule: rule.name.clone(),
            group: group.clone(),
            conclusion,
        }
    }

    /// Returns the note of the conclusion with its events.
    pub fn note(&self) -> ConclusionNote {
        ConclusionNote {
            rule: self.rule.clone(),
            conclusion: self.id.clone(),
        }
    }

    /// Returns the event of the conclusion.
    pub fn event(&self, rule: &Rule) -> HealthEvent {
        let evidence = self.conclusion.evidence.join(",");
        let mut event = about(rule, &self.group, &self.id, self.conclusion.node.as_deref());
        event.is_fatal = rule.fatal;
        event.recommended_action = rule.action as i32;
        event.message.clone_from(&rule.message);
        event.generated_timestamp = Some(json::proto_timestamp(self.conclusion.since));
        event
            .metadata
            .insert(keys::META_EVIDENCE.to_owned(), evidence);
        event
    }

    /// Returns the event that ends a conclusion of a group that was said to be open.
    pub(crate) fn recovery(rule: &Rule, group: &Group, told: &Told, now: Timestamp) -> HealthEvent {
        let mut event = about(rule, group, &told.id, told.node.as_deref());
        event.is_healthy = true;
        event.generated_timestamp = Some(json::proto_timestamp(now));
        event
    }

    /// Returns the event that ends what an event of a conclusion has opened, without its time.
    pub(crate) fn recovery_of(event: &HealthEvent) -> HealthEvent {
        HealthEvent {
            is_healthy: true,
            is_fatal: false,
            recommended_action: 0,
            message: String::new(),
            generated_timestamp: None,
            id: String::new(),
            ..event.clone()
        }
    }
}

// === impl Told ===

impl Told {
    pub(crate) fn of(finding: &Finding) -> Self {
        Self {
            id: finding.id.clone(),
            since: finding.conclusion.since,
            evidence: finding.conclusion.evidence.clone(),
            node: finding.conclusion.node.clone(),
        }
    }
}

/// Returns the conclusion that an event of the analysis itself is about. `None` for other events of
/// the same agent, such as a recovery that a person reports.
pub(crate) fn said_in(event: &HealthEvent) -> Option<Told> {
    let evidence = event.metadata.get(keys::META_EVIDENCE);
    let evidence = evidence.into_iter().flat_map(|ids| ids.split(','));
    let since = event.generated_timestamp.and_then(json::timestamp);
    Some(Told {
        id: event.metadata.get(keys::META_CONCLUSION)?.clone(),
        since: since.unwrap_or(Timestamp::MIN),
        evidence: evidence.map(str::to_owned).collect(),
        node: Some(event.node_name.clone()),
    })
}

/// Returns an event with the parts that a conclusion and its end have in common.
fn about(rule: &Rule, group: &Group, id: &str, node: Option<&str>) -> HealthEvent {
    let node_name = if group.node.is_empty() {
        node.unwrap_or_default()
    } else {
        &group.node
    };
    let strategy = match rule.strategy {
        ProcessingStrategy::Unspecified => ProcessingStrategy::ExecuteRemediation,
        other => other,
    };
    let mut event = HealthEvent {
        version: EVENT_VERSION,
        agent: keys::ANALYZER_AGENT.to_owned(),
        component_class: rule.component_class.clone(),
        check_name: rule.name.clone(),
        node_name: node_name.to_owned(),
        processing_strategy: strategy as i32,
        metadata: [(keys::META_CONCLUSION.to_owned(), id.to_owned())].into(),
        ..HealthEvent::default()
    };
    for value in &group.values {
        value.write(&mut event);
    }
    event
}
