//! The JSON of the API. Field names are part of it; the command line reads the same types.

mod gpus;

use std::collections::BTreeMap;

pub use fleet::view::PolicyView;
use fleet::view::{FleetView, NodeStatus};
use jiff::Timestamp;
use model::event::Record;
use model::journal::EntryKind;
pub use model::mode::Mode;
use model::position::Position;
use runtime::sources::SourceStatus;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use gpus::{GpuConditionView, GpuView};

/// The answer of `/api/v1/status`: all that is known right now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusView {
    /// The process itself.
    #[serde(flatten)]
    pub process: ProcessView,
    /// The time of this answer, by the server's clock.
    pub now: Timestamp,
    /// The policy that decides about quarantine.
    pub policy: PolicyView,
    /// Nodes with open faults or a session.
    pub fleet: FleetView,
    /// The catalogue's rows of the XID codes that are open now, by code.
    #[serde(default)]
    pub xids: BTreeMap<String, XidView>,
    /// The GPUs of this machine, by their index.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuView>,
    /// The sources of events, and their freshness.
    pub sources: Vec<SourceStatus>,
    /// The stored events; at an agent, those that wait for the controller.
    pub store: StoreView,
    /// At an agent: the delivery to the controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery: Option<DeliveryView>,
    /// The election of the leader, where controllers elect one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leadership: Option<LeadershipView>,
    /// The gRPC sink; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward: Option<ForwardView>,
    /// True if the process sees and does all that it is there for.
    pub ready: bool,
    /// The reasons why it is not ready; empty where it is.
    pub not_ready: Vec<String>,
}

/// The facts about a process that do not change while it lives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessView {
    /// Version of gpuwarden.
    pub version: String,
    /// Name of the node that it runs on; of the host, where it watches no node.
    pub node_name: String,
    /// Its role.
    #[serde(default)]
    pub role: Role,
    /// Its mode in the cluster.
    pub mode: Mode,
    /// The time of its start.
    pub started_at: Timestamp,
    /// Directory of its events and state.
    pub data_dir: String,
    /// True if commands look in that directory by themselves.
    #[serde(skip)]
    pub data_dir_is_default: bool,
    /// Unix socket on which it takes events.
    pub socket: String,
}

/// The role of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// All in one, on a node.
    #[default]
    Run,
    /// A node's side.
    Agent,
    /// A cluster's side; it watches no node itself.
    Controller,
}

/// The election of the controller that leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeadershipView {
    /// The Lease, as `NAMESPACE/NAME`.
    pub lease: String,
    /// The name of this process in it.
    pub identity: String,
    /// The holder of the Lease, as last seen; empty: nobody, or it was never seen.
    pub leader: String,
    /// True if this process holds the Lease.
    pub leads: bool,
    /// The reason why the Lease cannot be asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A row of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct XidView {
    /// The publisher's name of the code.
    pub mnemonic: String,
    /// The meaning of the code, for people.
    pub meaning: String,
    /// A note; may be empty.
    pub note: String,
    /// The source of the facts.
    pub source: String,
}

/// The store of events.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoreView {
    /// Number of events.
    pub events: u64,
    /// Room on disk (bytes).
    pub bytes: u64,
    /// Position of the newest event in the feed.
    pub latest: Position,
    /// Events met since the start that cannot be read: they are passed over.
    #[serde(default)]
    pub unreadable: u64,
    /// Notes in sentences, of what hinders nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The time at which the oldest event was received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest: Option<Timestamp>,
    /// The time at which the newest event was received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest: Option<Timestamp>,
    /// The error of the store; the numbers are zero then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The delivery of events from an agent to its controller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeliveryView {
    /// Address of the controller.
    pub controller: String,
    /// Events delivered since the start.
    pub delivered: u64,
    /// Events that the controller refused since the start.
    pub refused: u64,
    /// Events on which the controller failed while it took others, since the start.
    #[serde(default)]
    pub not_taken: u64,
    /// Events on which the controller fails, and that are tried again.
    #[serde(default)]
    pub suspects: u64,
    /// Events of both kinds that are kept in `outbox/refused.jsonl` of the data directory.
    #[serde(default)]
    pub aside: u64,
    /// The store that has what is delivered, as the controller calls it; absent before it
    /// has said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// The number of times that it was another one than before, since the start.
    #[serde(default)]
    pub store_changes: u64,
    /// Events that were sent again for that, since the start.
    #[serde(default)]
    pub resent: u64,
    /// Events that are delivered and kept for that.
    #[serde(default)]
    pub kept: u64,
    /// The reason why the last attempt failed; absent after one that did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing: Option<String>,
}

