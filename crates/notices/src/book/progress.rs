//! The next state of one maintenance, by its notice, its node and the clock.

use jiff::{SignedDuration, Timestamp};

use super::{NodeState, Settings};
use crate::notice::Phase;
use crate::record::{Record, Settled, State};

/// Advances a maintenance that is not over for good. `node` is `None` if the cluster does not have
/// the node.
pub(super) fn advance(
    record: &mut Record,
    node: Option<NodeState>,
    settings: &Settings,
    now: Timestamp,
) {
    let is_gone = node.is_none();
    let node = node.unwrap_or_default();
    if record.boot_id.is_empty() && record.vanished.is_none() {
        record.boot_id.clone_from(&node.boot_id);
    }
    record.was_out |= record.out_since.is_some() && node.is_out;
    record.node_gone = is_gone.then(|| record.node_gone.unwrap_or(now));
    if record.phase == Phase::Cancelled {
        record.settle(State::Cancelled, Settled::Provider, now);
        return;
    }
    if record
        .node_gone
        .is_some_and(|since| passed(since, settings.readiness, now))
    {
        record.settle(State::HealthyTriggered, Settled::NodeGone, now);
        return;
    }
    let may_be_over = record.vanished.is_some() || record.settled.is_some();
    if may_be_over && record.was_out && !node.is_out && !is_gone {
        record.settle(State::HealthyTriggered, Settled::Person, now);
        return;
    }
    if !record.state.is_over() && !is_gone {
        end(record, &node, settings, now);
    }
    if !record.state.is_over() && !is_gone {
        begin(record, settings, now);
    }
    if matches!(
        record.state,
        State::MaintenanceComplete | State::NodeReadinessTimeout
    ) {
        give_back(record, &node, settings, now);
    }
}

/// Finds out whether the maintenance is over.
fn end(record: &mut Record, node: &NodeState, settings: &Settings, now: Timestamp) {
    if record.phase == Phase::Completed {
        record.settle(State::MaintenanceComplete, Settled::Provider, now);
        return;
    }
    let Some(vanished) = record.vanished else {
        return;
    };
    if !passed(vanished, settings.missing, now) {
        return;
    }
    let known = !record.boot_id.is_empty() && !node.boot_id.is_empty();
    let has_booted = known && record.boot_id != node.boot_id;
    let is_due =
        record.phase == Phase::Ongoing || record.start.is_none_or(|start| start <= vanished);
    if has_booted {
        record.settle(State::MaintenanceComplete, Settled::BootId, now);
    } else if !is_due || record.out_since.is_none() {
        record.settle(State::Cancelled, Settled::Withdrawn, now);
    } else if record.end.is_some_and(|end| end <= now) || !record.kind.boots() {
        // Such a maintenance leaves no other trace.
        record.settle(State::MaintenanceComplete, Settled::EndTime, now);
    } else if passed(vanished, settings.readiness, now) && record.state != State::Error {
        record.enter(State::Error, now);
    }
}

/// Takes the node out in time, and back where the maintenance is put off.
fn begin(record: &mut Record, settings: &Settings, now: Timestamp) {
    let is_ongoing = record.phase == Phase::Ongoing;
    let starts = record.start;
    let begins = |limit| starts.is_none_or(|start| start.duration_since(now) <= limit);
    let is_urgent = is_ongoing || record.is_emergency();
    if record.out_since.is_none() {
        // A notice that is missing may be withdrawn.
        if record.vanished.is_none() && (is_urgent || begins(settings.limit)) {
            record.out_since = Some(now);
            record.enter(State::QuarantineTriggered, now);
        }
    } else if !is_urgent && !begins(settings.limit * 2) {
        // It would leave again at once if it were put off by less.
        (record.out_since, record.began, record.was_out) = (None, None, false);
        record.enter(State::Detected, now);
    }
    if record.state == State::QuarantineTriggered && is_ongoing {
        record.began = record.began.or(Some(now));
        record.enter(State::MaintenanceOngoing, now);
    }
}

/// Gives the node back once the delay is over and the node is ready.
fn give_back(record: &mut Record, node: &NodeState, settings: &Settings, now: Timestamp) {
    let ended = record.ended.unwrap_or(now);
    let in_time = settings.delay + settings.readiness;
    if !passed(ended, settings.delay, now) {
        return;
    }
    if node.ready {
        record.enter(State::HealthyTriggered, now);
    } else if record.state == State::MaintenanceComplete && passed(ended, in_time, now) {
        record.enter(State::NodeReadinessTimeout, now);
    }
}

fn passed(since: Timestamp, time: SignedDuration, now: Timestamp) -> bool {
    now.duration_since(since) >= time
}
