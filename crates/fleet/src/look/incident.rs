//! The Kubernetes Event of an incident of several nodes: one, on the node that had the first fault.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use model::fault::Fault;

use super::Look;
use crate::{Effect, EventReason};

/// Wait from the first fault of an incident until its Event: by then most of its faults are known.
const SETTLED_AFTER: SignedDuration = SignedDuration::from_secs(10);

// === impl Look ===

impl Look<'_> {
    /// Emits the Events of the node's incidents that are due, and notes when the next one is.
    pub(super) fn announce_incidents(&mut self) {
        if !self.state.acts() {
            return;
        }
        let book = &self.state.book;
        let faults = book.faults(self.name).iter();
        let ids: BTreeSet<&str> = faults.map(|fault| fault.incident.as_str()).collect();
        let announced = &mut self.entry.journaled.incidents;
        announced.retain(|id| ids.contains(id.as_str()));
        let mut next: Option<Timestamp> = None;
        for id in ids {
            let nodes: Vec<&str> = book.nodes_of_incident(id).collect();
            if nodes.len() < 2 || announced.contains(id) {
                continue;
            }
            let faults = nodes.iter().flat_map(|name| {
                let faults = book.faults(name).iter();
                faults.map(move |fault| (fault.first_seen, *name, fault))
            });
            let of_incident = faults.filter(|(.., fault)| fault.incident == id);
            let Some((since, first, fault)) = of_incident.min_by_key(|(at, name, _)| (*at, *name))
            else {
                continue;
            };
            let due = since.checked_add(SETTLED_AFTER).unwrap_or(since);
            if due > self.state.now {
                next = Some(next.map_or(due, |known| known.min(due)));
                continue;
            }
            announced.insert(id.to_owned());
            if first == self.name {
                self.agenda.effects.push(Effect::EmitEvent {
                    node: first.to_owned(),
                    since,
                    reason: EventReason::Incident,
                    message: message(id, fault),
                });
            }
        }
        self.entry.journaled.incident_due = next;
    }
}

/// Returns the message of the Event. It names no number of nodes, so that a restart makes no second
/// Event.
fn message(id: &str, first: &Fault) -> String {
    format!(
        "incident {id}: faults of several nodes belong together, the first is {} of this node; \
         gpuwarden incidents {id} shows them",
        first.title()
    )
}
