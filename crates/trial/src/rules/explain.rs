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
    let share = rule
        .share
        .map(|share| format!(", {share}% of all at least,"));
    let items = format!("{}{}", items(rule), share.unwrap_or_default());
    let window = condition.window;
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
        ConditionKind::Exclusive { .. } => format!(
            "{} {items} within {window:#} that no other group has",
            condition.threshold
        ),
        ConditionKind::Noisy {
            factor, siblings, ..
        } => format!(
            "a {} with {} reports within {window:#}, and {factor} times the median of its siblings, of which \
             {siblings} report too",
            member(rule),
            condition.threshold
        ),
        ConditionKind::Silent { .. } => format!(
            "a {} without a report within {window:#}, where all others of the group report, {} at least",
            member(rule),
            condition.threshold
        ),
        _ => format!("{} {items} within {window:#}", condition.threshold),
    }
}

/// Returns the word for the members that a rule compares.
fn member(rule: &Rule) -> String {
    rule.member
        .as_ref()
        .map(ToString::to_string)
        .unwrap_or_default()
}

/// Explains a group of a rule.
pub fn explained(rule: &Rule, view: &GroupView) -> ExplainedGroup {
    let Held {
        count,
        evidence,
        last,
        lack,
    } = &view.held;
    let (needed, window) = (view.needed, rule.condition.window);
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
        evidence: evidence.iter().map(|id| id.to_string()).collect(),
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
        ConditionKind::Noisy { .. } => format!("reports of the noisiest {}", member(rule)),
        ConditionKind::Silent { .. } => format!("siblings, each a {} that reports,", member(rule)),
        ConditionKind::Distinct | ConditionKind::Exclusive { .. } => {
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
        (Lack::Elsewhere(values), _) => {
            let values = values.join(", ");
            Some(format!("values that no other group has, unlike {values}"))
        }
        (Lack::Siblings(number), ConditionKind::Noisy { siblings, .. }) => Some(format!(
            "{siblings} siblings that report too, for {number} do so far"
        )),
        (Lack::Median(median), ConditionKind::Noisy { factor, .. }) => {
            let least = median.saturating_mul(u64::from(*factor));
            Some(format!(
                "{least} reports, for the median of its siblings is {median}"
            ))
        }
        (Lack::OneSilent(silent), _) if silent.is_empty() => Some(format!(
            "a {} that is known to be there and does not report",
            member(rule)
        )),
        (Lack::OneSilent(silent), _) => {
            let silent = silent.join("; ");
            Some(format!(
                "reports of all but one of those without any: {silent}"
            ))
        }
        (Lack::Wait(until), _) => Some(format!("no other result of reports until {until}")),
        (Lack::Before(_) | Lack::Siblings(_) | Lack::Median(_), _) => None,
    }
}

#[cfg(test)]
mod tests {
    use analysis::Group;

    use super::*;

    const NOISY: &str = "kind = \"outlier\"\nmember = \"gpu\"\nfactor = 10\nsiblings = 8\nthreshold = 20\n\
                         gap = \"5m\"";
    const SILENT: &str =
        "kind = \"outlier\"\nmember = \"gpu\"\nsilent = true\nsiblings = 16\ngap = \"5m\"";

    #[test]
    fn a_condition_names_the_share_of_the_nodes() {
        for (keys, expected) in [
            ("", "3 values of node, 50% of all at least, within 1h"),
            (
                "exclusive = true\ngap = \"1m\"",
                "3 values of node, 50% of all at least, within 1h that no other group has",
            ),
        ] {
            let text = format!(
                "built_in = false\n[[rules]]\nname = \"r\"\nkind = \"count\"\nwindow = \"1h\"\n\
                 threshold = 3\ngroup_by = [\"rack\"]\ndistinct = [\"node\"]\nshare = \"50%\"\n\
                 action = \"NONE\"\nmessage = \"m\"\n{keys}\n"
            );
            let rules = analysis::parse(&text, "rules.toml").unwrap();
            assert_eq!(condition(&rules[0]), expected);
        }
    }

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
            (
                "kind = \"count\"\ndistinct = [\"job\"]\nexclusive = true\ngap = \"5m\"\nthreshold = 3",
                2,
                Some(Lack::Elsewhere(vec!["ml/a".to_owned(), "ml/b".to_owned()])),
                &[
                    "1 more",
                    "values that no other group has, unlike ml/a, ml/b",
                ],
            ),
            (
                NOISY,
                20,
                Some(Lack::Median(3)),
                &["30 reports, for the median of its siblings is 3"],
            ),
            (
                NOISY,
                20,
                Some(Lack::Siblings(5)),
                &["8 siblings that report too, for 5 do so far"],
            ),
            (
                SILENT,
                15,
                Some(Lack::OneSilent(Vec::new())),
                &[
                    "1 more",
                    "a gpu that is known to be there and does not report",
                ],
            ),
            (
                SILENT,
                16,
                Some(Lack::OneSilent(vec![
                    "a, PCI 1".to_owned(),
                    "b, PCI 2".to_owned(),
                ])),
                &["reports of all but one of those without any: a, PCI 1; b, PCI 2"],
            ),
            (
                SILENT,
                16,
                Some(Lack::Wait(at(60))),
                &["no other result of reports until 1970-01-01T00:01:00Z"],
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
                needed: rule.condition.threshold,
                conclusion: None,
                until: None,
            };
            assert_eq!(explained(rule, &view).lacks, expected, "{keys}");
        }
    }
}
