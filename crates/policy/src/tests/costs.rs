//! The limit on the cost of a rule. A rule above it is refused when it is loaded, since it cannot
//! be stopped when it runs.

use contract::findings::MAX_FILE_BYTES;

use super::*;

fn refused(kind: RuleKind, expression: &str) -> String {
    CelRule::compile(kind, expression).unwrap_err().to_string()
}

fn ones(count: usize) -> String {
    format!("[{}]", vec!["1"; count].join(","))
}

#[test]
fn what_could_run_for_ever_or_eat_all_memory_is_refused() {
    let (list, codes) = (ones(600), "event.errorCode");
    let nested = |body: &str, loop_: &str| {
        format!("{list}.{loop_}(a, {list}.{loop_}(b, {list}.{loop_}(c, {body}))) != null")
    };
    for expression in [
        nested("a + b + c > 0", "all"),
        nested("c", "map"),
        nested("[a, b, c]", "map"),
        nested("c > a", "filter"),
        format!("{codes}.all(a, {codes}.all(b, {codes}.all(c, a != b || c != a)))"),
        format!("{codes}.exists(a, {codes}.map(b, {codes}.filter(c, true)).size() == 1)"),
        // Two loops in sequence: the second iterates over the result of the first.
        format!("{codes}.map(a, {codes}.map(b, {codes})) == []"),
        format!("{list}.map(a, event.metadata).map(b, b.map(c, b[c] + b[c])) == []"),
        "event.message.split('').all(a, event.message.contains(a))".to_owned(),
        "event.message.replace('', event.message).contains('a')".to_owned(),
        "event.message.indexOf(event.message + 'a') == 1".to_owned(),
        "event.metadata.all(a, event.metadata.all(b, event.metadata + 1 == event.metadata[b]))"
            .to_owned(),
        "event.errorCode.all(a, event.metadata.all(b, event.metadata[b].matches('a+b')))"
            .to_owned(),
        r"event.errorCode.all(a, event.message.matches('(\\w+\\s+){20}x'))".to_owned(),
    ] {
        let why = refused(RuleKind::HealthEvent, &expression);
        assert!(
            why.contains("steps on the largest event"),
            "{expression}: {why}"
        );
        assert!(why.contains(&MAX_COST.to_string()), "{why}");
    }
    let nodes = "node.status.conditions.all(a, node.status.conditions.all(b, a == b))";
    let why = refused(RuleKind::Node, nodes);
    assert!(why.contains("steps on the largest node"), "{why}");
}

#[test]
fn the_part_that_costs_most_is_named() {
    let codes = "event.errorCode";
    // The innermost loop.
    let why = refused(
        RuleKind::HealthEvent,
        &format!("event.isFatal && {codes}.all(a, {codes}.all(b, {codes}.all(c, c == a)))"),
    );
    assert!(
        why.contains("steps on the largest event") && why.contains("part at character 83;"),
        "{why}"
    );
    let text = any(
        "HealthEvent",
        &format!("{codes}.all(a, {codes}.all(b, {codes}.all(c, c == a)))"),
    );
    let error = Policy::parse(&text, "p.toml").unwrap_err().to_string();
    assert!(
        error.starts_with("p.toml:6: rule set 'r': expression can take"),
        "{error}"
    );
}

