//! The tables of permissions in SECURITY.md are those that `doctor` checks, and that the webhook's
//! example grants.

use serde::Deserialize as _;
use serde_json::Value;

use super::*;

const PAGE: &str = include_str!("../../../../../../../SECURITY.md");
const WEBHOOK: &str = include_str!("../../../../../../../examples/kubernetes/preflight.yaml");
const VALIDATION: &str = include_str!("../../../../../../../examples/validation/validation.yaml");

/// Returns the rows of the table whose first column has this heading, without the last column.
fn table(heading: &str) -> Vec<String> {
    let rows = (PAGE.lines()).skip_while(|line| !line.starts_with(&format!("| {heading} |")));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    let rows = rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, cells @ .., what_for, _] = cells.as_slice() else {
            panic!("{row}");
        };
        assert!(!what_for.is_empty(), "{row}");
        cells.join(" | ")
    });
    rows.collect()
}

fn quoted(words: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let words = words.into_iter().map(|word| format!("`{}`", word.as_ref()));
    words.collect::<Vec<_>>().join(", ")
}

/// Returns the rows of needs that `beyond` lacks.
fn rows(with: &str, needs: &[Need], beyond: &[Need]) -> Vec<String> {
    let row = |need: &Need| {
        let place = match need.namespace.as_deref() {
            None => "the cluster",
            Some("gw") => "its namespace",
            Some("policies") => "the policy's namespace",
            Some(other) => other,
        };
        let resource = quoted([need.full_name()]);
        let named = named(&need.objects);
        let verbs = quoted(&need.verbs);
        let may_lack = if need.may_lack { " (may lack)" } else { "" };
        format!("{with} | {resource}{named} | {place} | {verbs}{may_lack}")
    };
    let added = needs.iter().filter(|need| !beyond.contains(need));
    added.map(row).collect()
}

fn named(objects: &[String]) -> String {
    match objects {
        [] => String::new(),
        names => format!(": {}", quoted(names)),
    }
}

#[test]
fn the_table_of_permissions_is_what_doctor_asks_for() {
    let files = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = files.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let kubelet = tempfile::NamedTempFile::new().unwrap();
    let kubelet = kubelet.path().to_str().unwrap();
    let quarantining = |edit: &dyn Fn(&mut ActArgs)| {
        let installation = with_kubelet(kubelet, |act| {
            act.quarantine = Some(true);
            edit(act);
        });
        of(&installation, false)
    };
    let observing = of(&run(|_| ()), false);
    let quarantine = quarantining(&|_| ());
    let mut expected = rows("a cluster", &observing, &[]);
    let mut add = |with: &str, needs: &[Need], beyond: &[Need]| {
        expected.extend(rows(with, needs, beyond));
    };

    let dry = run(|act| (act.quarantine, act.dry_run) = (Some(true), Some(true)));
    add("`--quarantine --dry-run`", &of(&dry, false), &observing);
    add("`--quarantine`", &quarantine, &observing);
    let policy = quarantining(&|act| act.policy = Some("configmap:policies/name".into()));
    add("`--policy configmap:`", &policy, &quarantine);
    let acts = run(|act| act.quarantine = Some(true));
    let devices = some_rows(&["device-taints"], &acts);
    add("`[device-taints]`", &devices, &quarantine);
    let central = of(&controller(act(|act| act.quarantine = Some(true))), false);
    add("`controller`", &central, &quarantine);
    let issues = of(&issuing(act(|act| act.quarantine = Some(true))), false);
    add("`controller` without `--grpc-tls-cert`", &issues, &central);

    let drained = quarantining(&|act| act.drain = Some(true));
    add("`--drain`", &drained, &quarantine);
    let config = fleet::remediation::RemediationConfig::builtin();
    let kinds = config.kinds().into_iter();
    let repaired = kinds.filter_map(|kind| {
        let plural = format!("{}s", kind.kind.to_lowercase());
        of_remediation(Mode::Act, kind, plural)
    });
    add("`--remediate`", &repaired.collect::<Vec<_>>(), &[]);

    // Without --quarantine: another program may create the custom resources.
    let janitor = |config: &str, tests: Option<&str>| {
        let installation = run(|act| {
            act.janitor = Some(true);
            act.janitor_config = Some(file("janitor.yaml", config));
            act.validation_config = tests.map(|tests| file("tests.yaml", tests));
        });
        of(&installation, false)
    };
    let provider = "global: {cspProviderHost: \"a:1\", cspProviderInsecure: true}\n";
    let only_reboots = "terminateNodeController: {enabled: false}\n";
    let base = format!("{provider}{only_reboots}");
    let least = janitor(&base, None);
    add("`--janitor`", &least, &observing);
    let terminates = janitor(provider, None);
    add("`terminateNodeController`", &terminates, &least);
    add("reboots by Jobs", &janitor(only_reboots, None), &least);
    let bmc = format!("redfish: {{address: \"http://{{node}}\"}}\n{only_reboots}");
    add("`redfish`", &janitor(&bmc, None), &least);
    let resets = format!("{base}gpuResetController: {{resetJob: {{imageConfig: {{image: i}}}}}}\n");
    add("`gpuResetController`", &janitor(&resets, None), &least);
    let tested = janitor(&base, Some(VALIDATION));
    add("`--validation-config`", &tested, &least);
    let provides = some_rows(&["reboot-jobs", "tokens"], &acts);
    add("`janitor-provider`", &provides, &[]);
    assert_eq!(table("with"), expected, "\n{}", expected.join("\n"));
}

#[test]
fn the_table_of_the_webhook_is_what_its_example_grants() {
    let words =
        |rule: &Value, key: &str| Vec::<String>::deserialize(&rule[key]).unwrap_or_default();
    let mut granted = Vec::new();
    for document in serde_saphyr::from_multiple::<Value>(WEBHOOK).unwrap() {
        let place = match document["kind"].as_str() {
            Some("Role") => "its namespace",
            Some("ClusterRole") => "the cluster",
            _ => continue,
        };
        for rule in document["rules"].as_array().unwrap() {
            let mut resources = Vec::new();
            for group in words(rule, "apiGroups") {
                for resource in words(rule, "resources") {
                    let need = Need {
                        group: group.clone(),
                        resource,
                        ..Need::default()
                    };
                    resources.push(need.full_name());
                }
            }
            let (resources, verbs) = (quoted(resources), quoted(words(rule, "verbs")));
            let named = named(&words(rule, "resourceNames"));
            granted.push(format!("{resources}{named} | {place} | {verbs}"));
        }
    }
    assert_eq!(table("of the webhook"), granted, "\n{}", granted.join("\n"));
}
