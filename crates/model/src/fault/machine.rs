//! The machine of a fault. Faults are stored under the name of their node, and a node may be
//! replaced by another machine with the same name. Faults of the old machine then do not apply
//! to the new one.
//!
//! The cluster identifies the machine by the UUID of its mainboard or virtual machine. A fault
//! is attributed to another machine only if all evidence agrees: an error must leave a healthy
//! node out of service, not a broken node in service.

use contract::{EVENT_VERSION, HealthEvent, ProcessingStrategy, json, keys};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Fault, FaultBook};
use crate::reporter::Reporter;

/// Machine behind a node's name, as reported by its kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// `status.nodeInfo.systemUUID`: stays the same over reboots and new node objects. Empty if
    /// unknown.
    pub system_uuid: String,
    /// `status.nodeInfo.bootID` of the running kernel.
    pub boot_id: String,
    /// `metadata.creationTimestamp` of the node object.
    pub registered_at: Option<Timestamp>,
}

/// Machine of the newest report of a fault, if it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Boot id, if the report names it, as those from a kernel log do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot_id: Option<String>,
    /// [`Machine::system_uuid`], once the cluster has reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    system_uuid: Option<String>,
}

// === impl Origin ===

impl Origin {
    pub(super) fn of(event: &HealthEvent) -> Self {
        Self {
            boot_id: event.metadata.get(keys::META_BOOT_ID).cloned(),
            system_uuid: None,
        }
    }

    /// Sets the machine from the current state of the node. A report that names a boot is
    /// attributed to the machine only if the node still runs that boot. Returns whether the
    /// machine was set.
    fn set_machine(&mut self, now: &Machine) -> bool {
        let may_be = self.boot_id.as_ref().is_none_or(|id| *id == now.boot_id);
        if now.system_uuid.is_empty() || self.system_uuid.is_some() || !may_be {
            return false;
        }
        self.system_uuid = Some(now.system_uuid.clone());
        true
    }
}

// === impl Fault ===

impl Fault {
    /// Returns whether `now` is a different machine than the one the fault was found on.
    fn is_on_another_machine(&self, now: &Machine) -> bool {
        let other = |uuid: &String| !now.system_uuid.is_empty() && *uuid != now.system_uuid;
        let before = match &self.origin.boot_id {
            Some(id) => *id != now.boot_id,
            // A sender may start before the kubelet has registered the machine.
            None => now.registered_at.is_some_and(|at| self.accepted_at < at),
        };
        self.origin.system_uuid.as_ref().is_some_and(other) && before
    }

    /// Returns whether a healthy event, if it reports a machine as gone, covers this fault.
    pub(super) fn gone_with(&self, event: &HealthEvent) -> bool {
        let Some(after) = event.metadata.get(keys::META_GONE_AFTER) else {
            return true;
        };
        after.parse().is_ok_and(|after| self.accepted_at <= after)
    }

    /// Returns the event that closes this fault, and no newer one, because its machine is gone
    /// or gpuwarden opened the fault itself.
    pub fn gone(&self, why: &str, now: Timestamp) -> HealthEvent {
        let mut event = HealthEvent {
            version: EVENT_VERSION,
            agent: self.agent.clone(),
            component_class: self.event.component_class.clone(),
            check_name: self.check.clone(),
            is_healthy: true,
            message: why.to_owned(),
            error_code: (!self.code.is_empty())
                .then(|| self.code.clone())
                .into_iter()
                .collect(),
            entities_impacted: self.subject.entities(),
            metadata: [(
                keys::META_GONE_AFTER.to_owned(),
                self.accepted_at.to_string(),
            )]
            .into(),
            generated_timestamp: Some(json::proto_timestamp(now)),
            node_name: self.event.node_name.clone(),
            processing_strategy: ProcessingStrategy::ExecuteRemediation as i32,
            ..HealthEvent::default()
        };
        Reporter::Monitor.note_in(&mut event);
        event
    }
}

// === impl FaultBook ===

impl FaultBook {
    /// Sets the machine of the faults of `node` where it is not set yet. Returns whether any
    /// was set.
    pub fn learn_machine(&mut self, node: &str, now: &Machine) -> bool {
        let mut changed = false;
        for fault in self.nodes.get_mut(node).into_iter().flatten() {
            changed |= fault.origin.set_machine(now);
        }
        changed
    }

    /// Returns the events that close the faults found on another machine than the one that
    /// `node` is now.
    pub fn of_replaced_machine(
        &self,
        node: &str,
        machine: &Machine,
        now: Timestamp,
    ) -> Vec<HealthEvent> {
        let faults = self.faults(node).iter();
        let replaced = faults.filter(|fault| fault.is_on_another_machine(machine));
        let close = replaced.map(|fault| {
            let why = format!(
                "the node is another machine now (system UUID {}; the fault was found on {})",
                machine.system_uuid,
                fault.origin.system_uuid.as_deref().unwrap_or_default(),
            );
            fault.gone(&why, now)
        });
        close.collect()
    }

    /// Returns the acceptance time of the newest report among the open faults of `node`. `None`
    /// if it has none.
    pub fn newest_report(&self, node: &str) -> Option<Timestamp> {
        (self.faults(node).iter())
            .map(|fault| fault.accepted_at)
            .max()
    }

