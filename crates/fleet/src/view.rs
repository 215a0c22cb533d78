//! The state as shown on the status page, by the API and on the command line. Serialised names
//! are part of the JSON API.

use contract::keys;
use contract::node::{FaultEntity, ListFaultsResponse, OpenFault};
use jiff::Timestamp;
use model::fault::{Fault, title};
use model::position::Position;
use model::proposal::Proposal;
use model::reporter::{OWN_AGENT, Reporter};
use model::status::eviction::Eviction;
use serde::{Deserialize, Serialize};

use crate::session::Phase;

mod incident;

pub use incident::{IncidentNode, IncidentView};

/// State of all known nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetView {
    /// Feed position of the last event applied.
    pub applied: Position,
    /// Feed position of the first report to be read again, since it found no room in the fault
    /// book; absent if all found room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missed_from: Option<Position>,
    /// True once all events that were stored at the start are applied.
    pub ready: bool,
    /// Nodes with open faults or a session, by name.
    pub nodes: Vec<NodeStatus>,
    /// Connection to the cluster; absent without a cluster.
    pub cluster: Option<ClusterView>,
    /// Limits of new quarantines; absent without a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub brake: Option<BrakeView>,
    /// Troubles that keep this state from being saved, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<String>,
}

/// Limits of new quarantines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BrakeView {
    /// True if the brake is on.
    pub enabled: bool,
    /// `CLOSED` or `TRIPPED`, as in the `ConfigMap`; or any other word written there.
    pub state: String,
    /// Limits, the fullest first.
    pub limits: Vec<LimitView>,
    /// Reason why the limits are not known yet; absent once they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
    /// Number of nodes that are held back.
    pub held: usize,
    /// The current pause, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<String>,
    /// Notes on what a person should know or do.
    pub notes: Vec<String>,
}

/// A limit of the brake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitView {
    /// The limit, for people: `20% per rack`, `50% in 5m`.
    pub limit: String,
    /// Nodes that it counts, for people: `GPU nodes, rack=r1`.
    pub of_which: String,
    /// Number of nodes counted.
    pub used: usize,
    /// Largest number that is allowed.
    pub allowed: usize,
    /// Number of nodes that `allowed` is a share of.
    pub of: usize,
    /// Names of some counted nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by: Vec<String>,
}

/// The policy in force, and the troubles of its source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyView {
    /// Source of the policy: a file, a `ConfigMap`, or `built-in`.
    pub source: String,
    /// Names of its rule sets, in order.
    pub rule_sets: Vec<String>,
    /// Names of the further policies that a node can choose.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<String>,
    /// Warnings about the policy.
    pub warnings: Vec<String>,
    /// Time when the policy was loaded; absent without a policy, and nothing is decided then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loaded_at: Option<Timestamp>,
    /// Error in the source's current text; the policy above stays in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Time since which the error holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_since: Option<Timestamp>,
}

/// Connection to a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterView {
    /// Address of the API server.
    pub server: String,
    /// True while nodes are being watched.
    pub connected: bool,
    /// Error, if it is not connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Number of nodes of the cluster.
    pub nodes: usize,
}

/// A node with open faults or a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Name of the node.
    pub name: String,
    /// State in one word.
    pub state: NodeState,
    /// Quarantine session, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionView>,
    /// True if the cluster has the node; absent without a cluster, or before its nodes are read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_cluster: Option<bool>,
    /// True if the node is unschedulable; absent if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unschedulable: Option<bool>,
    /// Open faults, gravest first.
    pub faults: Vec<FaultView>,
    /// Notices of the last day, which need no remediation, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notices: Vec<FaultView>,
    /// Devices that we have tainted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceView>,
    /// Notes on what a person should know or do.
    pub notes: Vec<String>,
}

/// A device that we have tainted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceView {
    /// The device, as `driver/pool/name`.
    pub device: String,
    /// UUID or PCI address of its GPU; empty if not known.
    pub gpu: String,
    /// Taints of the device, as `key=value:effect`.
    pub taints: Vec<String>,
    /// Messages of the cluster about pods that have to leave because of these taints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evictions: Vec<String>,
    /// Pods that use it, as `namespace/name`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<String>,
}

/// State of a node in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeState {
    /// No fault is open.
    Healthy,
    /// Only faults that are not fatal are open.
    Degraded,
    /// A fatal fault is open, and the node is not quarantined.
    Unhealthy,
    /// Single devices of the node are out of service, and the node is not.
    PartlyQuarantined,
    /// The node's session is in this phase, which is not [`Phase::Idle`].
    #[serde(untagged)]
    Session(Phase),
}

/// Quarantine session of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SessionView {
    /// Id of the session.
    pub id: String,
    /// Current phase of the session.
    pub phase: Phase,
    /// Begin of the phase.
    pub since: Timestamp,
    /// Number of failed attempts in this phase.
    pub failures: u32,
    /// Text for people about what the session awaits.
    pub awaits: String,
    /// True if the session has cordoned the node.
    #[serde(default)]
    pub cordoned: bool,
    /// True if an uncordon ends the session now; false at the times of machines, whose uncordon
    /// is undone.
    #[serde(default)]
    pub uncordon_releases: bool,
    /// The other gpuwarden that owns the session; absent for our own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub another: Option<ForeignGpuwardenView>,
    /// Proposal of the session that waits for a person's approval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proposal: Option<Proposal>,
    /// Progress of the drain, as in the records of the node's events; absent if only single
    /// devices are out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<Eviction>,
}

/// Another gpuwarden that has quarantined a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ForeignGpuwardenView {
    /// Description of that gpuwarden, for people.
    pub who: String,
    /// Command that removes its changes from the node, for use if it is gone for good.
    pub end: String,
}

