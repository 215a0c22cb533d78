use contract::{Entity, HealthEvent};
use jiff::SignedDuration;
use serde_json::json;

use super::*;

mod costs;
mod functions;
mod keys_unused;
mod node_parts;

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
        let answer = policy.rule_sets[0].answer(&variable(event), &NodeVariable::new(node));
        assert_eq!(answer == RuleSetAnswer::Matched, matched, "{answer:?}");
    }
}

/// Each shipped rule set of NVSentinel names an agent, and two agents are in none.
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
            RuleSetAnswer::Failed(..) => None,
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
    assert!(!policy.unhealthy_taint && !policy.uncordon_labels && policy.policies.is_empty());
    assert!(policy.warnings.is_empty(), "{:?}", policy.warnings);
    // Each agent by its rule set, and none where the label says so.
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
    // As its binary is configured in tests: no prefix, no priority, no match, no taint.
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
fn keys_that_nothing_reads_are_named_where_they_stand() {
    let text = format!(
        "label-prefx = \"x\"\n{}sholdCordon = true\n[rule-sets.cordn]\na = 1\n\
         [[policies]]\nname = \"b\"\nrulesets = []\n[circuitBreaker]\nwindow = 1\n",
        any("Node", "true")
    );
    let error = Policy::parse(&text, "p.toml").unwrap_err();
    let said = [
        "p.toml:1: unknown key 'label-prefx'; did you mean 'label-prefix'?",
        "p.toml:10: unknown key 'rule-sets[0].cordon.sholdCordon'; did you mean 'shouldCordon'?",
        "p.toml:11: unknown key 'rule-sets[0].cordn'; did you mean 'cordon'?",
        "p.toml:15: unknown key 'policies[0].rulesets'; did you mean 'rule-sets'?",
        "p.toml:17: unknown key 'circuitBreaker.window'; there is percentage, duration",
    ];
    assert_eq!(error.findings, said);
    for (text, said) in [
        // What TOML makes of a key of the file behind the first rule set.
        (
            format!("{}\nlabel-prefix = 'x'\n", rule_set(""))
                .replace("[rule-sets.cordon]\nshouldCordon = true\n", ""),
            "p.toml:6: unknown key 'rule-sets[0].label-prefix'; it is of the whole file, so it \
             stands before the first [[rule-sets]]",
        ),
        (
            any("Node", "true\'\'\'\nkid = \'\'\'"),
            "p.toml:7: unknown key 'rule-sets[0].match.any[0].kid'; did you mean 'kind'?",
        ),
        (
            format!("[[policies]]\nname = 'a'\n{}", rule_set("prio = 1"))
                .replace("rule-sets", "policies.rule-sets"),
            "p.toml:6: unknown key 'policies[0].rule-sets[0].prio'; there is enabled, version",
        ),
    ] {
        let error = Policy::parse(&text, "p.toml").unwrap_err().to_string();
        assert!(error.starts_with(said), "{text}\n{error}");
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
fn what_is_wrong_is_named_with_file_line_and_hint() {
    let table = [
        (
            "rule-sets = 3\n".to_owned(),
            "p.toml:1: rule-sets: 3 is an integer, and an array of tables belongs here; ",
            "write each rule set below a line [[rule-sets]]",
        ),
        (
            rule_set("priority = \"high\""),
            "p.toml:4: rule-sets[0].priority: \"high\" is a string, and an integer belongs here; ",
            "write priority = 100",
        ),
        (
            rule_set("match = \"all\""),
            "p.toml:4: rule-sets[0].match: \"all\" is a string, and a table belongs here; ",
            "[[rule-sets.match.any]]",
        ),
        (
            rule_set("[rule-sets.match]\nany = [3]"),
            "p.toml:5: rule-sets[0].match.any[0]: 3 is an integer, and an array of tables",
            "[[rule-sets.match.any]]",
        ),
        (
            rule_set("[[rule-sets.match.any]]\nkind = \"Node\""),
            "p.toml:4: rule-sets[0].match.any[0]: the key 'expression' is missing; ",
            "write expression = \"event.isFatal\"",
        ),
        (
            "[[brake.budgets]]\nmax = true\n".to_owned(),
            "p.toml:2: brake.budgets[0].max: true is a boolean",
            "max = 5 or max = \"10%\"",
        ),
        (
            "[[brake.budgets]]\nmax = 1\nmx = 2\n".to_owned(),
            "p.toml:3: ",
            "unknown field `mx`, expected `max` or `per`",
        ),
        (
            "\n \n".to_owned(),
            "p.toml:1: it is empty; a comment in it (# no rules)",
            "no rules are meant",
        ),
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
            "does not parse: column ",
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
        ("match-any-all = \"or\"\n".to_owned(), "p.toml:1", "both"),
        (
            "[[policies]]\nname = \"a\"\n[[policies]]\nname = \"a\"\n".to_owned(),
            "p.toml:3",
            "there twice",
        ),
        (
            format!(
                "[[policies]]\nname = \"a\"\n{}",
                any("Node", "nodee == 1").replace("rule-sets", "policies.rule-sets")
            ),
            "p.toml:8",
            "unknown variable",
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
            let why = why.to_string();
            let known = ["nested", "bytes", "true or false", "does not parse"];
            assert!(known.iter().any(|part| why.contains(part)), "{why}");
        }
    }
    let chain = format!("0{} == 1", "+1".repeat(400));
    assert!(
        Rule::compile(RuleKind::HealthEvent, &chain)
            .unwrap_err()
            .to_string()
            .contains("nested")
    );
    let nested = (0..6).fold("true".to_owned(), |inner, n| {
        format!("[1,2].all(x{n}, {inner})")
    });
    let doubling = format!("['a']{} == []", ".map(x, x + x)".repeat(40));
    for expression in [nested, doubling] {
        let why = Rule::compile(RuleKind::HealthEvent, &expression)
            .unwrap_err()
            .to_string();
        assert!(why.contains("loops"), "{why}");
    }
    let long = format!("event.agent == '{}'", "x".repeat(MAX_EXPRESSION_BYTES));
    assert!(
        Rule::compile(RuleKind::HealthEvent, &long)
            .unwrap_err()
            .to_string()
            .contains("4096")
    );
    let usual = vec!["event.isFatal"; 60].join(" || ");
    Rule::compile(RuleKind::HealthEvent, &usual).unwrap();
}

#[test]
fn all_findings_are_reported_at_once() {
    // Also the two of one rule.
    let both = Policy::parse(&any("Nod", "1 +"), "p.toml").unwrap_err();
    assert!(both.findings[0].contains("kind 'Nod'"), "{both}");
    assert!(both.findings[1].contains("does not parse"), "{both}");
    let other = Policy::parse(&any("Nod", "node.spec.unschedulable"), "p.toml").unwrap_err();
    assert_eq!(other.findings.len(), 1, "{other}");
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
fn a_file_that_says_nothing_of_the_brake_gets_the_default_and_else_what_it_says() {
    let brake = |text: &str| Policy::parse(text, "p").unwrap().brake;
    assert_eq!(brake("# nothing"), Brake::default());
    assert_eq!(Policy::builtin().brake, Brake::default());
    let budget = |max, per: Option<&str>| Budget {
        max,
        per: per.map(str::to_owned),
    };
    // NVSentinel's own setting, and its chart's values where it leaves one out.
    for text in [
        "[circuitBreaker]\npercentage = 50\nduration = \"5m\"\n",
        "[circuitBreaker]\n",
        "circuitBreaker = { duration = \"300s\" }\n",
        "circuitBreaker = { duration = \"0h5m0s\" }\n",
    ] {
        let window = Window {
            percentage: 50,
            duration: SignedDuration::from_mins(5),
        };
        assert_eq!(
            brake(text),
            Brake {
                budgets: vec![],
                window: Some(window)
            },
            "{text}"
        );
    }
    let text = "[[brake.budgets]]\nmax = \"10%\"\nper = \"rack\"\n[[brake.budgets]]\nmax = 5\n";
    assert_eq!(
        brake(text).budgets,
        [
            budget(Amount::Percent(10), Some("rack")),
            budget(Amount::Nodes(5), None)
        ]
    );
    // Said to be none: then there is none.
    let none = brake("[brake]\nbudgets = []\n");
    assert_eq!((none.budgets.len(), none.window), (0, None));
}

#[test]
fn what_is_wrong_with_the_brake_is_named_with_its_line() {
    let table = [
        (
            "[[brake.budgets]]\nmax = \"ten\"",
            "p:2: brake: max 'ten' is neither",
        ),
        (
            "[[brake.budgets]]\nmax = \"0%\"",
            "p:2: brake: max '0%' is neither",
        ),
        (
            "[[brake.budgets]]\nmax = \"101%\"",
            "p:2: brake: max '101%' is neither",
        ),
        (
            "[[brake.budgets]]\nmax = -1",
            "p:2: brake: max -1 is neither",
        ),
        (
            "[[brake.budgets]]\nmax = 1\nper = \"\"",
            "p:2: brake: 'per' names",
        ),
        ("[[brake.budgets]]\nmin = 1", "p:2: unknown field `min`"),
        ("[brake]\nbudget = 1", "p:2: unknown field `budget`"),
        (
            "[circuitBreaker]\npercentage = 0",
            "p:1: circuitBreaker: percentage 0",
        ),
        (
            "[circuitBreaker]\npercentage = 150",
            "p:1: circuitBreaker: percentage 150",
        ),
        (
            "[circuitBreaker]\nduration = \"soon\"",
            "p:1: circuitBreaker: duration 'soon'",
        ),
    ];
    for (text, expected) in table {
        let error = Policy::parse(text, "p").unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}
