use analysis::ledger::{FaultHistory, NodeRow, Score};
use console::api::NodeEntry;
use contract::Entity;
use model::event::{EventRecord, normalise};
use model::reporter::Reporter;
use serde_json::json;

use super::super::html;
use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

/// Returns an event of a GPU that was observed at a time and accepted a second later.
fn event(serial: &str, healthy: bool, message: &str, second: i64) -> EventRecord {
    let mut event = HealthEvent {
        agent: keys::SYSLOG_AGENT.to_owned(),
        component_class: "GPU".to_owned(),
        check_name: keys::CHECK_XID.to_owned(),
        error_code: vec!["79".to_owned()],
        is_fatal: !healthy,
        is_healthy: healthy,
        message: message.to_owned(),
        recommended_action: if healthy { 0 } else { 24 },
        entities_impacted: vec![Entity {
            entity_type: keys::ENTITY_PCI.to_owned(),
            entity_value: "0000:3b:00".to_owned(),
        }],
        metadata: [(keys::META_GPU_SERIAL.to_owned(), serial.to_owned())].into(),
        generated_timestamp: Some(json::proto_timestamp(at(second))),
        node_name: "n1".to_owned(),
        ..HealthEvent::default()
    };
    Reporter::Monitor.note_in(&mut event);
    normalise(&mut event, at(second + 1));
    EventRecord {
        seq: u64::try_from(second + 1).unwrap().into(),
        id: event.id.clone(),
        created_at: at(second + 1),
        event,
    }
}

fn line(second: i64, session: Option<&str>, detail: Value) -> TimelineEntry {
    TimelineEntry {
        at: at(second),
        kind: TimelineKind::Journal(EntryKind::Session),
        text: "said".to_owned(),
        detail,
        session: session.map(str::to_owned),
    }
}

fn attempt(id: &str, group: &str, kind: &str, second: i64) -> Value {
    json!({"attempt": {
        "id": id, "action": "RESTART_BM", "group": group, "event": "e",
        "resource": {"group": "g", "version": "v1", "kind": kind, "condition": "Done"},
        "name": format!("{kind}-1"), "since": at(second), "timeoutMinutes": 60,
    }})
}

/// Returns the material of a node with a fault of one GPU, its outage and repair, and an event of
/// another GPU.
fn material() -> Material {
    let records = [
        event("17", false, "Xid 79 <b>&", 10),
        event("18", false, "Xid 79 elsewhere", 20),
        event("17", true, "well", 500),
    ];
    let mut ledger = analysis::ledger::Ledger::default();
    ledger.record(&records[0]);
    let id = records[0].id.as_str();
    let entries = vec![
        line(
            12,
            Some(id),
            json!({"from": "idle", "to": "quarantining", "id": id}),
        ),
        line(
            14,
            Some(id),
            json!({"from": "quarantining", "to": "quarantined", "id": id}),
        ),
        line(20, Some(id), attempt("a1", "reboot", "RebootNode", 20)),
        line(30, Some(id), attempt("a2", "external", HAND_OVER, 30)),
        line(400, Some(id), attempt("a3", VALIDATION_GROUP, "Job", 400)),
        line(
            510,
            None,
            json!({"from": "releasing", "to": "idle", "id": id}),
        ),
        line(
            600,
            Some("other"),
            json!({"from": "idle", "to": "quarantined", "id": "other"}),
        ),
    ];
    let story = Explain {
        node: "n1".to_owned(),
        status: None,
        in_cluster: None,
        entries,
        awaits: String::new(),
        how_to_clear: Vec::new(),
        gpus: Vec::new(),
        unhealthy_gpus: Vec::new(),
    };
    Material {
        name: "17".to_owned(),
        version: "0.1.0".to_owned(),
        now: at(1_000),
        entry: LedgerEntry::of(&ledger, "17", at(1_000)),
        nodes: vec![NodeMaterial {
            name: "n1".to_owned(),
            events: records.iter().map(|one| EventView::of(one, None)).collect(),
            story: Ok(story),
        }],
    }
}

