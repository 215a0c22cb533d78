//! Warnings about a valid policy: rules that no event matches, missing limits, and missing ways
//! to opt out.

use contract::nearest::nearest;
use contract::{RecommendedAction, keys};
use diagnosis::catalog::Catalog;
use model::node::NodeView;
use policy::{
    Brake, CelRule, Comparison, ComparisonKind, EventVariable, Limit, NodeVariable, Policy,
    RuleKind, RuleSet, RuleSetAnswer, event_variable,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::standard::{self, Standard};

/// Most events that a warning lists.
const NAMED: usize = 8;

/// Warning about a policy. Serialized names are part of the output of `policy lint`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Warning {
    /// Name of the rule set; absent for a warning about the whole file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule_set: Option<String>,
    /// Finding of the check, for people.
    pub what: String,
    /// Advice on what to change, for people.
    pub hint: String,
}

/// Returns the warnings about `policy`.
pub fn lint(policy: &Policy, catalog: &Catalog) -> Vec<Warning> {
    let mut warnings: Vec<Warning> = policy
        .warnings
        .iter()
        .map(|what| of_file(what.clone(), "see docs/policy.md"))
        .collect();
    let Brake { budgets, window } = &policy.brake;
    if budgets.is_empty() && window.is_none() {
        warnings.push(of_file(
            "nothing limits how many nodes are out of service at once".to_owned(),
            "add [[brake.budgets]] or [circuitBreaker], or configure neither: then the \
             default holds",
        ));
    } else if window.is_none()
        && budgets
            .iter()
            .all(|one| matches!(one.limit, Limit::Keep(_)))
    {
        warnings.push(of_file(
            "each budget keeps GPU nodes in service: nothing limits how many nodes without GPUs, or \
             without a label of its own, are out at once"
                .to_owned(),
            "add a budget with max, such as max = \"20%\"",
        ));
    }
    if policy.rule_sets.is_empty() {
        warnings.push(of_file(
            "there is no rule set that is switched on: no fault ever quarantines".to_owned(),
            "`gpuwarden policy presets default` prints one to begin with",
        ));
    }
    for (index, rule_set) in policy.rule_sets.iter().enumerate() {
        let mut before = policy.rule_sets.iter().take(index);
        if before.any(|other| other.name == rule_set.name) {
            warnings.push(of_file(
                format!("several rule sets are named '{}'", rule_set.name),
                "explain, metrics and cordon-reason tell rule sets apart by their names",
            ));
        }
    }
    let events = standard::events(catalog);
    let named = policy.policies.iter().flat_map(|named| &named.rule_sets);
    for rule_set in policy.rule_sets.iter().chain(named) {
        of_rule_set(rule_set, &events, &mut warnings);
    }
    let mut taken: Option<&str> = None;
    for route in &policy.routes {
        of_route(&route.rules, taken, &events, &mut warnings);
        let rules = route.rules.all.iter().chain(&route.rules.any);
        let every = rules
            .map(|rule| rule.expression.trim())
            .all(|one| one == "true");
        taken = taken.or(every.then_some(route.rules.name.as_str()));
    }
    warnings
}

fn of_file(what: String, hint: &str) -> Warning {
    Warning {
        rule_set: None,
        what,
        hint: hint.to_owned(),
    }
}

