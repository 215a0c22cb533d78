//! Conclusions about groups, and their events.

use std::sync::Arc;

use contract::{EVENT_VERSION, HealthEvent, ProcessingStrategy, json, keys};
use jiff::Timestamp;
use model::status::ConclusionNote;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::condition::Conclusion;
use crate::group::Group;
use crate::member::Member;
use crate::rule::Rule;
use crate::text::Text;

/// Conclusion of a rule about a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Hash of rule, group and first evidence.
    pub id: String,
    /// Name of the rule.
    pub rule: String,
    /// Group of the events.
    pub group: Arc<Group>,
    /// Time of the event that met the condition, and the events that the conclusion rests on.
    pub conclusion: Conclusion,
}

/// Conclusion that an event of ours says is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) id: String,
    pub(crate) since: Timestamp,
    pub(crate) evidence: Vec<Text>,
    pub(crate) node: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) member: Option<Member>,
}

// === impl Finding ===

impl Finding {
    pub(crate) fn new(rule: &Rule, group: &Arc<Group>, conclusion: Conclusion) -> Self {
        let mut hash = Sha256::new();
        let first = conclusion.evidence.first();
        let first = first.map(|id| id.to_string()).unwrap_or_default();
        let values = group.values.iter().map(|value| format!("{value:?}"));
        let member = conclusion.member.iter().map(|member| format!("{member:?}"));
        let parts = [rule.name.clone(), group.node.clone(), first].into_iter();
        for part in parts.chain(values).chain(member) {
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
        let evidence: Vec<&str> = self.conclusion.evidence.iter().map(|id| &**id).collect();
        let of = Told::of(self);
        let mut event = about(rule, &self.group, &of);
        event.is_fatal = rule.fatal;
        event.recommended_action = rule.action as i32;
        event.message.clone_from(&rule.message);
        event.generated_timestamp = Some(json::proto_timestamp(self.conclusion.since));
        event
            .metadata
            .insert(keys::META_EVIDENCE.to_owned(), evidence.join(","));
        event
    }

    /// Returns the event that ends a conclusion of a group that was said to be open.
    pub(crate) fn recovery(rule: &Rule, group: &Group, told: &Told, now: Timestamp) -> HealthEvent {
        let mut event = about(rule, group, told);
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
            member: finding.conclusion.member.clone(),
        }
    }

    /// Returns true if an event about the group is about the member of the conclusion, if it has one.
    pub(crate) fn is_in(&self, event: &HealthEvent) -> bool {
        let gpus = Member::gpus(event);
        let is_named = |member: &Member| {
            let mut named = gpus.iter().map(|gpu| gpu.is(member));
            member.node == event.node_name && (gpus.is_empty() || named.any(|is| is))
        };
        self.member.as_ref().is_none_or(is_named)
    }

    /// Returns true if an event of a conclusion of the same group takes the place of this one, or
    /// would only repeat it.
    pub(crate) fn is_replaced_by(&self, finding: &Finding) -> bool {
        let conclusion = &finding.conclusion;
        let is_there = !finding.group.node.is_empty() || self.node == conclusion.node;
        self.is(conclusion) || (is_there && self.member == conclusion.member)
    }

    /// Returns true if a conclusion is the same: the id follows from its first evidence, in a way that
    /// may change.
    pub(crate) fn is(&self, conclusion: &Conclusion) -> bool {
        self.evidence.first() == conclusion.evidence.first() && self.member == conclusion.member
    }
}

/// Returns the conclusion that an event of the analysis itself is about. `None` for other events of
/// the same agent, such as a recovery that a person reports.
pub(crate) fn said_in(event: &HealthEvent, rule: Option<&Rule>) -> Option<Told> {
    let evidence = event.metadata.get(keys::META_EVIDENCE);
    let evidence = evidence.into_iter().flat_map(|ids| ids.split(','));
    let since = event.generated_timestamp.and_then(json::timestamp);
    Some(Told {
        id: event.metadata.get(keys::META_CONCLUSION)?.clone(),
        since: since.unwrap_or(Timestamp::MIN),
        evidence: evidence.map(Text::from).collect(),
        node: Some(event.node_name.clone()),
        member: rule.and_then(|rule| rule.members(event).into_iter().next()),
    })
}

/// Returns an event with the parts that a conclusion and its end have in common.
fn about(rule: &Rule, group: &Group, of: &Told) -> HealthEvent {
    let node_name = if group.node.is_empty() {
        of.node.as_deref().unwrap_or_default()
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
        metadata: [(keys::META_CONCLUSION.to_owned(), of.id.clone())].into(),
        ..HealthEvent::default()
    };
    for value in &group.values {
        value.write(&mut event);
    }
    let entities = of.member.iter().flat_map(Member::entities);
    event.entities_impacted.extend(entities);
    event
}
