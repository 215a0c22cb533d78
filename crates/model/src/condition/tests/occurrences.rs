//! Tests for faults that are not fatal.

use super::*;

#[test]
fn faults_that_are_not_fatal_are_occurrences() {
    let mild = |code: &str, gpu: &str| HealthEvent {
        is_fatal: false,
        ..fatal("X", code, &[("GPU", gpu)], "m")
    };
    let repeat = HealthEvent {
        message: "other text".into(),
        ..mild("1", "0")
    };
    let many = HealthEvent {
        entities_impacted: entities(&[("GPU", "4"), ("GPU", "5")]),
        ..mild("2", "")
    };
    let book = book(vec![
        mild("1", "0"),
        fatal("X", "9", &[], "m"),
        many,
        repeat,
    ]);
    let found = occurrences(book.faults(NODE), &MessageLimits::default());
    let shown: Vec<_> = found
        .iter()
        .map(|one| (one.message.as_str(), one.count))
        .collect();
    assert_eq!(
        shown,
        [
            ("ErrorCode:1 GPU:0 m Recommended Action=RESTART_BM;", 2),
            (
                "ErrorCode:2 GPU:4 GPU:5 m Recommended Action=RESTART_BM;",
                1
            ),
        ]
    );
    assert!(is_open(book.faults(NODE), &found[0].key));
    assert!(!is_open(book.faults(NODE), "gone"));
    assert_eq!(reason("X", false), "XIsNotHealthy");
}
