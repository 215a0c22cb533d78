//! `policy`: commands to check a policy before it is deployed.

use std::fs;

use serde_json::Value;

use crate::support::gpuwarden;

const GOOD: &str = r#"
[[rule-sets]]
name = "fatal"
cordon = { shouldCordon = true }
[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal"
[[rule-sets.match.all]]
kind = "Node"
expression = "!(has(node.metadata.labels) && 'k8saas.nvidia.com/ManagedByNVSentinel' in node.metadata.labels)"
"#;

#[test]
fn a_policy_is_linted_shown_and_tested() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (good, odd, wrong) = (path("good.toml"), path("odd.toml"), path("wrong.toml"));
    fs::write(&good, GOOD).unwrap();
    fs::write(
        &odd,
        GOOD.replace("event.isFatal", "event.agent == 'sylog-health-monitor'"),
    )
    .unwrap();
    fs::write(&wrong, GOOD.replace("event.isFatal", "event.isFatl")).unwrap();

    let (code, out, _) = gpuwarden(&["policy", "lint", &good], "");
    assert_eq!(
        (code, out),
        (Some(0), format!("{good}: 1 rule set, nothing odd\n"))
    );
    let (code, out, _) = gpuwarden(&["policy", "lint", &odd], "");
    assert_eq!(code, Some(1));
    assert!(
        out.contains("did you mean 'syslog-health-monitor'?"),
        "{out}"
    );
    let (code, _, err) = gpuwarden(&["policy", "lint", &wrong], "");
    assert_eq!(code, Some(2));
    assert!(
        err.contains("wrong.toml:7") && err.contains("isFatal"),
        "{err}"
    );

    let (code, out, _) = gpuwarden(&["policy", "show", &good, "-o", "json"], "");
    let shown: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, Some(0));
    assert_eq!(shown["settings"][1]["from"], "default");
    assert_eq!(
        shown["ruleSets"][0]["all"][0]["expression"],
        "event.isFatal"
    );
    let (_, out, _) = gpuwarden(&["policy", "show"], "");
    assert!(out.starts_with("policy from built-in default"), "{out}");
    assert!(
        out.contains("label-prefix     \"k8saas.nvidia.com/\"  (file)"),
        "{out}"
    );

    // First no tests, then passing ones in YAML, then a failing one.
    let (code, _, err) = gpuwarden(&["policy", "test", &good], "");
    assert_eq!(code, Some(2));
    assert!(err.contains("good.test.yaml does not exist"), "{err}");
    let tests = "tests:\n- name: 79 takes it out\n  events: [{xid: 79}]\n  expect: {cordon: true, decisions: [quarantine]}\n\
        - name: an opted-out node stays\n  node: {metadata: {labels: {k8saas.nvidia.com/ManagedByNVSentinel: 'false'}}}\n  events: [{xid: 79}]\n  expect: {cordon: false}\n";
    fs::write(path("good.test.yaml"), tests).unwrap();
    let (code, out, err) = gpuwarden(&["policy", "test", &good], "");
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.ends_with("\n2 passed, 0 failed\n"), "{out}");
    fs::write(
        path("good.test.yaml"),
        tests.replace("cordon: false", "cordon: true"),
    )
    .unwrap();
    let (code, out, _) = gpuwarden(&["policy", "test", &good], "");
    assert_eq!(code, Some(1));
    for part in [
        "FAIL",
        "- true  expected",
        "+ false  found",
        "does not match: !(has(",
        "1 passed, 1 failed",
    ] {
        assert!(out.contains(part), "{part} in {out}");
    }
    fs::write(path("good.test.yaml"), "tests:\n- nme: x\n").unwrap();
    let (code, _, err) = gpuwarden(&["policy", "test", &good], "");
    assert_eq!(code, Some(2));
    assert!(
        err.contains("good.test.yaml is not a file of tests"),
        "{err}"
    );
}

