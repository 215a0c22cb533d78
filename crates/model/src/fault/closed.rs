//! Recently closed faults. A report that was made before a fault was closed, but arrives after,
//! must not open the fault again.
//!
//! Counted reports and reports in outboxes are delayed, while a recovery may take another path
//! and arrive first. The order of the feed is then not the order of events. If it is (an agent
//! sends in order, also to another store), the acceptance times in the feed agree with it.

use std::collections::BTreeMap;

use contract::{HealthEvent, keys};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{Fault, MAX_FAULTY_NODES, Subject, heals};
use crate::event::EventRecord;
use crate::reporter::Authority;

/// Most closed faults that are remembered for one node and authority: the GPUs, switches and
/// NICs of a large machine. The oldest are forgotten first; a late report of a forgotten one
/// opens a fault.
pub const MAX_CLOSED_PER_NODE: usize = 64;
/// Longest time between a report and a later recovery for the recovery to suppress the report:
/// as long as an agent keeps delivered events. A larger difference indicates a wrong clock,
/// which must not hide a fault.
pub const CLOSED_FOR: SignedDuration = SignedDuration::from_hours(24);
/// Shortest time between a report that is not a count and a later recovery for the recovery to
/// suppress the report. The age that an agent gives for its events is inexact by the time of a
/// request, and a fault that it sends after a recovery is a new one. An agent waits at most
/// this long for a response.
pub const REQUESTS_APART: SignedDuration = SignedDuration::from_secs(10);

/// Recently closed faults by node, in the order of their closing.
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
    /// Reports accepted up to this time belong to the closed fault: the acceptance time of the
    /// event that closed it, or the fault's last report if the machine is gone.
    at: Timestamp,
    /// Boot that closed the fault. Reports from this boot are newer, whatever their clock said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot_id: Option<String>,
}

// === impl ClosedFaults ===

impl ClosedFaults {
    /// Remembers that the event `by` closed `fault`.
    pub(super) fn note(&mut self, fault: Fault, by: &EventRecord) {
        let node = &by.event.node_name;
        if !self.nodes.contains_key(node) && self.nodes.len() >= MAX_FAULTY_NODES {
            return;
        }
        let metadata = &by.event.metadata;
        let boot_id = metadata
            .contains_key(keys::META_REBOOT)
            .then(|| metadata.get(keys::META_BOOT_ID).cloned());
        // If the machine is gone, reports newer than the fault's last one are about another
        // machine.
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

    /// Records a recovery of faults that are already closed. It also suppresses earlier reports
    /// that are still on their way.
    pub(super) fn healed_again(&mut self, by: &EventRecord) {
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

    /// Returns whether `report` was made before the recovery that closed the fault with this
    /// code and subject.
    pub(super) fn after(&self, report: &EventRecord, code: &str, subject: &Subject) -> bool {
        let event = &report.event;
        let closed = self.nodes.get(&event.node_name).into_iter().flatten();
        closed
            .filter(|one| one.is(event, code, subject))
            .any(|one| one.after(report))
    }

    /// Returns the remembered faults of a node.
    pub(super) fn of(&self, node: &str) -> &[Closed] {
        self.nodes.get(node).map_or(&[], Vec::as_slice)
    }

    /// Replaces the remembered faults of a node with saved ones.
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
    /// Returns whether the event reports this fault under the given code and subject.
    fn is(&self, event: &HealthEvent, code: &str, subject: &Subject) -> bool {
        self.code == code
            && self.agent == event.agent
            && self.check == event.check_name
            && self.subject.same(subject)
            && self.authority == Authority::of(event)
    }

    fn after(&self, report: &EventRecord) -> bool {
        let metadata = &report.event.metadata;
        let of_this_boot =
            self.boot_id.is_some() && metadata.get(keys::META_BOOT_ID) == self.boot_id.as_ref();
        let older = self.at.duration_since(report.created_at);
        !of_this_boot && may_be_before(&report.event, older) && older <= CLOSED_FOR
    }
}

/// Returns whether a report that was accepted `older` before a recovery may have been made
/// before it.
pub fn may_be_before(report: &HealthEvent, older: SignedDuration) -> bool {
    let least = if report.metadata.contains_key(keys::META_COUNT) {
        SignedDuration::ZERO
    } else {
        REQUESTS_APART
    };
    older > least
}
