use contract::{Entity, HealthEvent};
use serde_json::json;

use super::*;

fn rule_set(body: &str) -> String {
    format!(
        "[[rule-sets]]\nname = \"r\"\nenabled = true\n{body}\n[rule-sets.cordon]\nshouldCordon = true\n"
    )
}

fn any(kind: &str, expression: &str) -> String {
    rule_set(&format!(
        "[[rule-sets.match.any]]\nkind = \"{kind}\"\nexpression = '''{expression}'''"
    ))
}

fn matches(text: &str, event: &HealthEvent, node: &Value) -> Answer {
    let policy = Policy::parse(text, "p.toml").unwrap();
    policy.rule_sets[0].answer(&event_variable(event), &NodeVariable::new(node))
}

fn fatal() -> HealthEvent {
    HealthEvent {
        agent: "syslog-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "SysLogsXIDError".into(),
        is_fatal: true,
        recommended_action: 24,
        error_code: vec!["79".into()],
        entities_impacted: vec![Entity {
            entity_type: "PCI".into(),
            entity_value: "0000:b3:00".into(),
        }],
        ..HealthEvent::default()
    }
}

#[test]
fn the_built_in_policy_loads_and_takes_out_what_is_fatal() {
    let policy = Policy::parse(DEFAULT_POLICY, "built-in").unwrap();
    assert!(policy.warnings.is_empty());
    let labelled = |value: &str| json!({"metadata": {"name": "n", "labels": {"k8saas.nvidia.com/ManagedByNVSentinel": value}}});
    let bare = json!({"metadata": {"name": "n"}});
    let quiet = HealthEvent::default();
    let replace = HealthEvent {
        recommended_action: 25,
        ..HealthEvent::default()
    };
    for (event, node, matched) in [
        (&fatal(), &bare, true),
        (&replace, &bare, true),
        (&quiet, &bare, false),
        (&fatal(), &labelled("true"), true),
        (&fatal(), &labelled("false"), false),
    ] {
        let answer = policy.rule_sets[0].answer(&event_variable(event), &NodeVariable::new(node));
        assert_eq!(answer == Answer::Matched, matched, "{answer:?}");
    }
}

#[test]
fn expressions_of_the_reference_hold() {
    let node = json!({"metadata": {"name": "n", "labels": {"zone": "a"}}, "spec": {}});
    for (kind, expression, expected) in [
        (
            "HealthEvent",
            "event.agent == 'syslog-health-monitor' && (event.componentClass == 'GPU' || event.componentClass == 'NIC') && event.isFatal == true",
            true,
        ),
        (
            "HealthEvent",
            "event.agent.startsWith('preflight-') && event.isFatal == true",
            false,
        ),
        ("HealthEvent", "'79' in event.errorCode", true),
        (
            "HealthEvent",
            "event.errorCode.exists(code, code == '79')",
            true,
        ),
        ("HealthEvent", "event.recommendedAction == 24", true),
        ("HealthEvent", "event.recommendedAction == 24.0", true),
        ("HealthEvent", "event.quarantineOverrides == null", true),
        (
            "HealthEvent",
            "event.entitiesImpacted.exists(e, e.entityType == 'PCI' && e.entityValue.startsWith('0000:'))",
            true,
        ),
        (
            "HealthEvent",
            "event.agent.upperAscii() == 'SYSLOG-HEALTH-MONITOR'",
            true,
        ),
        (
            "Node",
            "!('k8saas.nvidia.com/ManagedByNVSentinel' in node.metadata.labels && node.metadata.labels['k8saas.nvidia.com/ManagedByNVSentinel'] == \"false\")",
            true,
        ),
        ("Node", "node.metadata.labels['zone'] == 'b'", false),
    ] {
        let answer = matches(&any(kind, expression), &fatal(), &node);
        assert_eq!(
            answer == Answer::Matched,
            expected,
            "{expression}: {answer:?}"
        );
    }
}

#[test]
fn a_rule_that_cannot_be_evaluated_does_not_match_and_says_why() {
    let node = json!({"metadata": {"name": "n"}});
    let answer = matches(
        &any("Node", "node.metadata.labels['zone'] == 'b'"),
        &fatal(),
        &node,
    );
    assert!(
        matches!(&answer, Answer::Failed(_, why) if why.contains("labels")),
        "{answer:?}"
    );
}

#[test]
fn any_and_all_both_mean_both() {
    let text = |any: &str, all: &str| {
        rule_set(&format!(
            "[[rule-sets.match.any]]\nkind = \"HealthEvent\"\nexpression = \"{any}\"\n\
             [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"{all}\""
        ))
    };
    for (any, all, matched) in [
        ("event.isFatal", "event.isFatal", true),
        ("event.isFatal", "event.isHealthy", false),
        ("event.isHealthy", "event.isFatal", false),
    ] {
        let answer = matches(&text(any, all), &fatal(), &json!({}));
        assert_eq!(answer == Answer::Matched, matched, "{any} {all}");
    }
}

