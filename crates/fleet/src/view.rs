//! The state as it looks from outside: read by the status page, the API and the command line. Serialised names are part of the JSON API.

use contract::keys;
use contract::node::{FaultEntity, ListFaultsResponse, OpenFault};
use jiff::Timestamp;
use model::fault::{Fault, title};
use model::position::Position;
use model::reporter::{OWN_AGENT, Reporter};
use serde::{Deserialize, Serialize};

use crate::session::Phase;
use crate::status::eviction::Eviction;

/// The state of all nodes that anything is known about.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetView {
    /// Feed position up to which events are taken in.
    pub applied: Position,
    /// Feed position from which on reports of monitors are read again, for they found no room;
    /// absent where all did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missed_from: Option<Position>,
    /// True once all events that were stored at start are taken in.
    pub ready: bool,
    /// Nodes with open faults or a session, by name.
    pub nodes: Vec<NodeStatus>,
    /// The connection to the cluster; absent where none was asked for.
    pub cluster: Option<ClusterView>,
    /// The limits of new quarantines; absent where there is no cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub brake: Option<BrakeView>,
    /// Troubles that keep this state from being kept as it should be, for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<String>,
}

/// The limits of new quarantines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BrakeView {
    /// True if the brake is switched on.
    pub enabled: bool,
    /// `CLOSED` or `TRIPPED`, as in the `ConfigMap`; or another word that somebody wrote.
    pub state: String,
    /// The limits, the fullest first.
    pub limits: Vec<LimitView>,
    /// The reason why the limits are not known yet; absent where they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
    /// Number of nodes that are held back.
    pub held: usize,
    /// The pause that holds now, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<String>,
    /// Notes of what a person should know or do.
    pub notes: Vec<String>,
}

/// A limit of the brake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LimitView {
    /// The limit, for people: `20% per rack`, `50% in 5m`.
    pub limit: String,
    /// The nodes that it counts, for people: `GPU nodes, rack=r1`.
    pub of_which: String,
    /// Nodes that count.
    pub used: usize,
    /// Nodes that may.
    pub allowed: usize,
    /// The number of nodes of which `allowed` is a share.
    pub of: usize,
    /// Names of some of the nodes that count.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by: Vec<String>,
}

/// The policy that holds, and the troubles of its source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyView {
    /// Its source: a file, a `ConfigMap`, or the built-in one.
    pub source: String,
    /// Names of its rule sets, in their order.
    pub rule_sets: Vec<String>,
    /// Names of the further policies that a node can choose.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<String>,
    /// Warnings about it.
    pub warnings: Vec<String>,
    /// The time at which the policy was loaded; absent: there is none yet, and nothing is decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loaded_at: Option<Timestamp>,
    /// The reason why what the source says now does not hold; the policy above does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Since when that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_since: Option<Timestamp>,
}

/// The connection to a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterView {
    /// Address of the API server.
    pub server: String,
    /// True while nodes are being watched.
    pub connected: bool,
    /// The trouble, where it is not connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Number of nodes of the cluster.
    pub nodes: usize,
}

/// A node with open faults or a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Name.
    pub name: String,
    /// Its state in one word.
    pub state: NodeState,
    /// Its quarantine session, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionView>,
    /// True if the cluster knows the node; absent where there is no cluster, or its nodes could not
    /// be read yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_cluster: Option<bool>,
    /// True if the node is unschedulable; absent where that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unschedulable: Option<bool>,
    /// Open faults, gravest first.
    pub faults: Vec<FaultView>,
    /// Reports of the last day for whose repair nothing waits, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notices: Vec<FaultView>,
    /// Its devices that we have tainted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceView>,
    /// Notes of what a person should know or do.
    pub notes: Vec<String>,
}

/// A device that we have tainted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceView {
    /// The device, as `driver/pool/name`.
    pub device: String,
    /// Its GPU, by UUID or PCI address; empty where it is not known.
    pub gpu: String,
    /// Its taints, as `key=value:effect`.
    pub taints: Vec<String>,
    /// The cluster's words on pods that have to go because of these taints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evictions: Vec<String>,
    /// The pods that use it, as `namespace/name`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<String>,
}

/// The state of a node in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeState {
    /// No fault is open.
    Healthy,
    /// Only faults that are not fatal are open.
    Degraded,
    /// A fatal fault is open, and the node is not quarantined.
    Unhealthy,
    /// It is to be taken out of service, and held back by the brake.
    Held,
    /// It is being taken out of service.
    Quarantining,
    /// It is out of service.
    Quarantined,
    /// Out of service, and pods leave it.
    Draining,
    /// Out of service, and all pods that were to leave have left.
    Drained,
    /// Out of service, and it is repaired.
    Remediating,
    /// Out of service and repaired; its faults are to be over.
    Remediated,
    /// Out of service, and a person is to repair it.
    RemediationFailed,
    /// Single devices of it are out of service, and it is not.
    PartlyQuarantined,
    /// It is being given back.
    Releasing,
}

