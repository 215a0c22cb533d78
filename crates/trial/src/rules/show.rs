//! Rules with their keys, as in a file, and how two sets of rules differ.

use std::collections::BTreeSet;

use analysis::{ConditionKind, MAX_WINDOW, Matches, Rule};
use contract::action_name;
use jiff::SignedDuration;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

/// Rule in effect. Serialized names are part of the output of `rules show`; the keys are those
/// of a file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ShownRule {
    /// Name of the rule.
    pub name: String,
    /// `built-in`, `changed` for a built-in rule that a file changes, or `own`.
    pub from: &'static str,
    /// Keys and values, in the order in which people read them.
    #[serde(flatten, serialize_with = "as_map")]
    pub keys: Vec<(&'static str, Value)>,
}

/// Key of a rule that differs between two sets of rules. Serialized names are part of the output
/// of `rules diff`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RuleDifference {
    /// Name of the rule.
    pub rule: String,
    /// Key that differs; `rule` for a rule that only one set has.
    pub key: &'static str,
    /// Value of the first set, for people.
    pub a: String,
    /// Value of the second set, for people.
    pub b: String,
}

/// Returns the rules for people.
pub fn shown(rules: &[Rule]) -> Vec<ShownRule> {
    let built_in = analysis::built_in();
    let shown = |rule: &Rule| {
        let keys = keys_of(rule);
        let from = match built_in.iter().find(|known| known.name == rule.name) {
            Some(known) if keys_of(known) == keys => "built-in",
            Some(_) => "changed",
            None => "own",
        };
        ShownRule {
            name: rule.name.clone(),
            from,
            keys,
        }
    };
    rules.iter().map(shown).collect()
}

/// Returns the names of the built-in rules that are not among `rules`.
pub fn switched_off(rules: &[Rule]) -> Vec<String> {
    let names = analysis::built_in().into_iter().map(|rule| rule.name);
    let is_off = |name: &String| !rules.iter().any(|rule| rule.name == *name);
    names.filter(is_off).collect()
}

/// Returns the differences between two sets of rules, by rule.
pub fn differences(a: &[Rule], b: &[Rule]) -> Vec<RuleDifference> {
    let names: BTreeSet<&str> = a.iter().chain(b).map(|rule| rule.name.as_str()).collect();
    let of = |rules: &[Rule], name: &str| {
        let rule = rules.iter().find(|rule| rule.name == name);
        rule.map(keys_of)
    };
    let mut found = Vec::new();
    for name in names {
        let (of_a, of_b) = (of(a, name), of(b, name));
        let mut differs = |key, a: String, b: String| {
            found.push(RuleDifference {
                rule: name.to_owned(),
                key,
                a,
                b,
            });
        };
        let (Some(of_a), Some(of_b)) = (&of_a, &of_b) else {
            let word = |one: bool| if one { "there" } else { "not there" }.to_owned();
            differs("rule", word(of_a.is_some()), word(of_b.is_some()));
            continue;
        };
        let mut keys: Vec<&'static str> = of_a.iter().map(|(key, _)| *key).collect();
        keys.extend(of_b.iter().map(|(key, _)| *key));
        let mut compared = BTreeSet::new();
        for key in keys.into_iter().filter(|key| compared.insert(*key)) {
            let value = |keys: &[(&str, Value)]| {
                let entry = keys.iter().find(|(known, _)| *known == key);
                entry.map_or_else(|| "none".to_owned(), |(_, value)| text(value))
            };
            let (a, b) = (value(of_a), value(of_b));
            if a != b {
                differs(key, a, b);
            }
        }
    }
    found
}

/// Returns a value as a file of rules (TOML) has it.
pub fn text(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(text).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(table) => {
            let keys = table.iter();
            let keys: Vec<String> = keys
                .map(|(key, it)| format!("{key} = {}", text(it)))
                .collect();
            match keys.len() {
                0 => "{}".to_owned(),
                _ => format!("{{ {} }}", keys.join(", ")),
            }
        }
        other => other.to_string(),
    }
}

