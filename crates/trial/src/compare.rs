//! Differences between two policies: their answers to the events of known monitors, and their
//! other settings.

use diagnosis::catalog::Catalog;
use model::event::EventRecord;
use model::node::{NodeView, Taint};
use model::position::Position;
use policy::assess::Desired;
use policy::{ALL_STAGES, CelRule, EventVariable, NodeVariable, Policy, Routed, RuleKind, RuleSet};
use serde::{Deserialize, Serialize};

use crate::replay::Replay;
use crate::standard::{self, Standard};

/// Event with different answers of two policies. Serialized names are part of the output of
/// `policy diff`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// Name of the event, for people.
    pub event: String,
    /// Gravity and recommended action, for people.
    pub judged: String,
    /// Node with this difference; absent for a node of unknown properties.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Answer of the first policy.
    pub a: Asked,
    /// Answer of the second policy.
    pub b: Asked,
}

/// Key of the policy file that differs, other than rule sets. Serialized names are part of the
/// output of `policy diff`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingDifference {
    /// Name of the key.
    pub setting: String,
    /// Value of the first policy, for people.
    pub a: String,
    /// Value of the second policy, for people.
    pub b: String,
}

/// Answer of a policy to an event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Asked {
    /// True if the policy asks for a cordon.
    pub cordon: bool,
    /// Taints that the policy asks for.
    pub taints: Vec<Taint>,
    /// Names of the rule sets that ask for them.
    pub rule_sets: Vec<String>,
    /// Stages that a route gives the node, for people; absent if it gets all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages: Option<String>,
}

/// Returns the settings that differ between `a` and `b`. Rule sets are compared by their effect
/// ([`differences`]); of policies that a node can choose, only the names are compared.
pub fn settings(a: &Policy, b: &Policy) -> Vec<SettingDifference> {
    let of = |policy: &Policy| {
        let budgets = policy.brake.budgets.iter().map(ToString::to_string);
        let protect_from = policy.protect_from.iter().map(ToString::to_string);
        let names = policy.policies.iter().map(|named| named.name.clone());
        [
            ("brake", listed(budgets)),
            (
                "circuitBreaker",
                listed(policy.brake.window.iter().map(ToString::to_string)),
            ),
            ("label-prefix", format!("{:?}", policy.label_prefix)),
            ("unhealthy-taint", policy.unhealthy_taint.to_string()),
            ("uncordon-labels", policy.uncordon_labels.to_string()),
            ("uncordon", policy.uncordon.to_string()),
            ("protect-from", listed(protect_from)),
            ("policies", listed(names)),
        ]
    };
    of(a)
        .into_iter()
        .zip(of(b))
        .filter(|((_, a), (_, b))| a != b)
        .map(|((setting, a), (_, b))| SettingDifference {
            setting: setting.to_owned(),
            a,
            b,
        })
        .collect()
}

fn listed(items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.collect();
    if items.is_empty() {
        return "none".to_owned();
    }
    items.join(", ")
}

/// Returns the events of known monitors with different answers of `a` and `b`, on one node of
/// each kind that their rules distinguish among `nodes`. Without nodes, a node of unknown
/// properties is used.
pub fn differences(
    a: &Policy,
    b: &Policy,
    catalog: &Catalog,
    nodes: &[NodeView],
) -> Vec<Difference> {
    let kinds = kinds(nodes, [a, b]);
    let tried: Vec<Option<&NodeView>> = if nodes.is_empty() {
        vec![None]
    } else {
        kinds.into_iter().map(Some).collect()
    };
    let mut found = Vec::new();
    for standard in standard::events(catalog) {
        for node in &tried {
            let (a, b) = (asked(a, &standard, *node), asked(b, &standard, *node));
            if a.cordon != b.cordon || a.taints != b.taints || a.stages != b.stages {
                found.push(Difference {
                    event: standard.name.clone(),
                    judged: standard.judged(),
                    node: node.map(|node| node.name.clone()),
                    a,
                    b,
                });
            }
        }
    }
    found
}

/// Returns the names of the rule sets in `policy` with a rule about nodes that `other` does not
/// have. Without nodes, [`differences`] cannot find the effect of these rules.
pub fn untried<'a>(policy: &'a Policy, other: &Policy) -> Vec<&'a str> {
    let known: Vec<&str> = rule_sets(other).flat_map(about_nodes).map(text).collect();
    let mut names = Vec::new();
    for set in rule_sets(policy) {
        let own = about_nodes(set).any(|rule| !known.contains(&text(rule)));
        if own && !names.contains(&set.name.as_str()) {
            names.push(&set.name);
        }
    }
    names
}

