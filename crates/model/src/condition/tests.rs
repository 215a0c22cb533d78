use contract::{Entity, HealthEvent, ProcessingStrategy};
use jiff::Timestamp;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::event::{EventRecord, normalise};
use crate::fault::FaultBook;
use crate::reporter::Reporter;

mod any_events;
mod occurrences;

const NODE: &str = "n1";

/// A fault book with these events recorded, in order.
fn book(events: Vec<HealthEvent>) -> FaultBook {
    let mut book = FaultBook::default();
    for (seq, mut event) in (1_u64..).zip(events) {
        let created_at = Timestamp::from_second(1_000 + i64::try_from(seq).unwrap()).unwrap();
        event.node_name = NODE.into();
        normalise(&mut event, created_at);
        book.record(&EventRecord {
            seq: seq.into(),
            id: event.id.clone(),
            created_at,
            event,
        });
    }
    book
}

fn entities(list: &[(&str, &str)]) -> Vec<Entity> {
    list.iter()
        .map(|(kind, value)| Entity {
            entity_type: (*kind).to_owned(),
            entity_value: (*value).to_owned(),
        })
        .collect()
}

fn fatal(check: &str, code: &str, on: &[(&str, &str)], message: &str) -> HealthEvent {
    HealthEvent {
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: check.into(),
        is_fatal: true,
        error_code: if code.is_empty() {
            vec![]
        } else {
            vec![code.into()]
        },
        entities_impacted: entities(on),
        message: message.into(),
        recommended_action: 24,
        ..HealthEvent::default()
    }
}

fn healthy(check: &str, codes: &[&str], on: &[(&str, &str)]) -> HealthEvent {
    HealthEvent {
        is_fatal: false,
        is_healthy: true,
        recommended_action: 0,
        error_code: codes.iter().map(|code| (*code).to_owned()).collect(),
        ..fatal(check, "", on, "all is well")
    }
}

fn node(conditions: &serde_json::Value) -> NodeView {
    let object = json!({"metadata": {"name": NODE}, "status": {"conditions": conditions}});
    NodeView::from_object(object).unwrap()
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> serde_json::Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message})
}

fn options(summary: bool) -> Options {
    Options {
        limits: MessageLimits::default(),
        summary,
    }
}

fn wanted(book: &FaultBook, node: &NodeView, summary: bool) -> Vec<ConditionChange> {
    changes(
        book.faults(NODE),
        book.reported_checks(NODE),
        node,
        &options(summary),
    )
}

/// Returns the message of the single changed condition, on a node without conditions.
fn message(events: Vec<HealthEvent>) -> String {
    let changes = wanted(&book(events), &node(&json!([])), false);
    assert_eq!(changes.len(), 1, "{changes:?}");
    changes.into_iter().next().unwrap().condition.message
}

/// Formats the changes as `type status reason`, with `!` for a transition.
fn formatted(changes: &[ConditionChange]) -> Vec<String> {
    let line = |change: &ConditionChange| {
        let NodeCondition {
            kind,
            status,
            reason,
            ..
        } = &change.condition;
        let mark = if change.transition { "!" } else { "" };
        format!("{kind} {} {reason}{mark}", status_name(*status))
    };
    changes.iter().map(line).collect()
}

/// Returns the node with the changes applied.
fn written(node: &NodeView, changes: &[ConditionChange]) -> NodeView {
    let mut object = node.object();
    let list = object["status"]["conditions"].as_array_mut().unwrap();
    for ConditionChange { condition: one, .. } in changes {
        list.retain(|old| old["type"] != one.kind.as_str());
        list.push(condition(
            &one.kind,
            status_name(one.status),
            &one.reason,
            &one.message,
        ));
    }
    NodeView::from_object(object).unwrap()
}

