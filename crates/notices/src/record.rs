//! The record of one maintenance, in the form that NVSentinel stores as a document of
//! `MaintenanceEvents`, with keys of ours beside it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::notice::{Kind, Notice, Phase};

/// State of a maintenance: NVSentinel's eight words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum State {
    /// Announced.
    Detected,
    /// The node is to be out of service.
    QuarantineTriggered,
    /// The provider has begun.
    MaintenanceOngoing,
    /// Over; the node returns after a delay, once it is ready.
    MaintenanceComplete,
    /// The node was given back.
    HealthyTriggered,
    /// Over, and the node is not ready in time. A person is asked, and the node is still watched.
    NodeReadinessTimeout,
    /// Cancelled; the node was given back.
    Cancelled,
    /// The notice is gone, and nothing shows how the maintenance ended. A person is asked, and the
    /// node is still watched.
    Error,
}

/// Evidence that a maintenance is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Settled {
    /// The provider has said so.
    Provider,
    /// The notice is gone, and the node has booted since.
    BootId,
    /// The notice is gone, and so is its scheduled time.
    EndTime,
    /// The notice was gone before the maintenance was due.
    Withdrawn,
    /// A person has returned the node to service.
    Person,
    /// The node has left the cluster.
    NodeGone,
}

/// A maintenance of one node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Id of the record: the provider's, or one of ours.
    #[serde(rename = "eventId")]
    pub id: String,
    /// The provider.
    #[serde(rename = "csp")]
    pub provider: String,
    /// Type of the resource.
    pub resource_type: String,
    /// Id of the resource.
    pub resource_id: String,
    /// Name of the node.
    #[serde(rename = "nodeName")]
    pub node: String,
    /// `SCHEDULED` or `UNSCHEDULED`: NVSentinel's form of [`Self::emergency`].
    pub maintenance_type: MaintenanceType,
    /// Effect on the node.
    pub kind: Kind,
    /// State of ours.
    #[serde(rename = "status")]
    pub state: State,
    /// The provider's own word, unchanged.
    #[serde(rename = "cspStatus")]
    pub word: String,
    /// Progress, as read from that word.
    pub phase: Phase,
    /// Scheduled begin.
    #[serde(
        rename = "scheduledStartTime",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub start: Option<Timestamp>,
    /// Scheduled end.
    #[serde(
        rename = "scheduledEndTime",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub end: Option<Timestamp>,
    /// Time at which the maintenance was first seen to have begun.
    #[serde(
        rename = "actualStartTime",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub began: Option<Timestamp>,
    /// Time at which the maintenance was first seen to be over.
    #[serde(
        rename = "actualEndTime",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub ended: Option<Timestamp>,
    /// Time of the first notice.
    #[serde(rename = "eventReceivedTimestamp")]
    pub received: Timestamp,
    /// Time of the last change of the record.
    #[serde(rename = "lastUpdatedTimestamp")]
    pub changed: Timestamp,
    /// Name of the source.
    pub source: String,
    /// The provider's id of the maintenance; empty if it has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub event: String,
    /// Time of the provider's newest statement, if the source tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub updated: Option<Timestamp>,
    /// Boot of the node at the first notice; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
    /// Time since which the node is to be out of service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub out_since: Option<Timestamp>,
    /// True once the node was seen out of service since then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub was_out: bool,
    /// Time since which the notice is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vanished: Option<Timestamp>,
    /// Time since which the node is not in the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_gone: Option<Timestamp>,
    /// Evidence that the maintenance is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settled: Option<Settled>,
    /// Time at which the provider was told, by a mark on the node, that it may begin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told_to_begin: Option<Timestamp>,
}

/// Type of a maintenance, in NVSentinel's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum MaintenanceType {
    /// Announced in time.
    Scheduled,
    /// An emergency.
    Unscheduled,
}

// === impl State ===

