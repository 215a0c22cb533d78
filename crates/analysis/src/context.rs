//! Context of a group's conclusions, beside its own history: the GPUs that nodes are known to have,
//! the values of other groups, and the threshold of a group by its size.
//!
//! The first two follow from the set of events, whatever their order. All are asked whenever a
//! conclusion is.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::condition::{Conclusion, Condition, ConditionKind, Held, Lack, Pending};
use crate::elsewhere::Elsewhere;
use crate::group::{Group, GroupId};
use crate::history::History;
use crate::member::KnownGpus;
use crate::rule::Rule;

/// Facts beside the histories.
#[derive(Debug, Default)]
pub(crate) struct Context {
    pub(crate) gpus: KnownGpus,
    pub(crate) elsewhere: Elsewhere,
    pub(crate) thresholds: Thresholds,
}

/// Thresholds of groups, where the size of the group makes it higher than that of the rule.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Vec<(Group, usize, u32)>", into = "Vec<(Group, usize, u32)>")]
pub(crate) struct Thresholds(pub(crate) BTreeMap<GroupId, u32>);

/// Group with the facts beside its history.
pub(crate) struct Seen<'a> {
    context: &'a Context,
    id: &'a GroupId,
    condition: Cow<'a, Condition>,
    history: &'a History,
    pending: Option<Pending>,
}

// === impl Context ===

impl Context {
    /// Looks at a group of a rule.
    pub(crate) fn seen<'a>(
        &'a self,
        rule: &'a Rule,
        id: &'a GroupId,
        history: &'a History,
    ) -> Seen<'a> {
        let mut seen = Seen {
            context: self,
            id,
            condition: self.thresholds.condition(rule, id),
            history,
            pending: None,
        };
        let (state, condition) = (history.state(), &*seen.condition);
        seen.pending = match condition.kind {
            ConditionKind::Silent { .. } => state.silent(condition, &self.gpus),
            ConditionKind::Exclusive { .. } => state.exclusive(condition, &|value, first, last| {
                seen.is_elsewhere(value, first, last)
            }),
            _ => None,
        };
        seen
    }
}

// === impl Thresholds ===

impl Thresholds {
    /// Returns the condition of a group.
    pub(crate) fn condition<'a>(&self, rule: &'a Rule, id: &GroupId) -> Cow<'a, Condition> {
        let known = rule.share.and_then(|_| self.0.get(id));
        match known {
            Some(threshold) => Cow::Owned(Condition {
                threshold: *threshold,
                ..rule.condition.clone()
            }),
            None => Cow::Borrowed(&rule.condition),
        }
    }
}

impl From<Vec<(Group, usize, u32)>> for Thresholds {
    fn from(saved: Vec<(Group, usize, u32)>) -> Self {
        let saved = saved.into_iter();
        let known = saved.map(|(group, rule, needed)| ((Arc::new(group), rule), needed));
        Self(known.collect())
    }
}

impl From<Thresholds> for Vec<(Group, usize, u32)> {
    fn from(thresholds: Thresholds) -> Self {
        let known = thresholds.0.into_iter();
        let saved =
            known.map(|((group, rule), needed)| (Arc::unwrap_or_clone(group), rule, needed));
        saved.collect()
    }
}

// === impl Seen ===

impl Seen<'_> {
    /// Returns the conclusion as of a time.
    pub(crate) fn conclusion(&self, now: Timestamp) -> Option<Cow<'_, Conclusion>> {
        let state = self.history.state();
        state.conclusion_with(&self.condition, self.pending.as_ref(), now)
    }

    /// Returns the time after which that changes without a further event, or after which nothing
    /// counts.
    pub(crate) fn changes_after(&self, now: Timestamp) -> Option<Timestamp> {
        let state = self.history.state();
        state.changes_after_with(&self.condition, self.pending.as_ref(), now)
    }

    /// Returns the number of items that are needed.
    pub(crate) fn needed(&self) -> u32 {
        self.condition.threshold
    }

    /// Returns what counts as of a time.
    pub(crate) fn held(&self, now: Timestamp) -> Held {
        let is_elsewhere = |value: &str, first, last| self.is_elsewhere(value, first, last);
        let state = self.history.state();
        let mut held = state.held(&self.condition, now, &self.context.gpus, &is_elsewhere);
        let is_judged = self
            .pending
            .as_ref()
            .filter(|pending| now <= pending.judged);
        if held.lack.is_none() {
            held.lack = is_judged.map(|pending| Lack::Wait(pending.judged));
        }
        held
    }

    fn is_elsewhere(&self, value: &str, first: Timestamp, last: Timestamp) -> bool {
        let (group, number) = self.id;
        let rule = (*number, self.condition.window);
        let elsewhere = &self.context.elsewhere;
        elsewhere.has(rule, value, (first, last), group)
    }
}
