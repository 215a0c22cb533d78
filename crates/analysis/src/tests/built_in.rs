use contract::RecommendedAction;

use crate::{BUILT_IN, parse};

#[test]
fn only_what_asks_for_an_action_is_fatal() {
    for rule in parse(BUILT_IN, "rules.toml").unwrap() {
        assert_eq!(
            rule.fatal,
            rule.action != RecommendedAction::None,
            "{}",
            rule.name
        );
        assert!(rule.message.ends_with('.'), "{}", rule.name);
    }
}

#[test]
fn wrong_rules_are_refused_with_line_and_hint() {
    let rule = "[[rules]]\nname = \"r\"\nkind = \"count\"\nwindow = \"1h\"\nthreshold = 2\n\
                action = \"NONE\"\nmessage = \"m\"\n";
    assert_eq!(parse(rule, "r").unwrap().len(), 1);
    for (wrong, right, expected) in [
        (
            "threshold = 0",
            "threshold = 2",
            "r:5: rules[0].threshold is 0; write a whole number",
        ),
        (
            "window = \"31d\"",
            "window = \"1h\"",
            "r:4: rules[0].window is \"31d\"; write a duration",
        ),
        (
            "kind = \"cuont\"",
            "kind = \"count\"",
            "r:3: rules[0].kind is \"cuont\"",
        ),
        (
            "kind = \"burst\"",
            "kind = \"count\"",
            "rules[0].gap is missing; a burst needs one",
        ),
        (
            "action = \"REBOOT\"",
            "action = \"NONE\"",
            "r:6: rules[0].action is \"REBOOT\"",
        ),
        (
            "group_by = [\"gpus\"]\nkind = \"count\"",
            "kind = \"count\"",
            "r:3: rules[0].group_by[0] is \"gpus\"; write one of node, gpu",
        ),
        (
            "match = \"event.x\"\nkind = \"count\"",
            "kind = \"count\"",
            "r:3: rules[0].match",
        ),
        (
            "colour = 1\nkind = \"count\"",
            "kind = \"count\"",
            "r:3: unknown key 'rules[0].colour'",
        ),
    ] {
        let error = parse(&rule.replace(right, wrong), "r")
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = parse(&format!("{rule}{rule}"), "r")
        .unwrap_err()
        .to_string();
    assert!(error.contains("another rule with this name"), "{error}");
}