impl State {
    /// All states.
    pub const ALL: [Self; 8] = [
        Self::Detected,
        Self::QuarantineTriggered,
        Self::MaintenanceOngoing,
        Self::MaintenanceComplete,
        Self::HealthyTriggered,
        Self::NodeReadinessTimeout,
        Self::Cancelled,
        Self::Error,
    ];

    /// Returns NVSentinel's word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Detected => "DETECTED",
            Self::QuarantineTriggered => "QUARANTINE_TRIGGERED",
            Self::MaintenanceOngoing => "MAINTENANCE_ONGOING",
            Self::MaintenanceComplete => "MAINTENANCE_COMPLETE",
            Self::HealthyTriggered => "HEALTHY_TRIGGERED",
            Self::NodeReadinessTimeout => "NODE_READINESS_TIMEOUT",
            Self::Cancelled => "CANCELLED",
            Self::Error => "ERROR",
        }
    }

    /// Returns whether nothing more will happen.
    pub fn is_last(self) -> bool {
        matches!(self, Self::HealthyTriggered | Self::Cancelled)
    }

    /// Returns whether a person is asked.
    pub fn asks_a_person(self) -> bool {
        matches!(self, Self::NodeReadinessTimeout | Self::Error)
    }

    /// Returns whether the maintenance counts as over.
    pub fn is_over(self) -> bool {
        self.is_last() || matches!(self, Self::MaintenanceComplete | Self::NodeReadinessTimeout)
    }
}

// === impl Record ===

impl Record {
    /// Creates the record of a notice.
    pub(crate) fn new(id: String, source: &str, notice: &Notice, now: Timestamp) -> Self {
        let (resource_type, resource_id) = notice.resource.clone();
        Self {
            id,
            provider: notice.provider.clone(),
            resource_type,
            resource_id,
            node: notice.node.clone(),
            maintenance_type: MaintenanceType::of(notice),
            kind: notice.kind,
            state: State::Detected,
            word: notice.word.clone(),
            phase: notice.phase,
            start: notice.start,
            end: notice.end,
            began: None,
            ended: None,
            received: now,
            changed: now,
            source: source.to_owned(),
            event: notice.event.clone(),
            updated: notice.updated,
            boot_id: String::new(),
            out_since: None,
            was_out: false,
            vanished: None,
            node_gone: None,
            settled: None,
            told_to_begin: None,
        }
    }

    /// Returns whether the provider may begin before the scheduled time, once the node is drained.
    pub fn may_begin(&self) -> bool {
        let is_here = self.vanished.is_none() && !self.state.is_over();
        is_here && self.phase == Phase::Scheduled && self.out_since.is_some()
    }

    /// Returns whether the maintenance does not wait for its window.
    pub fn is_emergency(&self) -> bool {
        self.maintenance_type == MaintenanceType::Unscheduled
    }

    /// Takes over what a notice says.
    pub(crate) fn update(&mut self, notice: &Notice) {
        self.maintenance_type = MaintenanceType::of(notice);
        self.kind = notice.kind;
        self.word.clone_from(&notice.word);
        self.phase = notice.phase;
        // A provider that has begun may say no longer when it was to begin.
        self.start = notice.start.or(self.start);
        self.end = notice.end.or(self.end);
        self.updated = notice.updated.or(self.updated);
        self.vanished = None;
    }

    /// Changes the state.
    pub(crate) fn enter(&mut self, state: State, now: Timestamp) {
        self.state = state;
        self.changed = now;
    }

    /// Records that the maintenance is over.
    pub(crate) fn settle(&mut self, state: State, by: Settled, now: Timestamp) {
        self.settled = Some(by);
        self.ended = self.ended.or(Some(now));
        self.enter(state, now);
    }
}

// === impl MaintenanceType ===

impl MaintenanceType {
    fn of(notice: &Notice) -> Self {
        if notice.emergency {
            Self::Unscheduled
        } else {
            Self::Scheduled
        }
    }
}