#[test]
fn policies_are_compared_and_presets_listed() {
    let (code, out, _) = gpuwarden(&["policy", "diff", "preset:default", "preset:gke"], "");
    assert_eq!(code, Some(1));
    let line = |event: &str| {
        out.lines()
            .find(|line| line.starts_with(event))
            .map(str::to_owned)
    };
    let xid = line("XID 95 ").unwrap();
    assert!(
        xid.contains("cordon by 'default'") && xid.ends_with("nothing"),
        "{xid}"
    );
    assert_eq!((line("XID 79 "), line("XID 13 ")), (None, None));
    let (code, _, _) = gpuwarden(&["policy", "diff", "preset:gke", "preset:gke"], "");
    assert_eq!(code, Some(0));
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("n1.log");
    fs::write(
        &log,
        "2026-07-01T12:00:00Z n1 kernel: NVRM: Xid (PCI:0000:b3:00): 95, pid=1, name=a, x\n",
    )
    .unwrap();
    let (code, out, _) = gpuwarden(
        &[
            "policy",
            "diff",
            "preset:default",
            "preset:gke",
            log.to_str().unwrap(),
        ],
        "",
    );
    assert_eq!(code, Some(1));
    assert!(
        out.contains(
            "A  2026-07-01 12:00:02.000  n1  quarantine by 'default': cordon: SysLogsXIDError 95"
        ),
        "{out}"
    );

    // Rules about nodes are listed if they cannot be tried, and tried if a list of nodes is
    // given.
    let pool = |name: &str| {
        let path = dir.path().join(name).to_str().unwrap().to_owned();
        let rule = format!("node.metadata.labels['pool'] == '{name}'");
        let opted_out = GOOD.rfind("!(has").unwrap();
        fs::write(&path, format!("{}{rule}\"\n", &GOOD[..opted_out])).unwrap();
        path
    };
    let (batch, web) = (pool("batch"), pool("web"));
    let (code, _, err) = gpuwarden(&["policy", "diff", &batch, &web], "");
    assert_eq!(code, Some(0));
    for path in [&batch, &web] {
        let told = format!("only {path} has the rules about nodes in the rule set 'fatal'");
        assert!(err.contains(&told), "{err}");
    }
    let nodes = dir.path().join("nodes.json").to_str().unwrap().to_owned();
    let named = |name: &str, pool: &str| serde_json::json!({"metadata": {"name": name, "labels": {"pool": pool}}});
    let items = [
        named("n1", "batch"),
        named("n2", "batch"),
        named("n3", "web"),
    ];
    fs::write(&nodes, serde_json::json!({"items": items}).to_string()).unwrap();
    let (code, out, err) = gpuwarden(&["policy", "diff", &batch, &web, "--nodes", &nodes], "");
    assert_eq!((code, err.as_str()), (Some(1), ""));
    assert!(
        out.contains("XID 79 on n1") && out.contains("XID 79 on n3"),
        "{out}"
    );
    assert!(!out.contains("on n2"), "one of its kind was tried: {out}");

    let (code, out, _) = gpuwarden(&["policy", "presets", "-o", "json"], "");
    let presets: Vec<Value> = serde_json::from_str(&out).unwrap();
    assert_eq!(code, Some(0));
    assert!(
        presets.len() >= 5
            && presets
                .iter()
                .all(|one| one["source"].as_str().unwrap().len() > 10)
    );
    let (code, out, _) = gpuwarden(&["policy", "presets", "eks"], "");
    assert_eq!(code, Some(0));
    assert!(out.contains("[[rule-sets]]"), "{out}");
    assert_eq!(gpuwarden(&["policy", "presets", "mars"], "").0, Some(2));
}

#[test]
fn the_example_passes_its_tests() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/policy.toml");
    let (code, out, err) = gpuwarden(&["policy", "test", example], "");
    assert_eq!(code, Some(0), "{out}{err}");
    let (code, out, _) = gpuwarden(&["policy", "lint", example], "");
    assert_eq!(code, Some(0), "{out}");
}

#[test]
fn policies_over_objects_are_checked_and_tested() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/objects.toml");
    let (code, out, err) = gpuwarden(&["objects", "test", example], "");
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("8 passed, 0 failed"), "{out}");
    let (code, out, _) = gpuwarden(&["objects", "lint", example], "");
    assert_eq!(code, Some(0), "{out}");
    // An example whose node never counts fails its tests.
    let dir = tempfile::tempdir().unwrap();
    let changed = dir.path().join("objects.toml");
    let changed = changed.to_str().unwrap();
    let text = fs::read_to_string(example).unwrap();
    fs::write(changed, text.replace("\"5m\"", "\"10m\"")).unwrap();
    let tests = example.replace(".toml", ".test.yaml");
    let (code, out, _) = gpuwarden(&["objects", "test", changed, &tests], "");
    assert_eq!(code, Some(1), "{out}");
    assert!(
        out.contains("FAIL") && out.contains("6 passed, 2 failed"),
        "{out}"
    );
    for (to, code, part) in [
        ("resource.sttus.conditions", 2, "objects.toml:16: "),
        ("dyn(resource).status.conditions", 1, "objects.toml:16: "),
    ] {
        fs::write(changed, text.replace("resource.status.conditions", to)).unwrap();
        let (found, out, err) = gpuwarden(&["objects", "lint", changed], "");
        assert_eq!(found, Some(code), "{out}{err}");
        assert!(format!("{out}{err}").contains(part), "{out}{err}");
    }
    let (code, _, err) = gpuwarden(&["objects", "lint", "preset:mars"], "");
    assert_eq!(code, Some(2));
    assert!(
        err.contains("preset:mars: there is no such preset; there are node-not-ready"),
        "{err}"
    );
    assert_eq!(gpuwarden(&["objects", "lint", "preset:aks"], "").0, Some(0));
}
