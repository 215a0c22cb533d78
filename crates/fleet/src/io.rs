//! Inputs of a fleet and the effects that it asks for. The controller, `replay` and the
//! simulators turn I/O into inputs and carry the effects out.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::HealthEvent;
use jiff::{SignedDuration, Timestamp};
use model::attempt::{Attempt, AttemptOutcome, ResourceKind};
use model::device::DeviceTaintRule;
use model::event::EventRecord;
use model::fault::Rereading;
use model::journal::JournalEntry;
use model::node::NodeView;
use model::position::Position;
use policy::Policy;
use serde_json::Value;

use super::{DeviceInput, PlannedRule, SwitchState};
use crate::drain::{DrainMode, PodView};
use crate::session::{Patch, RequestFailure};
use crate::status::StatusUpdate;

/// An input from outside.
#[derive(Debug)]
pub enum FleetInput {
    /// All events that the feed had at the start are recorded.
    CaughtUp,
    /// The analysis has read the events up to here, and what it concludes from them is recorded.
    Analysed(Position),
    /// Reports that had found no room in the fault book were read again.
    Reread(Box<Rereading>),
    /// Places of a node, as labels would say them, for its open faults that have none.
    Located {
        /// Node.
        node: String,
        /// Labels that say where the node is.
        labels: BTreeMap<String, String>,
    },
    /// The policy in force; `None` while none has been loaded.
    Policy(Option<Arc<Policy>>),
    /// The switches that people have set in the cluster.
    Switches(Box<SwitchState>),
    /// A list of the nodes begins.
    ListBegun,
    /// A node was observed, in the list or by the watch.
    NodeObserved(Arc<NodeView>),
    /// The cluster no longer has the node of this name.
    NodeGone(String),
    /// The list of the nodes is complete: a node that was not part of it is gone.
    Listed,
    /// The answer to an [`Effect::PatchNode`].
    NodePatched {
        /// Name of the node.
        node: String,
        /// Answer of the API server.
        answer: PatchAnswer,
    },
    /// A change of single devices, or of their watch.
    Devices(DeviceInput),
    /// The answer to an [`Effect::ChangeRule`].
    RuleChanged {
        /// Name of the node.
        node: String,
        /// Name of the rule.
        rule: String,
        /// The rule after the change, `None` once it is deleted; or why the change was not made.
        result: Result<Option<Box<DeviceTaintRule>>, RequestFailure>,
    },
    /// A change of a node's pods, after [`Effect::WatchPods`].
    Pods {
        /// Name of the node.
        node: String,
        /// Change that was observed.
        update: PodUpdate,
    },
    /// The answer to an [`Effect::RemovePod`] or an [`Effect::RequestCheckpoint`].
    PodAnswered {
        /// Name of the node.
        node: String,
        /// Uid of the pod.
        uid: String,
        /// Answer of the API server.
        answer: RemovalAnswer,
    },
    /// A change of a custom resource, after [`Effect::WatchResource`].
    Resource {
        /// Name of the node.
        node: String,
        /// Name of the resource.
        name: String,
        /// Change that was observed.
        update: ResourceUpdate,
    },
    /// The answer to an [`Effect::CreateResource`].
    ResourceCreated {
        /// Name of the node.
        node: String,
        /// Key of the attempt.
        key: String,
        /// Answer of the API server.
        answer: CreateAnswer,
    },
    /// A request has ended without an answer, and its node is not known.
    AnswersLost,
    /// The answer to an [`Effect::LookUp`].
    EventsFound {
        /// Name of the node.
        node: String,
        /// State of each event in the store, by id; `None` where the store does not answer.
        found: Option<BTreeMap<String, EventInStore>>,
    },
    /// The answer to an [`Effect::Append`].
    EventsAppended {
        /// Name of the node.
        node: String,
        /// Position of the last event that was new to the store, if one was; an error where the
        /// store did not append them.
        result: Result<Option<Position>, ()>,
    },
}

/// Answer of the API server to a patch.
#[derive(Clone, Debug)]
pub enum PatchAnswer {
    /// The patch is made, and this is the node after it.
    Made(Arc<NodeView>),
    /// The node has changed since the decision.
    Conflict,
    /// The cluster does not have the node.
    NotFound,
    /// The API server refuses the patch.
    Refused {
        /// Wait that the server asks for before a retry.
        retry_after: Option<SignedDuration>,
    },
    /// The answer is lost: the patch may have been made.
    Unknown,
}