#[test]
fn messages_are_in_the_grammar() {
    let gpu = [("PCI", "0000:b3:00"), ("GPU_UUID", "GPU-1")];
    let table: [(&str, HealthEvent, &str); 7] = [
        (
            "all parts",
            fatal("X", "79", &gpu, "fell off; the bus"),
            "ErrorCode:79 PCI:0000:b3:00 GPU_UUID:GPU-1 fell off. the bus \
             Recommended Action=RESTART_BM;",
        ),
        (
            "no code, no entity, no message",
            fatal("X", "", &[], ""),
            "Recommended Action=RESTART_BM;",
        ),
        (
            "the event's own form and order, with what describes the device",
            fatal(
                "X",
                "79",
                &[("PCI", "0000:B3:00.0"), ("GPC", "1"), ("REG0", "f")],
                "m",
            ),
            "ErrorCode:79 PCI:0000:B3:00.0 GPC:1 REG0:f m Recommended Action=RESTART_BM;",
        ),
        (
            "codes and values with the grammar's marks stay one word",
            fatal("X", "a b;c", &[("GPU", "0; 1\n")], "m"),
            "ErrorCode:a_b.c GPU:0._1_ m Recommended Action=RESTART_BM;",
        ),
        (
            "a message with the mark of the action does not move it",
            fatal("X", "79", &gpu[..1], "see Recommended Action=NONE\nhere"),
            "ErrorCode:79 PCI:0000:b3:00 see Recommended Action:NONE here \
             Recommended Action=RESTART_BM;",
        ),
        (
            "a custom action shows its name",
            HealthEvent {
                recommended_action: 27,
                custom_recommended_action: "RESEAT CABLE".into(),
                ..fatal("X", "79", &gpu[..1], "m")
            },
            "ErrorCode:79 PCI:0000:b3:00 m Recommended Action=CUSTOM:RESEAT_CABLE;",
        ),
        (
            "an unknown action is its number",
            HealthEvent {
                recommended_action: 77,
                ..fatal("X", "79", &gpu[..1], "m")
            },
            "ErrorCode:79 PCI:0000:b3:00 m Recommended Action=77;",
        ),
    ];
    for (what, event, expected) in table {
        assert_eq!(message(vec![event]), expected, "{what}");
    }
}

#[test]
fn one_event_is_one_piece_and_what_has_recovered_is_not_named() {
    let mut event = fatal("X", "A", &[("GPU", "0"), ("GPU", "1")], "m");
    event.error_code.push("B".into());
    let whole = "ErrorCode:A ErrorCode:B GPU:0 GPU:1 m Recommended Action=RESTART_BM;";
    assert_eq!(message(vec![event.clone()]), whole);
    assert_eq!(
        message(vec![event.clone(), healthy("X", &[], &[("GPU", "0")])]),
        "ErrorCode:A ErrorCode:B GPU:1 m Recommended Action=RESTART_BM;"
    );
    // A recovery that names a code clears that code only, also where it names no entity.
    assert_eq!(
        message(vec![event.clone(), healthy("X", &["A"], &[])]),
        "ErrorCode:B GPU:0 GPU:1 m Recommended Action=RESTART_BM;"
    );
    assert_eq!(
        message(vec![event, healthy("X", &["A"], &[("GPU", "1")])]),
        "ErrorCode:A ErrorCode:B GPU:0 m Recommended Action=RESTART_BM;\
         ErrorCode:B GPU:1 m Recommended Action=RESTART_BM;"
    );
}

#[test]
fn entities_are_compared_as_wholes() {
    let mig = fatal("X", "A", &[("MIG-GPU", "0")], "beside GPU:0 of the node");
    let change = wanted(
        &book(vec![mig, healthy("X", &[], &[("GPU", "0")])]),
        &node(&json!([])),
        false,
    );
    assert_eq!(formatted(&change), ["X True XIsNotHealthy!"]);
}

#[test]
fn repeats_with_other_texts_are_one_piece_whatever_the_device_is() {
    for on in [
        [("GPU", "0")],
        [("NIC", "mlx5_0")],
        [("NVSWITCH", "0")],
        [("v1/Pod", "a/b")],
    ] {
        let repeat = |pid| fatal("X", "79", &on, &format!("pid={pid}"));
        let text = message((0..100).map(repeat).collect());
        assert_eq!(text.matches("ErrorCode:79").count(), 1, "{text}");
    }
}

