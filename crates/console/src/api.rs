//! JSON types of the API, including their field names. The command line uses the same types.

mod gpus;
mod incidents;
mod ledger;
mod maintenance;

use std::collections::BTreeMap;

pub use fleet::view::PolicyView;
use fleet::view::{FleetView, NodeStatus};
use jiff::Timestamp;
use model::event::EventRecord;
use model::journal::EntryKind;
pub use model::mode::Mode;
use model::position::Position;
use runtime::sources::SourceStatus;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use gpus::{GpuConditionView, GpuView};
pub use incidents::IncidentsView;
pub use ledger::{GpuEntry, LedgerEntry, LedgerGpu, LedgerNode, LedgerView, NodeEntry};
pub use maintenance::MaintenancesView;

/// Response of `/api/v1/status`: the current state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusView {
    /// Facts about the process.
    #[serde(flatten)]
    pub process: ProcessView,
    /// Time of the response, by the server's clock.
    pub now: Timestamp,
    /// Policy that decides about quarantine.
    pub policy: PolicyView,
    /// Nodes with open faults or a session.
    pub fleet: FleetView,
    /// Catalogue rows of the XID codes that are open, by code.
    #[serde(default)]
    pub xids: BTreeMap<String, XidView>,
    /// GPUs of this machine, ordered by index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuView>,
    /// Sources of events, with their freshness.
    pub sources: Vec<SourceStatus>,
    /// Stored events; on an agent, those that wait for the controller.
    pub store: StoreView,
    /// Delivery to the controller; only on an agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery: Option<DeliveryView>,
    /// State of the leader election, if controllers elect a leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leadership: Option<LeadershipView>,
    /// Delivery to the gRPC sink, if one is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward: Option<ForwardView>,
    /// True if the process observes and does everything it should.
    pub ready: bool,
    /// Reasons why the process is not ready; empty if it is.
    pub not_ready: Vec<String>,
}

/// Facts about a process that are constant during its lifetime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessView {
    /// Version of gpuwarden, such as `0.1.0`.
    pub version: String,
    /// Name of the node that the process runs on, or of the host if it monitors no node.
    pub node_name: String,
    /// Role of the process.
    #[serde(default)]
    pub role: Role,
    /// Mode of operation in the cluster.
    pub mode: Mode,
    /// Start of the process.
    pub started_at: Timestamp,
    /// Directory of events and state.
    pub data_dir: String,
    /// True if commands use `data_dir` by default.
    #[serde(skip)]
    pub data_dir_is_default: bool,
    /// Unix socket that accepts events.
    pub socket: String,
}

/// Role of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Standalone, on a node.
    #[default]
    Run,
    /// Agent on a node.
    Agent,
    /// Controller of a cluster; it monitors no node itself.
    Controller,
}

/// State of the election of the leading controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeadershipView {
    /// Name of the Lease, as `NAMESPACE/NAME`.
    pub lease: String,
    /// Identity of this process in the Lease.
    pub identity: String,
    /// Holder of the Lease, as last observed; empty if nobody holds it or it was never
    /// observed.
    pub leader: String,
    /// True if this process holds the Lease.
    pub leads: bool,
    /// Error of the last request for the Lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Row of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct XidView {
    /// Name of the code by its publisher.
    pub mnemonic: String,
    /// Meaning of the code, for people.
    pub meaning: String,
    /// Additional note; may be empty.
    pub note: String,
    /// Source of the facts.
    pub source: String,
}

/// State of the event store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoreView {
    /// Number of stored events.
    pub events: u64,
    /// Size on disk in bytes.
    pub bytes: u64,
    /// Feed position of the newest event.
    pub latest: Position,
    /// Unreadable events found since the start; they are skipped.
    #[serde(default)]
    pub unreadable: u64,
    /// Notes about conditions that do no harm, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Time when the oldest event was received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest: Option<Timestamp>,
    /// Time when the newest event was received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest: Option<Timestamp>,
    /// Error of the store; the numbers are zero then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// State of the delivery from an agent to its controller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeliveryView {
    /// Address of the controller.
    pub controller: String,
    /// Events delivered since the start.
    pub delivered: u64,
    /// Events that the controller refused since the start.
    pub refused: u64,
    /// Events that the controller failed on while it accepted others, since the start.
    #[serde(default)]
    pub not_taken: u64,
    /// Events that the controller fails on and that are retried.
    #[serde(default)]
    pub suspects: u64,
    /// Refused and failed events in `outbox/refused.jsonl` of the data directory.
    #[serde(default)]
    pub aside: u64,
    /// Id of the controller's store; absent until the controller has reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// Number of times that the id of the store changed since the start.
    #[serde(default)]
    pub store_changes: u64,
    /// Events sent again after such changes, since the start.
    #[serde(default)]
    pub resent: u64,
    /// Delivered events that are kept to be sent again after such a change.
    #[serde(default)]
    pub kept: u64,
    /// Error of the last attempt; absent if it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing: Option<String>,
}

/// State of the delivery to the target of NVSentinel's gRPC sink.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ForwardView {
    /// Host and port of the target, prefixed by `https://` if TLS is used.
    pub target: String,
    /// Events that wait for delivery.
    pub waiting: u64,
    /// Events that the target accepted since the start.
    pub delivered: u64,
    /// Events that were dropped for lack of disk space since the start.
    pub missed: u64,
    /// Events that the target did not accept, in `forward/outbox/refused.jsonl` of the data
    /// directory.
    pub aside: u64,
    /// Error of the last attempt; absent if it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing: Option<String>,
}

