use contract::{Entity, HealthEvent};

use super::*;
use crate::event::{EventRecord, normalise};
use crate::fault::incidents::INCIDENT_GAP;
use crate::fault::{FaultChange, MAX_OPEN_FAULTS_PER_NODE, NodeShare};
use crate::reporter::{Process, Reporter};

const CLIQUE: &str = "nvidia.com/gpu.clique";

/// A fault book, and the position of its last event.
#[derive(Default)]
struct World {
    book: FaultBook,
    seq: u64,
}

impl World {
    /// Records an event of XID `code` that was observed at `second`.
    fn record(
        &mut self,
        second: i64,
        (node, code): (&str, &str),
        edit: impl FnOnce(&mut HealthEvent),
    ) -> Vec<FaultChange> {
        self.seq += 1;
        let created_at = at(second);
        let mut event = HealthEvent {
            version: 1,
            agent: "syslog-health-monitor".into(),
            component_class: "GPU".into(),
            check_name: keys::CHECK_XID.into(),
            node_name: node.into(),
            is_fatal: true,
            error_code: vec![code.into()],
            entities_impacted: vec![Entity {
                entity_type: keys::ENTITY_PCI.into(),
                entity_value: "0000:b3:00".into(),
            }],
            metadata: [(CLIQUE.to_owned(), "rack-1.0".to_owned())].into(),
            recommended_action: 2,
            ..HealthEvent::default()
        };
        Reporter::Monitor.note_in(&mut event);
        edit(&mut event);
        normalise(&mut event, created_at);
        self.book.record(&EventRecord {
            seq: self.seq.into(),
            id: event.id.clone(),
            created_at,
            event,
        })
    }

    fn report(&mut self, second: i64, of: (&str, &str)) -> Vec<FaultChange> {
        self.record(second, of, |_| {})
    }

    fn recover(&mut self, second: i64, of: (&str, &str)) -> Vec<FaultChange> {
        self.record(second, of, |event| {
            (event.is_healthy, event.is_fatal) = (true, false);
        })
    }

    fn fault(&self, node: &str, code: &str) -> &Fault {
        let mut faults = self.book.faults(node).iter();
        faults.find(|fault| fault.code == code).unwrap()
    }

    /// Returns the node of the open primary that explains a fault.
    fn explained_by(&self, node: &str, code: &str) -> Option<&str> {
        let cause = self.fault(node, code).cause.as_ref()?;
        cause.recovered.is_none().then_some(cause.node.as_str())
    }
}

