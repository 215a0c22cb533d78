//! The inputs of a fleet, and the effects that it asks for. The controller, `replay` and the
//! simulators turn the outside into the one, and carry the other out.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::HealthEvent;
use jiff::{SignedDuration, Timestamp};
use model::attempt::{Attempt, Outcome, ResourceKind};
use model::device::Rule;
use model::event::Record;
use model::fault::Rereading;
use model::journal::Entry;
use model::node::NodeView;
use model::position::Position;
use policy::Policy;
use serde_json::Value;

use super::{DeviceInput, PlannedRule, Switched};
use crate::drain::{DrainMode, PodView};
use crate::session::{Failure, Patch};
use crate::status::StatusUpdate;

/// News from outside.
#[derive(Debug)]
pub enum FleetInput {
    /// All events that the feed had at the start are recorded.
    CaughtUp,
    /// Reports that had found no room in the book were read again.
    Reread(Box<Rereading>),
    /// The policy that holds; `None` where it is not known yet.
    Policy(Option<Arc<Policy>>),
    /// The switches that people have set in the cluster.
    Switched(Box<Switched>),
    /// A list of the nodes begins.
    ListBegun,
    /// A node as it is, as part of the list or since.
    Seen(Arc<NodeView>),
    /// The cluster does not have the node any more.
    Gone(String),
    /// The list is complete: what was not part of it is not there.
    Listed,
    /// The answer to an [`Effect::PatchNode`].
    NodePatched {
        /// The node.
        node: String,
        /// The answer.
        answer: PatchAnswer,
    },
    /// News of single devices.
    Devices(DeviceInput),
    /// The answer to an [`Effect::ChangeRule`].
    RuleChanged {
        /// The node.
        node: String,
        /// The name of the rule.
        rule: String,
        /// The rule as it is now, `None` where it is gone; or why the change was not made.
        result: Result<Option<Box<Rule>>, Failure>,
    },
    /// News of the pods of a node of which an [`Effect::WatchPods`] asks to be told.
    Pods {
        /// The node.
        node: String,
        /// The news.
        news: PodNews,
    },
    /// The answer to an [`Effect::RemovePod`] or an [`Effect::RequestCheckpoint`].
    PodAnswered {
        /// The node.
        node: String,
        /// Uid of the pod.
        uid: String,
        /// The answer.
        answer: RemovalAnswer,
    },
    /// News of a custom resource of which an [`Effect::WatchResource`] asks to be told.
    Resource {
        /// The node.
        node: String,
        /// Name of the resource.
        name: String,
        /// The news.
        news: ResourceNews,
    },
    /// The answer to an [`Effect::CreateResource`].
    ResourceCreated {
        /// The node.
        node: String,
        /// The attempt.
        key: String,
        /// The answer.
        answer: CreateAnswer,
    },
    /// A request has ended without an answer, and nobody knows of which node.
    AnswersLost,
    /// The answer to an [`Effect::LookUp`]; `None` where the store does not answer.
    EventsFound {
        /// The node.
        node: String,
        /// The events by id, as the store has them.
        found: Option<BTreeMap<String, InStore>>,
    },
    /// The answer to an [`Effect::Append`].
    EventsAppended {
        /// The node.
        node: String,
        /// The position of the last event that was new to the store, if one was; an error where it
        /// did not take them.
        result: Result<Option<Position>, ()>,
    },
}

/// The answer of the API server to a patch.
#[derive(Clone, Debug)]
pub enum PatchAnswer {
    /// It is made, and the node is this now.
    Made(Arc<NodeView>),
    /// The node was not as the decision had seen it.
    Conflict,
    /// The cluster does not have the node.
    NotFound,
    /// It is refused.
    Refused {
        /// The time after which the server wishes to be asked again.
        retry_after: Option<SignedDuration>,
    },
    /// Nobody knows whether it was made.
    Unknown,
}

/// An event that a node lists, as the store has it.
#[derive(Clone, Debug)]
pub enum InStore {
    /// It is one of those that count.
    Current,
    /// It is from before another store was acted on.
    History(Box<Record>),
    /// The store does not have it.
    Nothing,
}