#[test]
fn what_the_limit_cuts_off_is_not_forgotten() {
    let name = |gpu: u32| gpu.to_string();
    let mut events: Vec<HealthEvent> = (0..64)
        .map(|gpu| fatal("X", "79", &[("GPU", &name(gpu))], &"long ".repeat(40)))
        .collect();
    let all = message(events.clone());
    assert!(all.len() <= 1024 && all.ends_with("..."), "{all}");
    assert!(!all.contains("GPU:63 "), "{all}");
    // All faults that the message shows recover, one by one. The last fault stays open.
    for gpu in 0..63 {
        events.push(healthy("X", &[], &[("GPU", &name(gpu))]));
    }
    let rest = message(events.clone());
    assert!(rest.starts_with("ErrorCode:79 GPU:63 long long"), "{rest}");
    assert!(rest.ends_with("Recommended Action=RESTART_BM;"), "{rest}");
    events.push(healthy("X", &[], &[("GPU", "63")]));
    let before = node(&json!([condition("X", "True", "XIsNotHealthy", &rest)]));
    let change = wanted(&book(events), &before, false);
    assert_eq!(formatted(&change), ["X False XIsHealthy!"]);
    assert_eq!(change[0].condition.message, "No Health Failures");
}

#[test]
fn too_long_a_list_is_compacted_first_and_then_cut_at_the_limit() {
    let limits = |message| MessageLimits::new(message, 72).unwrap();
    let render = |events: Vec<HealthEvent>, limits: MessageLimits| {
        let book = book(events);
        let faults: Vec<&Fault> = book.faults(NODE).iter().collect();
        message::render(&faults, &limits)
    };
    let long = |gpu: &str| fatal("X", "79", &[("GPU", gpu)], &"abcdefgh ".repeat(20));
    let two = render(vec![long("0"), long("1")], limits(256));
    assert_eq!(
        two,
        "ErrorCode:79 GPU:0 abcdefgh abcdefgh abcdefgh abcdefgh abcdefgh abcde... \
         Recommended Action=RESTART_BM;\
         ErrorCode:79 GPU:1 abcdefgh abcdefgh abcdefgh abcdefgh abcdefgh abcde... \
         Recommended Action=RESTART_BM;"
    );
    let cut = render(vec![long("0"), long("1")], limits(128));
    assert_eq!(
        cut,
        "ErrorCode:79 GPU:0 abcdefgh abcdefgh abcdefgh abcdefgh abcdefgh abcde... \
         Recommended Action=RESTART_BM;ErrorCode:79 GPU:1 ab;..."
    );
    // The identity is never compacted, however long it is.
    let links: Vec<(String, String)> = (0..9)
        .map(|link| ("NVLINK".to_owned(), format!("{link}-of-nine")))
        .collect();
    let links: Vec<(&str, &str)> = links
        .iter()
        .map(|(kind, value)| (kind.as_str(), value.as_str()))
        .collect();
    let many = render(
        vec![fatal("X", "74", &links, &"text ".repeat(200))],
        limits(1024),
    );
    assert!(
        many.contains("NVLINK:8-of-nine ... Recommended Action=RESTART_BM;"),
        "{many}"
    );
}

/// Title, events, conditions before, and expected changes.
type Case = (
    &'static str,
    Vec<HealthEvent>,
    Vec<serde_json::Value>,
    Vec<&'static str>,
);

