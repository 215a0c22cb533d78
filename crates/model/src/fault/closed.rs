//! The faults that were closed lately: a report that was made before, and comes after, opens
//! nothing.
//!
//! Reports are counted, and wait in outboxes; a recovery may come another way, and be here
//! first. The order of the feed is then not that in which things happened. Where it is (an
//! agent sends in order, also to another store) the feed says so by its times, too.

use std::collections::BTreeMap;

use contract::{HealthEvent, keys};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{Fault, MAX_FAULTY_NODES, Subject, heals};
use crate::event::Record;
use crate::reporter::Authority;

/// Most faults of a node and authority that are remembered after they were closed: the GPUs, switches and NICs
/// of a large machine. The oldest go first; a late report of such a one counts.
pub const MAX_CLOSED_PER_NODE: usize = 64;
/// Most by which a report may be older than the recovery that is held against it: as long as an
/// agent keeps what it has delivered. What is further apart says that a clock was wrong, which
/// must not hide a fault.
pub const CLOSED_FOR: SignedDuration = SignedDuration::from_hours(24);
/// Least by which a report that is no count has to be older than the recovery. What an agent says of
/// the age of its events is as exact as its requests are fast, and a fault that it sends behind
/// a recovery is a new one. It waits at most so long for an answer.
pub const REQUESTS_APART: SignedDuration = SignedDuration::from_secs(10);

/// The faults that were closed lately, by node, in the order in which they were.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct ClosedFaults {
    nodes: BTreeMap<String, Vec<Closed>>,
}

/// A fault that was closed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Closed {
    agent: String,
    check: String,
    authority: Authority,
    code: String,
    subject: Subject,
    /// The time up to which accepted reports are from before the end of the fault: when the event
    /// that closed it was accepted, or its own last report where the machine is gone.
    at: Timestamp,
    /// The boot that closed it: what was found in it is newer, whatever the clock said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot_id: Option<String>,
}

// === impl ClosedFaults ===

impl ClosedFaults {
    /// Notes that `by` has closed `fault`.
    pub(super) fn note(&mut self, fault: Fault, by: &Record) {
        let node = &by.event.node_name;
        if !self.nodes.contains_key(node) && self.nodes.len() >= MAX_FAULTY_NODES {
            return;
        }
        let metadata = &by.event.metadata;
        let boot_id = metadata
            .contains_key(keys::META_REBOOT)
            .then(|| metadata.get(keys::META_BOOT_ID).cloned());
        // Where a machine is gone, what is newer than its last report is of another one.
        let gone = metadata
            .contains_key(keys::META_GONE_AFTER)
            .then_some(fault.accepted_at);
        let closed = self.nodes.entry(node.clone()).or_default();
        closed.retain(|one| !one.is(&fault.event, &fault.code, &fault.subject));
        let of_authority = |one: &Closed| one.authority == fault.authority;
        if closed.iter().filter(|one| of_authority(one)).count() >= MAX_CLOSED_PER_NODE {
            let oldest = closed.iter().position(of_authority);
            oldest.map(|oldest| closed.remove(oldest));
        }
        closed.push(Closed {
            agent: fault.agent,
            check: fault.check,
            authority: fault.authority,
            code: fault.code,
            subject: fault.subject,
            at: gone.unwrap_or(by.created_at).min(by.created_at),
            boot_id: boot_id.flatten(),
        });
    }

    /// Takes in a recovery of faults that are closed already: it holds against reports from before
    /// it, too, one of which may not have come yet.
    pub(super) fn healed_again(&mut self, by: &Record) {
        let event = &by.event;
        let special = [keys::META_REBOOT, keys::META_GONE_AFTER];
        if special.iter().any(|key| event.metadata.contains_key(*key)) {
            return;
        }
        for one in self.nodes.get_mut(&event.node_name).into_iter().flatten() {
            let healed = one.authority <= Authority::of(event)
                && heals(event, &one.agent, &one.check, &one.code, &one.subject);
            if healed && one.at < by.created_at {
                (one.at, one.boot_id) = (by.created_at, None);
            }
        }
    }

    /// Returns whether what `report` says of a code and a subject is from before the recovery that
    /// has closed the fault.
    pub(super) fn after(&self, report: &Record, code: &str, subject: &Subject) -> bool {
        let event = &report.event;
        let closed = self.nodes.get(&event.node_name).into_iter().flatten();
        closed
            .filter(|one| one.is(event, code, subject))
            .any(|one| one.after(report))
    }

    /// Returns what is remembered of a node.
    pub(super) fn of(&self, node: &str) -> &[Closed] {
        self.nodes.get(node).map_or(&[], Vec::as_slice)
    }

    /// Takes what was saved of a node back, in place of what is there.
    pub(super) fn restore(&mut self, node: &str, closed: Vec<Closed>) {
        if closed.is_empty() {
            self.nodes.remove(node);
        } else {
            self.nodes.insert(node.to_owned(), closed);
        }
    }
}

// === impl Closed ===

impl Closed {
    /// Returns whether it is what an event reports by a code and a subject.
    fn is(&self, event: &HealthEvent, code: &str, subject: &Subject) -> bool {
        self.code == code
            && self.agent == event.agent
            && self.check == event.check_name
            && self.subject.same(subject)
            && self.authority == Authority::of(event)
    }

    fn after(&self, report: &Record) -> bool {
        let metadata = &report.event.metadata;
        let of_this_boot =
            self.boot_id.is_some() && metadata.get(keys::META_BOOT_ID) == self.boot_id.as_ref();
        let older = self.at.duration_since(report.created_at);
        !of_this_boot && may_be_before(&report.event, older) && older <= CLOSED_FOR
    }
}

/// Returns whether a report that was accepted so much earlier than a recovery may be from before
/// it.
pub fn may_be_before(report: &HealthEvent, older: SignedDuration) -> bool {
    let least = if report.metadata.contains_key(keys::META_COUNT) {
        SignedDuration::ZERO
    } else {
        REQUESTS_APART
    };
    older > least
}
