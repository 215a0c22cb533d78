use contract::Entity;
use model::attempt::{AttemptOutcome, ResourceKind};
use policy::assess::CountedEvent;
use serde_json::json;

use super::*;

const CONFIG: &str = r#"
[remediationActions.COMPONENT_RESET]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "GPUReset"
completeConditionType = "Complete"
templateFileName = "t"
equivalenceGroup = "reset"
impactedEntityScope = "GPU_UUID"
supersedingEquivalenceGroups = ["restart"]

[remediationActions.RESTART_BM]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "RebootNode"
completeConditionType = "NodeReady"
templateFileName = "t"
equivalenceGroup = "restart"

[remediationActions.recable]
apiGroup = "example.com"
version = "v1"
kind = "Ticket"
completeConditionType = "Closed"
templateFileName = "t"
equivalenceGroup = "ticket"

[templates]
t = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata:
  name: maintenance-{{ .NodeName }}-{{ .HealthEventID }}
spec: {nodeName: {{ .NodeName }}, gpu: "{{ .ImpactedEntityScopeValue }}"}
"""
"#;

fn config() -> RemediationConfig {
    RemediationConfig::parse(CONFIG, "t", |_| Err(String::new())).unwrap()
}

fn at(minute: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + minute * 60).unwrap()
}

fn event(id: &str, action: i32, gpus: &[&str], first_seen: Timestamp) -> CountedEvent {
    let entity = |uuid: &&str| Entity {
        entity_type: "GPU_UUID".into(),
        entity_value: (*uuid).into(),
    };
    let event = HealthEvent {
        id: id.into(),
        node_name: "n1".into(),
        recommended_action: action,
        entities_impacted: gpus.iter().map(entity).collect(),
        ..HealthEvent::default()
    };
    CountedEvent {
        open: vec![event.clone()],
        event,
        accepted_at: first_seen,
        first_seen,
        route: None,
        unapproved: false,
    }
}

/// A node whose decisions are all carried out at once.
struct Node {
    config: RemediationConfig,
    mark: Option<RemediationMark>,
    seen: ResourceObservation,
    partial: bool,
    proposals: Vec<Proposal>,
    now: Timestamp,
}

impl Node {
    fn new() -> Self {
        Self {
            config: config(),
            mark: None,
            seen: ResourceObservation::Unknown,
            partial: false,
            proposals: Vec::new(),
            now: at(0),
        }
    }

    fn decide(&mut self, events: &[CountedEvent]) -> RemediationDecision {
        let open: Vec<OpenFault<'_>> = (events.iter())
            .map(|one| OpenFault {
                event: &one.event,
                first_seen: one.first_seen,
                excluded_by: None,
                asks_approval: false,
                unapproved: false,
            })
            .collect();
        let decision = decide(&RemediationInput {
            events: &open,
            mark: self.mark.as_ref(),
            resource: &self.seen,
            creating: false,
            searching: false,
            config: Some(&self.config),
            blocker: None,
            drains: false,
            drain_since: None,
            partial: self.partial,
            proposals: &self.proposals,
            earlier: &[],
            now: self.now,
        });
        self.mark.clone_from(&decision.mark);
        decision
    }

    /// Creates the resource of the decided attempt; returns its name.
    fn begin(&mut self, events: &[CountedEvent]) -> String {
        self.seen = ResourceObservation::Unknown;
        self.decide(events);
        let open = self.mark.as_ref().and_then(RemediationMark::under_way);
        let Some(open) = open.cloned() else {
            panic!("{:?}", self.mark);
        };
        self.seen = ResourceObservation::There(Box::new(ResourceState {
            uid: "u".into(),
            attempt: Some(open.key()),
            begun: false,
            end: None,
        }));
        self.decide(events);
        open.name
    }

    /// Ends the attempt with this outcome.
    fn end(&mut self, outcome: AttemptOutcome, events: &[CountedEvent]) -> RemediationDecision {
        if let ResourceObservation::There(state) = &mut self.seen {
            state.end = Some((outcome, "so".into()));
        }
        self.decide(events)
    }
}

fn awaits(decision: &RemediationDecision) -> String {
    decision.awaiting.awaits().unwrap_or_default()
}

#[test]
fn each_gpu_of_an_event_is_reset_by_itself() {
    let mut node = Node::new();
    let events = [event("e1", 2, &["GPU-1", "GPU-0"], at(-1))];
    assert_eq!(node.begin(&events), "maintenance-n1-e1");
    // Only one attempt is made at a time.
    assert_eq!(
        awaits(&node.decide(&events)),
        "the end of GPUReset maintenance-n1-e1"
    );
    let decision = node.end(AttemptOutcome::Succeeded, &events);
    let attempts = decision.mark.unwrap().attempts;
    let groups: Vec<&str> = attempts.iter().map(|one| one.group.as_str()).collect();
    assert_eq!(groups, ["reset-GPU-0", "reset-GPU-1"]);
    assert_eq!(attempts[1].name, "maintenance-n1-e1-2");
    assert_eq!(attempts[1].entity, "GPU-1");
}

#[test]
fn a_reset_that_does_not_help_is_followed_by_a_reboot_and_then_a_person() {
    for outcome in [AttemptOutcome::Failed, AttemptOutcome::Succeeded] {
        let mut node = Node::new();
        let events = [event("e1", 2, &["GPU-0"], at(-1))];
        node.begin(&events);
        node.end(outcome, &events);
        node.now = at(16);
        assert_eq!(node.begin(&events), "maintenance-n1-e1-2");
        let open = node.mark.as_ref().unwrap().under_way().unwrap();
        assert_eq!(
            (open.group.as_str(), open.resource.kind.as_str()),
            ("restart", "RebootNode")
        );
        node.end(AttemptOutcome::Succeeded, &events);
        node.now = at(40);
        let decision = node.decide(&events);
        assert_eq!(
            awaits(&decision),
            "a person: no repair is left to be tried: RebootNode maintenance-n1-e1-2 has succeeded"
        );
        assert_eq!(decision.mark.unwrap().state(), Some("remediation-failed"));
    }
}

#[test]
fn a_node_of_which_some_pods_stay_is_not_rebooted() {
    let mut node = Node::new();
    node.partial = true;
    let events = [event("e1", 2, &["GPU-0"], at(-1))];
    node.begin(&events);
    let decision = node.end(AttemptOutcome::Failed, &events);
    assert!(decision.whole_node);
    assert_eq!(awaits(&decision), "all of its pods to leave");
    let mark = decision.mark.unwrap();
    // Until the drain of the whole node has begun the mark stays.
    assert_eq!((mark.attempts.len(), mark.state()), (1, None));
    node.partial = false;
    node.begin(&events);
    let open = node.mark.as_ref().unwrap().under_way().unwrap();
    assert_eq!(open.group, "restart");
}

#[test]
fn an_event_that_does_not_say_which_gpu_asks_for_the_next_group() {
    let mut node = Node::new();
    node.begin(&[event("e1", 2, &[], at(-1))]);
    let open = node.mark.as_ref().unwrap().under_way().unwrap();
    assert_eq!(open.group, "restart");
}

#[test]
fn a_group_that_supersedes_another_covers_it() {
    let mut node = Node::new();
    let events = [
        event("e1", 2, &["GPU-0"], at(-2)),
        event("e2", 24, &[], at(-1)),
    ];
    assert_eq!(node.begin(&events), "maintenance-n1-e2");
    node.end(AttemptOutcome::Succeeded, &events);
    // The fault of the attempt is over; the other has to recover, too, within its time.
    let decision = node.decide(&events[..1]);
    assert!(
        awaits(&decision).starts_with("the recovery of its faults"),
        "{decision:?}"
    );
    // A fault that came after the reboot is reset.
    node.now = at(3);
    let later = [event("e3", 2, &["GPU-1"], at(2))];
    assert_eq!(node.begin(&later), "maintenance-n1-e3");
}

#[test]
fn a_failed_attempt_of_a_group_that_supersedes_another_does_not_cover_it() {
    let mut node = Node::new();
    node.begin(&[event("e1", 24, &[], at(-2))]);
    node.end(AttemptOutcome::Failed, &[event("e1", 24, &[], at(-2))]);
    // The reboot was not done: a GPU that asks for its reset gets it.
    assert_eq!(
        node.begin(&[event("e2", 2, &["GPU-0"], at(-1))]),
        "maintenance-n1-e2"
    );
    let open = node.mark.as_ref().unwrap().under_way().unwrap();
    assert_eq!(open.resource.kind, "GPUReset");
}

#[test]
fn validations_are_not_held_by_the_most_attempts() {
    let validate = r#"
[remediationActions.VALIDATE]
apiGroup = "batch"
version = "v1"
kind = "Job"
namespace = "gpuwarden"
completeConditionType = "Complete"
templateFileName = "t"
equivalenceGroup = "validation"

[validation]
action = "VALIDATE"
"#;
    let text = format!("maxAttempts = 1\n{CONFIG}{validate}");
    let mut node = Node::new();
    node.config = RemediationConfig::parse(&text, "t", |_| Err(String::new())).unwrap();
    let reboot = [event("e1", 24, &[], at(-1))];
    node.begin(&reboot);
    node.end(AttemptOutcome::Succeeded, &reboot);
    let mut validation = event("e2", 27, &[], at(1));
    validation.event.custom_recommended_action = "VALIDATE".into();
    node.now = at(2);
    node.begin(&[validation]);
    let open = node.mark.as_ref().unwrap().under_way().unwrap();
    assert_eq!(open.resource.kind, "Job");
    // Another attempt would be one too many.
    let again = [event("e3", 24, &[], at(3))];
    node.end(AttemptOutcome::Succeeded, &again);
    assert_eq!(
        awaits(&node.decide(&again)),
        "a person: 1 repairs were tried within 168 hours, the most allowed"
    );
}

#[test]
fn an_action_of_ones_own_is_known_by_its_name() {
    let mut node = Node::new();
    let mut custom = event("e1", 27, &[], at(-1));
    custom.event.custom_recommended_action = "recable".into();
    node.begin(std::slice::from_ref(&custom));
    let open = node.mark.as_ref().unwrap().under_way().unwrap();
    assert_eq!(
        (open.resource.kind.as_str(), open.group.as_str()),
        ("Ticket", "ticket")
    );
    // The action is in no escalation: if it does not help, a person is asked.
    let decision = node.end(AttemptOutcome::Failed, &[custom]);
    assert_eq!(decision.mark.unwrap().state(), Some("remediation-failed"));
    // An action that is not configured is unsupported.
    let mut custom = event("e1", 27, &[], at(-1));
    custom.event.custom_recommended_action = "defrost".into();
    let decision = Node::new().decide(&[custom]);
    assert_eq!(decision.unsupported, ["defrost".to_owned()].into());
}

#[test]
fn nothing_is_done_twice_of_which_nobody_knows_how_it_went() {
    let mut node = Node::new();
    let events = [event("e1", 2, &["GPU-0"], at(-1))];
    node.begin(&events);
    let decision = node.end(AttemptOutcome::Unclear, &events);
    // Nothing stronger either: the attempt may still be going on.
    assert!(awaits(&decision).starts_with("a person: GPUReset maintenance-n1-e1 has ended"));
    node.now = at(10_000);
    assert_eq!(node.decide(&events).mark.unwrap().attempts.len(), 1);
}

#[test]
fn what_a_status_says_is_read_as_its_maker_means_it() {
    let condition = |kind: &str, status: &str, reason: &str| json!({"type": kind, "status": status, "reason": reason, "message": "m"});
    let ended = "2026-11-24T00:00:00Z";
    let read = |status: serde_json::Value, done: &str| {
        let kind = ResourceKind {
            condition: done.into(),
            ..ResourceKind::default()
        };
        let object = json!({"metadata": {"uid": "u"}, "status": status});
        ResourceState::read(&object, &kind)
    };
    let table = [
        (json!({}), "NodeReady", None),
        (
            json!({"conditions": [condition("NodeReady", "Unknown", "Initializing")]}),
            "NodeReady",
            None,
        ),
        (
            json!({"conditions": [condition("NodeReady", "True", "Succeeded")]}),
            "NodeReady",
            Some(AttemptOutcome::Succeeded),
        ),
        (
            json!({"conditions": [condition("NodeReady", "False", "Failed")]}),
            "NodeReady",
            Some(AttemptOutcome::Failed),
        ),
        // The node may have been rebooted all the same.
        (
            json!({"conditions": [condition("NodeReady", "False", "Timeout")]}),
            "NodeReady",
            Some(AttemptOutcome::Unclear),
        ),
        // The signal was not sent, and the condition stays open for ever.
        (
            json!({"completionTime": ended, "conditions": [
                condition("NodeReady", "Unknown", "Initializing"), condition("SignalSent", "False", "Failed")]}),
            "NodeReady",
            Some(AttemptOutcome::Failed),
        ),
        // A reset that has failed is complete, too.
        (
            json!({"phase": "Failed", "conditions": [condition("Complete", "True", "ResetJobFailed")]}),
            "Complete",
            Some(AttemptOutcome::Failed),
        ),
        (
            json!({"phase": "Succeeded", "conditions": [condition("Complete", "True", "GPUResetSucceeded")]}),
            "Complete",
            Some(AttemptOutcome::Succeeded),
        ),
        // Statuses of a ValidationRequest.
        (
            json!({"phase": "Running", "startTime": ended}),
            "Succeeded",
            None,
        ),
        (
            json!({"phase": "Succeeded", "completionTime": ended}),
            "Succeeded",
            Some(AttemptOutcome::Succeeded),
        ),
        (
            json!({"phase": "Succeeded", "completionTime": ended, "skipped": {"tests": ["a"]}}),
            "Succeeded",
            Some(AttemptOutcome::Unclear),
        ),
        (
            json!({"phase": "Failed", "completionTime": ended}),
            "Succeeded",
            Some(AttemptOutcome::Failed),
        ),
        // A node that an external system puts aside has not failed.
        (
            json!({"conditions": [condition("ExternalRemediationComplete", "False", "Parked")]}),
            "ExternalRemediationComplete",
            None,
        ),
        (
            json!({"conditions": [condition("ExternalRemediationComplete", "True", "Done")]}),
            "ExternalRemediationComplete",
            Some(AttemptOutcome::Succeeded),
        ),
        (
            json!({"conditions": [condition("NodeReady", "False", "Failed"), condition("AttemptComplete", "True", "TransientFailure")]}),
            "NodeReady",
            Some(AttemptOutcome::FailedForNow),
        ),
        (
            json!({"conditions": [condition("AttemptComplete", "True", "PermanentFailure")]}),
            "NodeReady",
            Some(AttemptOutcome::Failed),
        ),
        (
            json!({"conditions": [condition("AttemptComplete", "True", "Cancelled")]}),
            "NodeReady",
            Some(AttemptOutcome::Unclear),
        ),
        (
            json!({"conditions": [condition("AttemptComplete", "False", "Pending")]}),
            "NodeReady",
            None,
        ),
        (json!({"conditions": "none"}), "NodeReady", None),
    ];
    for (status, done, outcome) in table {
        let end = read(status.clone(), done).end.map(|(outcome, _)| outcome);
        assert_eq!(end, outcome, "{status}");
    }
    for (kind, begun) in [
        ("SignalSent", true),
        ("ServicesTornDown", true),
        ("Ready", false),
        ("ManualMode", false),
    ] {
        let status = json!({"conditions": [condition(kind, "True", "r")]});
        assert_eq!(read(status, "NodeReady").begun, begun, "{kind}");
    }
}