/// State in the store of an event that a node lists.
#[derive(Clone, Debug)]
pub enum EventInStore {
    /// The event counts as current.
    Current,
    /// The event dates from before another store was acted on.
    History(Box<EventRecord>),
    /// The store does not have the event.
    Missing,
}

/// Purpose of events that are appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Take over the faults that a node lists.
    TakeOver,
    /// Close faults of a machine that is gone.
    Close,
    /// Open or close the fault that keeps a node out until it has passed its validation.
    Validate,
    /// Record a repair that has succeeded.
    Record,
}

/// An action to be carried out outside.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Make a patch. Asks for a [`FleetInput::NodePatched`].
    PatchNode(Box<Planned>),
    /// Change a rule that taints a device. Asks for a [`FleetInput::RuleChanged`].
    ChangeRule(Box<PlannedRule>),
    /// Start or stop watching a node's pods. Asks for [`FleetInput::Pods`], with a full list
    /// first.
    WatchPods {
        /// Name of the node.
        node: String,
        /// True to start, false to stop.
        watch: bool,
    },
    /// Request that a pod writes a checkpoint. Asks for a [`FleetInput::PodAnswered`].
    RequestCheckpoint(Box<PlannedCheckpoint>),
    /// Remove a pod from its node. Asks for a [`FleetInput::PodAnswered`].
    RemovePod(Box<PlannedRemoval>),
    /// Emit a Kubernetes Event of a node. No answer is expected.
    EmitEvent {
        /// Name of the node.
        node: String,
        /// Time that tells apart two Events with the same message, such as the begin of a drain.
        since: Timestamp,
        /// Reason of the Event.
        reason: EventReason,
        /// Message of the Event.
        message: String,
    },
    /// Create a custom resource. Asks for a [`FleetInput::ResourceCreated`].
    CreateResource(Box<PlannedResource>),
    /// Start or stop watching a custom resource. Asks for [`FleetInput::Resource`].
    WatchResource {
        /// Name of the node that it was created for.
        node: String,
        /// Kind of the resource.
        kind: ResourceKind,
        /// Name of the resource.
        name: String,
        /// True to start, false to stop.
        watch: bool,
    },
    /// Delete the custom resource of an attempt that is no longer wanted, if it exists. No
    /// answer is expected.
    DeleteResource {
        /// Name of the node.
        node: String,
        /// Attempt that it was created for.
        attempt: Box<Attempt>,
        /// True to delete it even if its work has begun.
        begun: bool,
    },
    /// A remediation attempt has ended, or events recommend an action that is not configured.
    Remediation(RemediationResult),
    /// Look events up in the store. Asks for a [`FleetInput::EventsFound`].
    LookUp {
        /// Name of the node that lists them.
        node: String,
        /// Ids of the events.
        ids: Vec<String>,
    },
    /// Append events to the store. Asks for a [`FleetInput::EventsAppended`].
    Append {
        /// Name of the node that they are about.
        node: String,
        /// Events, each with the time when it counts as received.
        events: Vec<(HealthEvent, Timestamp)>,
        /// Purpose of the events.
        purpose: Purpose,
    },
    /// Write an entry into the journal; with a level, log it too.
    Journal(JournalEntry, Option<Level>),
    /// Write status updates into the records of events.
    Status(StatusUpdate),
    /// Log a line for people.
    Log {
        /// Level of the line.
        level: Level,
        /// Name of the node that it is about, if any.
        node: Option<String>,
        /// Text of the line.
        text: String,
    },
    /// Results of the rule sets for a node, emitted when they change.
    Evaluated(Vec<RuleSetOutcome>),
    /// Everything recorded of this node so far has been decided about.
    Decided(String),
    /// Write the conditions and Kubernetes Events of this node.
    UpdateConditions(String),
    /// The API server went back to an older state of this node.
    Restored(String),
    /// Trip the circuit breaker.
    Trip,
    /// Pages a person about a node: the effect of the stage for tests.
    #[cfg(test)]
    Page(String),
}

/// Reason of a Kubernetes Event of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EventReason {
    /// A drain waits for pods to end by themselves.
    AwaitingPodCompletion,
    /// A drain waits for pods until a time, and then deletes them.
    WaitingBeforeForceDelete,
    /// Something outside gpuwarden has undone what a session did to its node.
    QuarantineUndone,
    /// Faults of several nodes belong together.
    Incident,
    /// A proposal waits for a person's approval.
    ApprovalNeeded,
}

/// A patch to be made.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Name of the node.
    pub node: String,
    /// The node as the decision has observed it.
    pub view: Arc<NodeView>,
    /// Id of the session that the patch belongs to.
    pub session: Option<String>,
    /// Patch to be sent.
    pub patch: Patch,
    /// Time when the oldest of the faults was first observed.
    pub first_seen: Option<Timestamp>,
}

