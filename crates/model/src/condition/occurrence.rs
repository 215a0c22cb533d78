//! Kubernetes Events for faults that are not fatal: one Event for each health event that opened
//! such faults, with the number of reports.

use contract::keys;
use jiff::Timestamp;

use super::MessageLimits;
use super::message;
use crate::fault::Fault;
use crate::reporter::Authority;

/// Most occurrences of one node. Older ones are dropped.
pub const MAX_OCCURRENCES: usize = 64;
/// Most occurrences of one node that users reported.
const MAX_OF_USERS: usize = MAX_OCCURRENCES / 2;

/// Content of a Kubernetes Event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Occurrence {
    /// Id of the health event that opened the faults; identifies the Event while they are open.
    pub key: String,
    /// Monitor that reported the faults.
    pub agent: String,
    /// Check that found the faults.
    pub check: String,
    /// Faults in the grammar of a condition's message.
    pub message: String,
    /// Number of reports of the faults.
    pub count: u64,
    /// Time of the first observation.
    pub first_seen: Timestamp,
    /// Time of the last observation.
    pub last_seen: Timestamp,
    /// Time when the newest report was accepted.
    pub accepted_at: Timestamp,
}

/// Returns the occurrences of the open faults, newest first.
pub fn occurrences(faults: &[Fault], limits: &MessageLimits) -> Vec<Occurrence> {
    let mut groups: Vec<(&str, Vec<&Fault>)> = Vec::new();
    for fault in faults.iter().filter(|fault| !fault.event.is_fatal) {
        let key = fault.opened_by.as_str();
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, group)) => group.push(fault),
            None => groups.push((key, vec![fault])),
        }
    }
    let newest = |group: &[&Fault]| group.iter().map(|fault| fault.accepted_at).max();
    groups.sort_by_key(|(_, group)| std::cmp::Reverse(newest(group)));
    let mut of_users = 0;
    groups.retain(|(_, group)| {
        let is_users = group.iter().all(|fault| fault.authority == Authority::User);
        of_users += usize::from(is_users);
        !is_users || of_users <= MAX_OF_USERS
    });
    groups.truncate(MAX_OCCURRENCES);
    let occurrence = |(key, group): (&str, Vec<&Fault>)| {
        let first = group.first()?;
        Some(Occurrence {
            key: key.to_owned(),
            agent: first.agent.clone(),
            check: first.check.clone(),
            message: message::render(&group, limits),
            count: group.iter().map(|fault| fault.count).max()?,
            first_seen: group.iter().map(|fault| fault.first_seen).min()?,
            last_seen: group.iter().map(|fault| fault.last_seen).max()?,
            accepted_at: newest(&group)?,
        })
    };
    groups.into_iter().filter_map(occurrence).collect()
}

/// Returns whether faults of the occurrence `key` are still open, even if they are fatal by
/// now.
pub fn is_open(faults: &[Fault], key: &str) -> bool {
    faults.iter().any(|fault| fault.opened_by == key)
}

/// Returns the `reason` of an Event or condition for a check.
pub fn reason(check: &str, healthy: bool) -> String {
    let suffix = if healthy {
        keys::REASON_HEALTHY
    } else {
        keys::REASON_NOT_HEALTHY
    };
    format!("{check}{suffix}")
}
