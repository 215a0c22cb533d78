use jiff::{SignedDuration, Timestamp};
use notices::{Book, Settings};

use super::*;

fn report(node: &str, events: &[&str]) -> ReportMaintenanceRequest {
    let start = Some(contract::json::proto_timestamp(Timestamp::UNIX_EPOCH));
    let notices = events.iter().map(|event| MaintenanceNotice {
        event: (*event).to_owned(),
        provider: "aws".to_owned(),
        kind: "reboot".to_owned(),
        phase: "scheduled".to_owned(),
        start,
        ..MaintenanceNotice::default()
    });
    ReportMaintenanceRequest {
        node_name: node.to_owned(),
        notices: notices.collect(),
    }
}

fn shown(reading: &Reading) -> Vec<String> {
    let notices = reading.notices.iter();
    notices
        .map(|notice| format!("{} {}", notice.node, notice.event))
        .collect()
}

#[test]
fn the_last_report_of_each_node_counts() {
    let machines = MachineNotices::default();
    machines.handle(&report("a", &["1", "2"])).unwrap();
    machines.handle(&report("b", &["3"])).unwrap();
    machines.handle(&report("a", &["2"])).unwrap();
    let reading = machines.reading(|_| true, &[]);
    assert!(reading.complete && reading.unseen.is_empty());
    assert_eq!(shown(&reading), ["a 2", "b 3"]);
    // A node that has left the cluster has no notices, also when it comes back.
    assert_eq!(shown(&machines.reading(|node| node == "a", &[])), ["a 2"]);
    assert_eq!(shown(&machines.reading(|_| true, &[])), ["a 2"]);
}

#[test]
fn a_node_that_has_told_nothing_yet_keeps_its_maintenance() {
    let (before, now) = (MachineNotices::default(), Timestamp::UNIX_EPOCH);
    before.handle(&report("a", &["1"])).unwrap();
    let mut book = Book::default();
    book.read(SOURCE, &before.reading(|_| true, &[]), now);
    let minute = SignedDuration::from_mins(1);
    let settings = Settings {
        limit: minute,
        delay: minute,
        readiness: minute,
        missing: minute,
    };
    book.step(|_| Some(notices::NodeState::default()), &settings, 10, now);

    let after = MachineNotices::default();
    let reading = after.reading(|_| true, book.records());
    assert_eq!(Vec::from_iter(&reading.unseen), ["a"]);
    book.read(SOURCE, &reading, now);
    assert_eq!(book.records()[0].vanished, None);
    after.handle(&report("a", &[])).unwrap();
    book.read(SOURCE, &after.reading(|_| true, book.records()), now);
    assert_eq!(book.records()[0].vanished, Some(now));
}

#[test]
fn what_may_begin_is_answered_to_its_node() {
    let machines = MachineNotices::default();
    let events = BTreeSet::from(["1".to_owned()]);
    machines.set_may_begin([("a".to_owned(), events)].into());
    assert_eq!(machines.handle(&report("a", &["1"])).unwrap(), ["1"]);
    assert!(machines.handle(&report("b", &["1"])).unwrap().is_empty());
}

#[test]
fn a_report_that_no_agent_sends_is_refused_and_says_where() {
    let edited = |edit: fn(&mut MaintenanceNotice)| {
        let mut report = report("a", &["1", "2"]);
        edit(&mut report.notices[1]);
        MachineNotices::default().handle(&report).unwrap_err()
    };
    let errors = [
        edited(|one| one.kind = "x".to_owned()),
        edited(|one| one.phase = String::new()),
        edited(|one| one.word = "x".repeat(1025)),
        edited(|one| one.start.as_mut().unwrap().nanos = -1),
        edited(|one| {
            one.end = one.start;
            one.end.as_mut().unwrap().seconds = i64::MAX;
        }),
    ];
    assert_eq!(
        errors,
        [
            "notices[1].kind: \"x\" is unknown",
            "notices[1].phase: \"\" is unknown",
            "notices[1].word: 1025 bytes, at most 1024 are taken",
            "notices[1].start: no time",
            "notices[1].end: no time",
        ]
    );
    let many = report("a", &["1"; 101]);
    let error = MachineNotices::default().handle(&many).unwrap_err();
    assert_eq!(error, "the report has 101 notices, at most 100 are taken");
}
