//! `rules`: commands to check rules of the analysis before they are deployed, and to explain them.

use std::fs;

use serde_json::Value;
use testkit::Launch;

use crate::monitoring::repository;
use crate::page::{Shell, steps};
use crate::support::{SOON, gpuwarden, xid};

const GOOD: &str = r#"
[[rules]]
name = "Mine"
checks = ["SysLogsXIDError"]
codes = ["48"]
group_by = ["gpu"]
kind = "count"
window = "2h"
threshold = 2
action = "CONTACT_SUPPORT"
message = "It came back."
"#;

#[test]
fn rules_are_linted_shown_and_tested() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (good, odd, wrong) = (path("good.toml"), path("odd.toml"), path("wrong.toml"));
    fs::write(&good, GOOD).unwrap();
    fs::write(&odd, GOOD.replace("\"48\"", "\"1048\"")).unwrap();
    fs::write(&wrong, GOOD.replace("\"2h\"", "\"2x\"")).unwrap();

    let (code, out, _) = gpuwarden(&["rules", "lint", &good], "");
    assert_eq!(code, Some(0), "{out}");
    assert!(out.ends_with("rules in effect, nothing odd\n"), "{out}");
    let (code, out, _) = gpuwarden(&["rules", "lint", &good, "--retention", "1h"], "");
    assert_eq!(code, Some(1));
    assert!(out.contains("rule 'Mine': its window is 2h long"), "{out}");
    let (code, out, _) = gpuwarden(&["rules", "lint", &odd, "-o", "json"], "");
    let warnings: Vec<Value> = serde_json::from_str(&out).unwrap();
    assert_eq!((code, warnings.len()), (Some(1), 1));
    assert_eq!(warnings[0]["rule"], "Mine");
    let (code, _, err) = gpuwarden(&["rules", "lint", &wrong], "");
    assert_eq!(code, Some(2));
    assert!(
        err.contains("wrong.toml:8: rules[0].window is \"2x\""),
        "{err}"
    );

    let (code, out, _) = gpuwarden(
        &["rules", "show", "Mine", "--rules", &good, "-o", "json"],
        "",
    );
    let shown: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, Some(0));
    assert_eq!(
        (&shown["from"], &shown["threshold"]),
        (&"own".into(), &2.into())
    );
    let (code, _, err) = gpuwarden(&["rules", "show", "RackFualt"], "");
    assert_eq!(code, Some(2));
    assert!(err.contains("did you mean 'RackFault'?"), "{err}");

    let tests = "tests:\n- name: twice\n  events: [{xid: 48}, {xid: 48, at: 1h}]\n  \
                 expect: {concludes: [{rule: Mine, at: 1h}], never: [RackFault]}\n";
    fs::write(path("good.test.yaml"), tests).unwrap();
    let (code, out, err) = gpuwarden(&["rules", "test", &good], "");
    assert_eq!(code, Some(0), "{out}{err}");
    fs::write(
        path("good.test.yaml"),
        tests.replace("at: 1h}]\n", "at: 3h}]\n"),
    )
    .unwrap();
    let (code, out, _) = gpuwarden(&["rules", "test", &good], "");
    assert_eq!(code, Some(1));
    assert!(
        out.contains("+ []  found") && out.ends_with("0 passed, 1 failed\n"),
        "{out}"
    );
}

#[test]
fn two_sets_of_rules_are_compared_by_their_conclusions_and_decisions() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let line = |minute: u32| {
        format!(
            "2026-07-01T12:{minute:02}:00Z host kernel: NVRM: Xid (PCI:0000:b3:00): 31, pid=1, name=a, text\n"
        )
    };
    let log = path("gpu-1.log");
    fs::write(&log, line(0) + &line(10) + &line(20)).unwrap();
    let changed = path("changed.toml");
    let text = "[[rules]]\nname = \"RepeatedXID31OnSameGPU\"\nthreshold = 3\naction = \"CONTACT_SUPPORT\"\n";
    fs::write(&changed, text).unwrap();

    let (code, out, err) = gpuwarden(&["rules", "diff", "built-in", &changed, &log], "");
    assert_eq!(code, Some(1), "{err}");
    for part in [
        "RepeatedXID31OnSameGPU  threshold",
        "A  2026-07-01 12:10:00.000  RepeatedXID31OnSameGPU about gpu-1, PCI 0000:b3:00, open at the end",
        "B  2026-07-01 12:20:00.000  RepeatedXID31OnSameGPU",
        "1 conclusion the same, 1 only by A, 1 only by B",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    let (code, out, _) = gpuwarden(&["rules", "diff", &changed, &changed, &log], "");
    assert_eq!(code, Some(0), "{out}");

    let two = ["replay", &log, "--rules", "built-in", "--rules", &changed];
    let (code, out, err) = gpuwarden(&two, "");
    assert_eq!(code, Some(1), "{err}");
    assert!(out.contains(&format!("A: built-in  B: {changed}")), "{out}");
    assert!(out.contains("12:20:00.000  gpu-1  quarantine"), "{out}");
    let policies = ["--policy", "preset:gke", "--policy", "preset:default"];
    let (code, _, err) = gpuwarden(&[&two[..], &policies[..]].concat(), "");
    assert_eq!(code, Some(2));
    assert!(err.contains("compare either policies or rules"), "{err}");
}

#[tokio::test]
async fn the_groups_of_a_rule_are_explained_from_the_running_gpuwarden() -> anyhow::Result<()> {
    let product = Launch::new()?.node_name("n1").start().await?;
    product.append_kernel_log(&xid(31, "first"))?;
    let explain = ["rules", "explain", "RepeatedXID31OnSameGPU"];
    product
        .wait_for("the event to be explained", SOON, || async {
            let explained = product.client(explain).await;
            let explained = explained.map_err(|error| error.to_string())?;
            let holds = "1 of 2 bursts within 24h, the last at ";
            if explained.stdout.contains(holds) && explained.stdout.contains("lacks 1 more") {
                Ok(())
            } else {
                Err(explained.stdout)
            }
        })
        .await?;
    let none = ["rules", "explain", "RepeatedXID31OnSameGPU", "n2"];
    let none = product.client(none).await?;
    assert!(
        none.expect(0)?
            .ends_with("No event of n2 counts for the rule.\n")
    );
    Ok(())
}

#[tokio::test]
async fn the_commands_of_the_page_print_what_it_shows() -> anyhow::Result<()> {
    let steps = steps(&fs::read_to_string(repository("docs/analysis.md"))?);
    assert!(steps.len() > 5, "{steps:?}");
    let home = tempfile::tempdir()?;
    let mut shell = Shell::new(repository(""), &home.path().display().to_string())?;
    shell.follow(&steps).await
}