/// An open fault of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultView {
    /// Monitor that reported it.
    pub agent: String,
    /// Class of the component.
    pub component_class: String,
    /// Name of the check.
    pub check: String,
    /// Error code; may be empty.
    pub code: String,
    /// The broken component, for people.
    pub subject: String,
    /// The broken component, as entities.
    pub entities: Vec<EntityView>,
    /// True if work on the broken component must stop.
    pub fatal: bool,
    /// True if a person has dismissed the fault since its last report, so that it does not
    /// count.
    #[serde(default)]
    pub dismissed: bool,
    /// Name of the recommended action.
    pub recommended_action: String,
    /// Message of the monitor.
    pub message: String,
    /// Time when the fault was first observed.
    pub first_seen: Timestamp,
    /// Time when the fault was last observed.
    pub last_seen: Timestamp,
    /// Number of events since it opened.
    pub count: u64,
    /// Id of the event that stands for it.
    pub event_id: String,
    /// Reporter of that event, for people; absent for gpuwarden's own monitors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reported_by: Option<String>,
    /// Primary that explains the fault, which therefore asks for nothing; absent if none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explained_by: Option<CauseView>,
    /// Id of the incident that the fault belongs to.
    #[serde(default)]
    pub incident: String,
}

/// A primary that explains a fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CauseView {
    /// Node of the primary.
    pub node: String,
    /// Title of the primary.
    pub fault: String,
}

/// An entity of a fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntityView {
    /// Type, such as `GPU_UUID`.
    pub entity_type: String,
    /// Value, such as the UUID.
    pub entity_value: String,
}

// === impl FleetView ===

impl FleetView {
    /// Returns the open faults to send to a node's agent; `None` until all faults are known.
    /// `store_id` is the id of the event store.
    pub fn faults_of(&self, node: &str, store_id: &str) -> Option<ListFaultsResponse> {
        if !self.ready {
            return None;
        }
        let found = self
            .nodes
            .binary_search_by(|one| one.name.as_str().cmp(node));
        let found = found.ok().and_then(|index| self.nodes.get(index));
        let faults = found.map_or(&[][..], |status| &status.faults);
        let is_sent = |fault: &&FaultView| {
            !fault.dismissed && (fault.fatal || fault.check == keys::CHECK_XID)
        };
        Some(ListFaultsResponse {
            store_id: store_id.to_owned(),
            faults: faults.iter().filter(is_sent).map(OpenFault::from).collect(),
        })
    }
}

impl From<&FaultView> for OpenFault {
    fn from(fault: &FaultView) -> Self {
        let entities = fault.entities.iter().map(|entity| FaultEntity {
            r#type: entity.entity_type.clone(),
            value: entity.entity_value.clone(),
        });
        Self {
            agent: fault.agent.clone(),
            component_class: fault.component_class.clone(),
            check: fault.check.clone(),
            code: fault.code.clone(),
            fatal: fault.fatal,
            entities: entities.collect(),
        }
    }
}

// === impl FaultView ===

impl FaultView {
    /// Creates the view of a fault.
    pub fn of(fault: &Fault) -> Self {
        Self {
            agent: fault.agent.clone(),
            component_class: fault.event.component_class.clone(),
            check: fault.check.clone(),
            code: fault.code.clone(),
            subject: fault.subject.to_string(),
            entities: fault
                .subject
                .entities()
                .into_iter()
                .map(|entity| EntityView {
                    entity_type: entity.entity_type,
                    entity_value: entity.entity_value,
                })
                .collect(),
            fatal: fault.event.is_fatal,
            dismissed: false,
            recommended_action: contract::effective_action_name(&fault.event).into_owned(),
            message: fault.event.message.clone(),
            first_seen: fault.first_seen,
            last_seen: fault.last_seen,
            count: fault.count,
            event_id: fault.event.id.clone(),
            reported_by: Reporter::of(&fault.event)
                .filter(|reporter| *reporter != Reporter::Monitor)
                .map(|reporter| reporter.to_string()),
            explained_by: fault.cause.as_ref().map(|cause| CauseView {
                node: cause.node.clone(),
                fault: cause.fault.clone(),
            }),
            incident: fault.incident.clone(),
        }
    }

    /// Returns whether the fault is gpuwarden's own, which no other reporter closes.
    pub fn is_own_word(&self) -> bool {
        self.agent == OWN_AGENT && self.reported_by.is_none()
    }

    /// Returns a short name for people, as [`Fault::title`].
    pub fn title(&self) -> String {
        title(&self.check, &self.code, &self.subject)
    }
}

// === impl NodeState ===

impl NodeState {
    /// Returns the state's name, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Unhealthy => "unhealthy",
            Self::PartlyQuarantined => "partly-quarantined",
            Self::Session(phase) => phase.name(),
        }
    }

    /// Returns whether the whole node is out of service.
    pub fn is_out(self) -> bool {
        matches!(self, Self::Session(phase) if phase.is_out() || phase == Phase::Returning)
    }

    /// Returns the state that follows from the open faults, without notices, and the session's
    /// phase. A fatal fault that another one explains leaves the node in service.
    pub fn of(faults: &[&Fault], phase: Option<Phase>) -> Self {
        match phase {
            Some(phase) if phase != Phase::Idle => Self::Session(phase),
            _ if faults
                .iter()
                .any(|fault| fault.event.is_fatal && fault.cause.is_none()) =>
            {
                Self::Unhealthy
            }
            _ if faults.is_empty() => Self::Healthy,
            _ => Self::Degraded,
        }
    }
}
