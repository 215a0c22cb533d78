use std::collections::BTreeMap;

use super::*;
use crate::drain::DrainConfig;

const TABLE: &str = r#"
    [customDrain]
    enabled = true
    templateMountPath = "/etc/drain-template/"
    templateFileName = "drain.yaml"
    templateConfigMapName = "drain-template"
    namespace = "slinky"
    apiGroup = "nvsentinel.nvidia.com"
    version = "v1alpha1"
    kind = "DrainRequest"
    resource = "drainrequests"
    statusConditionType = "DrainComplete"
    statusConditionStatus = "True"
    timeout = "30m"
"#;
const TEMPLATE: &str = "\
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata:
  name: whatever
  namespace: {{ .Namespace }}
spec:
  nodeName: {{ .HealthEvent.NodeName }}
  checkName: {{ .HealthEvent.CheckName | printf \"%q\" }}
  healthEventID: {{ .EventID }}
  entitiesImpacted:
  {{- range .HealthEvent.EntitiesImpacted }}
  - {type: {{ .EntityType }}, value: {{ .EntityValue }}}
  {{- end }}
  podsToDrain:
  {{- range $namespace, $pods := .PodsToDrain }}
    {{ $namespace }}:
    {{- range $pods }}
    - {{ . }}
    {{- end }}
  {{- end }}
";

fn parse(text: &str, template: &str) -> Result<DrainConfig, String> {
    let read = |path: &str| {
        assert_eq!(path, "/etc/drain-template/drain.yaml");
        Ok(template.to_owned())
    };
    DrainConfig::parse_with(text, "d", read).map_err(|error| error.to_string())
}

fn custom() -> Arc<CustomDrain> {
    parse(TABLE, TEMPLATE).unwrap().custom.unwrap()
}

#[test]
fn the_reference_configuration_of_a_custom_drain_loads_and_its_timeout_counts() {
    assert_eq!(custom().timeout, SignedDuration::from_mins(30));
    for (text, seconds) in [
        ("\"1800\"", 1800),
        ("90", 90),
        ("\"1h30m\"", 5400),
        ("\"0\"", 3600),
    ] {
        let table = TABLE.replace("\"30m\"", text);
        let config = parse(&table, TEMPLATE).unwrap();
        let timeout = config.custom.unwrap().timeout;
        assert_eq!(timeout, SignedDuration::from_secs(seconds), "{text}");
    }
    // As the chart writes it without namespaces.
    let config = parse(&format!("userNamespaces = []\n{TABLE}"), TEMPLATE).unwrap();
    assert!(config.mode_of(&crate::drain::PodView::default()).is_some());
    // Switched off, its keys do not matter.
    let off = TABLE.replace("enabled = true", "enabled = false");
    assert!(
        parse(&off.replace("\"30m\"", "\"soon\""), "")
            .unwrap()
            .custom
            .is_none()
    );
}

#[test]
fn a_custom_resource_names_the_node_the_event_and_the_pods() {
    let event = HealthEvent {
        node_name: "n1".to_owned(),
        check_name: "SysLogsXIDError".to_owned(),
        entities_impacted: vec![Entity {
            entity_type: "GPU".to_owned(),
            entity_value: "3".to_owned(),
        }],
        ..HealthEvent::default()
    };
    let pods = ["a", "b"].map(str::to_owned).to_vec();
    let pods = PodsToDrain::from([("jobs".to_owned(), pods)]);
    let object = custom().render("n1", &event, "e1", &pods).unwrap();
    let metadata = json!({
        "name": "drain-n1-e1",
        "namespace": "slinky",
        "labels": {"nvsentinel.nvidia.com/node-name": "n1"},
    });
    assert_eq!(object["metadata"], metadata);
    let spec = json!({
        "nodeName": "n1",
        "checkName": "SysLogsXIDError",
        "healthEventID": "e1",
        "entitiesImpacted": [{"type": "GPU", "value": 3}],
        "podsToDrain": {"jobs": ["a", "b"]},
    });
    assert_eq!(object["spec"], spec);
}

#[test]
fn its_condition_says_when_it_is_done() {
    let custom = custom();
    let with = |kind: &str, status: &str| {
        json!({"status": {"conditions": [{"type": "Other", "status": "True"},
            {"type": kind, "status": status}]}})
    };
    assert!(custom.is_done(&with("DrainComplete", "True")));
    assert!(custom.is_done(&with("DrainComplete", "true")));
    assert!(!custom.is_done(&with("DrainComplete", "False")));
    assert!(!custom.is_done(&with("DrainStarted", "True")));
    assert!(!custom.is_done(&json!({})));
}

#[test]
fn a_node_selector_says_which_nodes_are_drained_so() {
    let pool = |value: &str| BTreeMap::from([("pool".to_owned(), value.to_owned())]);
    for selector in ["\"pool in (slurm)\"", "{ pool = \"slurm\" }"] {
        let table = format!(
            "{TABLE}\nnodeSelector = {selector}\n[[userNamespaces]]\nname = \"*\"\nmode = \"Immediate\"\n"
        );
        let custom = parse(&table, TEMPLATE).unwrap().custom.unwrap();
        assert!(custom.applies_to(&pool("slurm")), "{selector}");
        assert!(!custom.applies_to(&pool("web")) && !custom.applies_to(&BTreeMap::new()));
    }
    assert!(custom().applies_to(&BTreeMap::new()));
}

#[test]
fn what_is_wrong_with_it_is_said_at_the_start() {
    let table = |from: &str, to: &str| {
        assert!(TABLE.contains(from));
        TABLE.replace(from, to)
    };
    let modes = format!("{TABLE}\n[[userNamespaces]]\nname = \"*\"\nmode = \"Immediate\"\n");
    for (text, template, why) in [
        (
            table("\"slinky\"", "\"\""),
            TEMPLATE,
            "customDrain.namespace: it is empty",
        ),
        (
            table("\"30m\"", "\"soon\""),
            TEMPLATE,
            "customDrain.timeout is \"soon\"; write seconds, or a duration",
        ),
        (
            table("\"30m\"", "\"-5\""),
            TEMPLATE,
            "customDrain.timeout is \"-5\"; write seconds, or a duration",
        ),
        (table("timeout", "timeOut"), TEMPLATE, "timeOut"),
        (
            modes,
            TEMPLATE,
            "beside userNamespaces or podDrainPolicies it needs a nodeSelector",
        ),
        (
            format!("{TABLE}\nnodeSelector = \"pool in\"\n"),
            TEMPLATE,
            "customDrain.nodeSelector:",
        ),
        (
            TABLE.to_owned(),
            "kind: {{ .NodeName }}",
            "/etc/drain-template/drain.yaml:1:",
        ),
        (TABLE.to_owned(), "kind: Other", "its apiVersion is \"\""),
        (TABLE.to_owned(), "- a", "it is not an object"),
    ] {
        let said = parse(&text, template).unwrap_err();
        assert!(said.contains(why), "{why}: {said}");
    }
    let none = DrainConfig::parse(TABLE, "d").unwrap_err().to_string();
    assert!(none.contains("cannot be read"), "{none}");
}