/// The delivery of events to the target of NVSentinel's gRPC sink.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ForwardView {
    /// Host and port of the target; `https://` before them where it is talked to by TLS.
    pub target: String,
    /// Events that wait for it.
    pub waiting: u64,
    /// Events that it has taken, since the start.
    pub delivered: u64,
    /// Events that were not handed on for want of room on the disk, since the start.
    pub missed: u64,
    /// Events that it did not take, in `forward/outbox/refused.jsonl` of the data directory.
    pub aside: u64,
    /// The reason why the last attempt failed; absent after one that did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing: Option<String>,
}

/// One event: an element of `/api/v1/events`, or a line of it with `follow=true`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventView {
    /// Position in the feed.
    pub seq: Position,
    /// The time at which it was accepted.
    pub created_at: Timestamp,
    /// The event in its public form ([`contract::json`]).
    pub event: Value,
    /// The part that it had in a quarantine, under the names of the data-flow document.
    #[serde(default, rename = "healtheventstatus")]
    pub status: EventStatus,
}

/// The part that an event had in a quarantine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventStatus {
    /// `Quarantined`, `AlreadyQuarantined`, `UnQuarantined` or `Cancelled`; `null` where the
    /// quarantine has had no part in it, so far.
    #[serde(default)]
    pub nodequarantined: Option<String>,
    /// The time of that decision.
    #[serde(default)]
    pub quarantinefinishtimestamp: Option<Timestamp>,
    /// How far the pods of its node have left; `null` like `nodequarantined`.
    #[serde(default)]
    pub userpodsevictionstatus: Option<PodsEvictionView>,
    /// The time at which they had.
    #[serde(default)]
    pub drainfinishtimestamp: Option<Timestamp>,
    /// True once its fault was repaired, false while a person is asked; `null` until that was decided.
    #[serde(default)]
    pub faultremediated: Option<bool>,
    /// The time at which that was last tried.
    #[serde(default)]
    pub lastremediationtimestamp: Option<Timestamp>,
}

/// How far the pods of the node of an event have left.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodsEvictionView {
    /// `NotStarted`, `InProgress`, `Failed`, `Succeeded`, `AlreadyDrained` or `Cancelled`.
    pub status: String,
    /// The reason, for people; may be empty.
    pub message: String,
}

/// The answer of `/api/v1/nodes/{name}/explain`: one node's story.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explain {
    /// Node name.
    pub node: String,
    /// Its state; absent where it has neither an open fault nor a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<NodeStatus>,
    /// True if the cluster has the node; absent where there is no cluster, or nothing to ask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_cluster: Option<bool>,
    /// The story, oldest first.
    pub entries: Vec<TimelineEntry>,
    /// A sentence for people on what is awaited.
    pub awaits: String,
    /// The ways to clear what is open, for people: one a line.
    pub how_to_clear: Vec<String>,
    /// The GPUs of the node, where this process runs on it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuView>,
    /// The GPUs of its pods that its kubelet calls unhealthy, where pods may be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unhealthy_gpus: Vec<UnhealthyGpuView>,
}

/// A GPU of a pod that the kubelet calls unhealthy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnhealthyGpuView {
    /// The pod, as `namespace/name`.
    pub pod: String,
    /// The resource or the claim by which it has the GPU.
    pub resource: String,
    /// The GPU, as the resource names it.
    pub device: String,
}

/// One entry of a timeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TimelineEntry {
    /// The time of the entry.
    pub at: Timestamp,
    /// The kind of the entry.
    pub kind: TimelineKind,
    /// The text for people; of the kind `line` as the source wrote it.
    pub text: String,
    /// The facts for programs; the shape depends on the kind. Absent where there is nothing more.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub detail: Value,
    /// Session that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
}

/// The kind of a timeline entry: one of three parts of an event, or a kind of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimelineKind {
    /// The line of the log, or the message of the monitor.
    Line,
    /// The finding that it was read as.
    Decoded,
    /// The event that was accepted, and what it did to the open faults.
    Event,
    /// An entry of the journal.
    #[serde(untagged)]
    Journal(EntryKind),
}

/// The answer to a request that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorBody {
    /// The problem.
    pub error: String,
    /// A hint on what to do about it.
    pub hint: String,
}

// === impl EventView ===

impl EventView {
    /// Returns the view of an event with its status in the store.
    pub fn of(record: &Record, status: Option<store::EventStatus>) -> Self {
        let status = status.unwrap_or_default();
        Self {
            seq: record.seq,
            created_at: record.created_at,
            event: contract::json::to_value(&record.event),
            status: EventStatus {
                nodequarantined: status.node_quarantined,
                quarantinefinishtimestamp: status.quarantine_finished_at,
                userpodsevictionstatus: status.pods_eviction.map(|one| PodsEvictionView {
                    status: one.status,
                    message: one.message,
                }),
                drainfinishtimestamp: status.drain_finished_at,
                faultremediated: status.fault_remediated,
                lastremediationtimestamp: status.last_remediation_at,
            },
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
