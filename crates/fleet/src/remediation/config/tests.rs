use super::*;

/// Output of NVSentinel's chart for its defaults and the example of a reset.
const REFERENCE: &str = r#"
[template]
mountPath = "/etc/config"
fileName = "rebootnode-template.yaml"

[remediationActions."COMPONENT_RESET"]
namespace = ""
version = "v1alpha1"
apiGroup = "janitor.dgxc.nvidia.com"
kind = "GPUReset"
completeConditionType = "Complete"
scope = "Cluster"
templateFileName = "gpu-reset.yaml"
equivalenceGroup = "reset"
impactedEntityScope = "GPU_UUID"
supersedingEquivalenceGroups = ["restart"]

[remediationActions."RESTART_BM"]
namespace = ""
version = "v1alpha1"
apiGroup = "janitor.dgxc.nvidia.com"
kind = "RebootNode"
completeConditionType = "NodeReady"
scope = "Cluster"
templateFileName = "nvidia-reboot.yaml"
equivalenceGroup = "restart"
supersedingEquivalenceGroups = []

[remediationActions."my-action"]
namespace = "repairs"
version = "v1"
apiGroup = "example.com"
kind = "Ticket"
completeConditionType = "Closed"
scope = "Namespaced"
templateFileName = "ticket.yaml"
equivalenceGroup = "ticket"
timeoutMinutes = 600

[templates]
"gpu-reset.yaml" = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata:
  name: maintenance-{{ .NodeName }}-{{ .HealthEventID }}
  labels:
    app.kubernetes.io/managed-by: nvsentinel
  annotations:
    nvsentinel.nvidia.com/trace-id: "{{ .TraceID }}"
    nvsentinel.nvidia.com/ttl: "336h"
spec:
  nodeName: {{ .NodeName }}
  selector:
    uuids:
      - {{ .ImpactedEntityScopeValue }}
