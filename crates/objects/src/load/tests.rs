//! Tests of the reader: the reference's files load unchanged, and mistakes are named by line.

use super::*;

/// The forms of NVSentinel's documents and chart.
const REFERENCE: &str = r#"
[controller]
  maxConcurrentReconciles = 100

[[policies]]
name = "node-not-ready"
enabled = true

[policies.resource]
group = ""
version = "v1"
kind = "Node"

[policies.predicate]
expression = '''
resource.status.conditions.filter(c, c.type == "Ready" && c.status == "False").size() > 0
'''

[policies.healthEvent]
componentClass = "Node"
isFatal = true
message = "Node is not ready"
recommendedAction = "CONTACT_SUPPORT"
errorCode = ["NODE_NOT_READY"]

[[policies]]
name = "NVMLError"
enabled = true
[policies.resource]
group = "events.k8s.io"
version = "v1"
kind = "Event"
[policies.predicate]
expression = '''
resource.type == 'Warning' && resource.note.contains('nvml error') &&
(now - timestamp(resource.eventTime)) < duration('10m')
'''
[policies.nodeAssociation]
expression = "lookup('v1', 'Pod', resource.regarding.namespace, resource.regarding.name).spec.nodeName"
[policies.healthEvent]
componentClass = "GPU"
isFatal = true
message = "GPU container runtime failures detected"
recommendedAction = "REBOOT_NODE"
processingStrategy = "STORE_ONLY"
quarantineOverrides = { force = true }

[[policies]]
name = "off"
enabled = false
[policies.resource]
version = "v1"
kind = "Node"
[policies.predicate]
expression = "status.conditions.size() > 0"
[policies.healthEvent]
message = "a policy that is off is not compiled"
"#;

#[test]
fn a_file_of_the_reference_loads_unchanged() {
    let loaded = parse(REFERENCE, "policies.toml").unwrap();
    let [node, event] = loaded.policies.as_slice() else {
        panic!("{loaded:?}");
    };
    assert_eq!(node.watched.to_string(), "v1/Node");
    assert_eq!(node.event.action, RecommendedAction::ContactSupport);
    assert_eq!(event.watched.to_string(), "events.k8s.io/v1/Event");
    assert_eq!(event.event.strategy, ProcessingStrategy::StoreOnly);
    assert!(event.event.quarantine.as_ref().is_some_and(|one| one.force));
    // An action that does not exist is CONTACT_SUPPORT there, and said here.
    assert_eq!(event.event.action, RecommendedAction::ContactSupport);
    let [note] = loaded.notes.as_slice() else {
        panic!("{:?}", loaded.notes);
    };
    assert!(note.starts_with("policies.toml:44: "), "{note}");
    assert!(note.contains("no action 'REBOOT_NODE'"), "{note}");
}

#[test]
fn each_mistake_is_named_by_line() {
    let valid = "[[policies]]\nname = \"a\"\nenabled = true\n[policies.resource]\nversion = \"v1\"\n\
                 kind = \"Node\"\n[policies.predicate]\nexpression = \"resource.spec.x == 1\"\n\
                 [policies.healthEvent]\ncomponentClass = \"Node\"\nrecommendedAction = \"NONE\"\n";
    assert!(parse(valid, "p").is_ok());
    for (from, to, line, part) in [
        (
            "kind = \"Node\"",
            "kind = \"Node\"\nnamespace = \"a\"",
            7,
            "have no namespace",
        ),
        ("kind = \"Node\"", "kind = \"No/de\"", 6, "is no kind"),
        ("version = \"v1\"", "vresion = \"v1\"", 5, "vresion"),
        ("name = \"a\"", "name = \"a/b\"", 2, "without '/'"),
        (
            "resource.spec.x == 1",
            "resuorce.spec.x == 1",
            8,
            "unknown variable 'resuorce'",
        ),
        (
            "resource.spec.x == 1",
            "resource.sepc.x == 1",
            8,
            "no field 'sepc'",
        ),
        (
            "resource.spec.x == 1",
            "nothing(resource.spec.x)",
            8,
            "no function 'nothing'",
        ),
        (
            "resource.spec.x == 1",
            "'text'",
            8,
            "does not give true or false",
        ),
        ("enabled = true", "enabled = true\nfor = \"-1m\"", 4, "for"),
        (
            "enabled = true",
            "enabled = true\nclearFor = \"soon\"",
            4,
            "clearFor",
        ),
        (
            "recommendedAction = \"NONE\"",
            "quarantineOverrides = { force = true, skip = true }",
            11,
            "force and skip exclude each other",
        ),
        (
            "recommendedAction = \"NONE\"",
            "processingStrategy = \"STORE\"",
            11,
            "processingStrategy",
        ),
        (
            "componentClass = \"Node\"\n",
            "",
            9,
            "componentClass: is empty",
        ),
        (
            "recommendedAction = \"NONE\"",
            "recommendedAction = \"CUSTOM\"",
            9,
            "customRecommendedAction: is empty",
        ),
    ] {
        let text = valid.replace(from, to);
        assert_ne!(text, valid);
        let error = parse(&text, "p").unwrap_err().to_string();
        let place = format!("p:{line}: ");
        assert!(
            error.contains(part) && error.contains(&place),
            "{to}: {error}"
        );
    }
    let twice = parse(&format!("{valid}{valid}"), "p").unwrap_err();
    assert!(twice.to_string().contains("another policy has this name"));
    assert!(parse("", "p").is_err());
}

#[test]
fn what_is_often_meant_otherwise_is_noted() {
    let text = |kind: &str, expression: &str| {
        format!(
            "[[policies]]\nname = \"a\"\nenabled = true\n[policies.resource]\nversion = \"v1\"\n\
             kind = \"{kind}\"\n[policies.predicate]\nexpression = '''{expression}'''\n\
             [policies.healthEvent]\ncomponentClass = \"Node\"\nrecommendedAction = \"NONE\"\n"
        )
    };
    for (kind, expression, part) in [
        ("Pod", "resource.spec.x == 1", "the name of the object"),
        ("Node", "dyn(resource).kind == 'Node'", "as a whole"),
        (
            "Node",
            "resource.status.conditions.exists(c, c.type == 'Ready' && c.status != 'True')",
            "name 'Unknown'",
        ),
    ] {
        let notes = parse(&text(kind, expression), "p").unwrap().notes;
        assert!(notes.len() == 1 && notes[0].contains(part), "{notes:?}");
    }
}
