//! Tables of the desired state for faults of a node, and the number of rule evaluations.

use contract::{BehaviourOverrides, Entity};
use model::event::{EventRecord, normalise};
use model::fault::FaultBook;
use model::reporter::{Process, Reporter};

use super::*;
use crate::counts;

fn faults(events: Vec<HealthEvent>) -> Vec<Fault> {
    let mut book = FaultBook::default();
    for (seq, mut event) in (1_u64..).zip(events) {
        let created_at = Timestamp::from_second(1_000 + i64::try_from(seq).unwrap()).unwrap();
        event.node_name = "n1".into();
        normalise(&mut event, created_at);
        book.record(&EventRecord {
            seq: seq.into(),
            id: event.id.clone(),
            created_at,
            event,
        });
    }
    book.faults("n1").to_vec()
}

fn fatal(gpu: &str) -> HealthEvent {
    HealthEvent {
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        is_fatal: true,
        entities_impacted: vec![Entity {
            entity_type: "GPU".into(),
            entity_value: gpu.into(),
        }],
        ..HealthEvent::default()
    }
}

/// Assesses a node without known devices.
fn assess(
    faults: &[Fault],
    policy: &Policy,
    node: &NodeView,
    dismissed: Option<Dismissal>,
) -> Desired {
    super::assess(
        faults,
        policy,
        node,
        &NodeDevices::default(),
        dismissed,
        Timestamp::MAX,
    )
}

fn judge(events: Vec<HealthEvent>) -> Desired {
    assess(
        &faults(events),
        &Policy::builtin(),
        &NodeView::unknown("n1"),
        None,
    )
}

#[test]
fn fatal_and_replace_vm_quarantine_by_default() {
    let desired = judge(vec![fatal("0")]);
    assert!(desired.cordon && desired.taints.is_empty());
    assert_eq!(desired.rule_sets, ["default"]);
    let replace = HealthEvent {
        is_fatal: false,
        recommended_action: 25,
        ..fatal("0")
    };
    assert!(judge(vec![replace]).cordon);
    let harmless = HealthEvent {
        is_fatal: false,
        ..fatal("0")
    };
    let desired = judge(vec![harmless]);
    assert!(!desired.wanted() && desired.events.is_empty());
}

#[test]
fn which_expression_did_not_match_is_said() {
    let ruling_of = |event: HealthEvent, node: &NodeView, policy: &Policy| {
        assess(&faults(vec![event]), policy, node, None).rulings[0].to_string()
    };
    let harmless = HealthEvent {
        is_fatal: false,
        ..fatal("0")
    };
    let labels = serde_json::json!({contract::keys::MANAGED_LABEL: "false"});
    let opted_out = serde_json::json!({"metadata": {"name": "n1", "labels": labels}});
    let opted_out = NodeView::from_object(opted_out).unwrap();
    let node = NodeView::unknown("n1");
    let asks_nothing = Policy::parse(
        "[[rule-sets]]\nname = \"a\"\n[[rule-sets.match.all]]\nkind = \"HealthEvent\"\n\
         expression = \"event.isFatal\"\n",
        "p",
    )
    .unwrap();
    let title = "GpuMemWatch on GPU 0: ";
    for (event, node, policy, expected) in [
        (
            harmless,
            &node,
            &Policy::builtin(),
            "quarantines nothing: 'default' does not match: event.isFatal || \
             event.recommendedAction == 25",
        ),
        (
            fatal("0"),
            &opted_out,
            &Policy::builtin(),
            "quarantines nothing: 'default' does not match: !(has(node.metadata.labels) && \
             'k8saas.nvidia.com/ManagedByNVSentinel' in node.metadata.labels && \
             node.metadata.labels['k8saas.nvidia.com/ManagedByNVSentinel'] == 'false')",
        ),
        (
            fatal("0"),
            &node,
            &Policy::builtin(),
            "rule set 'default' matches",
        ),
        (
            fatal("0"),
            &node,
            &asks_nothing,
            "rule set 'a' matches; quarantines nothing: the matching rule sets request nothing",
        ),
        (
            fatal("0"),
            &node,
            &Policy::parse("# no rules", "p").unwrap(),
            "quarantines nothing: the policy has no rule sets",
        ),
    ] {
        assert_eq!(ruling_of(event, node, policy), format!("{title}{expected}"));
    }
}

