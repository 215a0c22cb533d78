//! Tests of the answers to changes of rules that taint devices.

use cluster::ApiError;
use fleet::PlannedRule;
use model::device::{DeviceId, DeviceTaint, RuleChange, RuleSpec, TaintEffect};
use model::ownership::Maker;

use super::*;
use crate::quarantine::requests::device_rule;

fn change() -> RuleChange {
    RuleChange::Create(RuleSpec {
        device: DeviceId {
            driver: "gpu.nvidia.com".to_owned(),
            pool: "n1".to_owned(),
            name: "gpu-0".to_owned(),
        },
        taint: DeviceTaint {
            key: "gpu.nvidia.com/xid".to_owned(),
            value: "48".to_owned(),
            effect: TaintEffect::NoSchedule,
        },
        node: "n1".to_owned(),
        gpu: "GPU-0".to_owned(),
        by: Maker::Controller,
        store: None,
    })
}

#[tokio::test]
async fn changes_of_rules_are_counted_by_what_came_of_them() {
    let bench = Bench::new().await;
    let conflict = || ApiError::Conflict { status: 409 };
    let gone = || ApiError::NotFound {
        message: String::new(),
    };
    let refused = || ApiError::Forbidden {
        status: 403,
        message: String::new(),
    };
    let written = || Ok(change().after());
    for result in [
        written(),
        written(),
        Ok(None),
        Err(conflict()),
        Err(gone()),
        Err(refused()),
        Err(ApiError::Throttled { retry_after: None }),
        Err(refused()),
    ] {
        let planned = PlannedRule {
            node: "n1".to_owned(),
            session: None,
            change: change(),
        };
        let client = bench.quarantine.client.as_ref().unwrap();
        device_rule::answered(client, planned, result);
    }
    let text = bench.metrics.encode();
    for (result, count) in [
        ("written", 2),
        ("deleted", 1),
        ("conflict", 2),
        ("failed", 3),
    ] {
        let line =
            format!("gpuwarden_device_taint_rule_changes_total{{result=\"{result}\"}} {count}\n");
        assert!(text.contains(&line), "{line}{text}");
    }
}
