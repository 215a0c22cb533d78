use std::collections::BTreeMap;

use super::*;
use crate::{BehaviourOverrides, Entity};

fn full() -> HealthEvent {
    HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        is_fatal: true,
        is_healthy: false,
        message: "two \"quotes\" and ; a semicolon".into(),
        recommended_action: 25,
        error_code: vec!["48".into()],
        entities_impacted: vec![Entity {
            entity_type: "GPU".into(),
            entity_value: "0".into(),
        }],
        metadata: BTreeMap::from([("rack".into(), "r7".into())]),
        generated_timestamp: Some(prost_types::Timestamp {
            seconds: 1_761_646_530,
            nanos: 123_000_000,
        }),
        node_name: "gpu-node-42".into(),
        quarantine_overrides: Some(BehaviourOverrides {
            force: false,
            skip: true,
        }),
        drain_overrides: None,
        processing_strategy: 1,
        id: "6720abc123def45678900000".into(),
        custom_recommended_action: String::new(),
    }
}

/// Other programs read these texts: files of events, annotations on nodes, rules.
#[test]
fn the_forms_are_these_to_the_byte() {
    let event = HealthEvent {
        error_code: vec!["48".into(), String::new()],
        entities_impacted: vec![Entity {
            entity_type: "GPU".into(),
            entity_value: String::new(),
        }],
        metadata: BTreeMap::from([("b".into(), "2".into()), ("a".into(), String::new())]),
        drain_overrides: Some(BehaviourOverrides::default()),
        processing_strategy: 9,
        ..full()
    };
    assert_eq!(
        to_string(&event),
        r#"{"version":1,"agent":"gpu-health-monitor","componentClass":"GPU","checkName":"GpuMemWatch","isFatal":true,"isHealthy":false,"message":"two \"quotes\" and ; a semicolon","recommendedAction":"REPLACE_VM","errorCode":["48",""],"entitiesImpacted":[{"entityType":"GPU","entityValue":""}],"metadata":{"a":"","b":"2"},"generatedTimestamp":"2025-10-28T10:15:30.123Z","nodeName":"gpu-node-42","quarantineOverrides":{"force":false,"skip":true},"drainOverrides":{"force":false,"skip":false},"processingStrategy":9,"id":"6720abc123def45678900000","customRecommendedAction":""}"#
    );
    assert_eq!(
        annotation::to_value(&event).to_string(),
        r#"{"agent":"gpu-health-monitor","checkName":"GpuMemWatch","componentClass":"GPU","drainOverrides":{},"entitiesImpacted":[{"entityType":"GPU"}],"errorCode":["48",""],"generatedTimestamp":{"nanos":123000000,"seconds":1761646530},"id":"6720abc123def45678900000","isFatal":true,"message":"two \"quotes\" and ; a semicolon","metadata":{"a":"","b":"2"},"nodeName":"gpu-node-42","processingStrategy":9,"quarantineOverrides":{"skip":true},"recommendedAction":25,"version":1}"#
    );
    assert_eq!(
        rule::to_value(&event).to_string(),
        r#"{"agent":"gpu-health-monitor","checkName":"GpuMemWatch","componentClass":"GPU","customRecommendedAction":"","drainOverrides":{"force":false,"skip":false},"entitiesImpacted":[{"entityType":"GPU","entityValue":""}],"errorCode":["48",""],"generatedTimestamp":{"nanos":123000000.0,"seconds":1761646530.0},"id":"6720abc123def45678900000","isFatal":true,"isHealthy":false,"message":"two \"quotes\" and ; a semicolon","metadata":{"a":"","b":"2"},"nodeName":"gpu-node-42","processingStrategy":9.0,"quarantineOverrides":{"force":false,"skip":true},"recommendedAction":25.0,"version":1.0}"#
    );
}

#[test]
fn public_form_names_enumerations_and_writes_rfc_3339() {
    let value = to_value(&full());
    assert_eq!(value["recommendedAction"], "REPLACE_VM");
    assert_eq!(value["processingStrategy"], "EXECUTE_REMEDIATION");
    assert_eq!(value["generatedTimestamp"], "2025-10-28T10:15:30.123Z");
    assert_eq!(
        value["quarantineOverrides"],
        serde_json::json!({"force": false, "skip": true})
    );
    assert_eq!(value["drainOverrides"], Value::Null);
    assert_eq!(value["entitiesImpacted"][0]["entityType"], "GPU");
}

