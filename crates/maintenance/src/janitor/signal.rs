//! The steps of a reboot or a termination.
//!
//! ```text
//! (none) --begin--> Sending --sent--> True --new boot id, Ready--> Succeeded
//!                    |  ^  \                \--nothing until the deadline--> AmbiguousFailure
//!                    |  |   `--unclear--> looked up by its operation id: sent, not sent, or unknown
//!                    |  `--later-- Retrying <--refused for now
//!                    `--refused for good--> PermanentFailure
//! ```
//!
//! `Sending` is written before the signal is sent, and names the process that sends it. Any
//! other process, and this one after sending, asks the provider about the operation id first,
//! and never sends again on its own.

use jiff::{SignedDuration, Timestamp};
use model::node::NodeView;
use model::ownership::{Ownership, Permit};
use model::resource::{ATTEMPT_COMPLETE, CompletionReason};
use serde_json::Value;

use super::Action;
use super::config::{JanitorConfig, ProviderPlace, Rules};
use super::failure::Class;
use super::label::OwnerAnswer;
use super::order::Position;
use super::record::{MANUAL_MODE, SIGNAL_SENT, SignalRecord};
use super::sending::{
    Course, Memory, ProviderAnswer, Question, RETRYING, SUCCEEDED, Sending, UNCLEAR,
};
use crate::SESSION_OBSERVED_WITHIN;
use crate::{MaintenanceResource, SESSION_ENDED, SESSION_ENDED_MESSAGE, Status, StatusCondition};

/// Time limit for a person to carry out the action, in manual mode.
const MANUAL: SignedDuration = SignedDuration::from_hours(24);

/// Reason of a condition without a result yet.
const INITIALIZING: &str = "Initializing";
/// Reason of a condition after a failure.
const FAILED: &str = "Failed";

/// State of a node, as far as reboots and terminations depend on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeObservation {
    /// `metadata.uid` of the node.
    pub uid: String,
    /// Id of the node's current boot.
    pub boot_id: String,
    /// True if the node is `Ready`.
    pub ready: bool,
    /// Time of the last change of `Ready`.
    pub ready_since: Option<Timestamp>,
    /// True if the configuration excludes the node.
    pub excluded: bool,
    /// Permission of the node's session.
    pub permit: Permit,
    /// Answer of the owner who is asked by a label.
    pub owner: OwnerAnswer,
}

/// Knowledge about a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum ObservedNode {
    /// The node has not been observed yet.
    #[default]
    Unknown,
    /// There is no node of this name.
    Absent,
    /// The node exists, in this state.
    Present(NodeObservation),
}

/// Input of a decision.
pub(super) struct Situation<'a> {
    pub(super) resource: &'a MaintenanceResource,
    pub(super) action: Action,
    pub(super) node: &'a ObservedNode,
    pub(super) position: Position,
    pub(super) rules: &'a Rules,
    pub(super) memory: &'a Memory,
    /// Id of this process.
    pub(super) process: &'a str,
    pub(super) now: Timestamp,
}

/// Next step of a resource.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SignalStep {
    /// Wait for a change, or until this time.
    Wait(Option<Timestamp>),
    /// Write this status to the resource.
    Write(Status),
    /// Send a question or the signal to the provider.
    Ask(Question),
    /// Delete the node object with this uid.
    DeleteNode(String),
}

/// End of a resource, with the resulting conditions.
struct End<'a> {
    outcome: CompletionReason,
    /// New status and reason of `SignalSent`. `None` to keep it.
    signal: Option<(&'a str, &'a str)>,
    /// New status and reason of the action's condition. `None` to keep it.
    done: Option<(&'a str, &'a str)>,
    message: &'a str,
}

// === impl NodeObservation ===

impl NodeObservation {
    /// Reads a node object.
    pub fn read(object: &Value, config: &JanitorConfig) -> Self {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let own = |pointer| text(pointer).unwrap_or_default().to_owned();
        let conditions = object
            .pointer("/status/conditions")
            .and_then(Value::as_array);
        let ready = conditions
            .into_iter()
            .flatten()
            .find(|one| one["type"] == "Ready");
        let labels = object
            .pointer("/metadata/labels")
            .and_then(Value::as_object);
        let labels = labels
            .into_iter()
            .flatten()
            .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
        let view = NodeView::from_object(object.clone());
        Self {
            uid: own("/metadata/uid"),
            boot_id: own("/status/nodeInfo/bootID"),
            ready: ready.is_some_and(|one| one["status"] == "True"),
            ready_since: ready.and_then(|one| one["lastTransitionTime"].as_str()?.parse().ok()),
            excluded: config.excludes(&labels.collect()),
            permit: view.as_ref().map(Ownership::permit).unwrap_or_default(),
            owner: view.as_ref().map(OwnerAnswer::read).unwrap_or_default(),
        }
    }
}

