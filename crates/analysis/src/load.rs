//! Loading of a file of rules (TOML). All findings are reported at once, each with its line.

use contract::findings::{FileError, Findings, Format};
use contract::{RecommendedAction, parse_action};
use jiff::SignedDuration;
use policy::{CelRule, RuleKind};
use serde::Deserialize;
use toml::Spanned;

use crate::condition::{Condition, ConditionKind, Gaps};
use crate::group::GroupKey;
use crate::rule::{Matches, Rule};

/// Built-in rules.
pub const BUILT_IN: &str = include_str!("../data/rules.toml");
/// Longest window: events are stored for 30 days by default.
pub const MAX_WINDOW: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Largest threshold: a group keeps as many items, and a conclusion names as many events.
pub const MAX_THRESHOLD: i64 = 100;
/// Codes whose faults last: reports with them are one burst for [`STICKY_GAP`] (NVSentinel's
/// analyzer).
const STICKY: [&str; 5] = ["74", "79", "95", "109", "119"];
/// Longest time between two reports of one burst with such codes.
const STICKY_GAP: SignedDuration = SignedDuration::from_hours(3);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    rules: Vec<Spanned<RuleEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleEntry {
    name: String,
    #[serde(default = "on")]
    enabled: bool,
    #[serde(default)]
    agents: Vec<String>,
    #[serde(default)]
    checks: Vec<String>,
    #[serde(default)]
    codes: Vec<String>,
    #[serde(rename = "match")]
    expression: Option<String>,
    #[serde(default)]
    group_by: Vec<String>,
    kind: String,
    window: String,
    threshold: i64,
    distinct: Option<String>,
    gap: Option<String>,
    #[serde(default = "gpu")]
    component_class: String,
    action: String,
    fatal: Option<bool>,
    message: String,
}

fn on() -> bool {
    true
}

fn gpu() -> String {
    "GPU".to_owned()
}

/// Parses a file of rules. `source` names it in findings. Rules that are not enabled are checked,
/// and left out.
pub fn parse(text: &str, source: &str) -> Result<Vec<Rule>, FileError> {
    let (file, mut findings) = Findings::read::<File>(text, source, Format::Toml)?;
    let mut rules: Vec<Rule> = Vec::new();
    for (index, entry) in file.rules.into_iter().enumerate() {
        let entry = findings.begin_entry(entry, |entry| format!("rule '{}'", entry.name));
        if entry.name.trim().is_empty() {
            findings.wrong("a rule needs a name");
        } else if rules.iter().any(|known| known.name == entry.name) {
            findings.wrong("there is another rule with this name");
        }
        let enabled = entry.enabled;
        let rule = rule(&format!("rules[{index}]"), entry, &mut findings);
        rules.extend(rule.filter(|_| enabled));
    }
    findings.result(rules)
}

/// Reads a rule; `None` if it has findings.
fn rule(path: &str, entry: RuleEntry, findings: &mut Findings<'_>) -> Option<Rule> {
    let at = |key: &str| format!("{path}.{key}");
    let before = findings.count();
    let window = findings.duration(&at("window"), &entry.window, MAX_WINDOW);
    let threshold = Some(entry.threshold);
    let threshold = findings.whole_number(&at("threshold"), threshold, 1..=MAX_THRESHOLD, "");
    let kind = kind(&at, &entry, findings);
    let mut group_by = Vec::new();
    for (index, name) in entry.group_by.iter().enumerate() {
        if name != "node" {
            let path = at(&format!("group_by[{index}]"));
            group_by.extend(key(&path, name, findings));
        }
    }
    let distinct = entry.distinct.as_deref();
    let distinct = distinct.and_then(|name| key(&at("distinct"), name, findings));
    let action =
        parse_action(&entry.action).and_then(|number| RecommendedAction::try_from(number).ok());
    if action.is_none() {
        findings.refuse(
            &at("action"),
            "write a recommended action such as CONTACT_SUPPORT",
        );
    }
    let expression = entry.expression.as_deref();
    let expression = expression.map(|text| CelRule::compile(RuleKind::HealthEvent, text));
    let expression = expression.and_then(|compiled| findings.check(&at("match"), compiled));
    if findings.count() > before {
        return None;
    }
    let action = action?;
    let fatal = entry.fatal.unwrap_or(action != RecommendedAction::None);
    Some(Rule {
        name: entry.name,
        matches: Matches {
            agents: entry.agents,
            checks: entry.checks,
            codes: entry.codes,
            expression,
        },
        group_by,
        distinct,
        condition: Condition {
            kind: kind?,
            threshold: u32::try_from(threshold?).ok()?,
            window: window?,
            until_repaired: fatal,
        },
        component_class: entry.component_class,
        action,
        fatal,
        message: entry.message,
    })
}

/// Reads the way of counting, with the keys that belong to it.
fn kind(
    at: &impl Fn(&str) -> String,
    entry: &RuleEntry,
    findings: &mut Findings<'_>,
) -> Option<ConditionKind> {
    let kinds = [("count", false), ("burst", true)];
    let is_burst = findings.one_of(&at("kind"), &entry.kind, &kinds)?;
    match (is_burst, &entry.gap) {
        (true, None) => findings.refuse(&at("gap"), "a burst needs one, such as 3m"),
        (false, Some(_)) => findings.refuse(&at("gap"), "it belongs to the kind burst"),
        _ => {}
    }
    if is_burst && entry.distinct.is_some() {
        findings.refuse(&at("distinct"), "it belongs to the kind count");
    }
    if !is_burst {
        let is_distinct = entry.distinct.is_some();
        return Some(if is_distinct {
            ConditionKind::Distinct
        } else {
            ConditionKind::Count
        });
    }
    let gap = findings.duration(&at("gap"), entry.gap.as_ref()?, MAX_WINDOW)?;
    Some(ConditionKind::Burst(Gaps {
        gap,
        sticky: STICKY.map(str::to_owned).into(),
        sticky_gap: STICKY_GAP,
    }))
}

fn key(path: &str, name: &str, findings: &mut Findings<'_>) -> Option<GroupKey> {
    if let Some(kind) = name.strip_prefix("entity:").filter(|kind| !kind.is_empty()) {
        return Some(GroupKey::Entity(kind.to_owned()));
    }
    let found = GroupKey::NAMES
        .into_iter()
        .find(|(known, _)| *known == name);
    if found.is_none() {
        let names = GroupKey::NAMES.map(|(known, _)| known).join(", ");
        findings.refuse(path, format!("write one of node, {names}, or entity:TYPE"));
    }
    found.map(|(_, key)| key)
}
