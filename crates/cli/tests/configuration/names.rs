//! Names that Kubernetes refuses are errors of the configuration that has them, in each place that takes one.

#![allow(clippy::unwrap_used)]

use connector::transform::load;
use fleet::drain::DrainConfig;
use fleet::remediation::RemediationConfig;
use maintenance::janitor::JanitorConfig;
use maintenance::validation_request::ValidationConfiguration;
use policy::Policy;

/// Reads a configuration; the text that stands for it has `@` in the place of a name.
type Read = fn(&str) -> Result<(), String>;

fn policy(text: &str) -> Result<(), String> {
    Policy::parse(text, "f")
        .map(drop)
        .map_err(|error| error.to_string())
}

fn drain(text: &str) -> Result<(), String> {
    let read = |_: &str| {
        let text = "apiVersion: g.example/v1\nkind: K\nmetadata: {name: 'd-{{ .HealthEvent.NodeName }}'}\n";
        Ok(text.to_owned())
    };
    DrainConfig::parse_with(text, "f", read)
        .map(drop)
        .map_err(|error| error.to_string())
}

fn remediation(text: &str) -> Result<(), String> {
    let read = |_: &str| Err("there are no files".to_owned());
    RemediationConfig::parse(text, "f", read)
        .map(drop)
        .map_err(|error| error.to_string())
}

fn janitor(text: &str) -> Result<(), String> {
    JanitorConfig::parse(text, "f")
        .map(drop)
        .map_err(|error| error.to_string())
}

fn validation(text: &str) -> Result<(), String> {
    let read = |_: &str| Err(std::io::Error::from(std::io::ErrorKind::NotFound));
    ValidationConfiguration::parse(text, "f", read)
        .map(drop)
        .map_err(|error| error.to_string())
}

fn metadata(text: &str) -> Result<(), String> {
    load::metadata(text, "f")
        .map(drop)
        .map_err(|error| error.to_string())
}

const RULE: &str =
    "[[rule-sets.match.all]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n";
const ACTION: &str = "[remediationActions.MINE]\nversion = \"v1\"\nkind = \"K\"\ncompleteConditionType = \"Done\"\n\
    equivalenceGroup = \"mine\"\ntemplateFileName = \"t\"\n[templates]\nt = \"\"\"\napiVersion: g.example/v1\n\
    kind: K\nmetadata: {name: 'm-{{ .HealthEventID }}'}\n\"\"\"\n";
const CUSTOM: &str = "[customDrain]\nenabled = true\ntemplateMountPath = \"/t\"\ntemplateFileName = \"t\"\n\
    version = \"v1\"\nkind = \"K\"\nstatusConditionType = \"Done\"\nstatusConditionStatus = \"True\"\n";