#[test]
fn skip_and_force_of_the_sender_have_precedence() {
    let skip = HealthEvent {
        quarantine_overrides: Some(BehaviourOverrides {
            force: false,
            skip: true,
        }),
        ..fatal("0")
    };
    assert!(!judge(vec![skip]).wanted());
    let force = HealthEvent {
        is_fatal: false,
        quarantine_overrides: Some(BehaviourOverrides {
            force: true,
            skip: false,
        }),
        metadata: [("creator_id".to_owned(), "alice".to_owned())].into(),
        ..fatal("0")
    };
    let desired = judge(vec![force]);
    assert!(desired.cordon);
    assert_eq!(
        desired.forced_by.as_deref(),
        Some("gpu-health-monitor-alice")
    );
}

#[test]
fn faults_dismissed_by_hand_do_not_count_but_newer_ones_do() {
    let faults = faults(vec![fatal("0"), fatal("1")]);
    let policy = Policy::builtin();
    let node = NodeView::unknown("n1");
    let judge = |second| {
        let dismissed = Dismissal {
            up_to: Timestamp::from_second(second).unwrap(),
            by: DismissedBy::Released,
        };
        assess(&faults, &policy, &node, Some(dismissed))
    };
    assert_eq!(judge(1_001).events.len(), 1);
    assert!(!judge(1_002).wanted());
    assert_eq!(judge(1_000).events.len(), 2);
}

#[test]
fn the_higher_priority_decides_about_an_effect_and_the_order_is_the_policys() {
    let rule = |name: &str, priority: i64, effect: &str| {
        format!(
            "[[rule-sets]]\nname = \"{name}\"\npriority = {priority}\n\
             taint = {{ key = \"gpu\", value = \"bad\", effect = \"{effect}\" }}\n\
             [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n"
        )
    };
    let text = [
        rule("a", 1, "NoSchedule"),
        rule("b", 5, "NoExecute"),
        rule("c", 5, "NoSchedule"),
    ];
    let policy = Policy::parse(&text.concat(), "p").unwrap();
    let desired = assess(
        &faults(vec![fatal("0")]),
        &policy,
        &NodeView::unknown("n1"),
        None,
    );
    assert_eq!(desired.taints.len(), 1);
    assert_eq!(desired.taints[0].effect, "NoExecute");
    assert_eq!(desired.rule_sets, ["a", "b", "c"]);
    assert!(!desired.cordon);
}

#[test]
fn two_values_of_one_key_and_effect_are_decided_by_priority() {
    let rule = |name: &str, priority: i64, value: &str| {
        format!(
            "[[rule-sets]]\nname = \"{name}\"\npriority = {priority}\n\
             taint = {{ key = \"gpu\", value = \"{value}\", effect = \"NoSchedule\" }}\n\
             [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n"
        )
    };
    for (a, b, expected) in [(1, 2, "b"), (2, 1, "a"), (0, 0, "a")] {
        let policy = Policy::parse(&(rule("a", a, "a") + &rule("b", b, "b")), "p").unwrap();
        let node = NodeView::unknown("n1");
        let desired = assess(&faults(vec![fatal("0")]), &policy, &node, None);
        let values: Vec<_> = desired.taints.iter().map(|taint| &taint.value).collect();
        assert_eq!(values, [expected], "{a} {b}");
    }
}

#[test]
fn the_taint_of_the_document_comes_by_the_policys_switch() {
    let policy = Policy::parse(
        "unhealthy-taint = true\n[[rule-sets]]\nname = \"a\"\ncordon.shouldCordon = true\n\
         [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n",
        "p",
    )
    .unwrap();
    let node = NodeView::unknown("n1");
    let mut odd = fatal("0");
    odd.check_name = "GPU memory/watch".into();
    let minor = HealthEvent {
        is_fatal: false,
        ..fatal("0")
    };
    for (event, expected) in [
        (
            fatal("0"),
            vec!["nvsentinel.nvidia.com/unhealthy=GpuMemWatch:NoSchedule"],
        ),
        (
            odd,
            vec!["nvsentinel.nvidia.com/unhealthy=GPU-memory-watch:NoSchedule"],
        ),
        (minor, vec![]),
    ] {
        let desired = assess(&faults(vec![event]), &policy, &node, None);
        let taints: Vec<_> = desired.taints.iter().map(ToString::to_string).collect();
        assert_eq!(taints, expected);
    }
}

