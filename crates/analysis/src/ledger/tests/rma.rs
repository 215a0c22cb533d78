//! GPUs that repairs do not help.

use super::*;

/// Returns the conclusion that repairs do not help against XID 79 of a GPU, named by these entities.
fn conclusion(id: &str, entities: &[(&str, &str)], second: i64) -> EventRecord {
    let entity = |(kind, value): &(&str, &str)| Entity {
        entity_type: (*kind).to_owned(),
        entity_value: (*value).to_owned(),
    };
    let mut event = HealthEvent {
        agent: AGENT.to_owned(),
        check_name: keys::CHECK_REPAIR_NOT_WORKING.to_owned(),
        error_code: vec!["79".to_owned()],
        is_fatal: true,
        entities_impacted: entities.iter().map(entity).collect(),
        node_name: "a".to_owned(),
        ..HealthEvent::default()
    };
    let check = format!("{}/{}", keys::SYSLOG_AGENT, keys::CHECK_XID);
    event.metadata.extend([
        (keys::META_CONCLUSION.to_owned(), id.to_owned()),
        (keys::META_ANALYSED_CHECK.to_owned(), check),
    ]);
    Reporter::Monitor.note_in(&mut event);
    accepted(event, at(second))
}

/// Returns the event that ends a conclusion; without an id, one that a person or the fleet sends.
fn end(of: &EventRecord, has_id: bool, second: i64) -> EventRecord {
    let mut event = HealthEvent {
        is_healthy: true,
        is_fatal: false,
        generated_timestamp: None,
        id: String::new(),
        ..of.event.clone()
    };
    if !has_id {
        event.metadata.remove(keys::META_CONCLUSION);
    }
    accepted(event, at(second))
}

/// Returns the faults that make a GPU a candidate.
fn candidacies(ledger: &Ledger, gpu: &str) -> Vec<String> {
    let (_, row) = ledger.gpu(gpu).unwrap();
    row.rma.values().map(|one| one.fault.clone()).collect()
}

#[test]
fn a_gpu_that_repairs_do_not_help_is_a_candidate_while_the_conclusion_is_open() {
    let seen = [
        inventory("a", "17", "0000:3b:00", 0),
        inventory("a", "18", "0000:5e:00", 0),
    ];
    let by_uuid = [(keys::ENTITY_GPU_UUID, "GPU-of-17")];
    let by_slot = [(keys::ENTITY_PCI, "0000:3b:00.0")];
    for entities in [&by_uuid[..], &by_slot[..]] {
        let open = conclusion("c", entities, HOUR);
        let mut ledger = ledger(seen.iter().chain([&open, &open]));
        assert_eq!(candidacies(&ledger, "17"), ["SysLogsXIDError 79"]);
        assert_eq!(candidacies(&ledger, "18"), [""; 0]);
        assert_eq!(ledger.due(), [], "nothing acts on it");
        let saved = serde_json::to_vec(ledger.gpu("17").unwrap().1).unwrap();
        let mut restored = Ledger::default();
        restored.restore("g:17", &saved).unwrap();
        assert_eq!(candidacies(&restored, "17"), ["SysLogsXIDError 79"]);
        ledger.take_unsaved();
        // The end of another conclusion, or of one about another GPU or node, ends nothing.
        let other_gpu = conclusion("d", &[(keys::ENTITY_GPU_UUID, "GPU-of-18")], HOUR);
        let mut other_node = end(&open, false, 2 * HOUR);
        other_node.event.node_name = "b".to_owned();
        for other in [end(&other_gpu, false, 2 * HOUR), other_node] {
            ledger.record(&other);
        }
        assert!(!ledger.is_unsaved());
        assert_eq!(candidacies(&ledger, "17").len(), 1);
        let mut by_person = end(&open, false, 2 * HOUR);
        by_person.event.entities_impacted.clear();
        for end in [
            end(&open, true, 2 * HOUR),
            end(&open, false, 2 * HOUR),
            by_person,
        ] {
            let mut ledger = ledger.clone();
            ledger.record(&end);
            assert_eq!(candidacies(&ledger, "17"), [""; 0]);
            assert!(ledger.is_unsaved());
        }
    }
}

#[test]
fn other_conclusions_and_those_that_are_only_stored_make_no_candidate() {
    let seen = inventory("a", "17", "0000:3b:00", 0);
    let open = conclusion("c", &[(keys::ENTITY_GPU_UUID, "GPU-of-17")], HOUR);
    let mut only_stored = open.clone();
    only_stored.event.processing_strategy = ProcessingStrategy::StoreOnly as i32;
    let mut other = open.clone();
    other.event.check_name = "RepeatedXID31OnSameGPU".to_owned();
    let mut by_user = open.clone();
    by_user.event.metadata.remove(keys::META_REPORTED_BY);
    for event in [only_stored, other, by_user] {
        assert_eq!(candidacies(&ledger([&seen, &event]), "17"), [""; 0]);
    }
}