    /// Returns the events that close all open faults of `node`, which has left the cluster.
    pub fn of_departed_node(&self, node: &str, why: &str, now: Timestamp) -> Vec<HealthEvent> {
        let faults = self.faults(node).iter();
        faults.map(|fault| fault.gone(why, now)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{EventRecord, normalise};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn machine(system_uuid: &str, boot_id: &str, registered_at: i64) -> Machine {
        Machine {
            system_uuid: system_uuid.to_owned(),
            boot_id: boot_id.to_owned(),
            registered_at: Some(at(registered_at)),
        }
    }

    /// Creates a book with faults 79 and 94 of two GPUs, accepted at second 100.
    fn book(boot_id: Option<&str>) -> FaultBook {
        let mut book = FaultBook::default();
        report(&mut book, 1, 79, boot_id, 100);
        report(&mut book, 2, 94, boot_id, 100);
        book
    }

    fn report(book: &mut FaultBook, seq: u64, code: u32, boot_id: Option<&str>, second: i64) {
        let mut event = HealthEvent {
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "c".into(),
            error_code: vec![code.to_string()],
            entities_impacted: vec![contract::Entity {
                entity_type: "PCI".into(),
                entity_value: format!("0000:{code}:00"),
            }],
            node_name: "n1".into(),
            is_fatal: true,
            metadata: (boot_id.map(|id| (keys::META_BOOT_ID.to_owned(), id.to_owned())))
                .into_iter()
                .collect(),
            ..HealthEvent::default()
        };
        normalise(&mut event, at(second));
        record(book, seq, event, second);
    }

    fn record(book: &mut FaultBook, seq: u64, event: HealthEvent, second: i64) {
        book.record(&EventRecord {
            seq: seq.into(),
            id: event.id.clone(),
            created_at: at(second),
            event,
        });
    }

    fn closed(book: &FaultBook, machine: &Machine) -> usize {
        book.of_replaced_machine("n1", machine, at(500)).len()
    }

    #[test]
    fn a_fault_is_anothers_only_where_nothing_speaks_against_it() {
        let old = machine("old", "b1", 10);
        let table = [
            ("another machine", machine("new", "b2", 10), 2, 0),
            ("and a new object", machine("new", "b2", 200), 2, 2),
            ("the same one rebooted", machine("old", "b2", 10), 0, 0),
            ("registered again", machine("old", "b1", 200), 0, 0),
            ("the boot of the report", machine("new", "b1", 200), 0, 2),
            ("says not which it is", machine("", "b2", 200), 0, 0),
        ];
        for (what, now, with_boot, without) in table {
            for (boot_id, expected) in [(Some("b1"), with_boot), (None, without)] {
                let mut book = book(boot_id);
                assert!(book.learn_machine("n1", &old), "{what}");
                assert!(!book.learn_machine("n1", &now), "{what}: known already");
                assert_eq!(closed(&book, &now), expected, "{what}, {boot_id:?}");
            }
        }
        // The machine of the fault was never set.
        assert_eq!(closed(&book(None), &machine("new", "b2", 200)), 0);
        let mut of_another_boot = book(Some("b0"));
        assert!(!of_another_boot.learn_machine("n1", &old));
        assert_eq!(closed(&of_another_boot, &machine("new", "b2", 200)), 0);
    }

    #[test]
    fn what_the_new_machine_reports_is_its_own() {
        let (old, new) = (machine("old", "b1", 10), machine("new", "b2", 200));
        let mut book = book(Some("b1"));
        book.learn_machine("n1", &old);
        let closings = book.of_replaced_machine("n1", &new, at(210));
        // Meanwhile the new machine finds one of the faults too.
        report(&mut book, 3, 79, Some("b2"), 210);
        for (seq, mut event) in (4..).zip(closings) {
            normalise(&mut event, at(211));
            record(&mut book, seq, event, 211);
        }
        let open: Vec<&str> = (book.faults("n1").iter())
            .map(|fault| fault.code.as_str())
            .collect();
        assert_eq!(open, ["79"]);
        assert!(book.learn_machine("n1", &new));
        assert_eq!(closed(&book, &new), 0);
    }

    #[test]
    fn the_faults_of_a_node_that_is_no_more_are_closed_for_all_readers_alike() {
        let mut book = book(None);
        assert_eq!(book.newest_report("n1"), Some(at(100)));
        for (seq, mut event) in (3..).zip(book.of_departed_node("n1", "it is gone", at(900))) {
            normalise(&mut event, at(900));
            record(&mut book, seq, event, 900);
        }
        assert_eq!(book.faults("n1"), []);
        assert_eq!(book.newest_report("n1"), None);
    }

    #[test]
    fn a_gone_after_that_is_no_time_closes_nothing() {
        let mut book = book(None);
        let mut event = book.of_departed_node("n1", "x", at(900)).remove(0);
        event
            .metadata
            .insert(keys::META_GONE_AFTER.into(), "soon".into());
        normalise(&mut event, at(900));
        record(&mut book, 3, event, 900);
        assert_eq!(book.faults("n1").len(), 2);
    }
}