/// The places: how a configuration is read, its text, a name that is right there, and some that are not, with the
/// place that the error names and what it says.
fn places() -> Vec<(Read, String, &'static str, Vec<&'static str>, &'static str)> {
    const KEYS: [&str; 4] = ["not a key!", "Example.com/x", "a/b/c", "-a"];
    const VALUES: [&str; 3] = ["not ready!", "a/b", "-a"];
    const NAMESPACES: [&str; 3] = ["Training", "a_b", "a b"];
    let of = |names: &[&'static str]| names.to_vec();
    let taint = |part: &str| {
        let value = |key: &str, right: &str| {
            format!("{key} = \"{}\"\n", if key == part { "@" } else { right })
        };
        format!(
            "[[rule-sets]]\nname = \"r\"\n{RULE}[rule-sets.taint]\n{}{}{}",
            value("key", "example.com/gpu"),
            value("value", "broken"),
            value("effect", "NoSchedule"),
        )
    };
    let named = |part: &str| {
        let rules = taint(part)
            .replace("[rule-sets", "[policies.rule-sets")
            .replace("[[rule-sets", "[[policies.rule-sets");
        format!("[[policies]]\nname = \"p\"\n{rules}")
    };
    let action = |keys: &str| ACTION.replacen("version", &format!("{keys}\nversion"), 1);
    let custom = |keys: &str| format!("{CUSTOM}{keys}\n");
    let gate = |keys: &str| format!("defaultTests: []\nschedulingGate:\n  {keys}\n");
    vec![
        (policy, "# a\nlabel-prefix = \"@\"\n".into(), "example.com/", vec!["bad prefix!/", "/"], "f:2: label-prefix: "),
        (policy, taint("key"), "example.com/gpu", of(&KEYS), "f:7: rule set 'r': taint.key: "),
        (policy, taint("value"), "not-ready", of(&VALUES), "f:8: rule set 'r': taint.value: "),
        (policy, taint("effect"), "NoExecute", vec!["Evict"], "f:9: rule set 'r': taint.effect: "),
        (policy, named("key"), "gpu", of(&KEYS), "f:9: rule set 'r': taint.key: "),
        (
            policy,
            "[[brake.budgets]]\nmax = 1\nper = \"@\"\n".into(),
            "topology.kubernetes.io/zone",
            of(&KEYS),
            "f:3: brake.budgets[0].per: it names the label of a node: ",
        ),
        (
            drain,
            "[[userNamespaces]]\nname = \"@\"\nmode = \"Immediate\"\n".into(),
            "team-*",
            of(&NAMESPACES),
            "f:2: userNamespaces[0].name: ",
        ),
        (
            drain,
            "[[podDrainPolicies]]\nname = \"p\"\nnamespace = \"@\"\npodSelector = \"a\"\nmode = \"Immediate\"\n".into(),
            "team-?",
            of(&NAMESPACES),
            "f:3: podDrainPolicies[0].namespace: ",
        ),
        (
            drain,
            "[[podDrainPolicies]]\nname = \"p\"\npodSelector = \"@\"\nmode = \"Immediate\"\n".into(),
            "example.com/a in (b)",
            vec!["not a key!", "a=not ready!", "a in (b, -)"],
            "f:3: podDrainPolicies[0].podSelector: ",
        ),
        (
            drain,
            custom("namespace = \"@\"\napiGroup = \"g.example\""),
            "drains",
            of(&NAMESPACES),
            "f:9: customDrain.namespace: ",
        ),
        (
            drain,
            custom("namespace = \"d\"\napiGroup = \"@\""),
            "g.example",
            vec!["G.example", "g_e"],
            "f:10: customDrain.apiGroup: ",
        ),
        (
            drain,
            custom("namespace = \"d\"\napiGroup = \"g.example\"\nnodeSelector = { a = \"@\" }"),
            "b",
            vec!["b,c", "not ready!"],
            "f:11: customDrain.nodeSelector: ",
        ),
        (
            remediation,
            action("apiGroup = \"g.example\"\nscope = \"Namespaced\"\nnamespace = \"@\""),
            "repairs",
            of(&NAMESPACES),
            "f:4: remediationActions.MINE.namespace: ",
        ),
        (
            remediation,
            action("apiGroup = \"@\""),
            "g.example",
            vec!["G.example", "g..e"],
            "f:2: remediationActions.MINE.apiGroup: ",
        ),
        (
            remediation,
            format!(
                "{}[validation]\nquietMinutes = 5\nnewNodesSince = \"2026-01-01T00:00:00Z\"\nnewNodesSelector = \"@\"\n",
                action("apiGroup = \"g.example\"")
            ),
            "nvidia.com/gpu.present=true",
            vec!["not a key!", "a=b c"],
            "f:17: validation.newNodesSelector: ",
        ),
        (
            janitor,
            "global:\n  nodes:\n    exclusions:\n      - matchLabels: {a: '@'}\n".into(),
            "b",
            vec!["b,c", "not ready!"],
            "f:4: global.nodes.exclusions[0]: ",
        ),
        (
            janitor,
            "global:\n  nodes:\n    exclusions:\n      - matchExpressions: [{key: '@', operator: Exists}]\n".into(),
            "example.com/b",
            of(&KEYS),
            "f:4: global.nodes.exclusions[0]: ",
        ),
        (janitor, "generic:\n  namespace: '@'\n".into(), "jobs", of(&NAMESPACES), "f:2: generic.namespace: "),
        (
            janitor,
            "generic:\n  imagePullSecrets: ['@']\n".into(),
            "registry.example",
            vec!["Registry", "a b"],
            "f:2: generic.imagePullSecrets[0]: ",
        ),
        (
            validation,
            gate("cordon: {remove: true, labelPrefix: '@'}"),
            "example.com/",
            vec!["bad prefix!/"],
            "f:3: schedulingGate.cordon.labelPrefix: ",
        ),
        (
            validation,
            gate("taints: [{key: '@', effect: NoSchedule, remove: true}]"),
            "example.com/new",
            of(&KEYS),
            "f:3: schedulingGate.taints[0].key: ",
        ),
        (
            validation,
            gate("taints: [{key: a, value: '@', effect: NoSchedule}]"),
            "x",
            of(&VALUES),
            "f:3: schedulingGate.taints[0].value: ",
        ),
        (
            validation,
            gate("taints: [{key: a, effect: '@', remove: true}]"),
            "NoExecute",
            vec!["Evict", ""],
            "f:3: schedulingGate.taints[0].effect: ",
        ),
        (
            metadata,
            "allowedLabels = [\"@\"]\n".into(),
            "topology.kubernetes.io/zone",
            of(&KEYS),
            "f:1: allowedLabels[0]: ",
        ),
    ]
}

#[test]
fn a_name_that_kubernetes_refuses_is_an_error_wherever_it_stands() {
    for (read, text, right, wrong, place) in places() {
        assert_eq!(read(&text.replace('@', right)), Ok(()), "{text}");
        for name in wrong {
            let error = read(&text.replace('@', name)).unwrap_err();
            let said = error.contains(place) && error.contains(&format!("{name:?}"));
            // A selector names the part that is wrong.
            let said = said || place.contains("elector") && error.contains(place);
            assert!(said, "{text}\n{name}: {error}");
        }
    }
}
