//! `gpuwarden policy show`: all that holds, and what of it is a default.

use domain::policy::{DEFAULT_POLICY, Policy, Rule, RuleSet};
use serde::Serialize;

use crate::EXIT_OK;
use crate::args::Format;
use crate::output::{self, Colour};
use crate::policy_source;

/// `Shown` is a policy with everything that holds.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    source: String,
    settings: Vec<Setting>,
    rule_sets: Vec<ShownRuleSet>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    policies: Vec<Named>,
    warnings: Vec<String>,
}

/// A `Setting` is one key of the file.
#[derive(Serialize)]
struct Setting {
    key: &'static str,
    value: String,
    /// `file` or `default`.
    from: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Named {
    name: String,
    rule_sets: Vec<ShownRuleSet>,
}

#[derive(Serialize)]
struct ShownRuleSet {
    name: String,
    priority: i64,
    cordon: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    taint: Option<String>,
    all: Vec<ShownRule>,
    any: Vec<ShownRule>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ShownRule {
    looks_at: &'static str,
    expression: String,
}

pub(super) fn execute(source: Option<&str>, format: Format) -> anyhow::Result<u8> {
    let (policy, text) = match source {
        Some(source) => (policy_source::load(source)?, policy_source::text(source)?),
        None => (Policy::builtin(), DEFAULT_POLICY.to_owned()),
    };
    let shown = Shown::of(&policy, &text);
    if !output::structured(format, &shown)? {
        shown.write()?;
    }
    Ok(EXIT_OK)
}

// === impl Shown ===

impl Shown {
    fn of(policy: &Policy, text: &str) -> Self {
        let table: toml::Table = text.parse().unwrap_or_default();
        let setting = |keys: &[&'static str], value: String| Setting {
            key: keys
                .iter()
                .find(|key| table.contains_key(**key))
                .or(keys.first())
                .copied()
                .unwrap_or_default(),
            value,
            from: if keys.iter().any(|key| table.contains_key(*key)) {
                "file"
            } else {
                "default"
            },
        };
        let budgets: Vec<String> = policy
            .brake
            .budgets
            .iter()
            .map(ToString::to_string)
            .collect();
        let window = policy.brake.window.iter().map(ToString::to_string);
        let brake: Vec<String> = budgets.into_iter().chain(window).collect();
        let brake = if brake.is_empty() {
            "none".to_owned()
        } else {
            brake.join(", ")
        };
        Self {
            source: policy.source.clone(),
            settings: vec![
                setting(&["label-prefix"], format!("{:?}", policy.label_prefix)),
                setting(&["brake", "circuitBreaker"], brake),
                setting(&["unhealthy-taint"], policy.unhealthy_taint.to_string()),
                setting(&["uncordon-labels"], policy.uncordon_labels.to_string()),
            ],
            rule_sets: policy.rule_sets.iter().map(ShownRuleSet::of).collect(),
            policies: policy
                .policies
                .iter()
                .map(|named| Named {
                    name: named.name.clone(),
                    rule_sets: named.rule_sets.iter().map(ShownRuleSet::of).collect(),
                })
                .collect(),
            warnings: policy.warnings.clone(),
        }
    }

    fn write(&self) -> anyhow::Result<()> {
        output::line(&format!("policy from {}\n", self.source))?;
        for Setting { key, value, from } in &self.settings {
            let from = output::colour(&format!("({from})"), Colour::Grey);
            output::line(&format!("{key:<16} {}  {from}", output::plain(value)))?;
        }
        for rule_set in &self.rule_sets {
            rule_set.write("")?;
        }
        for named in &self.policies {
            output::line(&format!(
                "\npolicy '{}', for nodes that name it",
                output::plain(&named.name)
            ))?;
            for rule_set in &named.rule_sets {
                rule_set.write("  ")?;
            }
        }
        for warning in &self.warnings {
            output::line(&format!(
                "\n{}: {}",
                output::colour("warning", Colour::Yellow),
                output::plain(warning)
            ))?;
        }
        Ok(())
    }
}

// === impl ShownRuleSet ===

impl ShownRuleSet {
    fn of(rule_set: &RuleSet) -> Self {
        Self {
            name: rule_set.name.clone(),
            priority: rule_set.priority,
            cordon: rule_set.cordon,
            taint: rule_set.taint.as_ref().map(ToString::to_string),
            all: rule_set.all.iter().map(ShownRule::of).collect(),
            any: rule_set.any.iter().map(ShownRule::of).collect(),
        }
    }

    fn write(&self, indent: &str) -> anyhow::Result<()> {
        let mut asks: Vec<String> = Vec::new();
        if self.cordon {
            asks.push("cordon".to_owned());
        }
        asks.extend(self.taint.iter().map(|taint| format!("taint {taint}")));
        if asks.is_empty() {
            asks.push("nothing".to_owned());
        }
        output::line(&format!(
            "\n{indent}rule set '{}', priority {}: {}",
            output::plain(&self.name),
            self.priority,
            asks.join(", ")
        ))?;
        for (group, rules) in [("all", &self.all), ("any", &self.any)] {
            for rule in rules {
                output::line(&format!(
                    "{indent}  {group}  {}",
                    output::plain(rule.expression.trim())
                ))?;
            }
        }
        Ok(())
    }
}

// === impl ShownRule ===

impl ShownRule {
    fn of(rule: &Rule) -> Self {
        Self {
            looks_at: rule.kind.variable(),
            expression: rule.expression.clone(),
        }
    }
}
