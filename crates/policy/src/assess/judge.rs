//! Asking the rules about the events of a node's faults.

use std::collections::BTreeMap;

use model::fault::Fault;
use model::reporter::Authority;

use crate::{EventVariable, MAX_POLICY_COST, NodeVariable, RuleSet, RuleSetAnswer, event_variable};

/// Most steps that a look takes for what users report: about half a second at 50 ns a step, which is
/// reckoned and not measured, for the work of a rule is known by its worst case. One event takes less,
/// whatever the policy.
const MAX_USERS_COST: u64 = MAX_POLICY_COST + MAX_POLICY_COST / 4;

/// The answers of all rule sets about an event, with their names.
pub(super) type Answers = Vec<(String, RuleSetAnswer)>;

/// Returns the answers of the rule sets, by the id of the event; `faults` has the gravest first.
///
/// One event may stand for many faults, and is asked about once. Users can report without end: of
/// their events the gravest are judged, as far as there is time in a look at one node of many.
pub(super) fn judge<'a>(
    faults: impl Iterator<Item = &'a Fault>,
    rule_sets: &[&RuleSet],
    node: impl Fn() -> &'a NodeVariable,
) -> BTreeMap<&'a str, Answers> {
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