fn of_rule_set(rule_set: &RuleSet, events: &[Standard], warnings: &mut Vec<Warning>) {
    let before = warnings.len();
    let mut warn = |what: String, hint: &str| {
        let warning = Warning {
            rule_set: Some(rule_set.name.clone()),
            what,
            hint: hint.to_owned(),
        };
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
        warnings.len() > before
    };
    let rules: Vec<&CelRule> = rule_set.all.iter().chain(&rule_set.any).collect();
    if rules.is_empty() {
        let what = "it has no rules, and never matches".to_owned();
        warn(what, "add match.all or match.any");
        return;
    }
    let mut explained = false;
    if !rule_set.asks() {
        explained = warn(
            "it asks for neither cordon nor taint: a match does nothing".to_owned(),
            "add [rule-sets.cordon] shouldCordon = true, or [rule-sets.taint]",
        );
    }
    let of_events = rules.iter().filter(|one| one.kind == RuleKind::HealthEvent);
    for rule in of_events {
        for (what, hint) in rule.comparisons().iter().filter_map(never_so) {
            explained = warn(format!("{what}, in: {}", rule.expression), &hint);
        }
    }
    for (what, hint) in rules.iter().filter_map(|rule| left_out(rule, events)) {
        warn(what, hint);
    }
    if !rule_set.asks() {
        return;
    }
    let looks_at_label =
        |one: &&CelRule| one.kind == RuleKind::Node && one.expression.contains(keys::MANAGED_LABEL);
    // This warning does not explain why a rule set matches nothing.
    if !rules.iter().any(looks_at_label) {
        warn(
            format!(
                "it does not look at the opt-out label {}",
                keys::MANAGED_LABEL
            ),
            "add the rule of kind Node that `gpuwarden policy presets default` has; without it \
             `kubectl label node NODE ...=false` does not keep a node in service",
        );
    }
    let matched = events.iter().filter(|event| matches(rule_set, event));
    let matched: Vec<&Standard> = matched.collect();
    if matched.is_empty() && !explained {
        let count = events.len();
        warn(
            format!("it matches none of the {count} events that known monitors send"),
            "right only for a monitor of your own: check the names that it compares with",
        );
    }
    let harmless = matched.iter().filter(|event| event.is_harmless());
    let harmless: Vec<&str> = harmless.map(|event| event.name.as_str()).collect();
    if !harmless.is_empty() {
        let named = named(&harmless);
        warn(
            format!("it takes nodes out for what its source calls harmless: {named}"),
            "`gpuwarden catalog xid CODE` tells what a code means; add event.isFatal where \
             that is not meant",
        );
    }
}

/// Adds the warnings about a route. `taken` names an earlier route that fits every event.
fn of_route(
    route: &RuleSet,
    taken: Option<&str>,
    events: &[Standard],
    warnings: &mut Vec<Warning>,
) {
    let name = &route.name;
    let before = warnings.len();
    if let Some(taken) = taken {
        warnings.push(of_file(
            format!("route '{name}' never counts: route '{taken}' before it fits every event"),
            "of those that fit an event, the first counts",
        ));
    }
    let rules = route.all.iter().chain(&route.any);
    for (what, hint) in rules.clone().filter_map(|rule| left_out(rule, events)) {
        warnings.push(of_file(format!("route '{name}': {what}"), hint));
    }
    for rule in rules.filter(|one| one.kind == RuleKind::HealthEvent) {
        for (what, hint) in rule.comparisons().iter().filter_map(never_so) {
            let what = format!("route '{name}': {what}, in: {}", rule.expression);
            warnings.push(of_file(what, &hint));
        }
    }
    if warnings.len() == before && !events.iter().any(|event| matches(route, event)) {
        let count = events.len();
        warnings.push(of_file(
            format!("route '{name}' fits none of the {count} events that known monitors send"),
            "right only for a monitor of your own: check the names that it compares with",
        ));
    }
}

/// Joins the first names, and adds the number of the others.
fn named(names: &[&str]) -> String {
    let (named, more) = names.split_at(NAMED.min(names.len()));
    let named = named.join("; ");
    match more.len() {
        0 => named,
        more => format!("{named}; and {more} more"),
    }
}

/// Returns true if the rules about events match; rules about nodes are assumed to match.
fn matches(rule_set: &RuleSet, standard: &Standard) -> bool {
    let is_node = |rule: &CelRule| rule.kind == RuleKind::Node;
    let mut all = rule_set.all.clone();
    all.retain(|rule| !is_node(rule));
    // A rule about nodes in `any` is enough.
    let mut any = rule_set.any.clone();
    if any.iter().any(is_node) {
        any.clear();
    }
    if all.is_empty() && any.is_empty() {
        return true;
    }
    let bare = RuleSet {
        any,
        all,
        ..rule_set.clone()
    };
    let node = NodeVariable::new(&NodeView::unknown(standard::NODE).object());
    bare.answer(&EventVariable::new(&event_variable(&standard.event)), &node)
        == RuleSetAnswer::Matched
}

