//! Checks of the rules: what the policy decides about each open fault of a node.

use std::sync::Arc;

use contract::keys;
use fleet::Situation;
use fleet::session::{ObservedNode, dismissal};
use model::fault::Fault;
use model::node::NodeView;
use policy::assess::{Dismissal, DismissedBy, FaultRuling, Ruling, assess, is_notice};
use policy::{
    ALL_STAGES, CelRule, EventVariable, NodeVariable, Policy, RuleKind, RuleSet, RuleSetAnswer,
    event_variable,
};
use serde_json::Value;

use super::check::{Check, RULES, passes, stops};

/// Most faults with rule details; the gravest ones.
const FAULTS_SHOWN: usize = 20;

/// Returns one check per open fault, gravest first, and the number of notices.
pub(super) fn rule_checks(situation: &Situation<'_>) -> (Vec<Check>, usize) {
    let Some(policy) = situation.policy else {
        let check = stops(RULES, "no policy was read yet: nothing is decided before")
            .fix("gpuwarden status says why the policy cannot be read");
        return (vec![check], 0);
    };
    let unknown = ObservedNode::of(Arc::new(NodeView::unknown(situation.node)));
    let observed = situation.observed.unwrap_or(&unknown);
    let node = observed.view.as_ref();
    let mut faults: Vec<&Fault> = situation.faults.iter().collect();
    faults.sort_by(|a, b| Fault::by_gravity(a, b));
    let variable = NodeVariable::new(&node.object());
    let (mut checks, mut notices, mut left) = (Vec::new(), 0, 0);
    for fault in faults {
        let desired = assess(
            std::slice::from_ref(fault),
            policy,
            node,
            &situation.devices,
            dismissal(observed, situation.dropped_at, &situation.session.times),
            situation.now,
        );
        if is_notice(fault, &desired.rulings) {
            notices += 1;
        } else if checks.len() >= FAULTS_SHOWN {
            left += 1;
        } else {
            let rulings = desired.rulings.iter();
            checks.extend(rulings.map(|ruling| rule_check(ruling, fault, policy, node, &variable)));
        }
    }
    if let Some(last) = checks.last_mut().filter(|_| left > 0) {
        last.details
            .push(format!("and {left} more open faults, which are less grave"));
    }
    (checks, notices)
}

fn rule_check(
    ruling: &FaultRuling,
    fault: &Fault,
    policy: &Policy,
    node: &NodeView,
    variable: &NodeVariable,
) -> Check {
    let FaultRuling {
        fault: title,
        ruling,
        lowered,
        route,
    } = ruling;
    match ruling {
        Ruling::HandedOver => stops(RULES, format!("{title}: {ruling}"))
            .fix("whoever remediates it removes the label when the node is returned"),
        Ruling::Dismissed(Dismissal { up_to, by }) => {
            let how = match by {
                DismissedBy::Released => "dismissed when the node was released by hand",
                DismissedBy::Dropped => {
                    "dropped when the circuit breaker was reset with cursor CREATE"
                }
            };
            stops(RULES, format!("{title}: {how} at {up_to:.0}"))
                .fix("a newer report of the fault counts again")
        }
        Ruling::Skipped | Ruling::AwaitsPrimary(_) => stops(RULES, format!("{title}: {ruling}")),
        Ruling::Explained(cause) => stops(RULES, format!("{title}: {ruling}")).fix(&format!(
            "gpuwarden why-not {} says what is done about its cause",
            cause.node
        )),
        Ruling::Forced => Check {
            details: route.iter().map(ToString::to_string).collect(),
            ..passes(RULES, format!("{title}: {ruling}"))
        },
        Ruling::Judged { wanted, .. } => {
            let asked = if *wanted { "a" } else { "no" };
            let asked = format!("{title}: {asked} rule set asks for it");
            let mut details = rule_details(policy, fault, node, variable);
            details.extend(
                lowered.map(|why| format!("NoExecute is asked for its device and not set: {why}")),
            );
            if *wanted {
                details.extend(route_details(policy, fault, node, variable));
            }
            let check = if *wanted {
                passes(RULES, asked)
            } else if ruling.opted_out(node) {
                details.insert(0, asked);
                let label = keys::MANAGED_LABEL;
                let name = &node.name;
                stops(RULES, format!("it is opted out by its label {label}=false")).fix(&format!(
                    "kubectl label node {name} {label}- lets the rules decide"
                ))
            } else {
                stops(RULES, asked)
            };
            Check { details, ..check }
        }
    }
}

/// Returns the result of each rule of each rule set, with the values that it read.
fn rule_details(
    policy: &Policy,
    fault: &Fault,
    node: &NodeView,
    variable: &NodeVariable,
) -> Vec<String> {
    let rule_sets = policy.rule_sets_of(node);
    if rule_sets.is_empty() {
        return vec![format!("the policy ({}) has no rule sets", policy.source)];
    }
    let (value, object) = (event_variable(&fault.event), node.object());
    let event = EventVariable::new(&value);
    let mut details = Vec::new();
    for rule_set in rule_sets {
        let answer = rule_set.answer(&event, variable);
        let asks = if rule_set.asks() {
            ""
        } else {
            ", and asks for nothing"
        };
        details.push(format!("'{}' {answer}{asks}", rule_set.name));
        details.extend(rules_of(rule_set, &event, &value, variable, &object));
    }
    details
}

/// Returns the result of each route up to the first match; empty if the policy has no routes.
fn route_details(
    policy: &Policy,
    fault: &Fault,
    node: &NodeView,
    variable: &NodeVariable,
) -> Vec<String> {
    let (value, object) = (event_variable(&fault.event), node.object());
    let event = EventVariable::new(&value);
    let mut details = Vec::new();
    for route in &policy.routes {
        let answer = route.rules.answer(&event, variable);
        let matched = answer == RuleSetAnswer::Matched;
        let name = &route.rules.name;
        let stages = if matched {
            format!(": {}", route.routed().stages())
        } else {
            String::new()
        };
        details.push(format!("route '{name}' {answer}{stages}"));
        details.extend(rules_of(&route.rules, &event, &value, variable, &object));
        if matched {
            return details;
        }
    }
    if !policy.routes.is_empty() {
        details.push(format!("no route fits: {ALL_STAGES}"));
    }
    details
}

/// Returns the result of each rule of a rule set.
fn rules_of(
    rule_set: &RuleSet,
    event: &EventVariable,
    value: &Value,
    variable: &NodeVariable,
    object: &Value,
) -> Vec<String> {
    let rules = rule_set.all.iter().map(|rule| ("all", rule));
    let rules = rules.chain(rule_set.any.iter().map(|rule| ("any", rule)));
    let lines = rules.flat_map(|(group, rule)| {
        let input = match rule.kind {
            RuleKind::HealthEvent | RuleKind::Override => value,
            RuleKind::Node => object,
        };
        rule_lines(group, rule, rule.holds(event, variable), input)
    });
    lines.collect()
}

fn rule_lines(
    group: &str,
    rule: &CelRule,
    holds: Result<bool, String>,
    input: &Value,
) -> Vec<String> {
    let result = match holds {
        Ok(holds) => holds.to_string(),
        Err(why) => format!("cannot be evaluated: {why}"),
    };
    let rule_line = format!("  {group}: {} -> {result}", rule.expression);
    let values = rule.values(input).into_iter();
    let values = values.map(|value| format!("    {value}"));
    [rule_line].into_iter().chain(values).collect()
}
