use contract::{Entity, HealthEvent};
use jiff::SignedDuration;
use serde_json::json;

use super::*;

mod brake;
mod costs;
mod device_taints;
mod findings;
mod functions;
mod keys_unused;
mod node_parts;
mod routes;

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

fn matches(text: &str, event: &HealthEvent, node: &Value) -> RuleSetAnswer {
    let policy = Policy::parse(text, "p.toml").unwrap();
    policy.rule_sets[0].answer(&variable(event), &NodeVariable::new(node))
}

fn variable(event: &HealthEvent) -> EventVariable {
    EventVariable::new(&event_variable(event))
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
fn the_fields_of_an_event_are_those_of_the_contract() {
    let variable = event_variable(&HealthEvent::default());
    let mut fields = RuleKind::HealthEvent.fields().to_vec();
    fields.sort_unstable();
    let expected: Vec<&String> = variable.as_object().unwrap().keys().collect();
    assert_eq!(fields, expected);
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
    let diagnosis = HealthEvent {
        agent: "health-events-analyzer".into(),
        recommended_action: 26,
        ..fatal()
    };
    let of_monitor = HealthEvent {
        recommended_action: 26,
        ..fatal()
    };
    for (event, node, matched) in [
        (&diagnosis, &bare, false),
        (&of_monitor, &bare, true),
        (&fatal(), &bare, true),
        (&replace, &bare, true),
        (&quiet, &bare, false),
        (&fatal(), &labelled("true"), true),
        (&fatal(), &labelled("false"), false),
    ] {
        let answer = policy.rule_sets[0].answer(&variable(event), &NodeVariable::new(node));
        assert_eq!(answer == RuleSetAnswer::Matched, matched, "{answer:?}");
    }
}

/// The rule sets that NVSentinel ships name one agent each, and miss two agents.
#[test]
fn the_built_in_policy_takes_out_whoever_reports() {
    let policy = Policy::parse(DEFAULT_POLICY, "built-in").unwrap();
    let node = json!({"metadata": {"name": "n"}});
    for agent in [
        "health-events-analyzer",
        "slurm-drain-monitor",
        "csp-health-monitor",
        "preflight-dcgm-diag",
        "of a third party",
    ] {
        let event = HealthEvent {
            agent: agent.into(),
            component_class: "any".into(),
            check_name: "any".into(),
            ..fatal()
        };
        let answer = policy.rule_sets[0].answer(&variable(&event), &NodeVariable::new(&node));
        assert_eq!(answer, RuleSetAnswer::Matched, "{agent}");
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
            answer == RuleSetAnswer::Matched,
            expected,
            "{expression}: {answer:?}"
        );
    }
}

#[test]
fn a_rule_that_cannot_be_evaluated_does_not_match_and_says_why() {
    let node = json!({"metadata": {"name": "n"}});
    let text = any("Node", "node.metadata.labels['zone'] == 'b'");
    for text in [text.replace("match.any", "match.all"), text] {
        let answer = matches(&text, &fatal(), &node);
        assert!(
            matches!(&answer, RuleSetAnswer::Failed(_, why) if why.contains("labels")),
            "{answer:?}"
        );
    }
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
        assert_eq!(answer == RuleSetAnswer::Matched, matched, "{any} {all}");
    }
}

#[test]
fn either_of_any_and_all_is_enough_where_the_file_says_so() {
    let text = |any: &str, all: &str| {
        format!(
            "match-any-all = \"either\"\n{}",
            rule_set(&format!(
                "[[rule-sets.match.any]]\nkind = \"HealthEvent\"\nexpression = \"{any}\"\n\
                 [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"{all}\""
            ))
        )
    };
    let (yes, no, broken) = (
        "event.isFatal",
        "event.isHealthy",
        "event.metadata['a'] == 'b'",
    );
    for (any, all, expected) in [
        (yes, yes, Some(true)),
        (yes, no, Some(true)),
        (no, yes, Some(true)),
        (no, no, Some(false)),
        (broken, yes, Some(true)),
        (yes, broken, Some(true)),
        (no, broken, None),
    ] {
        let found = match matches(&text(any, all), &fatal(), &json!({})) {
            RuleSetAnswer::Matched => Some(true),
            RuleSetAnswer::NotMatched(_) => Some(false),
            RuleSetAnswer::Failed(..) | RuleSetAnswer::NotAsked => None,
        };
        assert_eq!(found, expected, "{any} {all}");
    }
    // With only one of the two, nothing changes.
    let one = format!("match-any-all = \"either\"\n{}", any("HealthEvent", no));
    assert!(matches!(
        matches(&one, &fatal(), &json!({})),
        RuleSetAnswer::NotMatched(_)
    ));
}

#[test]
fn what_an_uncordon_means_is_a_key() {
    for (written, means) in [
        ("", Uncordon::NotDuringRepair),
        ("uncordon = \"releases\"", Uncordon::Releases),
        (
            "uncordon = \"not-during-repair\"",
            Uncordon::NotDuringRepair,
        ),
        ("uncordon = \"never\"", Uncordon::Never),
    ] {
        let policy = Policy::parse(&format!("# rules\n{written}\n"), "p.toml").unwrap();
        assert_eq!(
            (policy.uncordon, policy.warnings),
            (means, vec![]),
            "{written}"
        );
        assert!(written.is_empty() || written.contains(&format!("{means:#}")));
    }
}

#[test]
fn the_labels_of_an_uncordon_are_on_for_files_of_the_references_form() {
    let breaker = "[circuitBreaker]\npercentage = 50\n";
    for (text, on) in [
        ("# no rules\n".to_owned(), false),
        (breaker.to_owned(), true),
        (format!("uncordon-labels = false\n{breaker}"), false),
        ("uncordon-labels = true\n".to_owned(), true),
    ] {
        let policy = Policy::parse(&text, "p.toml").unwrap();
        assert_eq!(policy.uncordon_labels, on, "{text}");
    }
    assert!(!Policy::builtin().uncordon_labels);
}