/// Returns a warning about a rule that fails for every node in service, because the API server
/// omits a `spec.unschedulable` that is false.
fn left_out(rule: &CelRule, events: &[Standard]) -> Option<(String, &'static str)> {
    const FIELD: &str = "unschedulable";
    if rule.kind != RuleKind::Node || !rule.expression.contains(FIELD) {
        return None;
    }
    let event = EventVariable::new(&event_variable(&events.first()?.event));
    let holds = |spec: Value| {
        let mut node = NodeView::unknown(standard::NODE).object();
        node["spec"] = spec;
        rule.holds(&event, &NodeVariable::new(&node))
    };
    let in_service = holds(json!({}));
    let is_meant =
        holds(json!({FIELD: false})) == Ok(true) && holds(json!({FIELD: true})) != Ok(true);
    // The error may have another cause, such as a label that the node here does not have.
    let asked_for = rule.expression.replace("has(node.spec.unschedulable)", "");
    let fails = in_service.is_err() && asked_for.contains(FIELD);
    (fails || is_meant && in_service != Ok(true)).then(|| {
        (
            format!(
                "a node in service has no spec.unschedulable, for the API server leaves out what is false, so this \
                 does not hold for it: {}",
                rule.expression
            ),
            "write has(node.spec.unschedulable) for a node that is cordoned, and !has(node.spec.unschedulable) for \
             one that is not",
        )
    })
}

/// Returns a warning about a comparison with the same result for every event.
fn never_so(comparison: &Comparison) -> Option<(String, String)> {
    let Comparison {
        field,
        element,
        kind: compared_by,
        literal,
    } = comparison;
    let shown = match literal {
        Value::String(text) => format!("'{text}'"),
        other => other.to_string(),
    };
    let kind = match (field.as_str(), element) {
        ("isFatal" | "isHealthy", false) => "true or false",
        ("version" | "recommendedAction" | "processingStrategy", false) => "a number",
        (
            "agent"
            | "componentClass"
            | "checkName"
            | "message"
            | "nodeName"
            | "id"
            | "customRecommendedAction",
            false,
        )
        | ("errorCode", true) => "text",
        ("errorCode", false) => "a list",
        _ => return None,
    };
    let fits = match literal {
        Value::Bool(_) => kind == "true or false",
        Value::Number(_) => kind == "a number",
        Value::String(_) => kind == "text",
        _ => true,
    };
    if !fits {
        let what = if *element {
            format!("an element of event.{field}")
        } else {
            format!("event.{field}")
        };
        let hint = match (kind, literal) {
            ("text", Value::Number(number)) => format!("write '{number}'"),
            ("a list", Value::String(text)) => format!("write '{text}' in event.{field}"),
            _ => format!("compare it with {kind}"),
        };
        return Some((format!("{what} is {kind} and never equals {shown}"), hint));
    }
    if field == "recommendedAction" {
        let number = literal.as_f64()?;
        let known = |action: i32| (f64::from(action) - number).abs() < 0.5;
        let any = (0..=99).any(|n| known(n) && RecommendedAction::try_from(n).is_ok());
        return (!any).then(|| {
            (
                format!("no recommended action has the number {shown}"),
                "docs/policy.md lists them".to_owned(),
            )
        });
    }
    unknown_name(field, *compared_by, literal.as_str()?)
}

