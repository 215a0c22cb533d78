//! Properties of condition messages for arbitrary events.

use super::*;

fn event_of_anything() -> impl Strategy<Value = HealthEvent> {
    let entity = ("(GPU|PCI|NIC|é ;)", "[0-9a-zé:; ]{0,12}");
    (
        prop::collection::vec(entity, 0..3),
        prop::collection::vec("[0-9A-Zü;. ]{1,9}", 0..3),
        "[ -~éß€😀;]{0,200}",
        0..30_i32,
    )
        .prop_map(|(on, codes, message, action)| HealthEvent {
            error_code: codes,
            entities_impacted: on
                .into_iter()
                .map(|(entity_type, entity_value)| Entity {
                    entity_type,
                    entity_value,
                })
                .collect(),
            message,
            recommended_action: action,
            ..fatal("X", "", &[], "")
        })
}

proptest! {
    #[test]
    fn a_message_keeps_its_limit_and_is_a_list_of_whole_faults_where_it_fits(
        events in prop::collection::vec(event_of_anything(), 1..30),
        max in 128..2_000_usize,
        compacted in 1..200_usize,
    ) {
        let book = book(events);
        let faults: Vec<&Fault> = book.faults(NODE).iter().collect();
        let text = message::render(&faults, &MessageLimits::new(max, compacted).unwrap());
        prop_assert!(text.len() <= max, "{} bytes: {text}", text.len());
        prop_assert!(!text.chars().any(char::is_control));
        if let Some(cut) = text.strip_suffix("...") {
            prop_assert!(cut.is_empty() || cut.ends_with(';'));
        } else {
            let pieces: Vec<&str> = text.strip_suffix(';').unwrap().split(';').collect();
            for piece in pieces {
                prop_assert_eq!(piece.matches("Recommended Action=").count(), 1, "{}", piece);
            }
        }
    }

    #[test]
    fn what_was_written_once_is_not_written_again(
        events in prop::collection::vec(event_of_anything(), 0..30),
    ) {
        let (book, before) = (book(events), node(&json!([])));
        let first = wanted(&book, &before, true);
        let after = written(&before, &first);
        prop_assert_eq!(wanted(&book, &after, true), vec![]);
    }
}
