//! The conditions of a node, as a projection of its open faults.
//!
//! A check with an open fatal fault has a condition of its own name, `True` where it is
//! broken, in NVSentinel's grammar, and so has a host engine of DCGM that does not answer; beside them [`keys::CONDITION_GPU_HEALTHY`] sums all up.
//! What a condition says always follows from the whole set of open faults: what the limit of
//! its message cuts off is not forgotten, and what stands on the node is never read back.
//!
//! ```text
//! open faults, checks heard of --+
//!                                +-> changes -> one patch of status.conditions, or none
//! conditions on the node --------+
//! ```
//!
//! Beside them stand those of its drain, which follow from its session.

mod drain;
mod message;
mod occurrence;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use contract::keys;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::fault::Fault;
use crate::node::NodeView;
use crate::reporter::Authority;

pub use message::{Limits, LimitsError};
pub use occurrence::{MAX_OCCURRENCES, Occurrence, is_open, occurrences, reason};

/// Most conditions of checks on one node. Names of checks come from senders, and no condition
/// is ever removed.
pub const MAX_CONDITIONS: usize = 64;
/// Conditions up to which checks of users get one too; the rest is for the monitors.
const MAX_WITH_USERS: usize = MAX_CONDITIONS / 2;

/// Conditions that are Kubernetes' own: a check of such a name is not written over them.
const KUBERNETES_OWN: [&str; 11] = [
    "Ready",
    "MemoryPressure",
    "DiskPressure",
    "PIDPressure",
    "NetworkUnavailable",
    "OutOfDisk",
    "GracefulNodeShutdownInProgress",
    "DrainInProgress",
    "Drained",
    "MaintenancePlanned",
    "MaintenanceInProgress",
];
/// The checks whose faults have a condition although they are not fatal: alerts of NVSentinel's users
/// look at it, and no node goes out because of it.
const TOLD_THOUGH_NOT_FATAL: [&str; 1] = [keys::CHECK_DCGM_CONNECTIVITY];
/// Reason and message of the summary where no fatal fault is open.
const NO_FATAL_FAULTS: (&str, &str) = ("NoFatalFaults", "No fatal fault is open");
/// Reason of the summary where the name of the check does not fit one.
const UNNAMED_CHECK: &str = "HealthCheckFailed";

/// The settings of what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Sizes of a message.
    pub limits: Limits,
    /// True if [`keys::CONDITION_GPU_HEALTHY`] is written too.
    pub summary: bool,
}

/// A condition as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    /// `type`: name of the check.
    pub kind: String,
    /// `status`: `True` or `False`. Of a check `True` is bad, of the summary good.
    pub status: bool,
    /// `reason`.
    pub reason: String,
    /// `message`.
    pub message: String,
}

/// A condition to be written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConditionChange {
    /// The condition as it should be.
    pub condition: Condition,
    /// True if its status differs from what is on the node: then the time of the transition is
    /// written with it.
    pub transition: bool,
}

/// A condition as it stands on a node.
struct Observed<'a> {
    status: &'a str,
    reason: &'a str,
    message: &'a str,
}

/// Returns the conditions to write on `node`, so that they say what is known; empty where they do.
///
/// `faults` are the node's open ones, `heard` the checks that have spoken of it. A check that
/// is well gets no condition where it has none: that it was heard of is no news.
pub fn changes<'a>(
    faults: &[Fault],
    heard: impl Iterator<Item = &'a str>,
    node: &NodeView,
    options: &Options,
) -> Vec<ConditionChange> {
    let mut heard = heard.peekable();
    let drain = drain::of_node(node);
    let about_drain = drain.is_some() || node.tells_of_drain;
    if faults.is_empty() && heard.peek().is_none() && !about_drain {
        return Vec::new();
    }
    let object = node.object();
    let on_node = observed(&object);
    let mut broken: BTreeMap<&str, Vec<&Fault>> = BTreeMap::new();
    let is_told = |fault: &&Fault| {
        fault.event.is_fatal || TOLD_THOUGH_NOT_FATAL.contains(&fault.check.as_str())
    };
    for fault in faults.iter().filter(is_told) {
        broken.entry(&fault.check).or_default().push(fault);
    }
    for faults in broken.values_mut() {
        // A message has little room: what our own monitors say comes first.
        faults.sort_by_key(|fault| Reverse(fault.authority));
    }
    let mut wanted = of_broken(&broken, &on_node, &options.limits);
    let mut known = !faults.is_empty();
    for check in heard {
        known = true;
        let on_node = on_node.get(check);
        if broken.contains_key(check) || on_node.is_none() || !is_free(check, on_node) {
            continue;
        }
        wanted.push(Condition {
            kind: check.to_owned(),
            status: false,
            reason: reason(check, true),
            message: keys::NO_HEALTH_FAILURES.to_owned(),
        });
    }
    if options.summary && known {
        wanted.push(summary(faults, &options.limits));
    }
    if about_drain {
        let stands = |kind: &str| on_node.get(kind).map(drain::stands);
        wanted.extend(drain::conditions(drain, stands));
    }
    let change = |condition: Condition| {
        let found = on_node.get(condition.kind.as_str());
        let transition = found.is_none_or(|found| found.status != status_name(condition.status));
        let same = found.is_some_and(|found| {
            found.reason == condition.reason && found.message == condition.message
        });
        (transition || !same).then_some(ConditionChange {
            condition,
            transition,
        })
    };
    wanted.into_iter().filter_map(change).collect()
}

