//! What the groups of a rule hold and lack, for people.

use analysis::{ConditionKind, GroupView, Held, Lack, Rule};
use jiff::Timestamp;
use serde::Serialize;

/// Group of a rule as of a time. Serialized names are part of the output of `rules explain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ExplainedGroup {
    /// Node, if it is one, and values of the group.
    pub group: String,
    /// Number of items that count: reports, values, bursts or steps.
    pub count: u64,
    /// Number that is needed.
    pub needed: u64,
    /// What counts, for people: `2 of 5 bursts within 24h`.
    pub holds: String,
    /// What is lacking beside the number, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lacks: Option<String>,
    /// Time of the latest report.
    pub last: Option<Timestamp>,
    /// Ids of the events that a conclusion rests on, else of those that count.
    pub evidence: Vec<String>,
    /// Time since which the rule concludes; absent without a conclusion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub concluded_since: Option<Timestamp>,
    /// Time after which the conclusion ends, or nothing counts any longer, without a further event;
    /// absent if the conclusion lasts until a repair.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
}

/// Returns the condition of a rule for people: `5 bursts within 24h`.
pub fn condition(rule: &Rule) -> String {
    let condition = &rule.condition;
    let (items, window) = (items(rule), condition.window);
    match &condition.kind {
        ConditionKind::Solo { gap } => {
            format!("a report with no other within {gap:#}, and no other fault within {window:#}")
        }
        ConditionKind::Trend { factor } => format!(
            "{} {items} within {window:#}, and {factor} times as many as in the window before",
            condition.threshold
        ),
        ConditionKind::Sequence { .. } => {
            format!(
                "{} {items} in their order within {window:#}",
                condition.threshold
            )
        }
        _ => format!("{} {items} within {window:#}", condition.threshold),
    }
}

/// Explains a group of a rule.
pub fn explained(rule: &Rule, view: &GroupView) -> ExplainedGroup {
    let Held {
        count,
        evidence,
        last,
        lack,
    } = &view.held;
    let (needed, window) = (rule.condition.threshold, rule.condition.window);
    let open = view.conclusion.as_ref();
    let lacks = lack.as_ref().filter(|_| open.is_none());
    let evidence = open.map_or(evidence, |open| &open.evidence);
    ExplainedGroup {
        group: view.group.to_string(),
        count: *count,
        needed: u64::from(needed),
        holds: format!("{count} of {needed} {} within {window:#}", items(rule)),
        lacks: lacks.and_then(|lack| lacking(rule, *count, lack)),
        last: *last,
        evidence: evidence.clone(),
        concluded_since: open.map(|open| open.since),
        until: view.until,
    }
}

/// Returns what the condition of a rule counts.
fn items(rule: &Rule) -> String {
    match rule.condition.kind {
        ConditionKind::Count | ConditionKind::Trend { .. } => "reports".to_owned(),
        ConditionKind::Burst(_) => "bursts".to_owned(),
        ConditionKind::Sequence { .. } => "steps".to_owned(),
        ConditionKind::Solo { .. } => "reports that stand alone".to_owned(),
        ConditionKind::Distinct => {
            let keys: Vec<String> = rule.distinct.iter().map(ToString::to_string).collect();
            format!("values of {}", keys.join(" and "))
        }
    }
}

fn lacking(rule: &Rule, count: u64, lack: &Lack) -> Option<String> {
    let close = rule.condition.close;
    match (lack, &rule.condition.kind) {
        (Lack::Close, _) => close.map(|close| format!("two of them within {close:#}")),
        (Lack::Silence(until), _) => Some(format!("silence until {until}")),
        (Lack::Others(others), _) => {
            let others = others.join(", ");
            Some(format!(
                "the recovery of other faults of the group: {others}"
            ))
        }
        (Lack::Before(0), _) => Some("a report in the window before, to compare with".to_owned()),
        (Lack::Before(before), ConditionKind::Trend { factor }) => {
            let least = before.saturating_mul(u64::from(*factor));
            (count < least)
                .then(|| format!("{least} reports, for there were {before} in the window before"))
        }
        (Lack::Before(_), _) => None,
    }
}
