//! A policy file: any text, and its rules evaluated where it is one.

#![no_main]

use std::sync::LazyLock;

use contract::{BehaviourOverrides, Entity, HealthEvent};
use domain::policy::{NodeVariable, Policy, event_variable};
use libfuzzer_sys::fuzz_target;
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

fuzz_target!(|text: &str| {
    match Policy::parse(text, SOURCE) {
        Ok(policy) => {
            let node = NodeVariable::new(&NODE);
            for rule_set in &policy.rule_sets {
                let _ = rule_set.answer(&EVENT, &node);
                // Evaluated alone as well: an answer stops at the first rule that decides.
                for rule in rule_set.any.iter().chain(&rule_set.all) {
                    let _ = rule.holds(&EVENT, &node);
                }
            }
        }
        Err(error) => {
            assert!(!error.findings.is_empty());
            for finding in &error.findings {
                let rest = finding
                    .strip_prefix(SOURCE)
                    .and_then(|r| r.strip_prefix(':'));
                let line = rest.and_then(|rest| rest.split_once(": "));
                let line = line.and_then(|(line, _)| line.parse::<usize>().ok());
                let last = text.matches('\n').count() + 1;
                assert!(
                    line.is_some_and(|line| (1..=last).contains(&line)),
                    "{finding}"
                );
            }
        }
    }
});
