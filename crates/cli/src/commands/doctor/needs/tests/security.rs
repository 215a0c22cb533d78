//! The table of permissions in SECURITY.md is what `doctor` checks.

use super::*;

const PAGE: &str = include_str!("../../../../../../../SECURITY.md");
const VALIDATION: &str = include_str!("../../../../../../../examples/validation/validation.yaml");

/// Returns the rows of the table, without the last column.
fn table() -> Vec<String> {
    let rows = (PAGE.lines()).skip_while(|line| !line.starts_with("| with |"));
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
    let label = format!("label: {{reboot: a/b}}\n{base}");
    add("`label`", &janitor(&label, None), &least);
    let resets = format!("{base}gpuResetController: {{resetJob: {{imageConfig: {{image: i}}}}}}\n");
    add("`gpuResetController`", &janitor(&resets, None), &least);
    let tested = janitor(&base, Some(VALIDATION));
    add("`--validation-config`", &tested, &least);
    add(
        "`--label-nodes`",
        &some_rows(&["labels", "label-slices"], &acts),
        &[],
    );
    let pods = Watched {
        kind: objects::Kind::new("v1", "Pod"),
        namespace: None,
    };
    add("`--objects`", &[of_objects(&pods, "pods".into())], &[]);
    let map = TextPlace::ConfigMap {
        namespace: "policies".into(),
        name: "name".into(),
        key: "key".into(),
    };
    let map = of_objects_map(&map).into_iter().collect::<Vec<_>>();
    add("`--objects configmap:`", &map, &[]);
    let provides = some_rows(&["reboot-jobs", "tokens"], &acts);
    add("`janitor-provider`", &provides, &[]);
    assert_eq!(table(), expected, "\n{}", expected.join("\n"));
}
