//! Untrusted inputs of remediation, in parts separated by a line `---`: the template of a custom
//! resource, the message of an event, the status of a custom resource (JSON), and the file of
//! actions (TOML).

use contract::{Entity, HealthEvent};
use fleet::remediation::RemediationConfig;
use model::attempt::ResourceKind;
use model::resource::ResourceState;
use policy::template::{MAX_OUTPUT_BYTES, Template, Variables};
use serde_json::{Value, json};

/// Panics if remediation breaks an invariant on this input.
pub fn run(text: &str) {
    let mut parts = text.split("\n---\n");
    let template = parts.next().unwrap_or_default();
    let message = parts.next().unwrap_or_default();
    let status: Value = (parts.next()).map_or(Value::Null, |text| {
        serde_json::from_str(text).unwrap_or_default()
    });
    renders(template, message);
    let kind = ResourceKind {
        condition: "NodeReady".to_owned(),
        ..ResourceKind::default()
    };
    let object = json!({"metadata": {"uid": "u"}, "status": status});
    let state = ResourceState::read(&object, &kind);
    if let Some((_, why)) = state.end {
        assert!(why.chars().count() <= 300);
    }
    let config = parts.next().unwrap_or_default();
    let read = |_: &str| Ok(template.to_owned());
    if let Err(error) = RemediationConfig::parse(config, "remediation.toml", read) {
        for finding in &error.findings {
            assert!(finding.starts_with("remediation.toml:"), "{finding}");
        }
    }
}

/// Renders a template, which ends within its limits or returns an error with a position.
fn renders(source: &str, message: &str) {
    let event = HealthEvent {
        message: message.to_owned(),
        node_name: "n1".to_owned(),
        error_code: vec!["79".to_owned()],
        entities_impacted: vec![Entity {
            entity_type: "GPU".to_owned(),
            entity_value: "0".to_owned(),
        }],
        ..HealthEvent::default()
    };
    let variables = Variables {
        event: &event,
        id: "e1",
        entity: "",
        group: "g",
        version: "v1",
        kind: "K",
        namespace: "",
    };
    let rendered = Template::parse(source).and_then(|template| template.render(&variables));
    match rendered {
        Ok(text) => assert!(text.len() <= MAX_OUTPUT_BYTES),
        Err(error) => {
            assert!(error.line > 0 && error.column > 0, "{error}");
            assert!(error.line <= 1 + source.matches('\n').count(), "{error}");
            assert!(!error.what.is_empty());
        }
    }
}