/// The purpose of events that are appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To take over what a node lists.
    TakeOver,
    /// To close faults of a machine that is gone.
    Close,
    /// To keep a node out until it has passed its validation, or not any more.
    Validate,
}

/// A thing to be done outside.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Make a patch. Asks for a [`FleetInput::NodePatched`].
    PatchNode(Box<Planned>),
    /// Change a rule that taints a device. Asks for a [`FleetInput::RuleChanged`].
    ChangeRule(Box<PlannedRule>),
    /// Start or stop to watch the pods of a node. Asks for [`FleetInput::Pods`], all of them first.
    WatchPods {
        /// The node.
        node: String,
        /// True: start.
        watch: bool,
    },
    /// Tell a pod that it may write a checkpoint. Asks for a [`FleetInput::PodAnswered`].
    RequestCheckpoint(Box<PlannedCheckpoint>),
    /// Remove a pod from its node. Asks for a [`FleetInput::PodAnswered`].
    RemovePod(Box<PlannedRemoval>),
    /// Emit a Kubernetes Event of a node. Nobody waits for it.
    EmitEvent {
        /// The node.
        node: String,
        /// The time that tells two Events of the same words apart, such as the begin of a drain.
        since: Timestamp,
        /// The reason.
        reason: EventReason,
        /// The message.
        message: String,
    },
    /// Create a custom resource. Asks for a [`FleetInput::ResourceCreated`].
    CreateResource(Box<PlannedResource>),
    /// Start or stop to watch a custom resource. Asks for [`FleetInput::Resource`].
    WatchResource {
        /// The node that it was created for.
        node: String,
        /// Its kind.
        kind: ResourceKind,
        /// Its name.
        name: String,
        /// True: start.
        watch: bool,
    },
    /// Delete the custom resource of an attempt that is not wanted any more, if it is there. Nobody waits
    /// for it.
    DeleteResource {
        /// The node.
        node: String,
        /// The attempt.
        attempt: Box<Attempt>,
        /// True: also if something has begun.
        begun: bool,
    },
    /// An attempt to repair a node has ended, or events recommend what nobody carries out.
    Remediation(RemediationNews),
    /// Look events up in the store. Asks for a [`FleetInput::EventsFound`].
    LookUp {
        /// The node that lists them.
        node: String,
        /// Their ids.
        ids: Vec<String>,
    },
    /// Append events to the store. Asks for a [`FleetInput::EventsAppended`].
    Append {
        /// The node that they are about.
        node: String,
        /// Each, and when it counts as received.
        events: Vec<(HealthEvent, Timestamp)>,
        /// The purpose.
        purpose: Purpose,
    },
    /// Write an entry into the journal; with a level, log it too.
    Note(Entry, Option<Level>),
    /// Write into the records of events what became of them.
    Status(StatusUpdate),
    /// Log a line for people.
    Log {
        /// The gravity.
        level: Level,
        /// The node that it is about.
        node: Option<String>,
        /// The line.
        text: String,
    },
    /// The rules were asked about a node, and say something else than before.
    Evaluated(Vec<RuleSetOutcome>),
    /// All that was recorded of a node so far is decided about.
    Decided(String),
    /// Write conditions and events about the node.
    UpdateConditions(String),
    /// The API server went back to an older state of the node.
    Restored(String),
    /// Trip the circuit breaker.
    Trip,
}

/// The reason of a Kubernetes Event of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EventReason {
    /// A drain waits for pods to end by themselves.
    AwaitingPodCompletion,
    /// A drain waits for pods until a time, and deletes them then.
    WaitingBeforeForceDelete,
    /// Something has undone what a session did to its node.
    QuarantineUndone,
}

/// A patch to be made.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The node.
    pub node: String,
    /// The node as the decision has seen it.
    pub view: Arc<NodeView>,
    /// The session that it belongs to.
    pub session: Option<String>,
    /// The patch.
    pub patch: Patch,
    /// The time at which the oldest of the faults was first seen.
    pub first_seen: Option<Timestamp>,
}

