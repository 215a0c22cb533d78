//! Texts for people about the groups of a rule: the items that count, and what is lacking.

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
    /// Items that count, for people: `2 of 5 bursts within 24h`.
    pub holds: String,
    /// Parts that are lacking for a conclusion, for people.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
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
    let is_solo = matches!(rule.condition.kind, ConditionKind::Solo { .. });
    let more = u64::from(needed).saturating_sub(*count);
    let mut lacks = Vec::new();
    if open.is_none() {
        if more > 0 && is_solo {
            lacks.push("a report that stands alone".to_owned());
        } else if more > 0 {
            lacks.push(format!("{more} more"));
        }
        lacks.extend(lack.as_ref().and_then(|lack| lacking(rule, *count, lack)));
    }
    let holds = match (is_solo, count) {
        (true, 0) => "no report stands alone".to_owned(),
        (true, _) => "a report stands alone so far".to_owned(),
        (false, _) => format!("{count} of {needed} {} within {window:#}", items(rule)),
    };
    let evidence = open.map_or(evidence, |open| &open.evidence);
    ExplainedGroup {
        group: view.group.to_string(),
        count: *count,
        needed: u64::from(needed),
        holds,
        lacks,
        last: *last,
        evidence: evidence.clone(),
        concluded_since: open.map(|open| open.since),
        until: view.until,
    }
}

/// Returns what the condition of a rule counts.
fn items(rule: &Rule) -> String {
    match rule.condition.kind {
        ConditionKind::Count | ConditionKind::Trend { .. } | ConditionKind::Solo { .. } => {
            "reports".to_owned()
        }
        ConditionKind::Burst(_) => "bursts".to_owned(),
        ConditionKind::Sequence { .. } => "steps".to_owned(),
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

#[cfg(test)]
mod tests {
    use analysis::Group;

    use super::*;

    #[test]
    fn what_is_lacking_is_told_by_kind() {
        let at = |second| Timestamp::from_second(second).unwrap();
        for (keys, count, lack, expected) in [
            ("kind = \"count\"\nthreshold = 3", 2, None, &["1 more"][..]),
            (
                "kind = \"count\"\nthreshold = 2\nclose = \"5m\"",
                2,
                Some(Lack::Close),
                &["two of them within 5m"],
            ),
            (
                "kind = \"trend\"\nthreshold = 2",
                5,
                Some(Lack::Before(2)),
                &[],
            ),
            (
                "kind = \"trend\"\nthreshold = 2\nfactor = 3",
                5,
                Some(Lack::Before(2)),
                &["6 reports, for there were 2 in the window before"],
            ),
            (
                "kind = \"solo\"\ngap = \"3m\"",
                1,
                Some(Lack::Silence(at(60))),
                &["silence until 1970-01-01T00:01:00Z"],
            ),
            (
                "kind = \"solo\"\ngap = \"3m\"",
                0,
                None,
                &["a report that stands alone"],
            ),
        ] {
            let text = format!(
                "built_in = false\n[[rules]]\nname = \"r\"\nwindow = \"1h\"\naction = \"NONE\"\n\
                 message = \"m\"\n{keys}\n"
            );
            let rule = &analysis::parse(&text, "rules.toml").unwrap()[0];
            let view = GroupView {
                group: Group::of_node("n1"),
                held: Held {
                    count,
                    lack,
                    ..Held::default()
                },
                conclusion: None,
                until: None,
            };
            assert_eq!(explained(rule, &view).lacks, expected, "{keys}");
        }
    }
}
