//! Keys of rules that compare: members of a group with their siblings, values with other groups.

use crate::condition::ConditionKind;
use crate::group::GroupKey;
use crate::rule::Rule;

use super::{MAX_THRESHOLD, Reader, RuleEntry};

/// Hint for a gap that is missing.
const GAP: &str = "this kind needs one, such as 5m: for as long, others may still report";

// === impl Reader ===

impl Reader<'_, '_> {
    /// Reads the kind `outlier`.
    pub(super) fn outlier(&mut self, entry: &RuleEntry) -> Option<ConditionKind> {
        let gap = self.duration("gap", entry.gap.as_ref(), GAP);
        let siblings = self.siblings(entry.siblings);
        if entry.silent == Some(true) {
            let has_none = "this kind has none; siblings says how many others have to report";
            for (key, is_given) in [
                ("threshold", entry.threshold.is_some()),
                ("factor", entry.factor.is_some()),
            ] {
                if is_given {
                    self.refuse(key, has_none);
                }
            }
            siblings?;
            return Some(ConditionKind::Silent { gap: gap? });
        }
        let at = self.at("factor");
        let needed = "write how many times the median of its siblings is far";
        if entry.factor.is_none() {
            self.refuse("factor", needed);
        }
        let factor = self.findings.whole_number(&at, entry.factor, 1..=1_000, "");
        Some(ConditionKind::Noisy {
            factor: u32::try_from(factor?).ok()?,
            siblings: siblings?,
            gap: gap?,
        })
    }

    /// Reads the kind `count` of values that no other group has.
    pub(super) fn exclusive(&mut self, entry: &RuleEntry) -> Option<ConditionKind> {
        if entry.distinct.is_empty() {
            self.refuse(
                "distinct",
                "exclusive needs it: the key whose values no other group has",
            );
        }
        if entry.close.is_some() {
            self.refuse("close", "it belongs to a count without exclusive");
        }
        let gap = self.duration("gap", entry.gap.as_ref(), GAP)?;
        Some(ConditionKind::Exclusive { gap })
    }

    /// Reads the key of the members that are compared; `None` for a rule of another kind.
    pub(super) fn member(
        &mut self,
        entry: &RuleEntry,
        kind: Option<&ConditionKind>,
    ) -> Option<GroupKey> {
        let is_silent = match kind? {
            ConditionKind::Silent { .. } => true,
            ConditionKind::Noisy { .. } => false,
            _ => return None,
        };
        let named = entry.member.as_deref().unwrap_or_default();
        let member = GroupKey::parse(named, self.topology);
        let member = member.filter(|key| matches!(key, GroupKey::Gpu | GroupKey::Node));
        if is_silent && member != Some(GroupKey::Gpu) {
            let why = "write gpu: a node that says nothing may be off";
            self.refuse("member", why);
        } else if member.is_none() {
            self.refuse("member", "write gpu or node");
        }
        for (index, name) in entry.group_by.iter().enumerate().filter(|_| is_silent) {
            let key = GroupKey::parse(name, self.topology);
            if !matches!(key, None | Some(GroupKey::Node | GroupKey::Label { .. })) {
                let why = "write node or a label such as nvlink_domain: of other groups nothing tells \
                           whether a member without a report belongs to them";
                self.refuse(&format!("group_by[{index}]"), why);
            }
        }
        if is_silent && entry.fatal == Some(true) {
            self.refuse("fatal", "write false: silence is a hint, not a fault");
        }
        member
    }

    /// Reads the least number of siblings that report too.
    fn siblings(&mut self, number: Option<i64>) -> Option<u32> {
        if number.is_none() {
            self.refuse(
                "siblings",
                "write how many other members have to report too",
            );
        }
        let at = self.at("siblings");
        let number = self
            .findings
            .whole_number(&at, number, 1..=MAX_THRESHOLD, "");
        u32::try_from(number?).ok()
    }

    /// Reads what changes a built-in rule that compares members.
    pub(super) fn changed_outlier(&mut self, rule: &mut Rule, entry: &RuleEntry) -> Option<()> {
        let is_silent = matches!(rule.condition.kind, ConditionKind::Silent { .. });
        if is_silent {
            if entry.fatal == Some(true) {
                self.refuse("fatal", "write false: silence is a hint, not a fault");
            }
            if entry.threshold.is_some() {
                self.refuse("threshold", "this rule has none; write siblings");
            }
            rule.fatal = false;
        }
        if entry.siblings.is_none() {
            return Some(());
        }
        let number = self.siblings(entry.siblings)?;
        match &mut rule.condition.kind {
            ConditionKind::Silent { .. } => rule.condition.threshold = number,
            ConditionKind::Noisy { siblings, .. } => *siblings = number,
            _ => self.refuse("siblings", "it belongs to the kind outlier"),
        }
        Some(())
    }
}