/// Returns a warning about a name that no known monitor sends in a field.
pub(crate) fn unknown_name(
    field: &str,
    compared_by: ComparisonKind,
    name: &str,
) -> Option<(String, String)> {
    let names: Vec<&str> = match field {
        "agent" => standard::agents().collect(),
        "checkName" => standard::checks().collect(),
        "componentClass" => standard::component_classes().to_vec(),
        _ => return None,
    };
    let known = match compared_by {
        ComparisonKind::Equality => names.contains(&name),
        ComparisonKind::Prefix => names.iter().any(|known| known.starts_with(name)),
    };
    if known {
        return None;
    }
    let meant = nearest(name, names.iter().copied(), 1);
    let hint = match meant.first() {
        Some(meant) => format!("did you mean '{meant}'?"),
        // Many monitors have checks and classes of their own, but there are few agents.
        None if field != "agent" => return None,
        None => format!(
            "right only for a monitor of your own; known are {}",
            names.join(", ")
        ),
    };
    let what = format!("no known monitor sends event.{field} '{name}'");
    Some((what, hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    const OPT_OUT: &str = "[[rule-sets.match.all]]\nkind = \"Node\"\nexpression = \
        \"!(has(node.metadata.labels) && 'k8saas.nvidia.com/ManagedByNVSentinel' in node.metadata.labels)\"\n";

    fn warnings(text: &str) -> Vec<String> {
        let policy = Policy::parse(text, "p").unwrap();
        lint(&policy, Catalog::builtin())
            .into_iter()
            .map(|warning| format!("{}; {}", warning.what, warning.hint))
            .collect()
    }

    fn of_rule(expression: &str) -> Vec<String> {
        let text = format!(
            "[[rule-sets]]\nname = \"r\"\n\
             cordon = {{ shouldCordon = true }}\n[[rule-sets.match.all]]\nkind = \"HealthEvent\"\n\
             expression = \"{expression}\"\n{OPT_OUT}"
        );
        let all = warnings(&text);
        all.into_iter()
            .filter(|warning| !warning.contains("circuitBreaker"))
            .collect()
    }

    #[test]
    fn a_route_that_never_counts_is_named() {
        let rule = |expression: &str| {
            format!("match.all = [{{kind = \"HealthEvent\", expression = \"{expression}\"}}]\n")
        };
        let route = |name: &str, expression: &str| {
            format!("[[routes]]\nname = \"{name}\"\n{}", rule(expression))
        };
        let set = format!(
            "[[rule-sets]]\nname = \"r\"\ncordon = {{ shouldCordon = true }}\n\
             [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n{OPT_OUT}"
        );
        let typo = route("a", "event.agent == 'gpu-helth-monitor'");
        let text = format!(
            "{typo}{}{}{set}",
            route("b", "true"),
            route("c", "event.isFatal")
        );
        let all = warnings(&text);
        for expected in [
            "route 'a': no known monitor sends event.agent 'gpu-helth-monitor'",
            "route 'c' never counts: route 'b' before it fits every event",
        ] {
            let named = all.iter().any(|warning| warning.contains(expected));
            assert!(named, "{expected}: {all:#?}");
        }
        assert_eq!(all.len(), 2, "{all:#?}");
        let none = route("d", "event.isFatal && !event.isFatal");
        let all = warnings(&format!("{none}{set}"));
        assert!(all[0].starts_with("route 'd' fits none of the"), "{all:#?}");
    }

    #[test]
    fn what_never_matches_is_named_with_what_was_meant() {
        for (expression, expected) in [
            (
                "event.agent == 'syslog-helth-monitor' && event.isFatal",
                "did you mean 'syslog-health-monitor'?",
            ),
            (
                "event.agent in ['gpu-health-monitor', 'mars-monitor'] && event.isFatal",
                "sends event.agent 'mars-monitor'",
            ),
            (
                "event.agent.startsWith('preflght-')",
                "sends event.agent 'preflght-'",
            ),
            (
                "event.checkName == 'SysLogsXidError' && event.isFatal",
                "did you mean 'SysLogsXIDError'?",
            ),
            (
                "event.componentClass == 'gpu' && event.isFatal",
                "did you mean 'GPU'?",
            ),
            (
                "79 in event.errorCode",
                "an element of event.errorCode is text and never equals 79",
            ),
            (
                "event.errorCode.exists(code, code == 79 || code in [48])",
                "never equals 48",
            ),
            ("event.errorCode == '79'", "write '79' in event.errorCode"),
            ("event.isFatal == 'true'", "event.isFatal is true or false"),
            (
                "event.recommendedAction == 'REPLACE_VM'",
                "is a number and never equals 'REPLACE_VM'",
            ),
            (
                "event.recommendedAction == 3",
                "no recommended action has the number 3",
            ),
            ("event.isFatal && !event.isFatal", "matches none of the"),
            (
                "event.isFatal && event.checkName == 'our-own-policy-of-nodes'",
                "right only for a monitor of your own",
            ),
            ("event.checkName == 'SysLogsXIDError'", "harmless: XID 8; "),
        ] {
            let all = of_rule(expression);
            assert!(
                all.iter().any(|warning| warning.contains(expected)),
                "{expression}: {all:#?}"
            );
        }
        for fine in [
            "event.isFatal && event.agent == 'gpu-health-monitor'",
            "event.recommendedAction == 25 && event.isFatal",
            "event.agent.startsWith('preflight-') && event.isFatal",
            "event.errorCode.exists(code, code in ['48', '79'])",
        ] {
            let all = of_rule(fine);
            assert!(all.is_empty(), "{fine}: {all:#?}");
        }
    }

    #[test]
    fn that_a_rule_matches_nothing_is_said_beside_what_else_is() {
        let text = "[[rule-sets]]\nname = \"r\"\ncordon = { shouldCordon = true }\n\
            [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"'XID-79' in event.errorCode\"\n";
        let all = warnings(text);
        for expected in [
            "does not look at the opt-out label",
            "it matches none of the",
        ] {
            let said = all.iter().any(|warning| warning.contains(expected));
            assert!(said, "{expected}: {all:#?}");
        }
    }

    #[test]
    fn a_rule_that_waits_for_what_the_api_server_leaves_out_is_named() {
        let of_node = |expression: &str| {
            let text = format!(
                "[[rule-sets]]\nname = \"r\"\ncordon = {{ shouldCordon = true }}\n[[rule-sets.match.all]]\n\
                 kind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n[[rule-sets.match.all]]\nkind = \"Node\"\n\
                 expression = \"{expression}\"\n{OPT_OUT}"
            );
            let policy = Policy::parse(&text, "p").unwrap();
            let all = lint(&policy, Catalog::builtin()).into_iter();
            all.filter(|one| one.what.contains("spec.unschedulable"))
                .count()
        };
        for (expression, warnings) in [
            ("node.spec.unschedulable == false", 1),
            ("!node.spec.unschedulable", 1),
            (
                "has(node.spec.unschedulable) && node.spec.unschedulable == false",
                1,
            ),
            (
                "node.metadata.labels['a'] == 'b' && node.spec.unschedulable == false",
                1,
            ),
            ("node.spec.unschedulable == true", 1),
            ("has(node.spec.unschedulable)", 0),
            ("!has(node.spec.unschedulable)", 0),
            (
                "node.metadata.labels['a'] == 'b' && !has(node.spec.unschedulable)",
                0,
            ),
            (
                "!has(node.spec.unschedulable) || !node.spec.unschedulable",
                0,
            ),
            ("has(node.spec.unschedulable) && node.spec.unschedulable", 0),
            ("'unschedulable' in node.spec && node.spec.unschedulable", 0),
        ] {
            assert_eq!(of_node(expression), warnings, "{expression}");
        }
        let route = "[[routes]]\nname = \"a\"\nmatch.all = [{kind = \"Node\", expression = \
            \"node.spec.unschedulable == false\"}]\n";
        let all = warnings(&format!("{route}# no rule sets"));
        assert!(
            all.iter()
                .any(|one| one.starts_with("route 'a': a node in service has no")),
            "{all:#?}"
        );
    }

    #[test]
    fn what_is_missing_is_said() {
        let all = warnings(
            "[brake]\nbudgets = []\n[[rule-sets]]\nname = \"r\"\n[[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n\
             [[rule-sets]]\nname = \"r\"\ncordon = { shouldCordon = true }\n[[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n",
        );
        for expected in [
            "nothing limits how many nodes",
            "several rule sets are named 'r'",
            "neither cordon nor taint",
            "does not look at the opt-out label",
        ] {
            assert!(
                all.iter().any(|warning| warning.contains(expected)),
                "{expected}: {all:#?}"
            );
        }
        assert!(
            warnings("# no rules")
                .iter()
                .any(|warning| warning.contains("no fault ever quarantines"))
        );
    }

    #[test]
    fn budgets_that_only_keep_nodes_leave_some_without_a_limit() {
        let said = |budgets: &str| {
            let all = warnings(&format!("[brake]\nbudgets = [{budgets}]\n"));
            all.iter().any(|one| one.starts_with("each budget keeps"))
        };
        assert!(said("{ keep = 16, per = \"rack\" }"));
        assert!(!said("{ keep = 16, per = \"rack\" }, { max = \"20%\" }"));
        assert!(!said(""));
    }

    #[test]
    fn the_presets_are_fine_but_for_what_they_say() {
        for preset in presets::all() {
            let policy = Policy::parse(preset.text, preset.name).unwrap();
            for warning in lint(&policy, Catalog::builtin()) {
                let known = ["nothing limits", "circuitBreaker", "calls harmless"];
                assert!(
                    known.iter().any(|part| warning.what.contains(part)),
                    "{}: {warning:?}",
                    preset.name
                );
            }
        }
    }
}