#[test]
fn what_is_wrong_is_named_with_file_line_and_hint() {
    let table = [
        (
            "label-prefx = \"x\"\n".to_owned(),
            "p.toml:1",
            "label-prefx",
        ),
        ("rule-sets = 3\n".to_owned(), "p.toml:1", "invalid type"),
        ("\n\n[[rule-sets\n".to_owned(), "p.toml:3", ""),
        (any("HealthEvnt", "true"), "p.toml:5", "HealthEvent or Node"),
        (
            any("HealthEvent", "evnt.isFatal"),
            "p.toml:6",
            "unknown variable 'evnt'",
        ),
        (
            any("HealthEvent", "event.isFatl"),
            "p.toml:6",
            "did you mean 'isFatal'",
        ),
        (
            any("HealthEvent", "node.metadata.name == 'a'"),
            "p.toml:6",
            "kind Node",
        ),
        (
            any("HealthEvent", "event.agent"),
            "p.toml:6",
            "true or false",
        ),
        (any("HealthEvent", "1 + 1"), "p.toml:6", "true or false"),
        (
            any("HealthEvent", "frobnicate(event.agent)"),
            "p.toml:6",
            "frobnicate",
        ),
        (
            any("HealthEvent", "event.isFatal &&"),
            "p.toml:6",
            "does not parse",
        ),
        (
            any("Node", "node.metdata.name == 'a'"),
            "p.toml:6",
            "did you mean 'metadata'",
        ),
        (
            format!(
                "{}[rule-sets.taint]\nkey = \"a\"\nvalue = \"b\"\neffect = \"NoWay\"\n",
                any("Node", "true")
            ),
            "p.toml:",
            "NoSchedule",
        ),
        (
            format!("{}[rule-sets.cordn]\n", any("Node", "true")),
            "p.toml:",
            "cordn",
        ),
    ];
    for (text, place, what) in table {
        let error = Policy::parse(&text, "p.toml").unwrap_err().to_string();
        assert!(
            error.starts_with(place) && error.contains(what),
            "{text}\n-> {error}"
        );
    }
}

#[test]
fn what_is_too_deep_or_too_long_is_refused_and_does_not_overflow_the_stack() {
    let deep = |count: usize| {
        [
            format!("{}true{}", "(".repeat(count), ")".repeat(count)),
            format!("{}true", "!".repeat(count)),
            format!("{}[[]]{} == []", "[".repeat(count), "]".repeat(count)),
            format!("0{} == 1", "+1".repeat(count)),
            format!("true{}", "&&true".repeat(count)),
            format!("{}true{}", "true?".repeat(count), ":true".repeat(count)),
            format!("event.metadata{} == 1", ".a".repeat(count)),
            format!("{}1{} == 1", "-(".repeat(count), ")".repeat(count)),
        ]
    };
    for expression in deep(400).into_iter().chain(deep(1_000)) {
        // What is refused is refused with a reason; parentheses and pairs alone nest nothing.
        if let Err(why) = Rule::compile(RuleKind::HealthEvent, &expression) {
            let known = ["nested", "bytes", "true or false", "does not parse"];
            assert!(known.iter().any(|part| why.contains(part)), "{why}");
        }
    }
    let chain = format!("0{} == 1", "+1".repeat(400));
    assert!(
        Rule::compile(RuleKind::HealthEvent, &chain)
            .unwrap_err()
            .contains("nested")
    );
    let nested = (0..6).fold("true".to_owned(), |inner, n| {
        format!("[1,2].all(x{n}, {inner})")
    });
    let doubling = format!("['a']{} == []", ".map(x, x + x)".repeat(40));
    for expression in [nested, doubling] {
        let why = Rule::compile(RuleKind::HealthEvent, &expression).unwrap_err();
        assert!(why.contains("loops"), "{why}");
    }
    let long = format!("event.agent == '{}'", "x".repeat(MAX_EXPRESSION_BYTES));
    assert!(
        Rule::compile(RuleKind::HealthEvent, &long)
            .unwrap_err()
            .contains("4096")
    );
    let usual = vec!["event.isFatal"; 60].join(" || ");
    Rule::compile(RuleKind::HealthEvent, &usual).unwrap();
}

#[test]
fn all_findings_are_reported_at_once() {
    let text = format!(
        "{}{}",
        any("HealthEvent", "event.isFatl"),
        any("Node", "nodee == 1")
    );
    assert_eq!(
        Policy::parse(&text, "p.toml").unwrap_err().findings.len(),
        2
    );
}

#[test]
fn switched_off_rule_sets_are_checked_but_left_out() {
    let off = any("HealthEvent", "event.isFatal").replace("enabled = true", "enabled = false");
    assert!(Policy::parse(&off, "p.toml").unwrap().rule_sets.is_empty());
    let wrong = off.replace("isFatal", "isFatl");
    assert!(Policy::parse(&wrong, "p.toml").is_err());
}

#[test]
fn what_is_read_but_not_done_is_said() {
    let policy = Policy::parse(
        "[circuitBreaker]\npercentage = 50\nduration = \"5m\"\n",
        "p",
    )
    .unwrap();
    assert!(policy.warnings[0].contains("circuitBreaker"));
}