"""

[updateRetry]
maxRetries = 5
retryDelaySeconds = 10
"#;

fn read(path: &str) -> Result<String, String> {
    match path {
        "/etc/config/nvidia-reboot.yaml" => Ok("apiVersion: {{ .ApiGroup }}/{{ .Version }}\n\
             kind: {{ .Kind }}\nmetadata:\n  name: maintenance-{{ .NodeName }}-{{ .HealthEventID }}\n\
             spec:\n  nodeName: {{ .HealthEvent.NodeName }}\n  force: false\n"
            .to_owned()),
        "/etc/config/ticket.yaml" => Ok("apiVersion: example.com/v1\nkind: Ticket\n\
             metadata: {name: \"t-{{ .HealthEventID }}\", namespace: repairs}\n"
            .to_owned()),
        _ => Err("No such file".to_owned()),
    }
}

#[test]
fn the_configuration_of_nvsentinel_loads_unchanged() {
    let config = RemediationConfig::parse(REFERENCE, "r.toml", read).unwrap();
    let reset = &config.actions["COMPONENT_RESET"];
    assert_eq!(reset.entity_scope.as_deref(), Some("GPU_UUID"));
    assert_eq!(reset.superseding, ["restart"]);
    let event = HealthEvent {
        node_name: "n1".into(),
        ..HealthEvent::default()
    };
    let object = reset.render(&event, "e1", "GPU-7").unwrap();
    assert_eq!(object["metadata"]["name"], "maintenance-n1-e1");
    assert_eq!(object["spec"]["selector"]["uuids"][0], "GPU-7");
    assert_eq!(
        object["metadata"]["annotations"]["nvsentinel.nvidia.com/ttl"],
        "336h"
    );
    let object = config.actions["RESTART_BM"]
        .render(&event, "e1", "")
        .unwrap();
    assert_eq!(
        (&object["kind"], &object["spec"]["force"]),
        (&"RebootNode".into(), &false.into())
    );
    let ticket = &config.actions["my-action"];
    assert_eq!(ticket.resource.namespace.as_deref(), Some("repairs"));
    assert_eq!(
        (ticket.timeout.as_mins(), reset.timeout.as_mins()),
        (600, 60)
    );
    assert_eq!((config.max_attempts, config.window.as_hours()), (5, 168));
    assert_eq!(config.escalation, ["reset", "restart"]);
}

#[test]
fn without_a_file_machines_are_rebooted_and_replaced_where_that_is_asked_for() {
    let config = RemediationConfig::builtin();
    let kinds: Vec<(&str, &str)> = (config.actions.iter())
        .map(|(name, action)| (name.as_str(), action.resource.kind.as_str()))
        .collect();
    assert_eq!(
        kinds,
        [
            ("COMPONENT_RESET", "RebootNode"),
            ("REPLACE_VM", "TerminateNode"),
            ("RESTART_BM", "RebootNode"),
            ("RESTART_VM", "RebootNode"),
        ]
    );
    let event = HealthEvent {
        node_name: "1".into(),
        ..HealthEvent::default()
    };
    for action in config.actions.values() {
        let object = action.render(&event, "6720abc123def456789", "").unwrap();
        assert_eq!(object["apiVersion"], "janitor.dgxc.nvidia.com/v1alpha1");
        assert_eq!(
            object["metadata"]["name"],
            "maintenance-1-6720abc123def456789"
        );
        // A name of digits stays a text.
        assert_eq!(object["spec"]["nodeName"], "1");
    }
}

#[test]
fn what_is_wrong_is_said_with_its_line() {
    let table = [
        (
            "kind = \"Ticket\"",
            "kind = \"\"",
            "remediationActions.my-action.kind: it is empty",
        ),
        (
            "scope = \"Namespaced\"",
            "scope = \"Any\"",
            "scope is \"Any\"; write Cluster or Namespaced, or leave it out",
        ),
        (
            "namespace = \"repairs\"",
            "namespace = \"\"",
            "scope: it is Namespaced, and there is no namespace",
        ),
        (
            "equivalenceGroup = \"ticket\"",
            "equivalenceGroup = \"\"",
            "equivalenceGroup: it is empty",
        ),
        (
            "templateFileName = \"ticket.yaml\"",
            "templateFileName = \"none.yaml\"",
            "/etc/config/none.yaml cannot be read: No such file",
        ),
        (
            "mountPath = \"/etc/config\"",
            "",
            "is not below [templates], and template.mountPath does not say",
        ),
        (
            "impactedEntityScope = \"GPU_UUID\"",
            "impactedEntityScope = \"NIC\"",
            "impactedEntityScope is \"NIC\"; only GPU_UUID can be repaired by itself",
        ),
        (
            "supersedingEquivalenceGroups = []",
            "impactedEntityScope = \"GPU_UUID\"",
            "impactedEntityScope: it applies only to COMPONENT_RESET",
        ),
        (
            "supersedingEquivalenceGroups = []",
            "supersedingEquivalenceGroups = [\"restart\"]",
            "names its own group",
        ),
        (
            "supersedingEquivalenceGroups = []",
            "supersedingEquivalenceGroups = [\"none\"]",
            "no action has the group \"none\"",
        ),
        (
            "supersedingEquivalenceGroups = []",
            "supersedingEquivalenceGroups = [\"reset\"]",
            "the group \"reset\" has an impactedEntityScope",
        ),
        (
            "timeoutMinutes = 600",
            "timeoutMinutes = 0",
            "timeoutMinutes is 0; write a whole number of minutes from 1 to 100000",
        ),
        (
            "timeoutMinutes = 600",
            "timeoutMinutes = \"ten\"",
            "remediationActions.my-action.timeoutMinutes is \"ten\"; write a whole number",
        ),
        (
            "[template]",
            "maxAttempts = 0\n[template]",
            "r.toml:2: maxAttempts is 0; write a whole number from 1 to 20",
        ),
        (
            "[template]",
            "escalation = [\"none\"]\n[template]",
            "r.toml:2: escalation[0]: no action has the equivalenceGroup \"none\"",
        ),
        (
            "[template]",
            "templte = 1\n[template]",
            "unknown key 'templte'; did you mean 'template'?",
        ),
        (
            "kind: {{ .Kind }}",
            "kind: GPUResets",
            "its kind is \"GPUResets\" and not \"GPUReset\"",
        ),
        (
            "{{ .NodeName }}-{{ .HealthEventID }}",
            "{{ .NodeName }}",
            "metadata.name is the same for all faults",
        ),
        (
            "{{ .TraceID }}",
            "{{ .TraceId }}",
            "templates.\"gpu-reset.yaml\":8:41: there is no field TraceId",
        ),
        (
            "apiVersion: {{ .ApiGroup }}",
            "apiVersion: [{{ .ApiGroup }}",
            "is not YAML",
        ),
    ];
    for (from, to, text) in table {
        assert!(REFERENCE.contains(from), "{from}");
        let changed = REFERENCE.replacen(from, to, 1);
        let error = RemediationConfig::parse(&changed, "r.toml", read)
            .unwrap_err()
            .to_string();
        assert!(error.contains(text), "{to}: {error}");
        assert!(error.starts_with("r.toml:"), "{error}");
    }
    let large = " ".repeat(contract::findings::MAX_FILE_BYTES + 1);
    let error = RemediationConfig::parse(&large, "r.toml", read).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("r.toml:1: it has 1048577 bytes")
    );
}

/// Parses the keys of a validation, with a Job that carries it out.
fn validation(keys: &str) -> Result<RemediationConfig, String> {
    let example = include_str!("../../../../../examples/remediation/remediation.toml");
    let (before, _) = example.split_once("[validation]").unwrap();
    let text = format!("{before}[validation]\n{keys}");
    let validate = include_str!("../../../../../examples/remediation/validate.yaml");
    let collect = include_str!("../../../../../examples/remediation/collect.yaml");
    let read = |path: &str| match path {
        "/etc/gpuwarden/templates/validate.yaml" => Ok(validate.to_owned()),
        "/etc/gpuwarden/templates/collect.yaml" => Ok(collect.to_owned()),
        _ => Err("No such file".to_owned()),
    };
    RemediationConfig::parse(&text, "r.toml", read).map_err(|error| error.to_string())
}

#[test]
fn the_example_of_a_validation_loads_and_makes_a_job_on_the_node() {
    let config = validation("action = \"VALIDATE\"\nquietMinutes = 5").unwrap();
    let validation = config.validation.unwrap();
    assert_eq!(validation.action.as_deref(), Some("VALIDATE"));
    assert_eq!(
        (validation.quiet.as_mins(), validation.after_remediation),
        (5, true)
    );
    assert_eq!(validation.new_nodes, None);
    let event = HealthEvent {
        node_name: "7".into(),
        ..HealthEvent::default()
    };
    let job = config.actions["VALIDATE"].render(&event, "e1", "").unwrap();
    let pod = &job["spec"]["template"]["spec"];
    assert_eq!(pod["nodeName"], "7");
    assert_eq!(pod["containers"][0]["env"], pod["initContainers"][0]["env"]);
}

#[test]
fn the_example_of_diagnostics_loads_and_makes_a_job_on_the_node() {
    let config = validation("quietMinutes = 5").unwrap();
    assert_eq!(config.diagnostics.as_deref(), Some("COLLECT"));
    let action = &config.actions["COLLECT"];
    let event = HealthEvent {
        node_name: "7".into(),
        ..HealthEvent::default()
    };
    let job = action.render(&event, "e1", "").unwrap();
    assert_eq!(job["metadata"]["name"], "collect-e1");
    let pod = &job["spec"]["template"]["spec"];
    assert_eq!(pod["nodeName"], "7");
    let container = &pod["containers"][0];
    assert_eq!(container["env"][0]["name"], "GPUWARDEN_NODE_NAME");
    assert_eq!(container["env"][0]["value"], "7");
    assert_eq!(container["volumeMounts"][0]["readOnly"], true);
    // The Job ends by itself before a remediation goes ahead without it.
    let deadline = job["spec"]["activeDeadlineSeconds"].as_i64().unwrap();
    assert!(deadline < action.timeout.as_secs(), "{deadline}");
}

#[test]
fn a_validation_that_nobody_can_mean_is_refused() {
    let many = format!(
        "action = \"VALIDATE\"\nnewNodesSince = \"2026-11-25T00:00:00Z\"\nnewNodesSelector = \"{}\"",
        "a b"
    );
    for (keys, what) in [
        (
            "",
            "validation: action or quietMinutes: one of them belongs here",
        ),
        (
            "action = \"NONE_SUCH\"",
            "there is no remediationActions.\"NONE_SUCH\"",
        ),
        ("action = \"RESTART_BM\"", "it is to have a name of its own"),
        (
            "quietMinutes = 0",
            "validation.quietMinutes is 0; write a whole number of minutes from 1 to 1440",
        ),
        (
            "quietMinutes = 1\nnewNodesSince = \"2026-11-25T00:00:00Z\"",
            "newNodesSince and newNodesSelector belong together",
        ),
        (
            "quietMinutes = 1\nnewNodesSince = \"today\"\nnewNodesSelector = \"gpu\"",
            "write it as 2026-11-25T00:00:00Z",
        ),
        (&many, "validation.newNodesSelector: "),
        ("quietMinute = 1", "quietMinute"),
        (
            "action = \"OTHER\"\n[remediationActions.OTHER]\n",
            "r.toml:51: remediationActions.OTHER: the key 'version' is missing",
        ),
    ] {
        let refused = validation(keys).unwrap_err();
        assert!(refused.contains(what), "{keys}: {refused}");
    }
}

#[test]
fn an_action_waits_for_an_approval_where_its_key_says_so() {
    let text = BUILTIN.replacen("apiGroup", "approve = true\napiGroup", 1);
    let parse = |text: &str| RemediationConfig::parse(text, "t", |_| Err(String::new()));
    let asks: Vec<bool> = parse(&text)
        .unwrap()
        .actions
        .values()
        .map(|one| one.approve)
        .collect();
    assert_eq!(asks.iter().filter(|asks| **asks).count(), 1, "{asks:?}");
    let own = text.replacen("\"restart\"", "\"validation\"", 1);
    for (wrong, why) in [
        (
            own,
            "approve: it applies only to repairs, and this action is none; leave it out",
        ),
        (
            text.replacen("approve = true", "approve = \"yes\"", 1),
            "approve is \"yes\"",
        ),
        (
            text.replacen("approve = true", "aprove = true", 1),
            "approve",
        ),
    ] {
        let said = parse(&wrong).unwrap_err().to_string();
        assert!(said.contains(why) && said.starts_with("t:"), "{said}");
    }
}
