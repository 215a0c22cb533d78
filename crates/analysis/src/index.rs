//! Index of the rules by error code and check, so that an event is compared with few of them.

use std::collections::{BTreeMap, BTreeSet};

use contract::HealthEvent;
use policy::CelRule;

use crate::rule::{Matches, Rule};

/// Rules by what their events have to have.
#[derive(Debug, Default)]
pub(crate) struct Index {
    by_code: BTreeMap<String, Vec<usize>>,
    by_check: BTreeMap<String, Vec<usize>>,
    /// Rules for all events.
    others: Vec<usize>,
    /// Rules that need to know other faults of their groups.
    solo: Vec<usize>,
    /// Rules that healthy events can be part of.
    healthy: Vec<usize>,
    /// Rules whose groups are of several nodes.
    of_several_nodes: Vec<usize>,
    /// Fields of an event that the expressions of all rules read; `None` for all.
    fields: Option<BTreeSet<String>>,
}

// === impl Index ===

impl Index {
    pub(crate) fn new(rules: &[Rule]) -> Self {
        let mut index = Self {
            fields: fields(rules),
            ..Self::default()
        };
        for (number, rule) in rules.iter().enumerate() {
            if rule.needs_others() {
                index.solo.push(number);
            }
            if rule.has_healthy_step() {
                index.healthy.push(number);
            }
            if !rule.is_of_one_node() {
                index.of_several_nodes.push(number);
            }
            let own = std::slice::from_ref(&rule.matches);
            let steps = if rule.steps.is_empty() {
                own
            } else {
                &rule.steps
            };
            let (place, names) = match (names(steps, |it| &it.codes), names(steps, |it| &it.checks))
            {
                (Some(codes), _) => (&mut index.by_code, codes),
                (None, Some(checks)) => (&mut index.by_check, checks),
                (None, None) => {
                    index.others.push(number);
                    continue;
                }
            };
            for name in names {
                place.entry(name.clone()).or_default().push(number);
            }
        }
        index
    }

    /// Returns the rules that an event may be part of.
    pub(crate) fn candidates(&self, event: &HealthEvent) -> Vec<usize> {
        let codes = event.error_code.iter();
        let by_code = codes.filter_map(|code| self.by_code.get(code));
        let by_check = self.by_check.get(&event.check_name);
        let lists = by_code.chain(by_check).chain([&self.others]);
        let mut candidates: Vec<usize> = lists.flatten().copied().collect();
        candidates.sort_unstable();
        candidates.dedup();
        candidates
    }

    /// Returns the rules that need to know other faults of their groups.
    pub(crate) fn solo(&self) -> &[usize] {
        &self.solo
    }

    /// Returns the rules that healthy events can be part of.
    pub(crate) fn healthy(&self) -> &[usize] {
        &self.healthy
    }

    /// Returns the rules whose groups are of several nodes.
    pub(crate) fn of_several_nodes(&self) -> &[usize] {
        &self.of_several_nodes
    }

    /// Returns the fields of an event that the expressions of all rules read; `None` for all.
    pub(crate) fn fields(&self) -> Option<&BTreeSet<String>> {
        self.fields.as_ref()
    }
}

/// Returns the fields of an event that the expressions of rules read; `None` if they may read all.
fn fields(rules: &[Rule]) -> Option<BTreeSet<String>> {
    let matches = rules
        .iter()
        .flat_map(|rule| [&rule.matches].into_iter().chain(&rule.steps));
    let expressions = matches.filter_map(|matches| matches.expression.as_ref());
    let fields: Option<Vec<BTreeSet<&str>>> = expressions.map(CelRule::fields).collect();
    Some(fields?.into_iter().flatten().map(str::to_owned).collect())
}

/// Returns all names in a list of each of the steps. `None` if one of the lists is empty, which
/// admits all.
fn names(steps: &[Matches], list: impl Fn(&Matches) -> &Vec<String>) -> Option<BTreeSet<&String>> {
    let lists: Vec<_> = steps.iter().map(list).collect();
    let all = lists.iter().all(|names| !names.is_empty());
    all.then(|| lists.into_iter().flatten().collect())
}