#[test]
fn what_people_ask_is_taken() {
    for expression in [
        "event.errorCode.exists(a, event.errorCode.exists(b, a != b))",
        "event.entitiesImpacted.exists(e, event.errorCode.exists(c, c == e.entityValue))",
        "event.entitiesImpacted.exists(a, a.entityType == 'GPU' && a.entityValue.startsWith('GPU-'))",
        "event.entitiesImpacted.filter(a, a.entityType == 'NVLINK').size() > 2",
        "event.entitiesImpacted.map(a, a.entityValue).exists(a, a in ['0', '1', '2'])",
        "event.message.split(' ').exists(word, word == 'Xid')",
        "event.message.lowerAscii().contains('xid') && event.message.indexOf('Xid') > 3",
        "event.errorCode.exists(c, c.matches('^[0-9]+$'))",
        "event.message.matches('(?i)nvrm: xid .*(79|48)')",
        "event.metadata.exists(k, k.startsWith('gpu') && event.metadata[k] == 'H100')",
        "event.errorCode.join(',') == '79,48'",
    ] {
        CelRule::compile(RuleKind::HealthEvent, expression).expect(expression);
    }
    for expression in [
        "node.metadata.labels.exists(k, k.startsWith('team/') && node.metadata.labels[k] == 'a')",
        "node.metadata.labels.exists(k, k.matches('^team/'))",
        "node.status.conditions.exists(c, c.type == 'Ready' && c.status != 'True')",
        "node.status.conditions.exists(c, c.type == 'Ready' && c.message.contains('kubelet'))",
        "node.spec.taints.map(t, t.key).exists(k, k in ['a', 'b'])",
        "node.spec.taints.filter(t, t.effect == 'NoExecute').size() > 0",
        "node.metadata.annotations['list'].contains('a,')",
        "node.metadata.name.split('-').exists(part, part == 'gpu')",
        "node.status.nodeInfo.kernelVersion.matches('^5[.]15')",
        "timestamp(node.metadata.creationTimestamp) < timestamp('2026-01-01T00:00:00Z')",
    ] {
        CelRule::compile(RuleKind::Node, expression).expect(expression);
    }
}

#[test]
fn a_loop_over_a_node_that_is_larger_than_any_cannot_be_evaluated_and_says_why() {
    let node = |labels: usize, text: &str| {
        let labels: serde_json::Map<String, Value> =
            (0..labels).map(|n| (n.to_string(), json!("x"))).collect();
        json!({"metadata": {"name": "n", "labels": labels}, "status": {"conditions": [{"message": text}]}})
    };
    let loops = any("Node", "node.metadata.labels.exists(k, k == '1')");
    let plain = any("Node", "node.metadata.labels['1'] == 'x'");
    let long = "x".repeat(MAX_NODE_BYTES);
    for (node, expected) in [
        (node(MAX_NODE_ITEMS, ""), None),
        (
            node(MAX_NODE_ITEMS + 1, ""),
            Some("has a list or map of 1025 entries"),
        ),
        (node(2, &long), Some("bytes, a rule with a loop takes")),
    ] {
        assert_eq!(matches(&plain, &fatal(), &node), RuleSetAnswer::Matched);
        match (matches(&loops, &fatal(), &node), expected) {
            (RuleSetAnswer::Matched, None) => {}
            (RuleSetAnswer::Failed(_, why), Some(part)) => assert!(why.contains(part), "{why}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_policy_that_is_too_large_is_refused_and_said_in_few_words() {
    let many = |count: usize, body: &str| {
        let set = |n| format!("[[rule-sets]]\nname = 'r{n}'\n{body}");
        (0..count).map(set).collect::<String>()
    };
    let rule = |expression: &str| {
        format!("[[rule-sets.match.any]]\nkind = 'HealthEvent'\nexpression = \"{expression}\"\n")
    };
    let square = "event.errorCode.exists(a, event.errorCode.exists(b, a != b))";
    let refused = |text: &str| Policy::parse(text, "p.toml").unwrap_err();
    for (text, expected) in [
        (
            many(20_000, ""),
            "p.toml:1025: 20000 rule sets, at most 512 are taken",
        ),
        (
            many(500, &rule("true").repeat(5)),
            "p.toml:1: 2500 rules, at most 2048 are taken",
        ),
        (
            many(20, &rule(square)),
            "rule set 'r5': the rules up to here can take",
        ),
        (
            "#".repeat(MAX_FILE_BYTES + 1),
            "p.toml:1: it has 1048577 bytes, at most 1048576 are taken",
        ),
        // Used to take time proportional to the number of keys times the length of the text.
        (
            (0..80_000).fold(String::new(), |text, n| text + &format!("k{n}=1\n")),
            "p.toml:1: unknown key 'k0'; there is label-prefix",
        ),
    ] {
        let error = refused(&text);
        assert!(error.findings.len() <= 101, "{}", error.findings.len());
        assert!(error.to_string().contains(expected), "{expected}: {error}");
    }
    assert!(Policy::parse(&many(MAX_RULE_SETS, ""), "p").is_ok());
    assert!(Policy::parse(&many(MAX_RULE_SETS, &rule("true").repeat(4)), "p").is_ok());
}
