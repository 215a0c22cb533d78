//! Validation: which nodes are validated before they come back or enter service, and the faults
//! that keep them out until then.
//!
//! Such a fault is gpuwarden's own: it is in the store like any other, so it survives whatever a
//! fault survives, its Job is created and watched like a remediation, and a person's release
//! dismisses it.

use contract::findings::Findings;
use contract::{
    BehaviourOverrides, EVENT_VERSION, HealthEvent, ProcessingStrategy, RecommendedAction, json,
    keys,
};
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;

use model::attempt::VALIDATION_GROUP;
use model::fault::Fault;
use model::node::NodeView;
use model::reporter::{Authority, OWN_AGENT, Reporter, is_own_word};
use model::selector::LabelSelector;

/// Longest quiet time that can be configured, in minutes.
const MAX_QUIET: i64 = 24 * 60;

/// Settings of the validation of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidationConfig {
    /// Action whose custom resource validates a node; `None` if the quiet time is enough.
    pub action: Option<String>,
    /// Time without a new fault that comes first.
    pub quiet: SignedDuration,
    /// True if nodes are validated after a remediation.
    pub after_remediation: bool,
    /// New nodes that are validated; `None` for none.
    pub new_nodes: Option<NewNodes>,
}

/// New nodes that are validated before they enter service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewNodes {
    /// Nodes created later than this.
    since: Timestamp,
    /// Labels of the nodes.
    selector: LabelSelector,
}

/// Reason why a node is validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validation {
    /// The node was remediated.
    Return,
    /// The node is new.
    Admission,
}

/// Keys of the file.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct File {
    action: Option<String>,
    quiet_minutes: Option<i64>,
    #[serde(rename = "afterRepair", default = "yes")]
    after_remediation: bool,
    new_nodes_since: Option<String>,
    new_nodes_selector: Option<String>,
}

fn yes() -> bool {
    true
}

/// Checks an action that no fault recommends, and that gpuwarden starts itself.
pub(super) fn check_own<'a>(
    name: &str,
    group: &str,
    group_of: impl Fn(&str) -> Option<&'a str>,
) -> Result<(), String> {
    let Some(found) = group_of(name) else {
        return Err(format!("there is no remediationActions.{name:?}"));
    };
    if RecommendedAction::from_str_name(name).is_some() {
        return Err("it is to have a name of its own, which no fault recommends".to_owned());
    }
    if found != group {
        return Err(format!(
            "the equivalenceGroup of {name:?} is to be {group:?}"
        ));
    }
    Ok(())
}

// === impl ValidationConfig ===

impl ValidationConfig {
    /// Parses the configuration; errors are added to `findings`.
    pub(super) fn read<'a>(
        file: File,
        group_of: impl Fn(&str) -> Option<&'a str>,
        findings: &mut Findings<'_>,
    ) -> Self {
        let quiet = findings.minutes("validation.quietMinutes", file.quiet_minutes, 1..=MAX_QUIET);
        if let Some(name) = &file.action {
            let own = check_own(name, VALIDATION_GROUP, group_of);
            findings.check("validation.action", own);
        }
        if file.action.is_none() && file.quiet_minutes.is_none() {
            findings.at_key(
                "validation",
                "action or quietMinutes: one of them belongs here",
            );
        }
        let new_nodes = match (file.new_nodes_since, file.new_nodes_selector) {
            (None, None) => None,
            (Some(since), Some(selector)) => {
                let since = since
                    .parse::<Timestamp>()
                    .map_err(|error| format!("{error}; write it as 2026-11-25T00:00:00Z"));
                let since = findings.check("validation.newNodesSince", since);
                let selector = findings.check("validation.newNodesSelector", selector.parse());
                since
                    .zip(selector)
                    .map(|(since, selector)| NewNodes { since, selector })
            }
            _ => {
                let what = "newNodesSince and newNodesSelector belong together: since when, and \
                            which nodes";
                findings.at_key("validation", what);
                None
            }
        };
        Self {
            action: file.action,
            quiet: quiet.unwrap_or_default(),
            after_remediation: file.after_remediation,
            new_nodes,
        }
    }

    /// Returns whether a node without a session is to be validated before it enters service.
    pub(crate) fn holds_new(&self, node: &NodeView) -> bool {
        let Some(new) = &self.new_nodes else {
            return false;
        };
        let created = node.machine.registered_at;
        let admitted = node.annotations.get(keys::ADMITTED);
        created.is_some_and(|at| at > new.since)
            && new.selector.matches(&node.labels)
            && admitted != Some(&node.uid)
    }
}

// === impl Validation ===

impl Validation {
    /// Returns the check name of its events.
    fn check(self) -> &'static str {
        match self {
            Self::Return => "NodeValidation",
            Self::Admission => "NodeAdmission",
        }
    }

    /// Returns the validation that an event of gpuwarden itself is about, if any.
    pub fn of(event: &HealthEvent) -> Option<Self> {
        let ours = is_own_word(event);
        let all = [Self::Return, Self::Admission].into_iter();
        all.filter(|_| ours)
            .find(|one| one.check() == event.check_name)
    }

    /// Returns the validation that a fault of gpuwarden itself is about, if any.
    pub(crate) fn of_fault(fault: &Fault) -> Option<Self> {
        Self::of(&fault.event).filter(|_| fault.authority == Authority::Trusted)
    }

    /// Returns the event that keeps a node out until it has passed.
    pub(crate) fn begins(self, node: &str, action: Option<&str>, now: Timestamp) -> HealthEvent {
        let why = match self {
            Self::Return => "it was repaired",
            Self::Admission => "it is new",
        };
        HealthEvent {
            message: format!("the node is to be validated before pods come to it: {why}"),
            recommended_action: if action.is_some() {
                RecommendedAction::Custom.into()
            } else {
                RecommendedAction::None.into()
            },
            custom_recommended_action: action.unwrap_or_default().to_owned(),
            ..self.event(node, now)
        }
    }

    /// Returns the event of a node that has failed its validation for this reason.
    pub(crate) fn failed(self, node: &str, why: &str, now: Timestamp) -> HealthEvent {
        HealthEvent {
            is_fatal: true,
            error_code: vec![keys::CODE_VALIDATION_FAILED.to_owned()],
            message: format!("the node has failed its validation: {why}"),
            recommended_action: RecommendedAction::ContactSupport.into(),
            ..self.event(node, now)
        }
    }

    fn event(self, node: &str, now: Timestamp) -> HealthEvent {
        let mut event = HealthEvent {
            version: EVENT_VERSION,
            agent: OWN_AGENT.to_owned(),
            component_class: "Node".to_owned(),
            check_name: self.check().to_owned(),
            node_name: node.to_owned(),
            generated_timestamp: Some(json::proto_timestamp(now)),
            processing_strategy: ProcessingStrategy::ExecuteRemediation.into(),
            // The event applies whatever the policy says of faults; and no pod is to leave for
            // it.
            quarantine_overrides: Some(BehaviourOverrides {
                force: true,
                skip: false,
            }),
            drain_overrides: Some(BehaviourOverrides {
                force: false,
                skip: true,
            }),
            ..HealthEvent::default()
        };
        Reporter::Monitor.note_in(&mut event);
        event
    }
}
