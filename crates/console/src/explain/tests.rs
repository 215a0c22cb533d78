use contract::{Entity, ProcessingStrategy, RecommendedAction};
use fleet::session::Phase;
use fleet::view::{FaultView, ForeignGpuwardenView, NodeState, SessionView};
use model::journal::EntryKind;
use model::reporter::{Process, Reporter};

use super::*;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

/// Returns an XID as the kernel log monitor reports it: observed at `seconds`, accepted half a
/// second later.
fn xid(seq: u64, seconds: i64, code: &str, healthy: bool) -> EventRecord {
    let event = HealthEvent {
        version: 1,
        agent: keys::SYSLOG_AGENT.into(),
        component_class: keys::COMPONENT_GPU.into(),
        check_name: keys::CHECK_XID.into(),
        is_fatal: !healthy,
        is_healthy: healthy,
        message: format!("NVRM: Xid (PCI:0000:b3:00): {code}, pid={seq}"),
        recommended_action: if healthy {
            0
        } else {
            RecommendedAction::RestartBm as i32
        },
        error_code: vec![code.into()],
        entities_impacted: vec![Entity {
            entity_type: keys::ENTITY_PCI.into(),
            entity_value: "0000:b3:00".into(),
        }],
        metadata: [(keys::META_BOOT_ID, "b00t"), (keys::META_JOB, "ml/train")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        generated_timestamp: Some(json::proto_timestamp(at(seconds))),
        node_name: "n1".into(),
        processing_strategy: ProcessingStrategy::ExecuteRemediation as i32,
        id: format!("id{seq}"),
        ..HealthEvent::default()
    };
    let created_at = at(seconds) + jiff::SignedDuration::from_millis(500);
    EventRecord {
        seq: seq.into(),
        id: event.id.clone(),
        created_at,
        event,
    }
}

fn entry(seconds: i64, kind: EntryKind, text: &str) -> JournalEntry {
    JournalEntry {
        at: at(seconds),
        node: "n1".into(),
        session: Some("id1".into()),
        kind,
        text: text.into(),
        detail: Value::Null,
    }
}

fn fault(code: &str) -> FaultView {
    let record = xid(1, 0, code, false);
    let mut book = FaultBook::default();
    book.record(&record);
    FaultView::of(&book.faults("n1")[0])
}

fn dismissed(code: &str) -> FaultView {
    FaultView {
        dismissed: true,
        ..fault(code)
    }
}

fn status(faults: Vec<FaultView>, phase: Option<Phase>) -> NodeStatus {
    NodeStatus {
        name: "n1".into(),
        state: NodeState::Unhealthy,
        session: phase.map(|phase| SessionView {
            id: "id1".into(),
            phase,
            since: at(0),
            failures: 0,
            proposal: None,
            drain: None,
            another: None,
            awaits: "the recovery of its faults, or a release by hand".into(),
            cordoned: true,
            uncordon_releases: true,
        }),
        in_cluster: phase.map(|_| true),
        unschedulable: None,
        faults,
        notices: vec![],
        devices: vec![],
        notes: Vec::new(),
    }
}

/// Returns a status whose session has only tainted the node, or found it cordoned.
fn not_cordoned(mut status: NodeStatus) -> NodeStatus {
    if let Some(session) = &mut status.session {
        session.cordoned = false;
    }
    status
}

/// Returns a status at a time when machines uncordon nodes, so that uncordons are undone.
fn of_machines(mut status: NodeStatus) -> NodeStatus {
    if let Some(session) = &mut status.session {
        session.uncordon_releases = false;
    }
    status
}

fn told(records: &[EventRecord], journal: &[JournalEntry]) -> Explain {
    explain(&Material {
        node: "n1",
        data_dir: None,
        records,
        complete: true,
        journal,
        status: None,
    })
}

fn kinds(explain: &Explain) -> Vec<Value> {
    let kinds = explain.entries.iter().map(|entry| json!(entry.kind));
    kinds.collect()
}

#[test]
fn a_fault_is_told_from_its_line_to_the_answer_of_the_api_server() {
    let journal = [
        entry(1, EntryKind::Rules, "rule set 'fatal' matches"),
        entry(1, EntryKind::Decision, "cordon"),
        entry(1, EntryKind::Call, "PATCH /api/v1/nodes/n1"),
        entry(2, EntryKind::Answer, "200 OK in 4 ms"),
        entry(2, EntryKind::Session, "quarantining -> quarantined"),
    ];
    let story = told(&[xid(1, 0, "79", false)], &journal);
    assert_eq!(
        kinds(&story),
        [
            "line", "decoded", "event", "rules", "decision", "call", "answer", "session"
        ]
    );
    let [line, decoded, event, rules, ..] = story.entries.as_slice() else {
        panic!()
    };
    assert_eq!(line.text, "NVRM: Xid (PCI:0000:b3:00): 79, pid=1");
    assert_eq!(line.detail["source"], "kernel log");
    assert_eq!(line.detail["bootId"], "b00t");
    assert_eq!(line.detail["job"], "ml/train");
    assert_eq!(
        (line.at, event.at),
        (at(0), at(0) + jiff::SignedDuration::from_millis(500))
    );
    for part in [
        "SysLogsXIDError 79 on PCI 0000:b3:00: fatal",
        "RESTART_BM",
        "PCI Express",
    ] {
        assert!(decoded.text.contains(part), "{}", decoded.text);
    }
    assert_eq!(
        decoded.detail["catalogue"][0]["mnemonic"],
        "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS"
    );
    assert!(
        decoded.detail["catalogue"][0]["source"]
            .as_str()
            .unwrap()
            .contains("NVIDIA")
    );
    assert_eq!(event.detail["id"], "id1");
    assert_eq!(
        event.detail["effect"],
        "opens the fault SysLogsXIDError 79 on PCI 0000:b3:00"
    );
    assert_eq!(rules.session.as_deref(), Some("id1"));
}

#[test]
fn what_an_event_did_is_said() {
    let with = |change: fn(&mut HealthEvent)| {
        let mut record = xid(1, 0, "79", false);
        change(&mut record.event);
        record
    };
    let table: [(&str, Vec<EventRecord>); 6] = [
        ("opens the fault", vec![xid(1, 0, "79", false)]),
        (
            "closes the fault",
            vec![xid(1, 0, "79", false), xid(2, 1, "79", true)],
        ),
        (
            "makes the open fault SysLogsXIDError 79 on PCI 0000:b3:00 fatal",
            vec![with(|event| event.is_fatal = false), xid(2, 1, "79", false)],
        ),
        ("no fault that it could close", vec![xid(1, 0, "79", true)]),
        (
            "stored only",
            vec![with(|event| event.processing_strategy = 2)],
        ),
        (
            "older than the history",
            vec![with(|event| {
                event
                    .metadata
                    .insert(keys::META_EARLIER_IN_BOOT.into(), "true".into());
            })],
        ),
    ];
    for (effect, records) in table {
        let story = told(&records, &[]);
        let last = story.entries.last().unwrap();
        assert_eq!(last.kind, TimelineKind::Event);
        assert!(last.text.contains(effect), "{effect}: {}", last.text);
        assert!(!last.text.contains("as far as"), "{}", last.text);
    }
    let records = [xid(7, 0, "79", false)];
    let part = explain(&Material {
        node: "n1",
        data_dir: None,
        records: &records,
        complete: false,
        journal: &[],
        status: None,
    });
    assert!(
        part.entries[2]
            .text
            .contains("judging by the events shown here")
    );
}

#[test]
fn who_reported_is_said_and_what_they_may_not_close() {
    let by = |mut record: EventRecord, reporter: &Reporter| {
        reporter.note_in(&mut record.event);
        record
    };
    let (uid, pid) = (1000, Some(7));
    let user = Reporter::User(Process { uid, pid });
    let fault = |reporter: &Reporter| by(xid(1, 0, "79", false), reporter);
    let monitors = || fault(&Reporter::Monitor);
    let mut notice = xid(1, 0, "13", false);
    (notice.event.is_fatal, notice.event.recommended_action) = (false, 0);
    let mut future = monitors();
    let said = (
        "gpuwarden.dev/future-time".to_owned(),
        "9998-01-01".to_owned(),
    );
    future.event.metadata.extend([said]);
    for (expected, records) in [
        ("from process 7 of user 1000", vec![fault(&user)]),
        ("from the node's agent", vec![fault(&Reporter::Node)]),
        (
            "from central monitor cloud",
            vec![fault(&Reporter::Central("cloud".to_owned()))],
        ),
        (
            "stays open until one of those",
            vec![monitors(), by(xid(2, 1, "79", true), &user)],
        ),
        (
            "closes the fault",
            vec![fault(&user), by(xid(2, 1, "79", true), &Reporter::Monitor)],
        ),
        ("a notice", vec![notice]),
        ("9998-01-01", vec![future]),
    ] {
        let story = told(&records, &[]);
        let last = story.entries.last().unwrap();
        let all = format!("{} {}", last.text, last.detail);
        assert!(all.contains(expected), "{expected}: {all}");
    }
    let own = told(&[monitors()], &[])
        .entries
        .last()
        .unwrap()
        .text
        .clone();
    assert!(!own.contains(" from "), "{own}");
}

#[test]
fn where_a_line_comes_from_is_said() {
    let with = |change: fn(&mut HealthEvent)| {
        let mut record = xid(1, 0, "79", false);
        change(&mut record.event);
        told(&[record], &[]).entries[0].detail["source"].clone()
    };
    let mark = |key: &str| (key.to_owned(), "true".to_owned());
    assert_eq!(with(|_| ()), "kernel log");
    assert_eq!(
        with(|event| event.metadata.clear()),
        "kernel log, from a file"
    );
    assert_eq!(
        with(|event| event.metadata = [("x".into(), "y".into())].into()),
        "kernel log, from a file"
    );
    let mut by_program = xid(1, 0, "79", false);
    by_program
        .event
        .metadata
        .extend([mark(keys::META_FROM_USER_SPACE)]);
    let story = told(&[by_program], &[]);
    assert_eq!(
        story.entries[0].detail["source"],
        "kernel log, written there by a program"
    );
    let other = with(|event| {
        event.metadata.clear();
        event.agent = "nic-monitor".into();
    });
    assert_eq!(other, "nic-monitor");
}

#[test]
fn repeats_are_folded_until_something_is_decided() {
    let mut records: Vec<EventRecord> = (1..=14)
        .map(|n| xid(n, i64::try_from(n).unwrap(), "79", false))
        .collect();
    let story = told(&records, &[]);
    assert_eq!(kinds(&story), ["line", "decoded", "event", "event"]);
    let fold = &story.entries[3];
    assert!(
        fold.text.starts_with("... and 13 more until 2027-"),
        "{}",
        fold.text
    );
    assert_eq!(fold.detail["repeats"], 13);
    assert_eq!(
        (&fold.detail["firstSeq"], &fold.detail["lastSeq"]),
        (&2.into(), &14.into())
    );

    // A decision after the tenth starts another run; a recovery makes the next report a new
    // fault.
    records.push(xid(15, 20, "79", true));
    records.push(xid(16, 21, "79", false));
    records.push(xid(17, 22, "79", false));
    let story = told(&records, &[entry(11, EntryKind::Decision, "cordon")]);
    let texts: Vec<&str> = story
        .entries
        .iter()
        .filter(|entry| matches!(entry.kind, TimelineKind::Event | TimelineKind::Journal(_)))
        .map(|entry| {
            entry
                .text
                .split_inclusive(' ')
                .take(3)
                .collect::<String>()
                .leak() as &str
        })
        .collect();
    assert_eq!(
        texts,
        [
            "accepted as #1 ",
            "... and 9 ",
            "cordon",
            "... and 4 ",
            "accepted as #15 ",
            "accepted as #16 ",
            "accepted as #17: "
        ]
    );
}

#[test]
fn another_gpuwardens_session_is_ended_by_its_command_not_by_an_uncordon() {
    let mut status = status(Vec::new(), Some(Phase::Quarantined));
    let session = status.session.as_mut().unwrap();
    session.awaits = "the gpuwarden on n1 itself, to give it back".into();
    session.another = Some(ForeignGpuwardenView {
        who: "the gpuwarden on n1 itself".into(),
        end: "kubectl annotate node n1 gpuwarden.dev/session-".into(),
    });
    let story = explain(&Material {
        node: "n1",
        data_dir: None,
        records: &[],
        complete: true,
        journal: &[],
        status: Some(&status),
    });
    assert_eq!(story.awaits, "the gpuwarden on n1 itself, to give it back");
    let ways = story.how_to_clear;
    assert_eq!(ways.len(), 1, "{ways:#?}");
    assert!(ways[0].contains("gone for good"), "{ways:#?}");
    assert!(ways[0].contains("`kubectl annotate node n1 "), "{ways:#?}");
}

#[test]
fn a_repeat_that_does_not_count_says_so() {
    let old = |seq: u64, second| {
        let mut record = xid(seq, second, "79", false);
        record.event.processing_strategy = 2;
        let key = keys::META_EARLIER_IN_BOOT.to_owned();
        record.event.metadata.insert(key, "true".to_owned());
        record
    };
    let repeats = |records: &[EventRecord]| {
        let story = told(records, &[]);
        story.entries.last().unwrap().text.clone()
    };
    for records in [
        vec![old(1, 0), old(2, 1)],
        vec![old(1, 0), old(2, 1), old(3, 2)],
    ] {
        let text = repeats(&records);
        assert!(text.contains("again; shown only: it is older"), "{text}");
    }
    // Repeats that count get no remark.
    let text = repeats(&[xid(1, 0, "79", false), xid(2, 1, "79", false)]);
    assert!(text.ends_with("again"), "{text}");
}

#[test]
fn two_faults_that_alternate_are_folded_each() {
    let records: Vec<EventRecord> = (1..=20)
        .map(|n| {
            xid(
                n,
                i64::try_from(n).unwrap(),
                if n % 2 == 0 { "79" } else { "48" },
                false,
            )
        })
        .collect();
    let story = told(&records, &[]);
    assert_eq!(story.entries.len(), 3 + 3 + 2, "{:#?}", story.entries);
}

#[test]
fn entries_are_in_order_of_time_whatever_the_order_and_the_clocks() {
    // The sender's clock is an hour ahead; the second event arrives late; all three share one
    // time.
    let mut ahead = xid(1, 3600, "79", false);
    ahead.created_at = at(10);
    let mut late = xid(2, -3600, "48", false);
    late.created_at = at(10);
    let mut same = xid(3, 10, "31", false);
    same.created_at = at(10);
    let journal = [
        entry(10, EntryKind::Rules, "first"),
        entry(10, EntryKind::Decision, "second"),
    ];
    let story = told(&[same, late, ahead], &journal);
    assert!(story.entries.is_sorted_by_key(|entry| entry.at));
    assert_eq!(
        kinds(&story),
        [
            "line", "decoded", "line", "decoded", "event", "event", "line", "decoded", "event",
            "rules", "decision"
        ]
    );
    assert_eq!(
        story.entries[2].detail["generatedTimestamp"],
        at(3600).to_string()
    );
}

#[test]
fn what_is_awaited_and_how_to_clear_it() {
    let uncordon = "kubectl uncordon n1";
    let recovery = "gpuwarden inject recovery --node-name n1 --code 79 --pci 0000:b3:00";
    let all = "`gpuwarden inject recovery --node-name n1`";
    let table = [
        (
            None,
            "nothing: no fault is open on n1",
            vec![],
            vec![uncordon, recovery],
        ),
        (
            Some(status(vec![], None)),
            "nothing: no fault is open",
            vec![],
            vec![uncordon],
        ),
        (
            Some(status(vec![fault("79")], None)),
            "the recovery of SysLogsXIDError 79 on PCI 0000:b3:00",
            vec![
                recovery,
                "healthy event of agent syslog-health-monitor, check SysLogsXIDError, code 79, \
                 for PCI 0000:b3:00",
                "RESTART_BM",
            ],
            vec![uncordon, all],
        ),
        (
            Some(status(vec![fault("79"), fault("48")], None)),
            "the recovery of its 2 open faults",
            vec![recovery, "--code 48", all],
            vec![uncordon],
        ),
        (
            Some(status(vec![fault("79")], Some(Phase::Quarantined))),
            "or a release by hand",
            vec![recovery, uncordon],
            vec![all],
        ),
        (
            Some(not_cordoned(status(
                vec![fault("79")],
                Some(Phase::Quarantined),
            ))),
            "or a release by hand",
            vec![recovery, "`gpuwarden release n1 --reason TEXT`"],
            vec![uncordon],
        ),
        (
            Some(of_machines(status(
                vec![fault("79")],
                Some(Phase::Remediating),
            ))),
            "or a release by hand",
            vec![recovery, "`gpuwarden release n1 --reason TEXT`"],
            vec![uncordon],
        ),
        (
            Some(status(vec![fault("79")], Some(Phase::Quarantining))),
            "or a release by hand",
            vec![recovery],
            vec![uncordon],
        ),
        (
            Some(status(vec![dismissed("79")], None)),
            "nothing: SysLogsXIDError 79 on PCI 0000:b3:00 was dismissed by hand; a newer report \
             counts again",
            vec![recovery],
            vec![uncordon],
        ),
        (
            Some(status(vec![dismissed("79"), dismissed("48")], None)),
            "nothing: its 2 open faults were dismissed by hand",
            vec![recovery],
            vec![uncordon],
        ),
        (
            Some(status(vec![dismissed("79"), fault("48")], None)),
            "the recovery of SysLogsXIDError 48",
            vec![recovery],
            vec![uncordon],
        ),
        (
            Some(status(vec![fault("79"); 30], None)),
            "30 open faults",
            vec!["and 10 more", all],
            vec![uncordon],
        ),
    ];
    for (status, awaits, has, has_not) in table {
        let story = explain(&Material {
            node: "n1",
            data_dir: None,
            records: &[],
            complete: true,
            journal: &[],
            status: status.as_ref(),
        });
        assert!(story.awaits.contains(awaits), "{}", story.awaits);
        let text = story.how_to_clear.join("\n");
        for part in has {
            assert!(text.contains(part), "{part} in {text}");
        }
        for part in has_not {
            assert!(!text.contains(part), "{part} not in {text}");
        }
    }
}

#[test]
fn a_hostile_name_makes_no_command() {
    let mut hostile = status(vec![fault("79")], Some(Phase::Quarantined));
    hostile.name = "n1\nreboot".into();
    let lines = clear::how_to_clear(&hostile, None);
    assert_eq!(lines.len(), 1);
    assert!(!lines[0].contains("gpuwarden inject"), "{}", lines[0]);
}

#[test]
fn a_command_names_the_server_that_it_is_for() {
    let faulty = status(vec![fault("79"), fault("48")], None);
    let lines = clear::how_to_clear(&faulty, Some("/tmp/x y"));
    let recovery = "`gpuwarden inject recovery --data-dir '/tmp/x y' --node-name n1";
    for line in &lines {
        assert!(line.contains(recovery), "{line}");
    }
    assert_eq!(lines.len(), 3);
    // A directory that cannot be quoted safely yields no command.
    for line in clear::how_to_clear(&faulty, Some("/tmp/x\ny")) {
        assert!(!line.contains("gpuwarden inject"), "{line}");
    }
    let many = status(vec![fault("79"); 30], None);
    let text = clear::how_to_clear(&many, Some("/x")).concat();
    assert!(
        text.contains("`gpuwarden status --data-dir /x -o wide`"),
        "{text}"
    );
}

#[test]
fn a_conclusion_names_the_events_that_it_rests_on() {
    for (evidence, expected) in [
        ("a", "RESTART_BM. It rests on the event a"),
        ("a,b", "RESTART_BM. It rests on 2 events: a, b"),
    ] {
        let mut conclusion = xid(1, 0, "62", false);
        let event = &mut conclusion.event;
        event.agent = keys::ANALYZER_AGENT.into();
        event.check_name = "RepeatedXIDErrorOnSameGPU".into();
        let evidence = (keys::META_EVIDENCE.to_owned(), evidence.to_owned());
        event.metadata.extend([evidence]);
        let explain = told(&[conclusion], &[]);
        let decoded = &explain.entries[1];
        assert_eq!(decoded.kind, TimelineKind::Decoded);
        assert!(decoded.text.ends_with(expected), "{}", decoded.text);
    }
}
