//! What goes over the wire, as JSON. Field names are part of the API.

use std::collections::BTreeMap;

use domain::event::Record;
use domain::journal::EntryKind;
pub use domain::mode::Mode;
use domain::position::Position;
pub use domain::view::PolicyView;
use domain::view::{FleetView, NodeStatus};
use jiff::Timestamp;
use runtime::sources::SourceStatus;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Answer of `/api/v1/status`: all that is known right now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Version of gpuwarden.
    pub version: String,
    /// Name of the node that it runs on; of the host, where it watches no node.
    pub node_name: String,
    /// What it is.
    #[serde(default)]
    pub role: Role,
    /// What it may do to the cluster.
    pub mode: Mode,
    /// When the process started.
    pub started_at: Timestamp,
    /// When this was put together, by the server's clock.
    pub now: Timestamp,
    /// Where it keeps its data.
    pub data_dir: String,
    /// Unix socket on which it takes events.
    pub socket: String,
    /// What decides about quarantine.
    pub policy: PolicyView,
    /// Nodes with open faults or a session.
    pub fleet: FleetView,
    /// What the catalogue says of the XID codes that are open now, by code.
    #[serde(default)]
    pub xids: BTreeMap<String, XidView>,
    /// What it can see, and how fresh that is.
    pub sources: Vec<SourceStatus>,
    /// How much is stored; at an agent, how much waits for the controller.
    pub store: StoreView,
    /// At an agent: how it gets to the controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery: Option<DeliveryView>,
    /// Where controllers elect who leads: who does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leadership: Option<LeadershipView>,
    /// How events are handed on to another service; absent where they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward: Option<ForwardView>,
    /// Whether it sees and does all that it is there for.
    pub ready: bool,
    /// Why not; empty where it is ready.
    pub not_ready: Vec<String>,
}

/// What a process is.
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

/// Which of several controllers leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeadershipView {
    /// The Lease, as `NAMESPACE/NAME`.
    pub lease: String,
    /// The name of this process in it.
    pub identity: String,
    /// Who holds it, as last seen; empty: nobody, or it was never seen.
    pub leader: String,
    /// Whether that is this process.
    pub leads: bool,
    /// Why it cannot be asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A row of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct XidView {
    /// The publisher's name of the code.
    pub mnemonic: String,
    /// What happened, for people.
    pub meaning: String,
    /// What else to know; may be empty.
    pub note: String,
    /// Where the facts come from.
    pub source: String,
}

/// How much is stored.
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
    /// What else to know of it, in sentences; it hinders nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// When the oldest event was received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest: Option<Timestamp>,
    /// When the newest event was received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest: Option<Timestamp>,
    /// What is wrong with it; the numbers are zero then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// How events get from an agent to its controller.
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
    /// How often it was another one than before, since the start.
    #[serde(default)]
    pub store_changes: u64,
    /// Events that were sent again for that, since the start.
    #[serde(default)]
    pub resent: u64,
    /// Events that are delivered and kept for that.
    #[serde(default)]
    pub kept: u64,
    /// Why the last attempt failed; absent after one that did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing: Option<String>,
}

/// How events are handed on to the target of NVSentinel's gRPC sink.
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
    /// Why the last attempt failed; absent after one that did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing: Option<String>,
}

/// One event: an element of `/api/v1/events`, or a line of it with `follow=true`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventView {
    /// Position in the feed.
    pub seq: Position,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// The event in its public form ([`contract::json`]).
    pub event: Value,
    /// What became of it, under the names of the data-flow document.
    #[serde(default, rename = "healtheventstatus")]
    pub status: EventStatus,
}

/// What became of an event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventStatus {
    /// `Quarantined`, `AlreadyQuarantined`, `UnQuarantined` or `Cancelled`; `null` where the
    /// quarantine has had no part in it, so far.
    #[serde(default)]
    pub nodequarantined: Option<String>,
    /// When that was decided.
    #[serde(default)]
    pub quarantinefinishtimestamp: Option<Timestamp>,
}

/// Answer of `/api/v1/nodes/{name}/explain`: one node's story.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Explain {
    /// Node name.
    pub node: String,
    /// Its state; absent where it has neither an open fault nor a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<NodeStatus>,
    /// Whether the cluster has it; absent where there is no cluster, or nothing to ask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_cluster: Option<bool>,
    /// What happened, oldest first.
    pub entries: Vec<TimelineEntry>,
    /// What is awaited, for people.
    pub awaits: String,
    /// How to clear what is open, for people: one way a line.
    pub how_to_clear: Vec<String>,
}

/// One entry of a timeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TimelineEntry {
    /// When.
    pub at: Timestamp,
    /// What kind of entry it is.
    pub kind: TimelineKind,
    /// For people. Of the kind `line` it is what the source wrote, as it wrote it.
    pub text: String,
    /// For programs; the shape depends on the kind. Absent where there is nothing more.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub detail: Value,
    /// Session that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
}

/// Kinds of timeline entries: three for what an event is, the rest as in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimelineKind {
    /// The line of the log, or the message of the monitor.
    Line,
    /// What it was read as.
    Decoded,
    /// The event that was accepted, and what it did to the open faults.
    Event,
    /// Which rules matched.
    Rules,
    /// What was decided.
    Decision,
    /// The same in a dry run.
    DryRun,
    /// A call to the API server.
    Call,
    /// Its answer.
    Answer,
    /// A session moved on.
    Session,
    /// A person is asked to look.
    Attention,
}

/// Answer to a request that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorBody {
    /// What is wrong.
    pub error: String,
    /// What to do about it.
    pub hint: String,
}

// === impl EventView ===

impl EventView {
    /// Returns an event, and what the store says became of it.
    pub fn of(record: &Record, status: Option<store::EventStatus>) -> Self {
        let status = status.unwrap_or_default();
        Self {
            seq: record.seq,
            created_at: record.created_at,
            event: contract::json::to_value(&record.event),
            status: EventStatus {
                nodequarantined: status.node_quarantined,
                quarantinefinishtimestamp: status.quarantine_finished_at,
            },
        }
    }
}

// === impl TimelineKind ===

impl TimelineKind {
    /// Returns the kind's name, as serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::Decoded => "decoded",
            Self::Event => "event",
            Self::Rules => "rules",
            Self::Decision => "decision",
            Self::DryRun => "dry-run",
            Self::Call => "call",
            Self::Answer => "answer",
            Self::Session => "session",
            Self::Attention => "attention",
        }
    }
}

impl From<EntryKind> for TimelineKind {
    fn from(kind: EntryKind) -> Self {
        match kind {
            EntryKind::Rules => Self::Rules,
            EntryKind::Decision => Self::Decision,
            EntryKind::DryRun => Self::DryRun,
            EntryKind::Call => Self::Call,
            EntryKind::Answer => Self::Answer,
            EntryKind::Session => Self::Session,
            EntryKind::Attention => Self::Attention,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_serialised() {
        for mode in [Mode::Observe, Mode::Quarantine, Mode::DryRun] {
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.name());
        }
        for kind in [
            EntryKind::Rules,
            EntryKind::Decision,
            EntryKind::DryRun,
            EntryKind::Call,
            EntryKind::Answer,
            EntryKind::Session,
            EntryKind::Attention,
        ] {
            assert_eq!(TimelineKind::from(kind).name(), kind.name());
        }
        for kind in [
            TimelineKind::Line,
            TimelineKind::Decoded,
            TimelineKind::Event,
        ] {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }
}
