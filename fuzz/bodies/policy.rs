//! A policy: any text as a file or, behind a `=`, as one expression, which is evaluated if
//! valid.

use std::sync::LazyLock;

use contract::{BehaviourOverrides, Entity, HealthEvent};
use policy::{CelRule, EventVariable, NodeVariable, Policy, RuleKind, event_variable};
use serde_json::{Value, json};

const SOURCE: &str = "policy.toml";

static EVENT: LazyLock<Value> = LazyLock::new(|| {
    event_variable(&HealthEvent {
        version: 1,
        agent: "syslog-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "SysLogsXIDError".into(),
        is_fatal: true,
        message: "NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus.".into(),
        recommended_action: 24,
        error_code: vec!["79".into()],
        entities_impacted: vec![Entity {
            entity_type: "PCI".into(),
            entity_value: "0000:b3:00".into(),
        }],
        metadata: [("key".into(), "value".into())].into(),
        node_name: "node-1".into(),
        quarantine_overrides: Some(BehaviourOverrides::default()),
        ..HealthEvent::default()
    })
});

static NODE: LazyLock<Value> = LazyLock::new(|| {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": "node-1",
            "labels": {"kubernetes.io/hostname": "node-1", "nvidia.com/gpu.present": "true"},
            "annotations": {},
        },
        "spec": {"taints": [{"key": "gpu", "value": "x", "effect": "NoSchedule"}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    })
});

/// Panics if the policy breaks an invariant on this input.
pub fn run(text: &str) {
    // Most mutations of a file make it invalid before its expressions are parsed.
    match text.strip_prefix('=') {
        Some(expression) => {
            for kind in [RuleKind::HealthEvent, RuleKind::Node] {
                match CelRule::compile(kind, expression) {
                    Ok(rule) => evaluate(&rule),
                    Err(what) => assert!(!what.to_string().contains('\n'), "{what:?}"),
                }
            }
        }
        None => file(text),
    }
}

fn file(text: &str) {
    match Policy::parse(text, SOURCE) {
        Ok(policy) => {
            for rule_set in &policy.rule_sets {
                let _ = rule_set.answer(&EventVariable::new(&EVENT), &NodeVariable::new(&NODE));
                // Each expression is evaluated as well, because a policy stops at the first rule
                // that decides.
                rule_set.any.iter().chain(&rule_set.all).for_each(evaluate);
            }
        }
        Err(error) => {
            assert!(!error.findings.is_empty());
            for finding in &error.findings {
                let place = finding.strip_prefix(SOURCE);
                let place = place.and_then(|rest| rest.strip_prefix(':')?.split_once(": "));
                let line = place.and_then(|(line, _)| line.parse::<usize>().ok());
                let last = text.matches('\n').count() + 1;
                assert!(
                    line.is_some_and(|line| (1..=last).contains(&line)),
                    "{finding}"
                );
            }
        }
    }
}

fn evaluate(rule: &CelRule) {
    if let Err(why) = rule.holds(&EventVariable::new(&EVENT), &NodeVariable::new(&NODE)) {
        assert!(!why.contains('\n'), "{why:?}");
    }
}