#[test]
fn conditions_follow_from_what_is_known_and_stands_on_the_node() {
    let broken = fatal("X", "79", &[("GPU", "0")], "m");
    let text = "ErrorCode:79 GPU:0 m Recommended Action=RESTART_BM;";
    let not_fatal = HealthEvent {
        is_fatal: false,
        ..broken.clone()
    };
    let store_only = HealthEvent {
        processing_strategy: ProcessingStrategy::StoreOnly as i32,
        ..broken.clone()
    };
    let analyse = HealthEvent {
        processing_strategy: ProcessingStrategy::StoreAndAnalyse as i32,
        ..broken.clone()
    };
    let recovery = healthy("X", &[], &[]);
    let set = |reason: &str, text: &str| condition("X", "True", reason, text);
    let well = condition("X", "False", "XIsHealthy", "No Health Failures");
    let ready = condition(
        "Ready",
        "True",
        "KubeletReady",
        "kubelet is posting ready status",
    );
    let table: Vec<Case> = vec![
        (
            "new",
            vec![broken.clone()],
            vec![ready.clone()],
            vec!["X True XIsNotHealthy!"],
        ),
        (
            "there already",
            vec![broken.clone()],
            vec![set("XIsNotHealthy", text)],
            vec![],
        ),
        (
            "another text: no transition",
            vec![broken.clone()],
            vec![set("XIsNotHealthy", "cut...")],
            vec!["X True XIsNotHealthy"],
        ),
        (
            "well before",
            vec![broken.clone()],
            vec![well.clone()],
            vec!["X True XIsNotHealthy!"],
        ),
        (
            "recovered",
            vec![broken.clone(), recovery.clone()],
            vec![set("XIsNotHealthy", text)],
            vec!["X False XIsHealthy!"],
        ),
        (
            "recovered, and written",
            vec![broken.clone(), recovery.clone()],
            vec![well],
            vec![],
        ),
        (
            "NVSentinel's, and the first report is a recovery",
            vec![recovery.clone()],
            vec![set(
                "XIsNotHealthy",
                "ErrorCode:48 GPU:3 old Recommended Action=NONE;...",
            )],
            vec!["X False XIsHealthy!"],
        ),
        (
            "not reported: it may be another's, and true",
            vec![healthy("Y", &[], &[])],
            vec![set("XIsNotHealthy", text)],
            vec![],
        ),
        (
            "a check that was always healthy has no condition",
            vec![recovery],
            vec![ready],
            vec![],
        ),
        ("not fatal", vec![not_fatal], vec![], vec![]),
        ("to be stored only", vec![store_only], vec![], vec![]),
        ("to be analysed only", vec![analyse], vec![], vec![]),
        (
            "a condition of that name with another's reason",
            vec![broken],
            vec![set("SomebodyElse", "text")],
            vec![],
        ),
        (
            "the kubelet's own, there or not",
            vec![
                fatal("Ready", "1", &[], "m"),
                fatal("DiskPressure", "1", &[], "m"),
                fatal("GPUHealthy", "1", &[], "m"),
                fatal("no name", "1", &[], "m"),
            ],
            vec![condition("Ready", "True", "KubeletReady", "")],
            vec![],
        ),
        (
            "malformed conditions",
            vec![],
            vec![json!(5), json!({"status": 3})],
            vec![],
        ),
    ];
    for (what, events, conditions, expected) in table {
        let changes = wanted(&book(events), &node(&json!(conditions)), false);
        assert_eq!(formatted(&changes), expected, "{what}");
    }
}

/// NVSentinel's users have alerts on this condition. The fault takes no node out of service and
/// is not a fault of a GPU.
#[test]
fn a_host_engine_that_does_not_answer_has_a_condition_and_is_in_no_summary() {
    let lost = HealthEvent {
        is_fatal: false,
        recommended_action: 5,
        ..fatal(
            "GpuDcgmConnectivityFailure",
            "DCGM_CONNECTIVITY_ERROR",
            &[],
            "it does not answer",
        )
    };
    let changes = wanted(&book(vec![lost.clone()]), &node(&json!([])), true);
    let shown = formatted(&changes);
    let is_true = |it: &&String| it.contains("GpuDcgmConnectivityFailure") && it.contains("True");
    assert_eq!(shown.iter().filter(is_true).count(), 1, "{shown:?}");
    let is_well = |it: &String| it.contains("NoFatalFaults");
    assert!(shown.iter().any(is_well), "{shown:?}");
    let on_node = written(&node(&json!([])), &changes);
    let back = healthy("GpuDcgmConnectivityFailure", &[], &[]);
    let shown = formatted(&wanted(&book(vec![lost, back]), &on_node, true));
    let is_over = |it: &String| it.starts_with("GpuDcgmConnectivityFailure False");
    assert!(shown.iter().any(is_over), "{shown:?}");
}