// === impl Situation ===

impl Situation<'_> {
    /// Returns the next step.
    pub(super) fn step(&self) -> SignalStep {
        if self.resource.is_over() {
            return SignalStep::Wait(None);
        }
        match self.resource.status.start {
            None => self.begin(),
            Some(start) => self.go_on(start),
        }
    }

    fn begin(&self) -> SignalStep {
        if let Position::Behind { before, same } = &self.position {
            if *same {
                let message = format!("{before} requests the same and is in progress");
                return self.refused(CompletionReason::Superseded, "Superseded", &message);
            }
            return SignalStep::Wait(None);
        }
        match self.node {
            ObservedNode::Unknown => SignalStep::Wait(None),
            ObservedNode::Absent => {
                let message = format!("there is no node {}", self.resource.node);
                self.refused(CompletionReason::Cancelled, "NodeNotFound", &message)
            }
            ObservedNode::Present(node) if node.excluded => {
                let message = "the configuration excludes this node (global.nodes.exclusions)";
                self.refused(CompletionReason::PermanentFailure, "Excluded", message)
            }
            ObservedNode::Present(node) if self.lacks_permission(node) => {
                let until = self.resource.created.checked_add(SESSION_OBSERVED_WITHIN);
                match until {
                    Ok(until) if self.now < until => SignalStep::Wait(Some(until)),
                    _ => {
                        let outcome = CompletionReason::Cancelled;
                        self.refused(outcome, SESSION_ENDED, SESSION_ENDED_MESSAGE)
                    }
                }
            }
            ObservedNode::Present(node) if self.waits_for_session(node) => SignalStep::Wait(None),
            ObservedNode::Present(node) => self.begun(node),
        }
    }

    /// Returns whether the resource was created for a session that the node does not, or no
    /// longer, show.
    fn lacks_permission(&self, node: &NodeObservation) -> bool {
        let attempt = self.resource.attempt.as_ref();
        attempt.is_some_and(|attempt| node.permit.attempt.as_ref() != Some(attempt))
    }

    /// Returns whether the resource waits until the state of its node matches the session.
    fn waits_for_session(&self, node: &NodeObservation) -> bool {
        self.resource.attempt.is_some() && node.permit.waits
    }

    /// Returns the step instead of a signal if the session that the resource was created for
    /// has ended, or may have. Must be called only if no signal was sent.
    fn ended_with_its_session(&self) -> Option<SignalStep> {
        match self.node {
            ObservedNode::Unknown => self
                .resource
                .attempt
                .as_ref()
                .map(|_| SignalStep::Wait(None)),
            ObservedNode::Present(node) if self.lacks_permission(node) => Some(self.end(&End {
                outcome: CompletionReason::Cancelled,
                signal: Some(("False", SESSION_ENDED)),
                done: None,
                message: SESSION_ENDED_MESSAGE,
            })),
            ObservedNode::Present(node) if self.waits_for_session(node) => {
                Some(SignalStep::Wait(None))
            }
            ObservedNode::Absent | ObservedNode::Present(_) => None,
        }
    }

    /// Records the start and, unless a person has to act, that the signal is about to be sent.
    fn begun(&self, node: &NodeObservation) -> SignalStep {
        let mut status = self.resource.status.clone();
        status.start = Some(self.now);
        let record = SignalRecord {
            boot_id: node.boot_id.clone(),
            node_uid: node.uid.clone(),
            attempt: 1,
            by: if self.rules.manual {
                String::new()
            } else {
                self.process.to_owned()
            },
            not_before: None,
        };
        if self.rules.manual {
            record.write(&mut status, self.now);
            let message = "a person has to do it; this resource ends once it is done";
            let reason = "OutsideActorRequired";
            self.set(&mut status, MANUAL_MODE, "True", reason, message);
            self.set(&mut status, SIGNAL_SENT, "Unknown", INITIALIZING, "");
        } else {
            self.sending().announce(&mut status, &record);
        }
        let done = self.action.done();
        self.set(&mut status, done, "Unknown", INITIALIZING, "");
        SignalStep::Write(status)
    }

    fn go_on(&self, start: Timestamp) -> SignalStep {
        let status = &self.resource.status;
        let record = SignalRecord::read(status);
        if let Some(message) = self.success(record.as_ref()) {
            let done = Some(("True", SUCCEEDED));
            return self.end(&End {
                outcome: CompletionReason::Succeeded,
                signal: None,
                done,
                message: &message,
            });
        }
        let signal = status.condition(SIGNAL_SENT);
        let manual = status.is_true(MANUAL_MODE);
        let deadline = self.deadline(start, signal, manual);
        if self.now >= deadline {
            return self.too_late(signal);
        }
        let step = match signal.map(|one| one.status.as_str()) {
            Some("True") => self.watch(signal, manual),
            _ if manual => SignalStep::Wait(None),
            // NVSentinel's janitor stopped between two writes.
            Some("False") => {
                let message = signal.map_or("", |one| &one.message);
                self.not_sent(CompletionReason::PermanentFailure, message)
            }
            _ => self.send(record),
        };
        match step {
            SignalStep::Wait(until) => {
                SignalStep::Wait(Some(until.map_or(deadline, |time| time.min(deadline))))
            }
            other => other,
        }
    }

    /// Returns the proof of success for people. `None` if there is none yet.
    fn success(&self, record: Option<&SignalRecord>) -> Option<String> {
        let name = &self.resource.node;
        match (self.action, self.node) {
            (Action::Reboot, ObservedNode::Present(node)) => {
                let changed = record.is_some_and(|before| {
                    let known = before.attempt > 0 || !before.boot_id.is_empty();
                    known && !node.boot_id.is_empty() && node.boot_id != before.boot_id
                });
                // Started by NVSentinel's janitor, so the boot before the signal is unknown.
                let unknown = record.is_none_or(|before| before.attempt == 0);
                let reported = unknown && self.memory.ready && self.was_ready_after_signal(node);
                (node.ready && node.owner != OwnerAnswer::Awaited && (changed || reported))
                    .then(|| format!("the node is ready in the boot {}", node.boot_id))
            }
            (Action::Reboot, ObservedNode::Absent)
            | (Action::Reset, _)
            | (_, ObservedNode::Unknown) => None,
            (Action::Terminate, ObservedNode::Present(node)) => {
                let another = record.is_some_and(|record| {
                    !record.node_uid.is_empty() && node.uid != record.node_uid
                });
                another.then(|| format!("another node has the name {name}"))
            }
            (Action::Terminate, ObservedNode::Absent) => Some(format!("the node {name} is gone")),
        }
    }

    /// Returns whether the node became ready after the signal.
    fn was_ready_after_signal(&self, node: &NodeObservation) -> bool {
        let sent = self.resource.status.since(SIGNAL_SENT);
        matches!((sent, node.ready_since), (Some(sent), Some(since)) if since > sent)
    }

    /// Returns the deadline of a resource that has started.
    pub(super) fn last_moment(&self) -> Option<Timestamp> {
        let status = &self.resource.status;
        let manual = status.is_true(MANUAL_MODE);
        Some(self.deadline(status.start?, status.condition(SIGNAL_SENT), manual))
    }

    /// Returns the deadline. In manual mode a person has a day for the signal before.
    fn deadline(
        &self,
        start: Timestamp,
        signal: Option<&StatusCondition>,
        manual: bool,
    ) -> Timestamp {
        let sent = signal.filter(|one| one.status == "True");
        let (from, time) = match (manual, sent.and_then(|one| one.last_transition_time)) {
            (false, _) => (start, self.rules.timeout),
            (true, Some(sent)) => (sent, self.rules.timeout),
            (true, None) => (start, MANUAL),
        };
        from.checked_add(time).unwrap_or(Timestamp::MAX)
    }

    fn too_late(&self, signal: Option<&StatusCondition>) -> SignalStep {
        let minutes = self.rules.timeout.as_mins();
        let reason = signal.map_or("", |one| &one.reason);
        // Nothing was done while it waited for another try.
        let outcome = if reason == RETRYING {
            CompletionReason::TransientFailure
        } else {
            CompletionReason::AmbiguousFailure
        };
        let condition = self.action.done();
        let message = format!("{condition} did not become true within {minutes} min");
        self.end(&End {
            outcome,
            signal: None,
            done: Some(("False", "Timeout")),
            message: &message,
        })
    }

    /// Sends the signal, or asks whether it was sent.
    fn send(&self, record: Option<SignalRecord>) -> SignalStep {
        let Some(record) = record else {
            return match self.node {
                ObservedNode::Unknown => SignalStep::Wait(None),
                ObservedNode::Absent => self.taken_over(None),
                ObservedNode::Present(node) => self.taken_over(Some(node)),
            };
        };
        // Two resources started at once, since the write for one was not observed in time.
        let is_behind = matches!(self.position, Position::Behind { .. });
        match self.sending().course(&record) {
            Course::Note(status) => SignalStep::Write(status),
            Course::Refused(outcome, message) => self.not_sent(outcome, &message),
            _ if is_behind => SignalStep::Wait(None),
            Course::Later(time) => SignalStep::Wait(Some(time)),
            Course::Wait(until) => SignalStep::Wait(until),
            Course::Find => SignalStep::Ask(Question::Find),
            Course::Announce(status) => {
                let ended = self.ended_with_its_session();
                ended.unwrap_or(SignalStep::Write(status))
            }
            Course::Send => {
                let ended = self.ended_with_its_session();
                ended.unwrap_or(SignalStep::Ask(Question::Send))
            }
        }
    }

    fn sending(&self) -> Sending<'_> {
        Sending {
            resource: self.resource,
            memory: self.memory,
            process: self.process,
            now: self.now,
        }
    }

    /// Ends a resource whose signal was not sent and will not be.
    fn not_sent(&self, outcome: CompletionReason, message: &str) -> SignalStep {
        self.end(&End {
            outcome,
            signal: Some(("False", FAILED)),
            done: None,
            message,
        })
    }

    /// Takes over a resource started by NVSentinel's janitor, which sends before it writes, so
    /// its signal may be on its way.
    fn taken_over(&self, node: Option<&NodeObservation>) -> SignalStep {
        let mut status = self.resource.status.clone();
        let record = SignalRecord {
            boot_id: node.map(|node| node.boot_id.clone()).unwrap_or_default(),
            node_uid: node.map(|node| node.uid.clone()).unwrap_or_default(),
            ..SignalRecord::default()
        };
        record.write(&mut status, self.now);
        let message = "begun by another janitor, whose signal may have been sent";
        self.set(&mut status, SIGNAL_SENT, "Unknown", UNCLEAR, message);
        SignalStep::Write(status)
    }

    /// Follows the node after the signal.
    fn watch(&self, signal: Option<&StatusCondition>, manual: bool) -> SignalStep {
        if let Some(ProviderAnswer::Ready(Err(failure))) = &self.memory.response
            && failure.class == Class::Permanent
        {
            return self.end(&End {
                outcome: CompletionReason::PermanentFailure,
                signal: None,
                done: Some(("False", FAILED)),
                message: &failure.text(),
            });
        }
        match (self.action, self.node) {
            // The owner may not have acted yet, and must not act on a node that is back in service.
            (_, ObservedNode::Present(node))
                if node.owner == OwnerAnswer::Awaited && self.lacks_permission(node) =>
            {
                self.end(&End {
                    outcome: CompletionReason::AmbiguousFailure,
                    signal: None,
                    done: Some(("False", SESSION_ENDED)),
                    message: SESSION_ENDED_MESSAGE,
                })
            }
            (Action::Terminate, ObservedNode::Present(node)) if self.is_given_up(node, manual) => {
                match self.memory.ask_after {
                    Some(time) if self.now < time => SignalStep::Wait(Some(time)),
                    _ => SignalStep::DeleteNode(node.uid.clone()),
                }
            }
            (Action::Reboot, _) if !manual => match self.memory.ask_after {
                Some(time) if self.now < time => SignalStep::Wait(Some(time)),
                _ => SignalStep::Ask(Question::Ready(
                    signal.map_or("", |one| &one.message).to_owned(),
                )),
            },
            _ => SignalStep::Wait(None),
        }
    }

    /// Returns whether a machine is gone after its termination. A faulty node need not have been
    /// ready before either, so an owner has to say so; the label may not be observed yet.
    fn is_given_up(&self, node: &NodeObservation, manual: bool) -> bool {
        let asks_owner = self.rules.provider == ProviderPlace::Label && !manual;
        let given_up = match node.owner {
            OwnerAnswer::NotAsked => !asks_owner,
            OwnerAnswer::Awaited => false,
            OwnerAnswer::Done => true,
        };
        given_up && !node.ready
    }

    /// Ends a resource that has not started.
    fn refused(&self, outcome: CompletionReason, reason: &str, message: &str) -> SignalStep {
        self.end(&End {
            outcome,
            signal: Some(("False", reason)),
            done: Some(("False", reason)),
            message,
        })
    }

    fn end(&self, end: &End<'_>) -> SignalStep {
        let mut status = self.resource.status.clone();
        status.completion = Some(status.start.map_or(self.now, |start| start.max(self.now)));
        if let Some((to, reason)) = end.signal {
            self.set(&mut status, SIGNAL_SENT, to, reason, end.message);
        }
        if let Some((to, reason)) = end.done {
            let done = self.action.done();
            self.set(&mut status, done, to, reason, end.message);
        }
        let outcome = end.outcome.name();
        self.set(&mut status, ATTEMPT_COMPLETE, "True", outcome, end.message);
        SignalStep::Write(status)
    }

    fn set(&self, status: &mut Status, kind: &str, to: &str, reason: &str, message: &str) {
        status.set(kind, to, reason, message, self.now);
    }
}