#[test]
fn a_node_that_is_handed_over_is_not_taken_out() {
    let faults = faults(vec![fatal("0")]);
    let policy = Policy::builtin();
    let mut node = NodeView::unknown("n1");
    let label = keys::HANDED_OVER_LABEL.to_owned();
    node.labels.insert(label.clone(), "false".into());
    let desired = assess(&faults, &policy, &node, None);
    assert!(!desired.wanted(), "{desired:?}");
    assert!(desired.rulings[0].to_string().contains("handed over"));
    // A node that was taken out before stays out until its faults recover.
    node.annotations.insert(
        keys::QUARANTINE_HEALTH_EVENT.into(),
        "[{\"id\":\"a\"}]".into(),
    );
    assert!(assess(&faults, &policy, &node, None).wanted());
    node.annotations.clear();
    node.labels.insert(label, "true".into());
    assert!(assess(&faults, &policy, &node, None).wanted());
}

#[test]
fn a_node_s_own_choice_of_policy_decides() {
    let policy = Policy::parse(
        "[[rule-sets]]\nname = \"a\"\ncordon.shouldCordon = true\n\
         [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n\
         [[policies]]\nname = \"lenient\"\n",
        "p",
    )
    .unwrap();
    let faults = faults(vec![fatal("0")]);
    let mut node = NodeView::unknown("n1");
    for (name, wanted) in [("lenient", false), ("other", true)] {
        node.annotations.insert(keys::POLICY.into(), name.into());
        assert_eq!(assess(&faults, &policy, &node, None).wanted(), wanted);
    }
}

#[test]
fn one_event_for_several_faults_is_listed_once_gravest_first() {
    let mut both = fatal("0");
    both.error_code = vec!["48".into(), "95".into()];
    let minor = HealthEvent {
        is_fatal: false,
        recommended_action: 25,
        ..fatal("7")
    };
    let desired = judge(vec![minor, both]);
    assert_eq!(desired.events.len(), 2);
    assert!(desired.events[0].event.is_fatal);
}

#[test]
fn force_counts_where_a_sender_asks_for_both_and_skip_holds_for_its_own_fault_only() {
    let asking = |gpu: &str, force, skip| HealthEvent {
        quarantine_overrides: Some(BehaviourOverrides { force, skip }),
        ..fatal(gpu)
    };
    let rulings = |desired: &Desired| -> Vec<Ruling> {
        let rulings = desired.rulings.iter();
        rulings.map(|one| one.ruling.clone()).collect()
    };
    // One event with both.
    let both = judge(vec![asking("GPU-1", true, true)]);
    assert!(both.cordon && both.forced_by.is_some());
    assert_eq!(rulings(&both), [Ruling::Forced]);
    // Two events: both count, in whichever order they came.
    for events in [
        vec![asking("GPU-1", false, true), asking("GPU-2", true, false)],
        vec![asking("GPU-2", true, false), asking("GPU-1", false, true)],
    ] {
        let desired = judge(events);
        assert!(desired.cordon && desired.forced_by.is_some());
        let mut found = rulings(&desired);
        found.sort_by_key(|ruling| *ruling == Ruling::Skipped);
        assert_eq!(found, [Ruling::Forced, Ruling::Skipped]);
        let counted: Vec<_> = desired.events.iter().map(|one| &one.event).collect();
        assert_eq!(counted.len(), 1);
        assert!(counted[0].quarantine_overrides.unwrap().force);
    }
    assert!(!judge(vec![asking("GPU-1", false, true)]).wanted());
}