// === impl ShownRule ===

impl ShownRule {
    /// Returns the keys of a group for people.
    pub fn groups(&self) -> String {
        let entry = self.keys.iter().find(|(known, _)| *known == "group_by");
        let names = entry.and_then(|(_, value)| value.as_array());
        let names = names.into_iter().flatten().filter_map(Value::as_str);
        let names: Vec<&str> = names.collect();
        if names.is_empty() {
            return "node".to_owned();
        }
        names.join(", ")
    }

    /// Returns the value of a key as a file has it; empty if the rule does not have the key.
    pub fn text_of(&self, key: &str) -> String {
        let entry = self.keys.iter().find(|(known, _)| *known == key);
        match entry {
            Some((_, Value::String(word))) => word.clone(),
            Some((_, value)) => text(value),
            None => String::new(),
        }
    }
}

fn as_map<S: Serializer>(keys: &[(&'static str, Value)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(keys.iter().map(|(key, value)| (*key, value)))
}

/// Returns the keys of a rule. Empty lists and defaults that the kind gives are left out.
fn keys_of(rule: &Rule) -> Vec<(&'static str, Value)> {
    let condition = &rule.condition;
    let span = |span: SignedDuration| json!(format!("{span:#}"));
    let names = |keys: &[analysis::GroupKey]| {
        json!(keys.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    let (kind, more) = match &condition.kind {
        ConditionKind::Count | ConditionKind::Distinct => ("count", Vec::new()),
        ConditionKind::Exclusive { gap } => (
            "count",
            vec![("exclusive", json!(true)), ("gap", span(*gap))],
        ),
        ConditionKind::Burst(gaps) => ("burst", vec![("gap", span(gaps.gap))]),
        ConditionKind::Solo { gap } => ("solo", vec![("gap", span(*gap))]),
        ConditionKind::Trend { factor } => ("trend", vec![("factor", json!(factor))]),
        ConditionKind::Sequence { within } => {
            let within = (*within < MAX_WINDOW).then(|| ("within", span(*within)));
            ("sequence", within.into_iter().collect())
        }
        ConditionKind::Noisy {
            factor,
            siblings,
            gap,
        } => {
            let keys = [
                ("factor", json!(factor)),
                ("siblings", json!(siblings)),
                ("gap", span(*gap)),
            ];
            ("outlier", keys.to_vec())
        }
        ConditionKind::Silent { gap } => {
            let siblings = json!(condition.threshold);
            let keys = [
                ("silent", json!(true)),
                ("siblings", siblings),
                ("gap", span(*gap)),
            ];
            ("outlier", keys.to_vec())
        }
    };
    let has_threshold = !matches!(
        condition.kind,
        ConditionKind::Solo { .. } | ConditionKind::Sequence { .. } | ConditionKind::Silent { .. }
    );
    let mut keys = vec![("kind", json!(kind))];
    keys.extend(keys_of_matches(&rule.matches));
    keys.extend([
        ("steps", json!(steps_of(rule))),
        ("group_by", names(&rule.group_by)),
        ("distinct", names(&rule.distinct)),
    ]);
    let member = rule.member.as_ref();
    keys.extend(member.map(|member| ("member", json!(member.to_string()))));
    keys.extend([("window", span(condition.window))]);
    if has_threshold {
        keys.push(("threshold", json!(condition.threshold)));
    }
    keys.extend(
        rule.share
            .map(|share| ("share", json!(format!("{share}%")))),
    );
    keys.extend(more);
    keys.extend(condition.close.map(|close| ("close", span(close))));
    keys.extend([
        ("recover", json!(rule.recover)),
        ("component_class", json!(rule.component_class)),
        ("action", json!(action_name(rule.action as i32))),
        ("fatal", json!(rule.fatal)),
        ("strategy", json!(rule.strategy.as_str_name())),
        ("message", json!(rule.message)),
    ]);
    keys.retain(|(_, value)| value.as_array().is_none_or(|list| !list.is_empty()));
    keys
}

fn keys_of_matches(matches: &Matches) -> Vec<(&'static str, Value)> {
    let others = matches.other_than.iter().map(|code| format!("!{code}"));
    let codes: Vec<String> = matches.codes.iter().cloned().chain(others).collect();
    let mut keys = vec![
        ("agents", json!(matches.agents)),
        ("checks", json!(matches.checks)),
        ("codes", json!(codes)),
    ];
    keys.extend(matches.is_fatal.map(|fatal| ("fatal_events", json!(fatal))));
    let expression = matches.expression.as_ref();
    keys.extend(expression.map(|rule| ("match", json!(rule.expression))));
    keys.retain(|(_, value)| value.as_array().is_none_or(|list| !list.is_empty()));
    keys
}

/// Returns the steps of a sequence, equal neighbours as one, without the keys that are those of the
/// rule.
fn steps_of(rule: &Rule) -> Vec<Map<String, Value>> {
    let mut steps: Vec<(Map<String, Value>, u64)> = Vec::new();
    let common = keys_of_matches(&rule.matches);
    for matches in &rule.steps {
        let keys = keys_of_matches(matches).into_iter();
        let keys = keys.filter(|key| !common.contains(key));
        let mut step: Map<String, Value> = keys.map(|(key, it)| (key.to_owned(), it)).collect();
        if matches.is_healthy {
            step.insert("healthy".to_owned(), json!(true));
        }
        match steps.last_mut() {
            Some((last, times)) if *last == step => *times += 1,
            _ => steps.push((step, 1)),
        }
    }
    let with_times = |(mut step, times): (Map<String, Value>, u64)| {
        if times > 1 {
            step.insert("times".to_owned(), json!(times));
        }
        step
    };
    steps.into_iter().map(with_times).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Vec<Rule> {
        analysis::parse(text, "rules.toml").unwrap()
    }

    #[test]
    fn what_is_shown_is_a_rule_of_a_file() {
        for rule in shown(&analysis::built_in()) {
            assert_eq!(rule.from, "built-in");
            let lines = rule
                .keys
                .iter()
                .map(|(key, it)| format!("{key} = {}", text(it)));
            let keys = lines.collect::<Vec<_>>().join("\n");
            let file = format!(
                "built_in = false\n[[rules]]\nname = {:?}\n{keys}",
                rule.name
            );
            let again = shown(&parse(&file));
            assert_eq!(again, [rule], "{file}");
        }
    }

    #[test]
    fn changed_own_and_missing_rules_are_told_apart() {
        let rules = parse(
            "[[rules]]\nname = \"RackFault\"\nenabled = false\n\
             [[rules]]\nname = \"RepeatedXID31OnSameGPU\"\nthreshold = 3\n\
             [[rules]]\nname = \"Mine\"\nkind = \"trend\"\nfactor = 3\nwindow = \"1h\"\nthreshold = 10\n\
             action = \"NONE\"\nmessage = \"m\"\n",
        );
        let shown = shown(&rules);
        let from = |name: &str| {
            shown
                .iter()
                .find(|rule| rule.name == name)
                .map(|rule| rule.from)
        };
        assert_eq!(from("RepeatedXID31OnSameGPU"), Some("changed"));
        assert_eq!(from("Mine"), Some("own"));
        assert_eq!(from("RepeatedXIDErrorOnSameGPU"), Some("built-in"));
        assert_eq!(switched_off(&rules), ["RackFault"]);
        let found = differences(&analysis::built_in(), &rules).into_iter();
        let told: Vec<String> = found
            .map(|one| format!("{} {}: {} | {}", one.rule, one.key, one.a, one.b))
            .collect();
        assert_eq!(
            told,
            [
                "Mine rule: not there | there",
                "RackFault rule: there | not there",
                "RepeatedXID31OnSameGPU threshold: 2 | 3",
            ]
        );
        assert!(differences(&rules, &rules).is_empty());
    }
}