#[test]
fn public_form_survives_a_round_trip_with_unknown_numbers() {
    let mut event = full();
    for (action, strategy) in [(25, 1), (77, 9), (-1, -1), (0, 0)] {
        event.recommended_action = action;
        event.processing_strategy = strategy;
        assert_eq!(from_value(to_value(&event)).unwrap(), event);
        assert_eq!(from_str(&to_string(&event)).unwrap(), event);
    }
}

#[test]
fn public_form_reads_a_sparse_event_and_the_documents_example() {
    let event = from_str(
        r#"{"version": 1, "agent": "gpu-health-monitor", "checkName": "XID_ERROR_48", "isFatal": true,
            "recommendedAction": "REPLACE_VM", "errorCode": ["XID-48"], "metadata": null,
            "generatedTimestamp": "2025-10-28T10:15:30Z", "quarantineOverrides": null}"#,
    )
    .unwrap();
    assert_eq!(event.recommended_action, 25);
    assert_eq!(event.error_code, ["XID-48"]);
    assert_eq!(event.generated_timestamp.unwrap().seconds, 1_761_646_530);
    assert_eq!(event.quarantine_overrides, None);
    assert_eq!(from_str("{}").unwrap(), HealthEvent::default());
}

#[test]
fn public_form_says_which_field_is_wrong() {
    let error = from_str(r#"{"recommendedAction": "REBOOT"}"#)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("recommendedAction") && error.contains("REBOOT"),
        "{error}"
    );
    let error = from_str(r#"{"generatedTimestamp": "yesterday"}"#)
        .unwrap_err()
        .to_string();
    assert!(error.contains("generatedTimestamp"), "{error}");
    assert!(from_str("[]").is_err());
}

#[test]
fn annotation_form_drops_zero_values_and_keeps_numbers() {
    let value = annotation::to_value(&full());
    assert_eq!(value["recommendedAction"], 25);
    assert_eq!(
        value["generatedTimestamp"],
        serde_json::json!({"seconds": 1_761_646_530, "nanos": 123_000_000})
    );
    assert_eq!(
        value["quarantineOverrides"],
        serde_json::json!({"skip": true})
    );
    for absent in ["isHealthy", "drainOverrides", "customRecommendedAction"] {
        assert!(value.get(absent).is_none(), "{absent}");
    }
    assert_eq!(
        annotation::to_value(&HealthEvent::default()),
        serde_json::json!({})
    );
}

#[test]
fn annotation_form_is_read_as_array_object_or_nothing() {
    let event = full();
    let one = annotation::to_value(&event);
    assert_eq!(
        annotation::parse(&one.to_string()).unwrap(),
        std::slice::from_ref(&event)
    );
    let array = Value::Array(vec![one.clone(), one]);
    assert_eq!(annotation::parse(&array.to_string()).unwrap().len(), 2);
    assert!(annotation::parse(" ").unwrap().is_empty());
    assert!(annotation::parse("[]").unwrap().is_empty());
    assert!(annotation::parse("nonsense").is_err());
}

#[test]
fn rule_form_has_every_field_numbers_as_doubles_and_nulls() {
    let value = rule::to_value(&HealthEvent::default());
    assert_eq!(value.as_object().unwrap().len(), 18);
    for null in [
        "errorCode",
        "entitiesImpacted",
        "metadata",
        "generatedTimestamp",
        "drainOverrides",
    ] {
        assert_eq!(value[null], Value::Null, "{null}");
    }
    assert!(value["recommendedAction"].is_f64());
    assert!(rule::to_value(&full())["generatedTimestamp"]["seconds"].is_f64());
}

#[test]
fn timestamps_outside_the_calendar_are_refused_not_wrapped() {
    assert!(
        timestamp(prost_types::Timestamp {
            seconds: i64::MAX,
            nanos: 0
        })
        .is_none()
    );
    assert!(
        timestamp(prost_types::Timestamp {
            seconds: 0,
            nanos: -1
        })
        .is_none()
    );
    assert!(
        timestamp(prost_types::Timestamp {
            seconds: 0,
            nanos: 1_000_000_000
        })
        .is_none()
    );
    let before_1970 = prost_types::Timestamp {
        seconds: -2,
        nanos: 500_000_000,
    };
    assert_eq!(
        proto_timestamp(timestamp(before_1970).unwrap()),
        before_1970
    );
}
