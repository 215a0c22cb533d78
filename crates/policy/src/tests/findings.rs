//! Findings about a policy file.

use super::*;

#[test]
fn keys_that_nothing_reads_are_named_where_they_stand() {
    let text = format!(
        "label-prefx = \"x\"\n{}sholdCordon = true\n[rule-sets.cordn]\na = 1\n\
         [[policies]]\nname = \"b\"\nrulesets = []\n[circuitBreaker]\nwindow = 1\n",
        any("Node", "true")
    );
    let error = Policy::parse(&text, "p.toml").unwrap_err();
    let expected = [
        "p.toml:1: unknown key 'label-prefx'; did you mean 'label-prefix'?",
        "p.toml:10: unknown key 'rule-sets[0].cordon.sholdCordon'; did you mean 'shouldCordon'?",
        "p.toml:11: unknown key 'rule-sets[0].cordn'; did you mean 'cordon'?",
        "p.toml:15: unknown key 'policies[0].rulesets'; did you mean 'rule-sets'?",
        "p.toml:17: unknown key 'circuitBreaker.window'; there is percentage, duration",
    ];
    assert_eq!(error.findings, expected);
    for (text, expected) in [
        // In TOML, a key after the first rule set belongs to that rule set.
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
        assert!(error.starts_with(expected), "{text}\n{error}");
    }
}

#[test]
fn what_is_wrong_is_named_with_file_line_and_hint() {
    let table = [
        (
            "rule-sets = 3\n".to_owned(),
            "p.toml:1: rule-sets is 3; ",
            "write each rule set below a line [[rule-sets]]",
        ),
        (
            rule_set("priority = \"high\""),
            "p.toml:4: rule-sets[0].priority is \"high\"; ",
            "write priority = 100",
        ),
        (
            rule_set("match = \"all\""),
            "p.toml:4: rule-sets[0].match is \"all\"; ",
            "[[rule-sets.match.any]]",
        ),
        (
            rule_set("[rule-sets.match]\nany = [3]"),
            "p.toml:5: rule-sets[0].match.any[0] is 3; ",
            "[[rule-sets.match.any]]",
        ),
        (
            rule_set("[[rule-sets.match.any]]\nkind = \"Node\""),
            "p.toml:4: rule-sets[0].match.any[0]: the key 'expression' is missing; ",
            "write expression = \"event.isFatal\"",
        ),
        (
            "[[brake.budgets]]\nmax = true\n".to_owned(),
            "p.toml:2: brake.budgets[0].max is true; ",
            "max = 5 or max = \"10%\"",
        ),
        (
            "[[brake.budgets]]\nmax = 1\nmx = 2\n".to_owned(),
            "p.toml:3: ",
            "unknown key 'brake.budgets[0].mx'; did you mean 'max'?",
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
            "uncordon = \"sometimes\"\n".to_owned(),
            "p.toml:1",
            "write uncordon = \"releases\", \"not-during-repair\" or \"never\"",
        ),
        ("uncordon = true\n".to_owned(), "p.toml:1", "uncordon"),
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
        // Refused expressions have a reason. Parentheses and pairs alone cause no nesting.
        if let Err(why) = CelRule::compile(RuleKind::HealthEvent, &expression) {
            let why = why.to_string();
            let known = ["nested", "bytes", "true or false", "does not parse"];
            assert!(known.iter().any(|part| why.contains(part)), "{why}");
        }
    }
    let chain = format!("0{} == 1", "+1".repeat(400));
    assert!(
        CelRule::compile(RuleKind::HealthEvent, &chain)
            .unwrap_err()
            .to_string()
            .contains("nested")
    );
    let nested = (0..6).fold("true".to_owned(), |inner, n| {
        format!("[1,2].all(x{n}, {inner})")
    });
    let doubling = format!("['a']{} == []", ".map(x, x + x)".repeat(40));
    for expression in [nested, doubling] {
        let why = CelRule::compile(RuleKind::HealthEvent, &expression)
            .unwrap_err()
            .to_string();
        assert!(why.contains("loops"), "{why}");
    }
    let long = format!("event.agent == '{}'", "x".repeat(MAX_EXPRESSION_BYTES));
    assert!(
        CelRule::compile(RuleKind::HealthEvent, &long)
            .unwrap_err()
            .to_string()
            .contains("4096")
    );
    let usual = vec!["event.isFatal"; 60].join(" || ");
    CelRule::compile(RuleKind::HealthEvent, &usual).unwrap();
}

#[test]
fn values_of_a_chart_are_told_from_a_policy() {
    for text in [
        "# values\nruleSets:\n  - name: r\n",
        "---\nlabelPrefix: \"a/\"\n",
        "\"labelPrefix\": a/\n",
    ] {
        let error = Policy::parse(text, "values.yaml").unwrap_err().to_string();
        assert!(
            error.starts_with("values.yaml:1: it is YAML"),
            "{text}: {error}"
        );
        assert!(error.contains("helm template"), "{error}");
    }
    for text in [
        "label-prefix = \"a: b",
        "[rule-sets\n",
        "label prefix: = 1\n",
    ] {
        let error = Policy::parse(text, "p.toml").unwrap_err().to_string();
        assert!(!error.contains("YAML"), "{text}: {error}");
    }
}

#[test]
fn all_findings_are_reported_at_once() {
    // Including two findings about one rule.
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
