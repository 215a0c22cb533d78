//! Closing of faults whose machine is gone: another machine has the node's name, or the cluster
//! has been without the node for long; of conclusions that a person has dismissed; and of faults
//! whose cause has recovered.
//!
//! gpuwarden closes them by events of its own in the store, so that every later reader of the
//! feed (a restart, `explain`, another consumer) arrives at the same fault book.
//! `fault/machine.rs` tells two machines apart.

use contract::HealthEvent;
use contract::keys::META_CONCLUSION;
use jiff::SignedDuration;
use model::event::MAX_EVENTS;
use model::fault::MAX_OPEN_FAULTS_PER_NODE;
use model::time::later;

use super::Look;
use crate::Purpose;

/// Minimum absence of a node, as observed by this process, before its old faults are dropped: a
/// deleted node object comes back with the next start of the kubelet.
const MIN_ABSENCE: SignedDuration = SignedDuration::from_hours(24);

/// Closes the conclusions of the analysis that a person has dismissed: it counts anew from then on.
/// Returns whether the node can be decided about; false while such a conclusion is still open.
pub(super) fn close_dismissed_conclusions(look: &mut Look<'_>) -> bool {
    let Some(dismissal) = look.entry.dismissal(look.state) else {
        return true;
    };
    if !look.state.acts() {
        return true;
    }
    let why = "a person has given the node back";
    let faults = look.state.book.faults(look.name).iter();
    let closing: Vec<HealthEvent> = faults
        .filter(|fault| fault.event.metadata.contains_key(META_CONCLUSION))
        .filter(|fault| fault.dismissed(dismissal.up_to))
        .map(|fault| fault.gone(why, look.state.now))
        .collect();
    if closing.is_empty() {
        return true;
    }
    let text = format!(
        "{why}: {} conclusions of the analysis are closed",
        closing.len()
    );
    look.in_stages(|_, _, requests| requests.append(closing, Purpose::Close, Some(text)));
    false
}

/// Closes the faults that another one explained which has recovered since. Returns whether the
/// node can be decided about; false while such a fault is still open.
pub(super) fn close_explained_faults(look: &mut Look<'_>) -> bool {
    if !look.state.acts() {
        return true;
    }
    let faults = look.state.book.faults(look.name).iter();
    let over = faults.filter_map(|fault| {
        let cause = fault.cause.as_ref();
        let cause = cause.filter(|cause| cause.recovered.is_some())?;
        let why = format!("it was explained by {cause}, which has recovered");
        Some((fault.gone(&why, look.state.now), why))
    });
    let (closing, why): (Vec<HealthEvent>, Vec<String>) = over.unzip();
    let Some(why) = why.first() else {
        return true;
    };
    let text = format!("faults closed: {}; the first because {why}", closing.len());
    look.in_stages(|_, _, requests| requests.append(closing, Purpose::Close, Some(text)));
    false
}

/// Closes the faults of a machine that is gone. Returns whether the node can be decided
/// about; false while such faults are still open.
pub(super) fn close_faults_of_gone_machine(look: &mut Look<'_>) -> bool {
    // All faults of a node fit into one request to the store.
    const { assert!(MAX_OPEN_FAULTS_PER_NODE <= MAX_EVENTS) };
    if !look.state.settings.cluster {
        return true;
    }
    let Some(newest) = look.state.book.newest_report(look.name) else {
        return true;
    };
    let (name, now) = (look.name, look.state.now);
    let (closing, why) = if let Some(view) = look.entry.view.clone() {
        if look.state.book.learn_machine(name, &view.machine) {
            look.save();
        }
        let book = &look.state.book;
        let closing = book.of_replaced_machine(name, &view.machine, now);
        (closing, "the node is another machine now".to_owned())
    } else {
        let absent_since = *look.entry.absent_since.get_or_insert(now);
        let retention = look.state.settings.retention;
        let until = later(newest, retention).max(later(absent_since, MIN_ABSENCE));
        if now < until {
            look.agenda.wakes.set(name, Some(until));
            return true;
        }
        let why = format!(
            "the cluster has not had the node since {absent_since:.0}, and nothing was \
             reported of it since {newest:.0}"
        );
        (look.state.book.of_departed_node(name, &why, now), why)
    };
    if closing.is_empty() {
        return true;
    }
    let text = format!("{why}: its {} earlier faults are closed", closing.len());
    look.in_stages(|_, _, requests| requests.append(closing, Purpose::Close, Some(text)));
    false
}
