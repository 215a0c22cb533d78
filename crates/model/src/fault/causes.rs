//! Causes: which open fault explains another one.
//!
//! A follower that was reported close to its primary asks for nothing while the primary is open
//! (`diagnosis/sympathy.rs` has the pairs). Once the primary has recovered, the follower is over
//! too; a report after that is judged on its own.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use contract::keys;
use diagnosis::sympathy::{self, Sympathy, SympathyScope};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::incidents::Incidents;
use super::{Fault, FaultBook};
use crate::topology::{Place, missing_labels};

/// Wait of a follower for its primary, from the follower's first observation: the two take
/// different ways to the controller.
pub const WAIT_FOR_PRIMARY: SignedDuration = SignedDuration::from_secs(2);

/// Primary that explains a fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cause {
    /// Node of the primary.
    pub node: String,
    /// Title of the primary.
    pub fault: String,
    /// Id of the event that opened the primary.
    pub opened_by: String,
    /// Time of the acceptance of the primary's recovery; `None` while it is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovered: Option<Timestamp>,
}

// === impl Cause ===

impl Cause {
    fn of(node: &str, primary: &Fault) -> Self {
        Self {
            node: node.to_owned(),
            fault: primary.title(),
            opened_by: primary.opened_by.clone(),
            recovered: None,
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of node {}", self.fault, self.node)
    }
}

// === impl FaultBook ===

impl FaultBook {
    /// Returns the NVLink domains in which faults of a node may explain others.
    pub(super) fn domains_of_primaries(&self, node: &str) -> BTreeSet<Place> {
        let primaries = self.faults(node).iter().filter(|fault| {
            fault.event.is_fatal && sympathy::may_be_primary(&fault.check, &fault.code)
        });
        primaries
            .filter_map(|fault| Place::nvlink_domain(&fault.event))
            .collect()
    }

    /// Adds the labels of a node that say where it is to its faults that lack them: at a start,
    /// events are read before the nodes. Returns the names of the nodes whose faults have changed.
    pub fn locate(&mut self, node: &str, labels: &BTreeMap<String, String>) -> BTreeSet<String> {
        let mut located = false;
        for fault in self.nodes.get_mut(node).into_iter().flatten() {
            let missing = missing_labels(&fault.event, labels);
            if missing.is_empty() {
                continue;
            }
            self.incidents.leave(fault);
            fault.event.metadata.extend(missing);
            fault.incident.clear();
            self.incidents.enter(fault);
            located = true;
        }
        if !located {
            return BTreeSet::new();
        }
        let mut changed = self.settle_causes(node, None, BTreeSet::new());
        changed.insert(node.to_owned());
        changed
    }

    /// Determines again the causes that may have changed with a node. `before` are the domains of
    /// its primaries before the change; `recovered` is the time of the change if that is a recovery.
    /// Returns the names of the other nodes with a change.
    pub(super) fn settle_causes(
        &mut self,
        node: &str,
        recovered: Option<Timestamp>,
        mut before: BTreeSet<Place>,
    ) -> BTreeSet<String> {
        before.extend(self.domains_of_primaries(node));
        let mut nodes = self.incidents.nodes_in(&before);
        nodes.insert(node.to_owned());
        let mut changed = BTreeSet::new();
        for name in nodes {
            let faults = self.faults(&name).iter();
            let causes: Vec<Option<Cause>> = faults
                .map(|fault| self.cause_of(&name, fault, (node, recovered)))
                .collect();
            let faults = self.nodes.get_mut(&name).into_iter().flatten();
            for (fault, cause) in faults.zip(causes) {
                if fault.cause != cause {
                    fault.cause = cause;
                    changed.insert(name.clone());
                }
            }
        }
        changed.remove(node);
        changed
    }

    /// Returns the cause of a fault of `node` after a change of a node, which is a recovery if it
    /// has a time.
    fn cause_of(
        &self,
        node: &str,
        fault: &Fault,
        (of, recovered): (&str, Option<Timestamp>),
    ) -> Option<Cause> {
        if !sympathy::concerns(&fault.check) {
            return None;
        }
        let open = self.open_cause_of(node, fault);
        let (None, Some(known)) = (&open, &fault.cause) else {
            return open;
        };
        let over = match known.recovered {
            Some(_) => known.clone(),
            // A primary that was evicted explains nothing.
            None if recovered.is_some() && of == known.node => Cause {
                recovered,
                ..known.clone()
            },
            None => return None,
        };
        let again = over.recovered.is_none_or(|at| fault.accepted_at > at);
        (!again).then_some(over)
    }

