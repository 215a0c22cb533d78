//! Tests of a switch's faults: their names, and their recovery.

use contract::Entity;
use model::condition::{MessageLimits, Options, changes};
use model::fault::FaultBook;
use model::node::NodeView;

use super::*;

const FATAL: &str =
    "nvidia-nvswitch3: SXid (PCI:0000:C1:00.0): 24007, Fatal, Link 44 sourcetrack timeout error";

#[test]
fn a_switch_is_named_with_its_function_and_is_the_same_without_it() {
    let event = event_of_line(FATAL, "n1", Timestamp::UNIX_EPOCH).unwrap();
    let of_type = |kind: &str| -> Vec<&str> {
        let entities = event.entities_impacted.iter();
        let of_type = entities.filter(|entity| entity.entity_type == kind);
        of_type.map(|entity| &*entity.entity_value).collect()
    };
    assert_eq!(of_type("PCI"), ["0000:c1:00.0"]);

    let record = |seq: u64, event: &HealthEvent| model::event::EventRecord {
        seq: seq.into(),
        id: event.id.clone(),
        created_at: Timestamp::UNIX_EPOCH,
        event: event.clone(),
    };
    let mut open = FaultBook::default();
    open.record(&record(1, &event));
    let node = NodeView::from_object(serde_json::json!({"metadata": {"name": "n1"}})).unwrap();
    let options = Options {
        limits: MessageLimits::default(),
        summary: false,
    };
    let changes = changes(
        open.faults("n1"),
        open.reported_checks("n1"),
        &node,
        &options,
    );
    let message = &changes[0].condition.message;
    assert!(message.contains(" PCI:0000:c1:00.0 "), "{message}");

    // Without the function, the fault is the same, and so is the switch of a recovery.
    for address in ["0000:c1:00.0", "0000:c1:00", "c1:00.0", "0000:C1:00"] {
        let mut known = event.clone();
        known
            .entities_impacted
            .retain(|entity| entity.entity_type != "PCI");
        known.entities_impacted.push(Entity {
            entity_type: "PCI".to_owned(),
            entity_value: address.to_owned(),
        });
        let mut book = open.clone();
        book.record(&record(2, &known));
        assert_eq!(book.faults("n1").len(), 1, "{address}");
        let recovery = HealthEvent {
            is_healthy: true,
            entities_impacted: known
                .entities_impacted
                .split_off(known.entities_impacted.len() - 1),
            ..event.clone()
        };
        book.record(&record(3, &recovery));
        assert_eq!(book.faults("n1").len(), 0, "{address}");
    }
}
