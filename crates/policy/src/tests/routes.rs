use super::*;
use crate::{Route, RouteDrain};

const ROUTES: &str = r#"
    [[routes]]
    name = "look first"
    drain = false
    [[routes.match.all]]
    kind = "HealthEvent"
    expression = "event.recommendedAction == 5"
    [[routes.match.all]]
    kind = "Node"
    expression = "has(node.metadata.labels) && 'prod' in node.metadata.labels"

    [[routes]]
    name = "hurry"
    drain = "forceful"
    remediate = false
    approve = true
    [[routes.match.any]]
    kind = "HealthEvent"
    expression = "'79' in event.errorCode"

    [[routes]]
    name = "rest"
    [[routes.match.all]]
    kind = "HealthEvent"
    expression = "true"
"#;

fn stages(route: &Route) -> (&str, RouteDrain, bool, bool) {
    let Route {
        drain,
        remediate,
        approve,
        ..
    } = *route;
    (&route.rules.name, drain, remediate, approve)
}

#[test]
fn routes_load_with_what_is_left_out() {
    let policy = Policy::parse(ROUTES, "p").unwrap();
    let found: Vec<_> = policy.routes.iter().map(stages).collect();
    assert_eq!(
        found,
        [
            ("look first", RouteDrain::No, false, false),
            ("hurry", RouteDrain::Forceful, false, true),
            ("rest", RouteDrain::Graceful, true, false),
        ]
    );
}

#[test]
fn what_is_wrong_with_a_route_is_said_where_it_stands() {
    let rule = "match.all = [{kind = \"HealthEvent\", expression = \"true\"}]";
    for (text, why) in [
        (format!("name = \" \"\n{rule}"), "a route needs a name"),
        (
            "name = \"a\"".to_owned(),
            "route 'a': it has no rules below match",
        ),
        (
            format!("name = \"a\"\n{rule}\ndrain = \"soon\""),
            "p:4: route 'a': drain is false, \"graceful\" or \"forceful\"",
        ),
        (
            format!("name = \"a\"\n{rule}\ndrain = 5"),
            "p:4: routes[0].drain is 5; write drain = false, drain = \"graceful\" or drain =",
        ),
        (
            format!("name = \"a\"\n{rule}\ndrain = false\nremediate = true"),
            "p:5: route 'a': remediate = true with drain = false would repair the node under its pods",
        ),
        (
            format!("name = \"a\"\n{rule}\ndrain = false\napprove = true"),
            "p:5: route 'a': approve = true with drain = false leaves nothing to approve; leave it out",
        ),
        (
            format!("name = \"a\"\n{rule}\napprove = \"yes\""),
            "p:4: routes[0].approve is \"yes\"; write true or false, without quotes",
        ),
        (
            format!("name = \"a\"\n{rule}\naprove = true"),
            "p:4: unknown key 'routes[0].aprove'; did you mean",
        ),
        (
            format!("name = \"a\"\n{rule}\n[[routes]]\nname = \"a\"\n{rule}"),
            "route 'a': it is there twice",
        ),
        (
            format!("name = \"a\"\n{rule}\nremedy = false"),
            "unknown key 'routes[0].remedy'",
        ),
        (
            "name = \"a\"\nmatch.all = [{kind = \"HealthEvent\", expression = \"event.isFatl\"}]"
                .to_owned(),
            "route 'a': expression unknown field 'isFatl'",
        ),
    ] {
        let error = Policy::parse(&format!("[[routes]]\n{text}\n"), "p").unwrap_err();
        let message = error.to_string();
        assert!(message.contains(why), "{text}\n{message}");
    }
}

#[test]
fn the_rules_of_routes_count_among_those_of_the_file() {
    let rule = "{kind = \"HealthEvent\", expression = \"true\"}";
    let many = vec![rule; MAX_RULES + 1].join(", ");
    let text = format!("[[routes]]\nname = \"a\"\nmatch.any = [{many}]\n");
    let message = Policy::parse(&text, "p").unwrap_err().to_string();
    assert!(message.contains("2049 rules, at most 2048"), "{message}");
    let one = format!("[[routes]]\nname = \"x\"\nmatch.any = [{rule}]\n");
    let error = Policy::parse(&one.repeat(MAX_RULE_SETS + 1), "p").unwrap_err();
    assert!(
        error.to_string().contains("513 routes, at most 512"),
        "{error}"
    );
}