fn rule_sets(policy: &Policy) -> impl Iterator<Item = &RuleSet> {
    let named = policy.policies.iter().flat_map(|named| &named.rule_sets);
    let routes = policy.routes.iter().map(|route| &route.rules);
    policy.rule_sets.iter().chain(named).chain(routes)
}

fn about_nodes(set: &RuleSet) -> impl Iterator<Item = &CelRule> {
    let rules = set.all.iter().chain(&set.any);
    rules.filter(|rule| rule.kind == RuleKind::Node)
}

fn text(rule: &CelRule) -> &str {
    &rule.expression
}

/// Returns the first node of each kind; all nodes of a kind give the same answers to rules
/// about nodes.
fn kinds<'a>(nodes: &'a [NodeView], policies: [&Policy; 2]) -> Vec<&'a NodeView> {
    let no_event = EventVariable::new(&serde_json::Value::Null);
    let mut answers = Vec::new();
    let mut kinds = Vec::new();
    for node in nodes {
        let variable = NodeVariable::new(&node.object());
        let of_policy = |policy: &Policy| -> Vec<(String, Option<bool>)> {
            let routes = policy.routes.iter().map(|route| &route.rules);
            let sets = policy.rule_sets_of(node).iter().chain(routes);
            sets.flat_map(|set| {
                // With the names, so that two policies that nodes can choose between differ.
                [(set.name.clone(), None)]
                    .into_iter()
                    .chain(about_nodes(set).map(|rule| {
                        let holds = rule.holds(&no_event, &variable);
                        (rule.expression.clone(), holds.ok())
                    }))
            })
            .collect()
        };
        let chosen = node.annotations.get(contract::keys::POLICY);
        let answer = (chosen, policies.map(of_policy));
        if !answers.contains(&answer) {
            answers.push(answer);
            kinds.push(node);
        }
    }
    kinds
}

/// Returns the answer of `policy` to one event, on `node` or on a node of unknown properties.
fn asked(policy: &Policy, standard: &Standard, node: Option<&NodeView>) -> Asked {
    let mut replay = Replay::new(policy.clone(), node.map(|node| vec![node.clone()]));
    let mut event = standard.event.clone();
    if let Some(node) = node {
        event.node_name.clone_from(&node.name);
    }
    let name = event.node_name.clone();
    replay.take(&EventRecord {
        seq: Position::START,
        id: event.id.clone(),
        created_at: jiff::Timestamp::UNIX_EPOCH,
        event,
    });
    replay.finish();
    let Desired {
        cordon,
        taints,
        rule_sets,
        events,
        ..
    } = replay.desired(&name);
    let route = events.first().and_then(|one| one.route.as_ref());
    let stages = route.map(Routed::stages);
    Asked {
        cordon,
        taints,
        rule_sets,
        stages: stages.filter(|stages| stages != ALL_STAGES),
    }
}

impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts: Vec<String> = Vec::new();
        if self.cordon {
            parts.push("cordon".to_owned());
        }
        parts.extend(self.taints.iter().map(|taint| format!("taint {taint}")));
        if parts.is_empty() {
            return f.write_str("nothing");
        }
        write!(
            f,
            "{} by '{}'",
            parts.join(", "),
            self.rule_sets.join("', '")
        )?;
        match &self.stages {
            Some(stages) => write!(f, "; {stages}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    fn preset(name: &str) -> Policy {
        Policy::parse(presets::find(name).unwrap().text, name).unwrap()
    }

    #[test]
    fn what_published_policies_disagree_on_is_found() {
        let (ours, gke) = (Policy::builtin(), preset("gke"));
        let all = differences(&ours, &gke, Catalog::builtin(), &[]);
        let find = |event: &str| all.iter().find(|one| one.event == event);
        let xid_95 = find("XID 95").unwrap();
        assert_eq!(xid_95.a.to_string(), "cordon by 'default'");
        assert_eq!(xid_95.b.to_string(), "nothing");
        // Both policies treat these events alike.
        for same in [
            "XID 48",
            "XID 79",
            "XID 13",
            "gpu-health-monitor GpuMemWatch, not fatal",
        ] {
            assert_eq!(find(same), None);
        }
        assert!(find("gpu-health-monitor GpuMemWatch, fatal").is_some());
        assert!(differences(&gke, &gke, Catalog::builtin(), &[]).is_empty());
    }

    #[test]
    fn rules_about_nodes_are_compared_on_one_node_of_each_kind() {
        let policy = |pool: &str| {
            let text = format!(
                "[[rule-sets]]\nname = \"{pool} only\"\n[rule-sets.cordon]\nshouldCordon = true\n\
                 [[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n\
                 [[rule-sets.match.all]]\nkind = \"Node\"\n\
                 expression = \"node.metadata.labels['pool'] == '{pool}'\"\n"
            );
            Policy::parse(&text, pool).unwrap()
        };
        let node = |name: &str, pool: &str| {
            let labels = serde_json::json!({"pool": pool, "kubernetes.io/hostname": name});
            let metadata = serde_json::json!({"name": name, "labels": labels});
            NodeView::from_object(serde_json::json!({"metadata": metadata})).unwrap()
        };
        let (batch, web) = (policy("batch"), policy("web"));
        assert_eq!(untried(&batch, &web), ["batch only"]);
        assert!(untried(&batch, &batch).is_empty());
        assert!(differences(&batch, &web, Catalog::builtin(), &[]).is_empty());
        let nodes = [
            node("n1", "batch"),
            node("n2", "batch"),
            node("n3", "web"),
            node("n4", "other"),
        ];
        let found = differences(&batch, &web, Catalog::builtin(), &nodes);
        let of_79: Vec<_> = found.iter().filter(|one| one.event == "XID 79").collect();
        let named: Vec<_> = of_79
            .iter()
            .map(|one| (one.node.as_deref(), one.a.cordon, one.b.cordon))
            .collect();
        assert_eq!(
            named,
            [(Some("n1"), true, false), (Some("n3"), false, true)]
        );
    }

    #[test]
    fn stages_that_differ_are_found() {
        let route = "[[routes]]\nname = \"a\"\nremediate = false\n[[routes.match.all]]\n\
                     kind = \"HealthEvent\"\nexpression = \"'79' in event.errorCode\"\n";
        let text = format!("{}{route}", policy::DEFAULT_POLICY);
        let routed = Policy::parse(&text, "p").unwrap();
        let found = differences(&Policy::builtin(), &routed, Catalog::builtin(), &[]);
        let told: Vec<String> = found
            .iter()
            .map(|one| format!("{}: {}", one.event, one.b))
            .collect();
        assert_eq!(told, ["XID 79: cordon by 'default'; drain, no repair"]);
    }

    #[test]
    fn settings_beside_the_rules_are_compared() {
        let with = |keys: &str| Policy::parse(keys, "p").unwrap();
        let brake = |max: u32| {
            let keys = format!("uncordon-labels = true\n[brake]\nbudgets = [{{max = {max}}}]\n");
            with(&keys)
        };
        let told = |a: &Policy, b: &Policy| -> Vec<(String, String, String)> {
            let found = settings(a, b).into_iter();
            found.map(|one| (one.setting, one.a, one.b)).collect()
        };
        let row = |setting: &str, a: &str, b: &str| (setting.into(), a.into(), b.into());
        assert_eq!(told(&brake(1), &brake(30)), [row("brake", "1", "30")]);
        assert!(told(&brake(1), &brake(1)).is_empty());
        let breaker = with(
            "uncordon-labels = false\nlabel-prefix = \"x/\"\n[circuitBreaker]\npercentage = 50\n",
        );
        assert_eq!(
            told(&brake(1), &breaker),
            [
                row("brake", "1", "none"),
                row("circuitBreaker", "none", "50% in 5m"),
                row("label-prefix", "\"\"", "\"x/\""),
                row("uncordon-labels", "true", "false"),
            ]
        );
    }

    #[test]
    fn the_standard_events_are_valid_and_named_once() {
        let events = standard::events(Catalog::builtin());
        let names: std::collections::BTreeSet<&str> =
            events.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names.len(), events.len());
        assert!(events.len() > 150, "{}", events.len());
        for standard in &events {
            model::event::validate(&standard.event).unwrap();
        }
    }
}