#[test]
fn the_summary_names_the_worst_check() {
    let mut events = vec![HealthEvent {
        is_fatal: false,
        ..fatal("A", "1", &[], "harmless")
    }];
    let empty = node(&json!([]));
    let only = |events: &Vec<HealthEvent>, node: &NodeView| {
        let mut all = wanted(&book(events.clone()), node, true);
        all.retain(|change| change.condition.kind == "GPUHealthy");
        all
    };
    assert!(
        only(&vec![], &empty).is_empty(),
        "nothing is known of the node"
    );
    let good = only(&events, &empty);
    assert_eq!(formatted(&good), ["GPUHealthy True NoFatalFaults!"]);
    let on_node = written(&empty, &good);
    assert!(only(&events, &on_node).is_empty());

    events.push(fatal("B", "79", &[("GPU", "0")], "GPU 0 reported XID 79"));
    let bad = only(&events, &on_node);
    assert_eq!(formatted(&bad), ["GPUHealthy False B!"]);
    assert_eq!(bad[0].condition.message, "GPU 0 reported XID 79");
    let on_node = written(&on_node, &bad);
    events.push(fatal("a b", "1", &[], ""));
    let more = only(&events, &on_node);
    assert_eq!(formatted(&more), ["GPUHealthy False B"]);
    assert_eq!(
        more[0].condition.message,
        "GPU 0 reported XID 79 (and 1 more)"
    );
    events.push(healthy("B", &[], &[]));
    let last = only(&events, &on_node);
    assert_eq!(formatted(&last), ["GPUHealthy False HealthCheckFailed"]);
    events.push(healthy("a b", &[], &[]));
    assert_eq!(
        formatted(&only(&events, &on_node)),
        ["GPUHealthy True NoFatalFaults!"]
    );
}

#[test]
fn names_of_checks_cannot_fill_a_node_nor_users_take_the_place_of_monitors() {
    let made_up = |by: Option<Reporter>| -> Vec<HealthEvent> {
        let names = (0..500).map(|index| format!("Check{index}"));
        let mut events: Vec<_> = names.map(|name| fatal(&name, "1", &[], "m")).collect();
        for event in &mut events {
            if let Some(by) = &by {
                by.note_in(event);
            }
        }
        events
    };
    let users = made_up(None);
    let changes = wanted(&book(users.clone()), &node(&json!([])), false);
    assert_eq!(changes.len(), MAX_WITH_USERS);
    let after = written(&node(&json!([])), &changes);
    assert!(wanted(&book(users.clone()), &after, false).is_empty());

    // Existing conditions stay, even after the fault recovers.
    let mut own = fatal(keys::CHECK_XID, "79", &[], "m");
    Reporter::Monitor.note_in(&mut own);
    let both = book([users, vec![own]].concat());
    let changes = wanted(&both, &after, false);
    assert_eq!(
        formatted(&changes),
        ["SysLogsXIDError True SysLogsXIDErrorIsNotHealthy!"]
    );

    let monitors = book(made_up(Some(Reporter::Monitor)));
    let changes = wanted(&monitors, &node(&json!([])), false);
    assert_eq!(changes.len(), MAX_CONDITIONS);
}

#[test]
fn what_monitors_say_stands_before_what_users_say() {
    let mut events: Vec<HealthEvent> = (0..100)
        .map(|code| fatal(keys::CHECK_XID, &code.to_string(), &[], "made up"))
        .collect();
    let mut own = fatal(keys::CHECK_XID, "79", &[], "real");
    Reporter::Monitor.note_in(&mut own);
    events.push(own);
    let changes = wanted(&book(events.clone()), &node(&json!([])), true);
    for change in &changes {
        let message = &change.condition.message;
        assert!(message.contains("real"), "{message}");
    }
    // Users get at most half of the Events for faults that are not fatal.
    for event in &mut events {
        event.is_fatal = false;
    }
    events.rotate_right(1);
    let book = book(events);
    let found = occurrences(book.faults(NODE), &MessageLimits::default());
    assert_eq!(found.len(), crate::condition::MAX_OCCURRENCES / 2 + 1);
    assert!(found.iter().any(|one| one.message.contains("real")));
}