/// Result of a rule set for a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSetOutcome {
    /// Name of the rule set.
    pub rule_set: String,
    /// True if the rule set asks for anything.
    pub passed: bool,
}

/// A custom resource to be created.
#[derive(Clone, Debug)]
pub struct PlannedResource {
    /// Name of the node.
    pub node: String,
    /// Id of the session that it belongs to.
    pub session: Option<String>,
    /// Key of the attempt.
    pub key: String,
    /// Name of the action.
    pub action: String,
    /// Kind of the resource.
    pub kind: ResourceKind,
    /// Name of the resource.
    pub name: String,
    /// The object to be sent.
    pub object: Value,
}

/// A change of a watched custom resource.
#[derive(Clone, Debug)]
pub enum ResourceUpdate {
    /// The resource exists, in this state.
    There(Box<Value>),
    /// The resource does not exist.
    Absent,
    /// The watch fails, for this reason; it is retried.
    Failing(String),
}

/// Answer of the API server to the creation of a custom resource.
#[derive(Clone, Debug)]
pub enum CreateAnswer {
    /// The resource exists, created now or earlier.
    There(Box<Value>),
    /// The API server refuses it for good, for this reason.
    Refused(String),
    /// The resource was not created, or the answer is lost.
    Failed {
        /// Reason of the failure.
        why: String,
        /// Wait that the server asks for before a retry.
        retry_after: Option<SignedDuration>,
    },
}

/// Result of a remediation, for metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemediationResult {
    /// An attempt has ended.
    Ended {
        /// Name of the node.
        node: String,
        /// Name of the action.
        action: String,
        /// Outcome of the attempt.
        outcome: AttemptOutcome,
    },
    /// An event recommends an action that is not configured.
    Unsupported {
        /// Name of the node.
        node: String,
        /// Name of the action.
        action: String,
    },
}

/// A change of the pods of a node, or of their watch.
#[derive(Clone, Debug)]
pub enum PodUpdate {
    /// A list of the pods begins.
    ListBegun,
    /// A pod was observed.
    Observed(Box<PodView>),
    /// The pod of this name (`NAMESPACE/NAME`) is gone, or has left the node.
    Gone(String),
    /// The list is complete: a pod that was not part of it is gone.
    Listed,
    /// The watch fails, for this reason; it is retried.
    Failing(String),
    /// The watch works again. Changes missed meanwhile follow.
    Recovered,
}

/// A pod to be removed from its node.
#[derive(Clone, Debug)]
pub struct PlannedRemoval {
    /// Name of the node.
    pub node: String,
    /// Id of the session that the removal belongs to.
    pub session: Option<String>,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Uid of the pod.
    pub uid: String,
    /// Drain mode of the pod.
    pub mode: DrainMode,
    /// Grace period of the eviction; `None` deletes the pod at once, whatever protects it.
    pub evict: Option<SignedDuration>,
}

/// Answer of the API server to the removal of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemovalAnswer {
    /// The pod is ending.
    Taken,
    /// The pod is gone, or another pod has its name.
    Gone,
    /// A disruption budget refuses the eviction.
    Held {
        /// Message of the API server.
        why: String,
        /// Wait that the server asks for before a retry.
        retry_after: Option<SignedDuration>,
    },
    /// The removal has failed.
    Failed {
        /// Reason of the failure.
        why: String,
        /// Wait that the server asks for before a retry.
        retry_after: Option<SignedDuration>,
    },
}

/// A pod that may write a checkpoint before it is evicted.
#[derive(Clone, Debug)]
pub struct PlannedCheckpoint {
    /// Name of the node.
    pub node: String,
    /// Id of the session that the request belongs to.
    pub session: Option<String>,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Uid of the pod.
    pub uid: String,
    /// Time of the request, which the pod repeats when its checkpoint is written.
    pub at: Timestamp,
}

/// Level of a line for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Part of normal operation.
    Info,
    /// Something needs a person's attention.
    Warn,
}

// === impl EventReason ===

impl EventReason {
    /// Returns the reason as written in the Event. Reasons of drains are NVSentinel's.
    pub fn name(self) -> &'static str {
        match self {
            Self::AwaitingPodCompletion => "AwaitingPodCompletion",
            Self::WaitingBeforeForceDelete => "WaitingBeforeForceDelete",
            Self::QuarantineUndone => "QuarantineUndone",
            Self::Incident => "Incident",
            Self::ApprovalNeeded => "ApprovalNeeded",
        }
    }
}
