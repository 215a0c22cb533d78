//! Faults that are not fatal, as Kubernetes Events tell of them: one for each event that
//! opened one, with how often it was reported.

use contract::keys;
use jiff::Timestamp;

use super::Limits;
use super::message;
use crate::fault::Fault;
use crate::reporter::Authority;

/// Most occurrences of one node: the newest.
pub const MAX_OCCURRENCES: usize = 64;
/// Most of these that users have reported.
const MAX_OF_USERS: usize = MAX_OCCURRENCES / 2;

/// The content of a Kubernetes Event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Occurrence {
    /// Its identity while it lasts: the id of the health event that opened it.
    pub key: String,
    /// Monitor that reported it.
    pub agent: String,
    /// Check that found it.
    pub check: String,
    /// The fault, in the grammar of a condition's message.
    pub message: String,
    /// The number of reports.
    pub count: u64,
    /// The time of the first observation.
    pub first_seen: Timestamp,
    /// The time of the last observation.
    pub last_seen: Timestamp,
    /// The time at which the newest report was accepted.
    pub accepted_at: Timestamp,
}

/// Returns the occurrences of these open faults, newest first.
pub fn occurrences(faults: &[Fault], limits: &Limits) -> Vec<Occurrence> {
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

/// Returns whether the faults of the occurrence `key` are open still, fatal by now or not.
pub fn is_open(faults: &[Fault], key: &str) -> bool {
    faults.iter().any(|fault| fault.opened_by == key)
}

/// Returns the reason that an Event gives.
pub fn reason(check: &str, healthy: bool) -> String {
    let suffix = if healthy {
        keys::REASON_HEALTHY
    } else {
        keys::REASON_NOT_HEALTHY
    };
    format!("{check}{suffix}")
}