#[test]
fn limits_that_cannot_be_kept_are_refused() {
    assert_eq!(MessageLimits::new(10, 72), Err(LimitsError::Message(10)));
    assert_eq!(
        MessageLimits::new(20_000, 72),
        Err(LimitsError::Long(20_000))
    );
    assert_eq!(MessageLimits::new(1024, 0), Err(LimitsError::Compacted));
    assert_eq!(MessageLimits::new(1024, 72), Ok(MessageLimits::default()));
}

#[test]
fn a_drain_is_told_and_taken_back_and_that_of_others_is_left_alone() {
    let session = |drain: &str| format!(r#"{{"id":"s","since":"1970-01-01T00:00:01Z"{drain}}}"#);
    let begun = r#","drain":{"since":"1970-01-01T00:00:02Z"}"#;
    let done = r#","drain":{"since":"1970-01-01T00:00:02Z","done":"1970-01-01T00:00:09Z"}"#;
    let node = |drain: Option<&str>, conditions: &[serde_json::Value]| {
        let mut annotations = json!({});
        if let Some(drain) = drain {
            annotations[keys::SESSION] = json!(session(drain));
            annotations[keys::QUARANTINE_IS_CORDONED] = json!("True");
        }
        let object = json!({
            "metadata": {"name": NODE, "annotations": annotations},
            "status": {"conditions": conditions},
        });
        NodeView::from_object(object).unwrap()
    };
    let written = |view: &NodeView| -> Vec<(String, bool, String)> {
        let changes = changes(&[], std::iter::empty(), view, &options(false));
        let conditions = changes.into_iter().map(|change| change.condition);
        conditions
            .map(|one| (one.kind, one.status, one.message))
            .collect()
    };
    let expected =
        |kind: &str, status, message: &str| (kind.to_owned(), status, message.to_owned());
    let ours = |kind: &str, status: &str, message: &str| {
        condition(kind, status, "GpuwardenDrain", message)
    };
    let leaves = "Pods leave since 1970-01-01T00:00:02Z";
    let left = "All pods that were to leave had left at 1970-01-01T00:00:09Z";
    let none = "No drain of gpuwarden is under way";
    assert_eq!(written(&node(Some(""), &[])), []);
    assert_eq!(
        written(&node(Some(begun), &[])),
        [expected("DrainInProgress", true, leaves)]
    );
    let in_progress = ours("DrainInProgress", "True", leaves);
    assert_eq!(
        written(&node(Some(begun), std::slice::from_ref(&in_progress))),
        []
    );
    assert_eq!(
        written(&node(Some(done), std::slice::from_ref(&in_progress))),
        [
            expected("DrainInProgress", false, none),
            expected("Drained", true, left)
        ]
    );
    // The session ended by itself, by a release, or because draining was disabled.
    let drained = ours("Drained", "True", left);
    let over = ours("DrainInProgress", "False", none);
    for drain in [None, Some("")] {
        assert_eq!(
            written(&node(drain, &[over.clone(), drained.clone()])),
            [expected("Drained", false, none)]
        );
    }
    assert_eq!(
        written(&node(None, &[over, ours("Drained", "False", none)])),
        []
    );
    // Another component drains the node as well.
    let others = condition("DrainInProgress", "True", "KubectlDrain", "by ann");
    assert_eq!(
        written(&node(Some(begun), std::slice::from_ref(&others))),
        []
    );
    assert_eq!(written(&node(None, &[others])), []);
    let others = condition("Drained", "False", "KubectlDrain", "");
    assert_eq!(
        written(&node(Some(done), &[others])),
        [expected("Drained", true, left)]
    );
}