/// Event: an element of `/api/v1/events`, or a line of it with `follow=true`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventView {
    /// Position in the feed.
    pub seq: Position,
    /// Time when the event was accepted.
    pub created_at: Timestamp,
    /// Event in its public form ([`contract::json`]).
    pub event: Value,
    /// Effect of the event on a quarantine, under the names of NVSentinel's data-flow document.
    #[serde(default, rename = "healtheventstatus")]
    pub status: EventStatus,
    /// Conclusions of the analysis that rest on the event; absent without any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub analysis: Vec<model::status::ConclusionNote>,
}

/// Effect of an event on a quarantine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventStatus {
    /// `Quarantined`, `AlreadyQuarantined`, `UnQuarantined` or `Cancelled`; `null` if there was
    /// none so far.
    #[serde(default)]
    pub nodequarantined: Option<String>,
    /// Time of that decision.
    #[serde(default)]
    pub quarantinefinishtimestamp: Option<Timestamp>,
    /// Progress of evicting the node's pods; `null` like `nodequarantined`.
    #[serde(default)]
    pub userpodsevictionstatus: Option<PodsEvictionView>,
    /// Time when the eviction ended.
    #[serde(default)]
    pub drainfinishtimestamp: Option<Timestamp>,
    /// True once the fault was remediated, false while a person must act; `null` until that was
    /// decided.
    #[serde(default)]
    pub faultremediated: Option<bool>,
    /// Time of the last attempt to remediate the fault.
    #[serde(default)]
    pub lastremediationtimestamp: Option<Timestamp>,
}

/// Progress of evicting the pods of an event's node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodsEvictionView {
    /// `NotStarted`, `InProgress`, `Failed`, `Succeeded`, `AlreadyDrained` or `Cancelled`.
    pub status: String,
    /// Reason, for people; may be empty.
    pub message: String,
}

/// Response of `/api/v1/nodes/{name}/explain`: the timeline of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explain {
    /// Name of the node.
    pub node: String,
    /// State of the node; absent if it has neither an open fault nor a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<NodeStatus>,
    /// True if the cluster has the node; absent if there is no cluster or it cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_cluster: Option<bool>,
    /// Entries of the timeline, oldest first.
    pub entries: Vec<TimelineEntry>,
    /// Sentence about what the node waits for.
    pub awaits: String,
    /// Ways to clear the open faults, one per line.
    pub how_to_clear: Vec<String>,
    /// GPUs of the node, if this process runs on it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuView>,
    /// GPUs of the node's pods that its kubelet reports as unhealthy, if pods may be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unhealthy_gpus: Vec<UnhealthyGpuView>,
}

/// GPU of a pod that the kubelet reports as unhealthy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnhealthyGpuView {
    /// Name of the pod, as `namespace/name`.
    pub pod: String,
    /// Resource or claim that allocated the GPU.
    pub resource: String,
    /// Name of the GPU in the resource.
    pub device: String,
}

/// Entry of a timeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TimelineEntry {
    /// Time of the entry.
    pub at: Timestamp,
    pub kind: TimelineKind,
    /// Text for people; for the kind `line`, as the source wrote it.
    pub text: String,
    /// Facts for programs, in a shape that depends on the kind; absent if there are none.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub detail: Value,
    /// Id of the session that the entry belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
}

/// Kind of a timeline entry: one of three parts of an event, or a kind of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimelineKind {
    /// Log line, or message of the monitor.
    Line,
    /// Finding decoded from the line.
    Decoded,
    /// Accepted event, and its effect on the open faults.
    Event,
    /// Entry of the journal.
    #[serde(untagged)]
    Journal(EntryKind),
}

/// Body of an error response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorBody {
    /// Description of the problem.
    pub error: String,
    /// Hint on what to do.
    pub hint: String,
}

// === impl EventView ===

impl EventView {
    /// Combines an event with its status in the store.
    pub fn of(record: &EventRecord, status: Option<model::status::EventStatus>) -> Self {
        let status = status.unwrap_or_default();
        Self {
            seq: record.seq,
            created_at: record.created_at,
            event: contract::json::to_value(&record.event),
            status: EventStatus {
                nodequarantined: (status.node_quarantined).map(|one| one.name().to_owned()),
                quarantinefinishtimestamp: status.quarantine_finished_at,
                userpodsevictionstatus: status.pods_eviction.map(|one| PodsEvictionView {
                    status: one.status.name().to_owned(),
                    message: one.message,
                }),
                drainfinishtimestamp: status.drain_finished_at,
                faultremediated: status.fault_remediated,
                lastremediationtimestamp: status.last_remediation_at,
            },
            analysis: status.analysis,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json, to_value};

    use super::*;

    #[test]
    fn names_are_as_serialised() {
        for mode in [Mode::Observe, Mode::Act, Mode::DryRun] {
            assert_eq!(to_value(mode).unwrap(), mode.name());
        }
        for (kind, name) in [
            (TimelineKind::Line, "line"),
            (TimelineKind::Event, "event"),
            (TimelineKind::Journal(EntryKind::DryRun), "dry-run"),
        ] {
            assert_eq!(to_value(kind).unwrap(), name);
            assert_eq!(from_value::<TimelineKind>(json!(name)).unwrap(), kind);
        }
    }
}
