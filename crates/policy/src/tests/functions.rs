//! The functions of rules, and the errors about unknown ones.

use super::*;

#[test]
fn a_pattern_that_is_no_regular_expression_is_refused_with_its_place() {
    let refused = |expression: &str| {
        let text = any("HealthEvent", expression);
        Policy::parse(&text, "p.toml").unwrap_err().to_string()
    };
    for (expression, expected) in [
        (
            "event.message.matches('(')",
            "p.toml:6: rule set 'r': expression has a pattern at character 23 that is no regular \
             expression: '(', at its character 1: unclosed group",
        ),
        (
            "event.isFatal && matches(event.message, 'Xid [9')",
            "pattern at character 41 that is no regular expression: 'Xid [9', at its character 5: \
             unclosed character class",
        ),
        (
            "event.errorCode != null && event.errorCode.exists(c, c.matches('*'))",
            "at its character 1: repetition operator missing expression",
        ),
        (
            r"event.message.matches('\\w{50}')",
            "Compiled regex exceeds size limit of 1048576 bytes",
        ),
        // The sender would determine the cost.
        (
            "event.isFatal && event.message.matches(event.metadata['pattern'])",
            "has a pattern at character 54 that is put together or read from the variable",
        ),
    ] {
        let message = refused(expression);
        assert!(message.contains(expected), "{message}");
    }
    let good = any(
        "HealthEvent",
        "event.checkName.matches('^SysLogs(XID|SXID)Error$')",
    );
    assert_eq!(matches(&good, &fatal(), &json!({})), RuleSetAnswer::Matched);
}

#[test]
fn a_function_that_does_not_exist_is_refused_wherever_it_stands() {
    for (expression, expected) in [
        // A trial evaluation reaches neither of the first two.
        (
            "event.isFatal && event.message.startswith('NVRM')",
            "p.toml:6: rule set 'r': expression unknown function 'startswith'; did you mean 'startsWith'?",
        ),
        (
            "event.isHealthy && event.errorCode.exists(c, c.sortBy(d, d) == c)",
            "unknown function 'sortBy'; docs/policy.md lists what there is",
        ),
        (
            "event.isFatal && contains(event.message, 'x')",
            "unknown function 'contains'; it is called on a value: x.contains(...)",
        ),
        (
            "event.isFatal && event.version.int() == 1",
            "unknown function 'int'; it is called as int(x)",
        ),
        (
            "event.isFatal && event.errorCode.exists('79')",
            "unknown function 'exists'; it is called with other arguments, see docs/policy.md",
        ),
        (
            "event.isFatal && string.quote('a') == 'a'",
            "unknown function 'quote'",
        ),
    ] {
        let text = any("HealthEvent", expression);
        let message = Policy::parse(&text, "p.toml").unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    // Functions of NVSentinel's cel-go are accepted.
    for expression in [
        "strings.quote(event.agent) != ''",
        "size(event.message) == event.message.size()",
        "'Xid'.matches('X') && matches('Xid', 'd$') && !event.message.matches('Y')",
        "['a', 'b'].join(',').split(',').exists_one(x, x.charAt(0) == 'a')",
        "' XA '.trim().lowerAscii().replace('a', 'b').substring(0, 2).reverse() == 'bx'",
        "timestamp('2026-01-01T00:00:00Z').getFullYear() == 2026",
        "duration('90s') > duration('1m') && type(1) == int && dyn(1) == 1 && bool('true')",
        "'%s'.format(['a']) == 'a' && {'a': 1}.map(k, k).size() == 1",
    ] {
        let text = any("HealthEvent", expression);
        let answer = matches(&text, &fatal(), &json!({}));
        assert_eq!(answer, RuleSetAnswer::Matched, "{expression}");
    }
}

#[test]
fn a_list_contains_what_equals_or_contains() {
    let node = json!({});
    let with = |codes: &[&str]| HealthEvent {
        error_code: codes.iter().map(|code| (*code).to_owned()).collect(),
        ..fatal()
    };
    for (expression, codes, expected) in [
        (
            r#"event.errorCode.contains("XID-48")"#,
            &["XID-48"][..],
            true,
        ),
        (
            r#"event.errorCode.contains("XID-48")"#,
            &["31", "GPU0:XID-48:DBE"],
            true,
        ),
        (r#"event.errorCode.contains("XID-48")"#, &["48"], false),
        (r#"event.errorCode.contains("XID-48")"#, &[], false),
        ("[1, 2].contains(2)", &[], true),
        ("[1, 2].contains('2')", &[], false),
        ("[[1], [2]].contains([2])", &[], true),
        ("event.message.contains('')", &[], true),
    ] {
        let answer = matches(&any("HealthEvent", expression), &with(codes), &node);
        assert_eq!(
            answer == RuleSetAnswer::Matched,
            expected,
            "{expression} {codes:?}: {answer:?}"
        );
    }
}

#[test]
fn a_bit_is_read_from_the_register_that_the_event_has() {
    let register = |value: &str| HealthEvent {
        entities_impacted: vec![
            Entity {
                entity_type: "NVLINK".into(),
                entity_value: "3".into(),
            },
            Entity {
                entity_type: "REG0".into(),
                entity_value: value.into(),
            },
        ],
        ..HealthEvent::default()
    };
    let holds = |expression: &str, event: &HealthEvent| {
        let rule = CelRule::compile(RuleKind::HealthEvent, expression).unwrap();
        let holds = rule.holds_for_event(&variable(event));
        if let Some(shortcut) = rule.holds_without_variable(event) {
            assert_eq!(Ok(shortcut), holds, "{expression}");
        }
        holds
    };
    for (bit, value, expected) in [
        (0, "0001", true),
        (1, "0001", false),
        (3, "1001", true),
        (31, "1001", false),
        (0, "", false),
        (0, "é", false),
    ] {
        let expression = format!("event.bit('REG0', {bit})");
        assert_eq!(
            holds(&expression, &register(value)),
            Ok(expected),
            "{value}"
        );
    }
    let bit = "event.bit('REG0', 0)";
    assert_eq!(holds(bit, &HealthEvent::default()), Ok(false));
    assert_eq!(holds("event.bit('REG1', 0)", &register("1")), Ok(false));
    assert!(holds("event.bit('REG0', -1)", &register("1")).is_err());
    let either = "event.bit('REG1', 0) || event.bit('REG0', 1) || event.bit('REG0', 2)";
    for (value, expected) in [("010", true), ("100", true), ("001", false)] {
        assert_eq!(holds(either, &register(value)), Ok(expected), "{value}");
    }
}

#[test]
fn only_rules_about_bits_need_no_variable() {
    let needs_none = |expression: &str| {
        let rule = CelRule::compile(RuleKind::HealthEvent, expression).unwrap();
        let answer = rule.holds_without_variable(&HealthEvent::default());
        answer.is_some()
    };
    assert!(needs_none("event.bit('REG0', 1)"));
    assert!(needs_none("event.bit('REG0', 1) || event.bit('REG4', 2)"));
    for other in [
        "event.bit('REG0', 1) && event.bit('REG4', 2)",
        "!event.bit('REG0', 1)",
        "event.bit('REG0', 1) || event.isFatal",
        "event.bit('REG0', 1 + 1)",
        "event.bit(event.nodeName, 1)",
    ] {
        assert!(!needs_none(other), "{other}");
    }
}
