//! Updates of the records of events, and the statuses that they add.

use std::collections::BTreeMap;

use jiff::Timestamp;
use model::attempt::RemediationProgress;
use model::status::NodeQuarantined;
use model::status::eviction::Eviction;
use serde::{Deserialize, Serialize};

use super::Report;

/// An update of the records of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StatusUpdate {
    /// Status of one event. A record keeps an existing status, except the `Cancelled` of an
    /// earlier quarantine: the fault may have taken the node out again.
    Event {
        /// Id of the event.
        id: String,
        /// Status of the event.
        #[serde(rename = "word")]
        status: NodeQuarantined,
        /// Time when it was observed on the node.
        at: Timestamp,
        /// Progress of the drain at that time, written with the status.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        eviction: Option<Eviction>,
    },
    /// Recoveries, in order, that may or may not belong to a quarantine. A recovery belongs to
    /// one if the store has a fault of it as `Quarantined` or `AlreadyQuarantined`; the last
    /// such recovery has given the node back.
    Recoveries {
        /// Recoveries in order of arrival.
        recoveries: Vec<Report>,
        /// Time of their observation.
        at: Timestamp,
    },
    /// Progress of the drain, for all events of the node's newest quarantine whose eviction
    /// status is not [final](model::status::eviction::EvictionStatus::is_final).
    Drain {
        /// Name of the node.
        node: String,
        /// Progress of the drain.
        eviction: Eviction,
        /// Time when it was observed.
        at: Timestamp,
    },
    /// Progress of the remediation, for the events of the node's newest quarantine, except those
    /// that came after it.
    RemediationProgress {
        /// Name of the node.
        node: String,
        /// Progress of the remediation.
        repair: RemediationProgress,
    },
    /// `Cancelled` for all events of the node's newest quarantine, unless a recovery has ended
    /// it.
    Cancel {
        /// Name of the node.
        node: String,
    },
}

/// Statuses of events by id, each with the time of its decision.
pub type EventStatuses = BTreeMap<String, (NodeQuarantined, Option<Timestamp>)>;

/// A status for the record of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventStatus {
    /// Id of the event.
    pub id: String,
    /// Status of the event.
    pub status: NodeQuarantined,
    /// Time of the decision.
    pub at: Timestamp,
    /// Progress of the drain, for this event.
    pub eviction: Option<Eviction>,
}

// === impl StatusUpdate ===

impl StatusUpdate {
    pub(super) fn of_recoveries(recoveries: Vec<Report>, at: Timestamp) -> Option<Self> {
        (!recoveries.is_empty()).then_some(Self::Recoveries { recoveries, at })
    }

    /// Returns the update for the drain of a session that has ended, given its last progress.
    pub(super) fn end_of_drain(node: &str, drain: Option<Eviction>, at: Timestamp) -> Option<Self> {
        let done = drain.is_some_and(|drain| drain.status.is_final());
        (!done).then(|| Self::Drain {
            node: node.to_owned(),
            eviction: Eviction::cancelled(),
            at,
        })
    }

    /// Returns whether the update applies to all events of a quarantine.
    pub fn is_of_session(&self) -> bool {
        matches!(
            self,
            Self::Cancel { .. } | Self::Drain { .. } | Self::RemediationProgress { .. }
        )
    }

    pub(super) fn size(&self) -> usize {
        match self {
            Self::Recoveries { recoveries, .. } => recoveries.len(),
            Self::Event { .. }
            | Self::Drain { .. }
            | Self::RemediationProgress { .. }
            | Self::Cancel { .. } => 1,
        }
    }

    /// Returns the ids of the events whose statuses [`Self::statuses`] needs.
    pub fn ids(&self) -> Vec<&String> {
        match self {
            Self::Event { id, .. } => vec![id],
            Self::Recoveries { recoveries, .. } => recoveries
                .iter()
                .flat_map(|one| one.faults.iter().chain([&one.id]))
                .collect(),
            Self::Drain { .. } | Self::RemediationProgress { .. } | Self::Cancel { .. } => {
                Vec::new()
            }
        }
    }

    /// Returns the statuses that this update adds to the `known` ones.
    pub fn statuses(&self, known: &EventStatuses) -> Vec<EventStatus> {
        match self {
            Self::Event {
                id,
                status,
                at,
                eviction,
            } => {
                // Stored times have microseconds.
                let later = |since: &Timestamp| at.as_microsecond() > since.as_microsecond();
                let keeps = known.get(id).is_some_and(|(status, since)| {
                    let cancelled = *status == NodeQuarantined::Cancelled;
                    !(cancelled && since.as_ref().is_none_or(later))
                });
                let status = (!keeps).then(|| EventStatus {
                    id: id.clone(),
                    status: *status,
                    at: *at,
                    eviction: eviction.clone(),
                });
                status.into_iter().collect()
            }
            Self::Recoveries { recoveries, at } => {
                let counted = |id: &String| {
                    let status = known.get(id);
                    status.is_some_and(|(status, _)| status.is_open())
                };
                let mut counted: Vec<&Report> = recoveries
                    .iter()
                    .filter(|one| one.faults.iter().any(counted))
                    .collect();
                let last = counted.last().map(|one| one.id.clone());
                counted.retain(|one| !known.contains_key(&one.id));
                let status =
                    |one: &Report| NodeQuarantined::of_report(last.as_ref() == Some(&one.id));
                let statuses = counted.into_iter().map(|one| EventStatus {
                    id: one.id.clone(),
                    status: status(one),
                    at: *at,
                    eviction: Some(Eviction::of_recovery(status(one))),
                });
                statuses.collect()
            }
            Self::Drain { .. } | Self::RemediationProgress { .. } | Self::Cancel { .. } => {
                Vec::new()
            }
        }
    }
}