    /// Returns the open fault that explains a fault of `node`: first the one that the driver
    /// names, then the one of the first row of the table, then the oldest.
    fn open_cause_of(&self, node: &str, fault: &Fault) -> Option<Cause> {
        if let Some(code) = fault.named_cause() {
            let mut faults = self.faults(node).iter();
            let named = faults.find(|one| fault.is_named_to_follow(one, code));
            if let Some(primary) = named {
                return Some(Cause::of(node, primary));
            }
        }
        let rows = sympathy::sympathies().iter();
        let mut rows = rows.filter(|row| row.follower.is(&fault.check, &fault.code));
        rows.find_map(|row| self.primary_by(row, node, fault))
    }

    fn primary_by(&self, row: &Sympathy, node: &str, fault: &Fault) -> Option<Cause> {
        let mut nodes = BTreeSet::from([node.to_owned()]);
        let domain = Place::nvlink_domain(&fault.event);
        if let (SympathyScope::NvlinkDomain, Some(domain)) = (row.scope, domain.clone()) {
            nodes.extend(self.incidents.nodes_in(&BTreeSet::from([domain])));
        }
        let in_reach = |name: &str, one: &Fault| match row.scope {
            SympathyScope::Gpu => fault.is_of_gpu_of(one),
            SympathyScope::Node => true,
            SympathyScope::NvlinkDomain => {
                name == node || domain == Place::nvlink_domain(&one.event)
            }
        };
        let all = nodes.iter().flat_map(|name| {
            let faults = self.faults(name).iter();
            faults.map(move |fault| (name.as_str(), fault))
        });
        let primaries = all.filter(|(name, one)| {
            row.primary.is(&one.check, &one.code)
                && fault.may_follow(one)
                && in_reach(name, one)
                && fault.is_near(one, row.within)
        });
        let first = primaries.min_by_key(|(name, one)| (one.first_seen, *name, &one.opened_by));
        first.map(|(name, one)| Cause::of(name, one))
    }

    /// Makes the index of a book that was read, and drops causes whose primary it does not have:
    /// the part of a node may be lost.
    pub fn index(&mut self) {
        self.incidents = Incidents::default();
        for fault in self.nodes.values_mut().flatten() {
            self.incidents.enter(fault);
        }
        let causes = self.nodes.values().flatten();
        let causes = causes.filter_map(|fault| fault.cause.as_ref());
        let lost: Vec<Cause> = causes
            .filter(|cause| {
                let mut faults = self.faults(&cause.node).iter();
                let is_open = faults.any(|fault| Cause::of(&cause.node, fault) == **cause);
                cause.recovered.is_none() && !is_open
            })
            .cloned()
            .collect();
        for fault in self.nodes.values_mut().flatten() {
            if fault
                .cause
                .as_ref()
                .is_some_and(|cause| lost.contains(cause))
            {
                fault.cause = None;
            }
        }
    }
}

// === impl Fault ===

impl Fault {
    /// Returns until when the fault waits for its primary; `None` if it has one, or never waits.
    pub fn awaits_primary_until(&self) -> Option<Timestamp> {
        let may_wait = self.cause.is_none() && sympathy::may_follow(&self.check, &self.code);
        let until = self.first_seen.checked_add(WAIT_FOR_PRIMARY).ok();
        until.filter(|_| may_wait)
    }

    /// Returns whether another fault may be the primary of this one. What users report explains
    /// nothing that monitors report.
    fn may_follow(&self, primary: &Self) -> bool {
        primary.event.is_fatal && primary.authority >= self.authority
    }

    /// Returns the XID that the driver names as the cause of this fault.
    fn named_cause(&self) -> Option<u32> {
        let named = self.event.metadata.get(keys::META_CAUSED_BY_XID)?;
        named.parse().ok()
    }

    /// Returns whether another fault is the XID `code` of this fault's GPU.
    fn is_named_to_follow(&self, primary: &Self, code: u32) -> bool {
        primary.check == keys::CHECK_XID
            && sympathy::leading(&primary.code) == Some(code)
            && self.may_follow(primary)
            && self.is_of_gpu_of(primary)
    }

    /// Returns whether this fault and another one are of the same GPU.
    fn is_of_gpu_of(&self, other: &Self) -> bool {
        [keys::ENTITY_PCI, keys::ENTITY_GPU_UUID]
            .iter()
            .any(|kind| {
                let own = self.subject.name(kind);
                own.is_some() && own == other.subject.name(kind)
            })
    }

    /// Returns whether all reports of this fault are close to those of another one.
    fn is_near(&self, primary: &Self, within: SignedDuration) -> bool {
        primary.first_seen.duration_since(self.first_seen) <= within
            && self.last_seen.duration_since(primary.last_seen) <= within
    }
}

#[cfg(test)]
pub(super) mod tests;