#[test]
fn a_configuration_of_the_reference_loads_unchanged() {
    let policy = Policy::parse(include_str!("tests/reference.toml"), "config.toml").unwrap();
    assert_eq!(policy.label_prefix, "k8saas.nvidia.com/");
    assert_eq!(policy.rule_sets.len(), 6);
    assert!(
        policy
            .rule_sets
            .iter()
            .all(|set| set.cordon && set.taint.is_none())
    );
    assert_eq!(policy.rule_sets[0].priority, 100);
    assert!(!policy.unhealthy_taint && policy.policies.is_empty());
    assert!(policy.uncordon_labels, "its users look for the labels");
    assert_eq!(policy.uncordon, Uncordon::NotDuringRepair);
    assert!(policy.warnings.is_empty(), "{:?}", policy.warnings);
    // Each agent is matched by its rule set, unless the label excludes the node.
    let event = |agent: &str, class: &str, check: &str| HealthEvent {
        agent: agent.into(),
        component_class: class.into(),
        check_name: check.into(),
        is_fatal: true,
        ..HealthEvent::default()
    };
    let node = json!({"metadata": {"name": "n", "labels": {"zone": "a"}}});
    let out = json!({"metadata": {"name": "n", "labels": {"k8saas.nvidia.com/ManagedByNVSentinel": "false"}}});
    for (event, expected) in [
        (event("gpu-health-monitor", "GPU", "GpuMemWatch"), Some(0)),
        (event("gpu-health-monitor", "NIC", "x"), None),
        (
            event("csp-health-monitor", "CSP", "CSPMaintenance"),
            Some(1),
        ),
        (event("syslog-health-monitor", "NIC", "x"), Some(2)),
        (event("nic-health-monitor", "NIC", "x"), Some(3)),
        (event("kubernetes-object-monitor", "Node", "x"), Some(4)),
        (event("preflight-dcgm-diag", "GPU", "x"), Some(5)),
        (event("health-events-analyzer", "GPU", "x"), None),
    ] {
        let matched = |node: &Value| {
            policy.rule_sets.iter().position(|set| {
                set.answer(&variable(&event), &NodeVariable::new(node)) == RuleSetAnswer::Matched
            })
        };
        assert_eq!(matched(&node), expected, "{}", event.agent);
        assert_eq!(matched(&out), None, "{}", event.agent);
    }
}

#[test]
fn what_a_file_of_the_reference_may_leave_out_has_its_default() {
    // Like the configuration in NVSentinel's tests: no prefix, priority, match or taint.
    let text = "[[rule-sets]]\nname = \"bare\"\nversion = \"1\"\n";
    let policy = Policy::parse(text, "p.toml").unwrap();
    let set = &policy.rule_sets[0];
    assert_eq!(policy.label_prefix, "");
    assert_eq!((set.priority, set.cordon, &set.taint), (0, false, &None));
    let answer = set.answer(&variable(&fatal()), &NodeVariable::new(&json!({})));
    assert!(matches!(answer, RuleSetAnswer::NotMatched(_)), "{answer:?}");
}

#[test]
fn a_taint_that_is_not_filled_in_is_none_and_said() {
    for taint in [
        "key = \"a\"\nvalue = \"b\"",
        "key = \"a\"\neffect = \"NoSchedule\"",
        "key = \"\"\nvalue = \"\"\neffect = \"\"",
    ] {
        let text = format!("{}[rule-sets.taint]\n{taint}\n", any("Node", "true"));
        let policy = Policy::parse(&text, "p.toml").unwrap();
        assert_eq!(policy.rule_sets[0].taint, None);
        assert!(
            policy.warnings[0].starts_with("p.toml:9: rule set 'r': the taint has no effect"),
            "{:?}",
            policy.warnings
        );
    }
}

#[test]
fn a_node_names_one_of_the_policys_own_and_no_other() {
    let other = any("HealthEvent", "event.isFatal")
        .replace("rule-sets", "policies.rule-sets")
        .replace("\"r\"", "\"other\"");
    let text = format!(
        "{}[[policies]]\nname = \"lenient\"\n[[policies]]\nname = \"strict\"\n{other}",
        any("HealthEvent", "event.isFatal")
    );
    let policy = Policy::parse(&text, "p.toml").unwrap();
    for (annotation, names, unknown) in [
        (None, vec!["r"], None),
        (Some(""), vec!["r"], None),
        (Some(" strict "), vec!["other"], None),
        (Some("lenient"), vec![], None),
        (Some("event.isFatal"), vec!["r"], Some("event.isFatal")),
    ] {
        let mut node = NodeView::unknown("n1");
        if let Some(name) = annotation {
            node.annotations.insert(keys::POLICY.into(), name.into());
        }
        let found: Vec<_> = policy
            .rule_sets_of(&node)
            .iter()
            .map(|set| set.name.as_str())
            .collect();
        assert_eq!(found, names, "{annotation:?}");
        assert_eq!(policy.unknown_choice(&node), unknown, "{annotation:?}");
    }
}

#[test]
fn switched_off_rule_sets_are_checked_but_left_out() {
    let off = any("HealthEvent", "event.isFatal").replace("enabled = true", "enabled = false");
    assert!(Policy::parse(&off, "p.toml").unwrap().rule_sets.is_empty());
    let wrong = off.replace("isFatal", "isFatl");
    assert!(Policy::parse(&wrong, "p.toml").is_err());
}