/// A quarantine session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SessionView {
    /// Its id.
    pub id: String,
    /// The phase in which it is.
    pub phase: Phase,
    /// Since when it is in this phase.
    pub since: Timestamp,
    /// Number of attempts made in this phase that failed.
    pub failures: u32,
    /// The thing that the session awaits, for people.
    pub awaits: String,
    /// True if the session has cordoned the node.
    #[serde(default)]
    pub cordoned: bool,
    /// True if an uncordon ends the session now: it is not the time of machines that do it, which is undone.
    #[serde(default)]
    pub uncordon_releases: bool,
    /// The other gpuwarden whose it is, where it is not ours: then it is left alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub another: Option<AnotherView>,
    /// How far its pods have left, as in the records of its events; absent where single devices are
    /// out only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<Eviction>,
}

/// Another gpuwarden that has quarantined a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AnotherView {
    /// Its description, for people.
    pub who: String,
    /// The command that takes what it did off the node, where it is gone for good.
    pub end: String,
}

/// An open fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FaultView {
    /// Monitor that reported it.
    pub agent: String,
    /// Class of the component.
    pub component_class: String,
    /// Check.
    pub check: String,
    /// Code; may be empty.
    pub code: String,
    /// The broken thing, for people.
    pub subject: String,
    /// The broken thing, as entities.
    pub entities: Vec<EntityView>,
    /// True if work on the broken thing must stop.
    pub fatal: bool,
    /// True if the fault does not count because a person has dismissed it since it was last
    /// reported.
    #[serde(default)]
    pub dismissed: bool,
    /// The action that mends it, by name.
    pub recommended_action: String,
    /// The monitor's text.
    pub message: String,
    /// The time at which the fault was first observed.
    pub first_seen: Timestamp,
    /// The time at which the fault was last observed.
    pub last_seen: Timestamp,
    /// Number of events since it opened.
    pub count: u64,
    /// Id of the event that stands for it.
    pub event_id: String,
    /// The reporter of that event, for people; absent for monitors of ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reported_by: Option<String>,
}

/// An entity of a fault.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntityView {
    /// Type.
    pub entity_type: String,
    /// Value.
    pub entity_value: String,
}

// === impl FleetView ===

impl FleetView {
    /// Returns the open faults of a node as its agent is told of them; `None` while not all faults
    /// are known. `store_id` is the event store that they are of.
    pub fn faults_of(&self, node: &str, store_id: &str) -> Option<ListFaultsResponse> {
        if !self.ready {
            return None;
        }
        let found = self
            .nodes
            .binary_search_by(|one| one.name.as_str().cmp(node));
        let found = found.ok().and_then(|index| self.nodes.get(index));
        let faults = found.map_or(&[][..], |known| &known.faults);
        let is_told = |fault: &&FaultView| {
            !fault.dismissed && (fault.fatal || fault.check == keys::CHECK_XID)
        };
        Some(ListFaultsResponse {
            store_id: store_id.to_owned(),
            faults: faults.iter().filter(is_told).map(OpenFault::from).collect(),
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
    /// Returns the view of a fault.
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
        }
    }

    /// Returns whether it is gpuwarden's own word about the node, which nobody else closes.
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
    /// Returns the word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Unhealthy => "unhealthy",
            Self::Held => "held",
            Self::Quarantining => "quarantining",
            Self::Quarantined => "quarantined",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::Remediating => "remediating",
            Self::Remediated => "remediated",
            Self::RemediationFailed => "remediation-failed",
            Self::PartlyQuarantined => "partly-quarantined",
            Self::Releasing => "releasing",
        }
    }

    /// Returns whether the node as a whole is out of service.
    pub fn is_out(self) -> bool {
        matches!(
            self,
            Self::Quarantined
                | Self::Draining
                | Self::Drained
                | Self::Remediating
                | Self::Remediated
                | Self::RemediationFailed
                | Self::Releasing
        )
    }

    /// Returns the state by the open faults, without notices, and the session's phase.
    pub fn of(faults: &[&Fault], phase: Option<Phase>) -> Self {
        match phase {
            Some(Phase::Held) => Self::Held,
            Some(Phase::Quarantining) => Self::Quarantining,
            Some(Phase::Quarantined) => Self::Quarantined,
            Some(Phase::Draining) => Self::Draining,
            Some(Phase::Drained) => Self::Drained,
            Some(Phase::Remediating) => Self::Remediating,
            Some(Phase::Remediated) => Self::Remediated,
            Some(Phase::RemediationFailed) => Self::RemediationFailed,
            Some(Phase::Releasing) => Self::Releasing,
            Some(Phase::Idle) | None if faults.iter().any(|fault| fault.event.is_fatal) => {
                Self::Unhealthy
            }
            Some(Phase::Idle) | None if faults.is_empty() => Self::Healthy,
            Some(Phase::Idle) | None => Self::Degraded,
        }
    }
}