/// The answer of a rule set about a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSetOutcome {
    /// Its name.
    pub rule_set: String,
    /// True if the rule set asks for anything.
    pub passed: bool,
}

/// A custom resource to be made.
#[derive(Clone, Debug)]
pub struct PlannedResource {
    /// The node.
    pub node: String,
    /// The session that it belongs to.
    pub session: Option<String>,
    /// The attempt.
    pub key: String,
    /// Its action.
    pub action: String,
    /// Its kind.
    pub kind: ResourceKind,
    /// Its name.
    pub name: String,
    /// The object.
    pub object: Value,
}

/// News of a custom resource.
#[derive(Clone, Debug)]
pub enum ResourceNews {
    /// It is this.
    There(Box<Value>),
    /// It is not there.
    Absent,
    /// It cannot be seen, for this reason; it is tried again.
    Failing(String),
}

/// The answer of the API server to a custom resource that was to be made.
#[derive(Clone, Debug)]
pub enum CreateAnswer {
    /// It is there, made now or before.
    There(Box<Value>),
    /// It is refused for good, for this reason.
    Refused(String),
    /// It was not made, for this reason, or nobody knows.
    Failed {
        /// The reason.
        why: String,
        /// The time after which the server wishes to be asked again.
        retry_after: Option<SignedDuration>,
    },
}

/// News of repairs, to be counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemediationNews {
    /// An attempt has ended.
    Ended {
        /// The node.
        node: String,
        /// Its action.
        action: String,
        /// How it went.
        outcome: Outcome,
    },
    /// An event recommends this action, and nobody carries it out.
    Unsupported {
        /// The node.
        node: String,
        /// The action.
        action: String,
    },
}

/// News of the pods of a node.
#[derive(Clone, Debug)]
pub enum PodNews {
    /// A list of them begins.
    ListBegun,
    /// A pod as it is.
    Seen(Box<PodView>),
    /// The pod of this name (`NAMESPACE/NAME`) is gone, or not on the node any more.
    Gone(String),
    /// The list is complete: what was not part of it is not there.
    Listed,
    /// They cannot be watched, for this reason; it is tried again.
    Failing(String),
    /// They are watched again. What was missed follows.
    Recovered,
}

/// A pod to be removed from its node.
#[derive(Clone, Debug)]
pub struct PlannedRemoval {
    /// The node.
    pub node: String,
    /// The session that it belongs to.
    pub session: Option<String>,
    /// Namespace of the pod.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// The mode in which it leaves.
    pub mode: DrainMode,
    /// The time that it has to end; `None`: it is deleted whatever protects it, without any.
    pub evict: Option<SignedDuration>,
}

/// The answer of the API server to the removal of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemovalAnswer {
    /// It is ending.
    Taken,
    /// It is gone, or another has its name.
    Gone,
    /// A disruption budget holds it, for this reason.
    Held {
        /// The words of the API server.
        why: String,
        /// The time after which the server wishes to be asked again.
        retry_after: Option<SignedDuration>,
    },
    /// It was not done, for this reason.
    Failed {
        /// The reason.
        why: String,
        /// The time after which the server wishes to be asked again.
        retry_after: Option<SignedDuration>,
    },
}

/// A pod to be told that it may write a checkpoint.
#[derive(Clone, Debug)]
pub struct PlannedCheckpoint {
    /// The node.
    pub node: String,
    /// The session that it belongs to.
    pub session: Option<String>,
    /// Namespace of the pod.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// The time of the request, which the pod repeats when it is done.
    pub at: Timestamp,
}

/// The gravity of a line for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// All is as it should be.
    Info,
    /// Somebody should know.
    Warn,
}

// === impl EventReason ===

impl EventReason {
    /// Returns the reason as the Event has it: of drains, NVSentinel's.
    pub fn name(self) -> &'static str {
        match self {
            Self::AwaitingPodCompletion => "AwaitingPodCompletion",
            Self::WaitingBeforeForceDelete => "WaitingBeforeForceDelete",
            Self::QuarantineUndone => "QuarantineUndone",
        }
    }
}
