//! The conditions of a node, derived from its open faults.
//!
//! A check with an open fatal fault has a condition of its own name, with status `True` and a
//! message in NVSentinel's grammar. So has a DCGM host engine that does not answer.
//! [`keys::CONDITION_GPU_HEALTHY`] sums up all faults. A condition always follows from the
//! whole set of open faults: text beyond the message limit is only hidden, and conditions on
//! the node are never parsed back into faults.
//!
//! ```text
//! open faults, reported checks ---+
//!                                +-> changes -> one patch of status.conditions, or none
//! conditions on the node --------+
//! ```
//!
//! A further pair of conditions shows the node's drain. It follows from the session on the
//! node.

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

pub use message::{LimitsError, MessageLimits};
pub use occurrence::{MAX_OCCURRENCES, Occurrence, is_open, occurrences, reason};

/// Most conditions of checks on one node. Senders choose the names of checks, and no condition
/// is ever removed.
pub const MAX_CONDITIONS: usize = 64;
/// Number of conditions beyond which users' checks get no new one. The rest of the room is
/// reserved for monitors.
const MAX_WITH_USERS: usize = MAX_CONDITIONS / 2;

/// Conditions owned by Kubernetes. A check of the same name never overwrites one.
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
/// Checks whose faults get a condition although they are not fatal: alerts of NVSentinel's
/// users depend on it. No node leaves service because of them.
const SHOWN_THOUGH_NOT_FATAL: [&str; 1] = [keys::CHECK_DCGM_CONNECTIVITY];
/// Reason and message of the summary if no fatal fault is open.
const NO_FATAL_FAULTS: (&str, &str) = ("NoFatalFaults", "No fatal fault is open");
/// Reason of the summary if the name of the check cannot be part of a reason.
const UNNAMED_CHECK: &str = "HealthCheckFailed";

/// Settings for the conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Limits of a condition's message.
    pub limits: MessageLimits,
    /// True if [`keys::CONDITION_GPU_HEALTHY`] is written as well.
    pub summary: bool,
}

/// Desired state of a condition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCondition {
    /// `type`: name of the check, or of the summary.
    pub kind: String,
    /// `status`: written as `True` or `False`. `True` means broken for a check, and healthy for
    /// the summary.
    pub status: bool,
    /// `reason`: in the grammar of NVSentinel for a check.
    pub reason: String,
    /// `message`: the open faults, or that there are none.
    pub message: String,
}

/// A condition to write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConditionChange {
    /// Desired state of the condition.
    pub condition: NodeCondition,
    /// True if the status differs from the one on the node. The transition time is updated
    /// then.
    pub transition: bool,
}

/// A condition as found on a node.
struct Observed<'a> {
    status: &'a str,
    reason: &'a str,
    message: &'a str,
}

/// Returns the conditions to write on `node`. Empty if the node already shows the state of its
/// faults.
///
/// `faults` are the open faults of the node, `reported` the checks that have reported about it.
/// A healthy check without a condition gets none.
pub fn changes<'a>(
    faults: &[Fault],
    reported: impl Iterator<Item = &'a str>,
    node: &NodeView,
    options: &Options,
) -> Vec<ConditionChange> {
    let mut reported = reported.peekable();
    let drain = drain::of_node(node);
    let concerns_drain = drain.is_some() || node.has_drain_condition;
    if faults.is_empty() && reported.peek().is_none() && !concerns_drain {
        return Vec::new();
    }
    let object = node.object();
    let on_node = observed(&object);
    let mut broken: BTreeMap<&str, Vec<&Fault>> = BTreeMap::new();
    let is_shown = |fault: &&Fault| {
        fault.event.is_fatal || SHOWN_THOUGH_NOT_FATAL.contains(&fault.check.as_str())
    };
    for fault in faults.iter().filter(is_shown) {
        broken.entry(&fault.check).or_default().push(fault);
    }
    for faults in broken.values_mut() {
        // Faults of our own monitors come first: a message has little room.
        faults.sort_by_key(|fault| Reverse(fault.authority));
    }
    let mut wanted = of_broken(&broken, &on_node, &options.limits);
    let mut known = !faults.is_empty();
    for check in reported {
        known = true;
        let on_node = on_node.get(check);
        if broken.contains_key(check) || on_node.is_none() || !is_free(check, on_node) {
            continue;
        }
        wanted.push(NodeCondition {
            kind: check.to_owned(),
            status: false,
            reason: reason(check, true),
            message: keys::NO_HEALTH_FAILURES.to_owned(),
        });
    }
    if options.summary && known {
        wanted.push(summary(faults, &options.limits));
    }
    if concerns_drain {
        let stands = |kind: &str| on_node.get(kind).map(drain::stands);
        wanted.extend(drain::conditions(drain, stands));
    }
    let change = |condition: NodeCondition| {
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

/// Returns the conditions of broken checks, within the limits on their number.
fn of_broken(
    broken: &BTreeMap<&str, Vec<&Fault>>,
    on_node: &BTreeMap<&str, Observed<'_>>,
    limits: &MessageLimits,
) -> Vec<NodeCondition> {
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
        wanted.push(NodeCondition {
            kind: (*check).to_owned(),
            status: true,
            reason: reason(check, false),
            message: message::render(faults, limits),
        });
    }
    wanted
}

/// Returns the spelling of a condition's status.
pub fn status_name(status: bool) -> &'static str {
    if status { "True" } else { "False" }
}

/// Returns whether a check's name can be the type of a condition and part of a reason.
fn is_name(check: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.' | b'/');
    !check.is_empty() && check.bytes().all(allowed)
}

/// Returns whether the condition named `check` is free to be written: it is not another
/// component's.
fn is_free(check: &str, on_node: Option<&Observed<'_>>) -> bool {
    is_name(check)
        && check != keys::CONDITION_GPU_HEALTHY
        && !KUBERNETES_OWN.contains(&check)
        && on_node.is_none_or(|found| is_of_check(check, found))
}

/// Returns whether a condition follows the grammar, so it was written by gpuwarden or
/// NVSentinel.
fn is_of_check(kind: &str, found: &Observed<'_>) -> bool {
    [keys::REASON_NOT_HEALTHY, keys::REASON_HEALTHY]
        .iter()
        .any(|suffix| found.reason.strip_suffix(suffix) == Some(kind))
}

/// Returns the positions in `status.conditions` of the conditions of this module: those in the
/// grammar, which NVSentinel's are too, the summary, and those of our drains.
pub fn written(node: &Value) -> Vec<usize> {
    let list = node["status"]["conditions"].as_array();
    let is_written = |one: &Value| {
        let text = |key: &str| one[key].as_str().unwrap_or_default();
        let found = Observed {
            status: text("status"),
            reason: text("reason"),
            message: text("message"),
        };
        let kind = text("type");
        let is_drain = found.reason == keys::REASON_DRAIN && KUBERNETES_OWN.contains(&kind);
        is_of_check(kind, &found) || kind == keys::CONDITION_GPU_HEALTHY || is_drain
    };
    let list = list.into_iter().flatten().enumerate();
    list.filter(|(_, one)| is_written(one))
        .map(|(index, _)| index)
        .collect()
}

fn summary(faults: &[Fault], limits: &MessageLimits) -> NodeCondition {
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
    NodeCondition {
        kind: keys::CONDITION_GPU_HEALTHY.to_owned(),
        status,
        reason,
        message,
    }
}

/// Returns the conditions in the object of a node. Malformed ones count as absent.
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
