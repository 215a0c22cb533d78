//! Marks that another ledger takes over.

use super::*;

#[test]
fn the_later_mark_of_both_ledgers_counts() {
    let marked = |kind, second| {
        let mut ledger = Ledger::default();
        ledger.record(&fault("a", "17", "GPU-17", "0000:b3:00", 0));
        ledger.record(&mark("17", kind, second));
        ledger
    };
    let kind = |ledger: &Ledger| {
        let row = ledger.gpu("GPU-17").unwrap().1;
        row.mark.as_ref().unwrap().kind
    };
    let bad = marked(MarkKind::Bad, HOUR);
    // By the UUID too, which an event without a serial number has.
    let mut empty = Ledger::default();
    assert!(empty.take_marks(bad.marks()));
    assert_eq!(kind(&empty), MarkKind::Bad);
    assert!(!empty.take_marks(bad.marks()), "that changes nothing");
    assert_eq!(empty.marks(), bad.marks());
    for (second, expected) in [(DAY, MarkKind::Good), (60, MarkKind::Bad)] {
        let mut other = marked(MarkKind::Good, second);
        other.take_marks(bad.marks());
        assert_eq!(kind(&other), expected);
    }
    let serials = (0..300).map(|number| mark(&format!("S{number}"), MarkKind::Bad, number));
    let mut many = Ledger::default();
    serials.for_each(|record| many.record(&record));
    assert_eq!(many.marks().len(), MAX_KEPT_MARKS);
    assert_eq!(many.marks()[0].serial.as_deref(), Some("S44"));
}
