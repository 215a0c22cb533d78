//! Evaluation of rule sets on the events of a node's faults.

use std::collections::BTreeMap;

use model::fault::Fault;
use model::reporter::Authority;

use crate::{EventVariable, MAX_POLICY_COST, NodeVariable, RuleSet, RuleSetAnswer, event_variable};

/// Budget of steps per evaluation of a node for users' events: about half a second at an
/// estimated 50 ns per step, since the cost of a rule is that of its worst case. Always
/// sufficient for one event, whatever the policy.
const MAX_USERS_COST: u64 = MAX_POLICY_COST + MAX_POLICY_COST / 4;

/// Answers of all rule sets about one event, with their names.
pub(super) type RuleSetAnswers = Vec<(String, RuleSetAnswer)>;

/// Returns the answers of the rule sets by event id. `faults` is sorted, gravest first.
///
/// One event may stand for many faults and is evaluated once. Users can report any number of
/// events; only the gravest are evaluated, within a budget, since many nodes share the
/// evaluator.
pub(super) fn judge<'a>(
    faults: impl Iterator<Item = &'a Fault>,
    rule_sets: &[&RuleSet],
    node: impl Fn() -> &'a NodeVariable,
) -> BTreeMap<&'a str, RuleSetAnswers> {
    let rules = rule_sets
        .iter()
        .flat_map(|set| set.all.iter().chain(&set.any));
    let cost: u64 = rules.map(|rule| rule.cost).sum();
    let mut left = MAX_USERS_COST;
    let mut judged = BTreeMap::new();
    for fault in faults {
        let id = fault.event.id.as_str();
        if judged.contains_key(id) {
            continue;
        }
        let price = match fault.authority {
            Authority::Trusted => 0,
            Authority::User => cost,
        };
        let event = (price <= left).then(|| EventVariable::new(&event_variable(&fault.event)));
        left = left.saturating_sub(price);
        let answers = rule_sets.iter().map(|set| {
            let answer = match &event {
                Some(event) => set.answer(event, node()),
                None => RuleSetAnswer::NotAsked,
            };
            (set.name.clone(), answer)
        });
        judged.insert(id, answers.collect());
    }
    judged
}
