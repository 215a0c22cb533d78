//! `gpuwarden policy show`: all settings and rules of a policy, including defaults.

use policy::{CelRule, DEFAULT_POLICY, Policy, Route, RuleSet};
use serde::Serialize;

use crate::EXIT_OK;
use crate::args::Format;
use crate::output::{self, Colour, say};
use crate::policy_source;

/// All settings and rules of a policy.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    source: String,
    settings: Vec<Setting>,
    rule_sets: Vec<ShownRuleSet>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routes: Vec<ShownRoute>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    policies: Vec<Named>,
    warnings: Vec<String>,
}

/// Key of the policy's file.
#[derive(Serialize)]
struct Setting {
    key: &'static str,
    value: String,
    /// Origin of the value: `file` or `default`.
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
    #[serde(rename = "taintDevices", skip_serializing_if = "Option::is_none")]
    taint_devices: Option<u32>,
    all: Vec<ShownRule>,
    any: Vec<ShownRule>,
}

#[derive(Serialize)]
struct ShownRoute {
    name: String,
    /// Stages of a node on this route.
    stages: String,
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
        Some(source) => {
            let text = policy_source::text(source)?;
            (Policy::parse(&text, source)?, text)
        }
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
        let setting = |keys: &[&'static str], value: String| {
            let in_file = keys.iter().find(|key| table.contains_key(**key));
            Setting {
                key: in_file.or(keys.first()).copied().unwrap_or_default(),
                value,
                from: in_file.map_or("default", |_| "file"),
            }
        };
        let budgets = policy.brake.budgets.iter().map(ToString::to_string);
        let window = policy.brake.window.iter().map(ToString::to_string);
        let brake = listed(budgets.chain(window));
        let policies = policy.policies.iter().map(|named| Named {
            name: named.name.clone(),
            rule_sets: named.rule_sets.iter().map(ShownRuleSet::of).collect(),
        });
        Self {
            source: policy.source.clone(),
            settings: vec![
                setting(&["label-prefix"], format!("{:?}", policy.label_prefix)),
                setting(&["brake", "circuitBreaker"], brake),
                setting(&["unhealthy-taint"], policy.unhealthy_taint.to_string()),
                setting(&["uncordon-labels"], policy.uncordon_labels.to_string()),
                setting(&["uncordon"], policy.uncordon.to_string()),
                setting(&["protect-from"], listed(policy.protect_from.iter())),
            ],
            rule_sets: policy.rule_sets.iter().map(ShownRuleSet::of).collect(),
            routes: policy.routes.iter().map(ShownRoute::of).collect(),
            policies: policies.collect(),
            warnings: policy.warnings.clone(),
        }
    }

    fn write(&self) -> anyhow::Result<()> {
        say!("policy from {}\n", self.source)?;
        for Setting { key, value, from } in &self.settings {
            let from = output::colour(&format!("({from})"), Colour::Grey);
            say!("{key:<16} {}  {from}", output::plain(value))?;
        }
        for rule_set in &self.rule_sets {
            rule_set.write("")?;
        }
        for route in &self.routes {
            let name = output::plain(&route.name);
            say!("\nroute '{name}': {}", route.stages)?;
            write_rules("", &route.all, &route.any)?;
        }
        for named in &self.policies {
            say!(
                "\npolicy '{}', for nodes that name it",
                output::plain(&named.name)
            )?;
            for rule_set in &named.rule_sets {
                rule_set.write("  ")?;
            }
        }
        for warning in &self.warnings {
            say!(
                "\n{}: {}",
                output::colour("warning", Colour::Yellow),
                output::plain(warning)
            )?;
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
            taint_devices: rule_set.taint_devices,
            all: rule_set.all.iter().map(ShownRule::of).collect(),
            any: rule_set.any.iter().map(ShownRule::of).collect(),
        }
    }

    fn write(&self, indent: &str) -> anyhow::Result<()> {
        let cordon = self.cordon.then(|| "cordon".to_owned());
        let taint = self.taint.iter().map(|taint| format!("taint {taint}"));
        let asks: Vec<String> = cordon.into_iter().chain(taint).collect();
        let asks = if asks.is_empty() {
            "nothing".to_owned()
        } else {
            asks.join(", ")
        };
        let asks = match self.taint_devices {
            Some(most) => format!("taint up to {most} faulty GPUs, beyond that {asks}"),
            None => asks,
        };
        let name = output::plain(&self.name);
        say!(
            "\n{indent}rule set '{name}', priority {}: {asks}",
            self.priority
        )?;
        write_rules(indent, &self.all, &self.any)
    }
}

// === impl ShownRoute ===

impl ShownRoute {
    fn of(route: &Route) -> Self {
        Self {
            name: route.rules.name.clone(),
            stages: route.routed().stages(),
            all: route.rules.all.iter().map(ShownRule::of).collect(),
            any: route.rules.any.iter().map(ShownRule::of).collect(),
        }
    }
}

// === impl ShownRule ===

impl ShownRule {
    fn of(rule: &CelRule) -> Self {
        Self {
            looks_at: rule.kind.variable(),
            expression: rule.expression.clone(),
        }
    }
}

/// Returns the items in one line; `none` if there are none.
fn listed(items: impl Iterator<Item = impl ToString>) -> String {
    let items: Vec<String> = items.map(|item| item.to_string()).collect();
    if items.is_empty() {
        return "none".to_owned();
    }
    items.join(", ")
}

fn write_rules(indent: &str, all: &[ShownRule], any: &[ShownRule]) -> anyhow::Result<()> {
    for (group, rules) in [("all", all), ("any", any)] {
        for rule in rules {
            say!(
                "{indent}  {group}  {}",
                output::plain(rule.expression.trim())
            )?;
        }
    }
    Ok(())
}