/// Returns a book as the next process reads it.
pub(in crate::fault) fn saved(book: &FaultBook) -> FaultBook {
    let text = serde_json::to_string(book).unwrap();
    let mut read: FaultBook = serde_json::from_str(&text).unwrap();
    read.index();
    read
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

#[test]
fn a_follower_is_explained_whichever_of_the_two_is_heard_first() {
    for order in [["n1", "n2"], ["n2", "n1"]] {
        let mut world = World::default();
        for node in order {
            let code = if node == "n1" {
                "149.NETIR_LINK_EVT"
            } else {
                "145.RLW_SRC_TRACK"
            };
            world.report(0, (node, code));
        }
        assert_eq!(world.explained_by("n2", "145.RLW_SRC_TRACK"), Some("n1"));
        assert_eq!(world.explained_by("n1", "149.NETIR_LINK_EVT"), None);
        assert_eq!(saved(&world.book), world.book);
    }
}

#[test]
fn the_other_node_is_named_when_its_fault_gets_or_loses_its_cause() {
    let mut world = World::default();
    world.report(0, ("n2", "145"));
    let explained = FaultChange::Explained("n2".into());
    assert!(world.report(0, ("n1", "149")).contains(&explained));
    assert!(!world.report(1, ("n1", "149")).contains(&explained));
    assert!(world.recover(60, ("n1", "149")).contains(&explained));
    let cause = world.fault("n2", "145").cause.clone().unwrap();
    assert_eq!(cause.recovered, Some(at(60)));
}

#[test]
fn what_is_reported_after_the_primary_has_recovered_is_judged_on_its_own() {
    let mut world = World::default();
    world.report(0, ("n1", "149"));
    world.report(1, ("n2", "145"));
    world.recover(60, ("n1", "149"));
    assert!(world.fault("n2", "145").cause.is_some());
    world.report(61, ("n2", "145"));
    assert_eq!(world.fault("n2", "145").cause, None);
}

#[test]
fn another_domain_another_time_and_a_lighter_fault_explain_nothing() {
    let elsewhere = |event: &mut HealthEvent| {
        event.metadata.insert(CLIQUE.into(), "rack-2.0".into());
    };
    let mut world = World::default();
    world.record(0, ("n1", "149"), elsewhere);
    world.record(0, ("n3", "149"), |event| event.is_fatal = false);
    let no_domain = |event: &mut HealthEvent| drop(event.metadata.remove(CLIQUE));
    world.record(0, ("n4", "149"), no_domain);
    world.report(0, ("n2", "145"));
    assert_eq!(world.explained_by("n2", "145"), None);
    // Eleven seconds before the follower, and eleven after its last report.
    world.report(-11, ("n5", "149"));
    assert_eq!(world.explained_by("n2", "145"), None);
    world.report(-10, ("n6", "149"));
    assert_eq!(world.explained_by("n2", "145"), Some("n6"));
    world.report(11, ("n2", "145"));
    assert_eq!(world.explained_by("n2", "145"), None);
}

#[test]
fn what_users_report_explains_nothing_that_monitors_report() {
    let user = |event: &mut HealthEvent| {
        Reporter::User(Process {
            uid: 1000,
            pid: None,
        })
        .note_in(event);
    };
    let mut world = World::default();
    world.record(0, ("n1", "149"), user);
    world.report(0, ("n2", "145"));
    world.record(0, ("n3", "145"), user);
    assert_eq!(world.explained_by("n2", "145"), None);
    assert_eq!(world.explained_by("n3", "145"), Some("n1"));
}

#[test]
fn a_cause_that_the_driver_names_is_of_the_same_gpu() {
    let named = |event: &mut HealthEvent| {
        event
            .metadata
            .insert(keys::META_CAUSED_BY_XID.into(), "119".into());
    };
    let other =
        |event: &mut HealthEvent| event.entities_impacted[0].entity_value = "0000:c1:00".into();
    let mut world = World::default();
    world.record(0, ("n1", "45"), named);
    world.record(0, ("n1", "119"), other);
    world.report(0, ("n2", "119"));
    assert_eq!(world.explained_by("n1", "45"), None);
    // No time limit: the driver says so.
    world.report(3_600, ("n1", "119"));
    let cause = world.fault("n1", "45").cause.clone().unwrap();
    assert_eq!((cause.node.as_str(), cause.recovered), ("n1", None));
}

#[test]
fn a_primary_whose_saved_state_was_lost_explains_nothing() {
    let mut world = World::default();
    world.report(0, ("n1", "149"));
    world.report(0, ("n2", "145"));
    let mut kept = saved(&world.book);
    assert_eq!(kept, world.book);
    kept.restore("n1", NodeShare::default());
    kept.index();
    assert_eq!(kept.faults("n2")[0].cause, None);
}

#[test]
fn a_primary_that_was_evicted_explains_nothing() {
    for (node, code, primary, domain) in [("n2", "145", "149", true), ("n1", "74", "79", false)] {
        let mut world = World::default();
        let edit = |event: &mut HealthEvent| {
            if !domain {
                event.metadata.remove(CLIQUE);
            }
        };
        world.record(0, ("n1", primary), edit);
        world.record(0, (node, code), edit);
        assert_eq!(world.explained_by(node, code), Some("n1"));
        let room = MAX_OPEN_FAULTS_PER_NODE - world.book.faults("n1").len();
        let other = |event: &mut HealthEvent| event.check_name = "Check".into();
        for code in 0..room {
            world.record(0, ("n1", &format!("c{code}")), other);
        }
        assert_eq!(world.explained_by(node, code), Some("n1"));
        world.record(0, ("n1", "last"), |event| {
            other(event);
            Reporter::Node.note_in(event);
        });
        assert!(
            world
                .book
                .faults("n1")
                .iter()
                .all(|fault| fault.code != primary)
        );
        assert_eq!(world.fault(node, code).cause, None);
    }
}

#[test]
fn labels_that_come_after_the_faults_tell_where_they_are() {
    let unknown = |event: &mut HealthEvent| drop(event.metadata.remove(CLIQUE));
    let mut world = World::default();
    world.record(0, ("n1", "149"), unknown);
    world.record(0, ("n2", "145"), unknown);
    assert_eq!(world.explained_by("n2", "145"), None);
    let labels = |domain: &str| [(CLIQUE.to_owned(), domain.to_owned())].into();
    assert_eq!(
        world.book.locate("n1", &labels("d")),
        ["n1".to_owned()].into()
    );
    assert_eq!(
        world.book.locate("n2", &labels("d")),
        ["n2".to_owned()].into()
    );
    assert_eq!(world.book.locate("n2", &labels("e")), [].into());
    assert_eq!(world.explained_by("n2", "145"), Some("n1"));
    assert_eq!(
        world.fault("n1", "149").incident,
        world.fault("n2", "145").incident
    );
    // The other way round, the follower's node is named too.
    let mut world = World::default();
    world.record(0, ("n2", "145"), |_| {});
    world.record(0, ("n1", "149"), unknown);
    let both = ["n1".to_owned(), "n2".to_owned()].into();
    assert_eq!(world.book.locate("n1", &labels("rack-1.0")), both);
}

#[test]
fn only_a_follower_without_a_cause_waits_and_for_two_seconds() {
    let mut world = World::default();
    world.report(0, ("n1", "149"));
    world.report(30, ("n2", "145"));
    world.report(0, ("n3", "145"));
    assert_eq!(world.fault("n1", "149").awaits_primary_until(), None);
    assert_eq!(
        world.fault("n2", "145").awaits_primary_until(),
        Some(at(32))
    );
    assert_eq!(world.fault("n3", "145").awaits_primary_until(), None);
}

#[test]
fn faults_close_in_time_and_place_are_one_incident() {
    let mut world = World::default();
    let elsewhere = |event: &mut HealthEvent| drop(event.metadata.remove(CLIQUE));
    let in_rack = |event: &mut HealthEvent| {
        event.metadata.remove(CLIQUE);
        event
            .metadata
            .insert("topology.kubernetes.io/rack".into(), "r7".into());
    };
    world.report(0, ("n1", "149"));
    world.report(30, ("n2", "145"));
    world.record(31, ("n3", "79"), elsewhere);
    world.report(90, ("n2", "79"));
    world.report(151, ("n1", "79"));
    world.record(152, ("n4", "79"), in_rack);
    world.record(153, ("n5", "79"), in_rack);
    let incident = |node: &str, code: &str| world.fault(node, code).incident.clone();
    let first = incident("n1", "149");
    assert_eq!(first.len(), 12);
    assert_eq!(incident("n2", "145"), first);
    assert_eq!(incident("n2", "79"), first);
    assert_ne!(incident("n3", "79"), first);
    // One second more than the gap after its last fault, and of the same node.
    assert_eq!(INCIDENT_GAP.as_secs(), 60);
    assert_ne!(incident("n1", "79"), first);
    assert_eq!(incident("n4", "79"), incident("n5", "79"));
    let nodes: Vec<&str> = world.book.nodes_of_incident(&first).collect();
    assert_eq!(nodes, ["n1", "n2"]);
    assert_eq!(saved(&world.book), world.book);
}

#[test]
fn an_incident_ends_with_its_last_fault() {
    let mut world = World::default();
    world.report(0, ("n1", "149"));
    let first = world.fault("n1", "149").incident.clone();
    world.recover(1, ("n1", "149"));
    assert_eq!(world.book.nodes_of_incident(&first).count(), 0);
    assert_eq!(world.book.incidents, FaultBook::default().incidents);
}