/// Returns the conditions of the checks that are broken, as far as there is room for them.
fn of_broken(
    broken: &BTreeMap<&str, Vec<&Fault>>,
    on_node: &BTreeMap<&str, Observed<'_>>,
    limits: &Limits,
) -> Vec<Condition> {
    let of_checks = on_node
        .iter()
        .filter(|(kind, found)| is_of_check(kind, found));
    let mut count = of_checks.count();
    let is_users = |faults: &[&Fault]| faults.iter().all(|one| one.authority == Authority::User);
    let (users, monitors): (Vec<_>, Vec<_>) =
        broken.iter().partition(|(_, faults)| is_users(faults));
    let monitors = monitors.into_iter().map(|one| (one, MAX_CONDITIONS));
    let users = users.into_iter().map(|one| (one, MAX_WITH_USERS));
    let mut wanted = Vec::new();
    for ((check, faults), most) in monitors.chain(users) {
        let is_new = !on_node.contains_key(check);
        if !is_free(check, on_node.get(check)) || (is_new && count >= most) {
            continue;
        }
        count += usize::from(is_new);
        wanted.push(Condition {
            kind: (*check).to_owned(),
            status: true,
            reason: reason(check, false),
            message: message::render(faults, limits),
        });
    }
    wanted
}

/// Returns the word of a status.
pub fn status_name(status: bool) -> &'static str {
    if status { "True" } else { "False" }
}

/// Returns whether a check's name may be that of a condition, or part of a reason.
fn is_name(check: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.' | b'/');
    !check.is_empty() && check.bytes().all(allowed)
}

/// Returns whether the condition of this name is the check's: nobody else's, as far as can be seen.
fn is_free(check: &str, on_node: Option<&Observed<'_>>) -> bool {
    is_name(check)
        && check != keys::CONDITION_GPU_HEALTHY
        && !KUBERNETES_OWN.contains(&check)
        && on_node.is_none_or(|found| is_of_check(check, found))
}

/// Returns whether a condition is in the grammar: written by us, or by NVSentinel.
fn is_of_check(kind: &str, found: &Observed<'_>) -> bool {
    [keys::REASON_NOT_HEALTHY, keys::REASON_HEALTHY]
        .iter()
        .any(|suffix| found.reason.strip_suffix(suffix) == Some(kind))
}

fn summary(faults: &[Fault], limits: &Limits) -> Condition {
    let mut fatal: Vec<&Fault> = faults.iter().filter(|fault| fault.event.is_fatal).collect();
    fatal.sort_by(|a, b| Fault::by_gravity(a, b));
    let (status, reason, message) = match fatal.as_slice() {
        [] => {
            let (reason, message) = NO_FATAL_FAULTS;
            (true, reason.to_owned(), message.to_owned())
        }
        [worst, others @ ..] => {
            let reason = if is_name(&worst.check) {
                worst.check.as_str()
            } else {
                UNNAMED_CHECK
            };
            let text = message::in_words(worst, others.len(), limits);
            (false, reason.to_owned(), text)
        }
    };
    Condition {
        kind: keys::CONDITION_GPU_HEALTHY.to_owned(),
        status,
        reason,
        message,
    }
}

/// Returns the conditions of a node's object. What is malformed is as good as absent.
fn observed(node: &Value) -> BTreeMap<&str, Observed<'_>> {
    let list = node["status"]["conditions"].as_array();
    list.into_iter()
        .flatten()
        .filter_map(|one| {
            let found = Observed {
                status: one["status"].as_str().unwrap_or_default(),
                reason: one["reason"].as_str().unwrap_or_default(),
                message: one["message"].as_str().unwrap_or_default(),
            };
            Some((one["type"].as_str()?, found))
        })
        .collect()
}

#[cfg(test)]
mod tests;