#[test]
fn a_ticket_has_the_times_and_names_that_a_claim_needs() {
    let evidence = Evidence::of(&material()).unwrap();
    let [ticket] = &evidence.tickets[..] else {
        panic!("one fault: {:?}", evidence.tickets);
    };
    assert_eq!(
        (
            ticket.hardware_id.as_str(),
            ticket.category.as_str(),
            ticket.fault.as_str()
        ),
        ("17", "GPU", "SysLogsXIDError 79")
    );
    assert_eq!(ticket.action, "RESTART_BM");
    let times = [
        (Some(ticket.fault_at), 10),
        (ticket.opened_at, 11),
        (ticket.out_of_service_at, 14),
        (ticket.handed_over_at, 30),
        (ticket.back_in_service_at, 510),
        (ticket.closed_at, 510),
        (Some(ticket.updated_at), 510),
    ];
    for (index, (time, second)) in times.into_iter().enumerate() {
        assert_eq!(time, Some(at(second)), "{index}");
    }
    let kinds = |attempts: &[Attempt]| -> Vec<String> {
        attempts
            .iter()
            .map(|one| one.resource.kind.clone())
            .collect()
    };
    assert_eq!(kinds(&ticket.repairs), ["RebootNode", HAND_OVER]);
    assert_eq!(kinds(&ticket.validations), ["Job"]);
    // Only what concerns this GPU.
    assert_eq!(evidence.events.len(), 2);
    assert_eq!(evidence.journal.len(), 6);
    assert_eq!(evidence.remarks, [""; 0]);
}

#[test]
fn an_outage_for_a_conclusion_is_a_ticket_too() {
    let mut material = material();
    let mut known_bad = event("17", false, "marked as bad", 590);
    known_bad.event.check_name = keys::CHECK_KNOWN_BAD_GPU.to_owned();
    known_bad.event.id = "other".to_owned();
    material.nodes[0]
        .events
        .push(EventView::of(&known_bad, None));
    let evidence = Evidence::of(&material).unwrap();
    let faults: Vec<&str> = evidence
        .tickets
        .iter()
        .map(|one| one.fault.as_str())
        .collect();
    assert_eq!(faults, ["SysLogsXIDError 79", "KnownBadGPU 79"]);
    let ticket = &evidence.tickets[1];
    assert_eq!(
        (ticket.out_of_service_at, ticket.closed_at),
        (Some(at(600)), None)
    );
    assert_eq!(evidence.journal.len(), 7);
}

#[test]
fn what_retention_has_deleted_is_said() {
    let mut material = material();
    material.nodes[0].events.clear();
    material.nodes[0].story = Err("no such node".to_owned());
    let evidence = Evidence::of(&material).unwrap();
    let ticket = &evidence.tickets[0];
    assert_eq!(
        (ticket.fault_at, ticket.opened_at, ticket.closed_at),
        (at(10), None, None)
    );
    assert_eq!(evidence.remarks.len(), 2);
    let page = html::page(&evidence).unwrap();
    for part in [
        "events of some faults are deleted",
        "n1 are not known: no such node",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
}

#[test]
fn without_an_outage_the_recovery_closes_a_ticket() {
    let mut material = material();
    material.nodes[0].story = Err("no such node".to_owned());
    let evidence = Evidence::of(&material).unwrap();
    assert_eq!(evidence.tickets[0].closed_at, Some(at(501)));
    assert_eq!(evidence.tickets[0].session, None);
}

#[test]
fn a_node_has_all_its_events_and_the_id_of_its_provider() {
    let mut material = material();
    let gpu = material.entry.as_ref().unwrap().gpu.as_ref().unwrap();
    let row = NodeRow {
        provider_id: "aws:///z1/i-0".to_owned(),
        history: FaultHistory::clone(&gpu.row.history),
    };
    material.entry = Some(LedgerEntry {
        now: at(1_000),
        gpu: None,
        node: Some(NodeEntry {
            score: Score::of(&row.history, at(1_000)),
            row,
            gpus: Vec::new(),
        }),
    });
    let evidence = Evidence::of(&material).unwrap();
    assert_eq!(
        evidence.tickets[0].hardware_id, "17",
        "the GPU, since the event names it"
    );
    assert_eq!((evidence.events.len(), evidence.journal.len()), (3, 7));
    material.nodes[0].events.clear();
    let evidence = Evidence::of(&material).unwrap();
    assert_eq!(evidence.tickets[0].hardware_id, "aws:///z1/i-0");
}

#[test]
fn the_page_stands_alone_and_text_from_outside_cannot_change_it() {
    let page = html::page(&Evidence::of(&material()).unwrap()).unwrap();
    assert!(page.contains("Xid 79 &lt;b&gt;&amp;"), "{page}");
    for foreign in ["<b>", "<script", "src=", "href=", "url("] {
        assert!(!page.contains(foreign), "{foreign}");
    }
}