#[test]
fn a_look_asks_each_rule_once_a_fault_and_makes_each_variable_once() {
    let rule = |group: &str, kind: &str, expression: &str| {
        format!("[[rule-sets.match.{group}]]\nkind = '{kind}'\nexpression = \"{expression}\"\n")
    };
    let set = |name: &str| {
        format!(
            "[[rule-sets]]\nname = '{name}'\ncordon = {{ shouldCordon = true }}\n{}{}{}{}",
            rule("all", "HealthEvent", "event.isFatal"),
            rule("all", "Node", "node.metadata.name != ''"),
            rule("any", "HealthEvent", "event.agent == 'x'"),
            rule("any", "HealthEvent", "event.agent != 'x'"),
        )
    };
    let policy = Policy::parse(&format!("{}{}", set("a"), set("b")), "p").unwrap();
    let faults = faults(vec![fatal("GPU-1"), fatal("GPU-2"), fatal("GPU-3")]);
    let mut node = NodeView::unknown("n1");
    for quarantined in [false, true] {
        if quarantined {
            node.annotations
                .insert(keys::QUARANTINE_HEALTH_EVENT.to_owned(), "[]".to_owned());
            node.unschedulable = true;
        }
        counts::reset();
        assert!(assess(&faults, &policy, &node, None).cordon);
        // Two rule sets of four rules and three faults; variables of three events and one node.
        assert_eq!(counts::asked(), 2 * 4 * 3);
        assert_eq!(counts::made(), 3 + 1);
    }
}

/// Returns a policy whose three rule sets use a large part of the step limit.
fn costly() -> Policy {
    let rule = "event.errorCode.all(a, event.errorCode.all(b, a != b || b == a))";
    let set = |n: u32| {
        format!(
            "[[rule-sets]]\nname = '{n}'\ncordon = {{ shouldCordon = true }}\n\
             [[rule-sets.match.all]]\nkind = 'HealthEvent'\nexpression = \"{rule}\"\n"
        )
    };
    Policy::parse(&[set(1), set(2), set(3)].concat(), "p").unwrap()
}

/// Returns an event with `count` codes, starting at `first`.
fn with_codes(reporter: &Reporter, first: u32, count: u32) -> HealthEvent {
    let mut event = HealthEvent {
        error_code: (first..first + count)
            .map(|code| code.to_string())
            .collect(),
        ..fatal("GPU-1")
    };
    reporter.note_in(&mut event);
    event
}

fn user() -> Reporter {
    let (uid, pid) = (1000, None);
    Reporter::User(Process { uid, pid })
}

#[test]
fn an_event_is_asked_about_once_however_many_faults_it_stands_for() {
    let mut event = with_codes(&user(), 1, 128);
    let more = ["GPU-2", "GPU-3"].map(|gpu| fatal(gpu).entities_impacted.remove(0));
    event.entities_impacted.extend(more);
    let faults = faults(vec![event]);
    assert!(faults.len() > 300, "{}", faults.len());
    counts::reset();
    assert!(judge_by(&costly(), &faults).cordon);
    assert_eq!((counts::asked(), counts::made()), (3, 1 + 1));
}

#[test]
fn users_take_a_look_s_time_only_up_to_their_share() {
    let policy = costly();
    let mut events: Vec<_> = (0..100)
        .map(|n| with_codes(&user(), 1_000 + 2 * n, 2))
        .collect();
    events.extend((0..20).map(|n| with_codes(&Reporter::Monitor, n, 1)));
    let faults = faults(events);
    assert_eq!(faults.len(), 220);
    counts::reset();
    let desired = judge_by(&policy, &faults);
    let is_unasked = |one: &FaultRuling| one.ruling.to_string().contains("users report more");
    let unasked = desired.rulings.iter().filter(|one| is_unasked(one)).count();
    // All events of monitors are evaluated, those of users within the budget.
    assert!((100..200).contains(&unasked), "{unasked}");
    let judged = 20 + (200 - unasked) / 2;
    assert_eq!(counts::asked(), 3 * judged);
    assert_eq!(desired.events.len(), judged);
}

fn judge_by(policy: &Policy, faults: &[Fault]) -> Desired {
    assess(faults, policy, &NodeView::unknown("n1"), None)
}
