//! `replay` and `simulate`: hypothetical decisions on old logs and exported events.

use std::fs;

use contract::HealthEvent;
use serde_json::Value;
use testkit::Launch;

use crate::support::{gpuwarden, send_to, taken_in};

/// Returns a line of `/var/log/kern.log` with an ISO time, which has year and time zone.
fn line(second: u32, text: &str) -> String {
    format!("2026-07-01T12:00:{second:02}.000000+00:00 host kernel: {text}\n")
}

fn xid(second: u32, pci: &str, code: u32) -> String {
    line(
        second,
        &format!("NVRM: Xid (PCI:{pci}): {code}, pid=1, name=a, text"),
    )
}

#[test]
fn logs_of_several_nodes_are_one_story_and_two_policies_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    // XID 45 is an application error, and 79 is not; on GKE, a node stays in service with 95,
    // which elsewhere waits two seconds for an XID 48.
    fs::write(
        path("gpu-1.log"),
        xid(1, "0000:b3:00", 45) + &xid(9, "0000:b3:00", 79),
    )
    .unwrap();
    fs::write(
        path("gpu-2.log"),
        xid(5, "0000:3b:00", 95) + "not a fault\n",
    )
    .unwrap();
    let (one, two) = (path("gpu-1.log"), path("gpu-2.log"));

    let (code, out, err) = gpuwarden(&["replay", &one, &two], "");
    assert_eq!(code, Some(1), "{err}");
    let lines: Vec<&str> = out.lines().collect();
    assert!(
        lines[0].starts_with(
            "2026-07-01 12:00:07.000  gpu-2  quarantine by 'default': cordon: SysLogsXIDError 95"
        ),
        "{out}"
    );
    assert!(
        lines[1].contains("12:00:09.000  gpu-1  quarantine"),
        "{out}"
    );
    assert!(
        out.contains("3 events of 2 nodes, 2026-07-01 12:00:01.000 to 2026-07-01 12:00:09.000"),
        "{out}"
    );
    assert!(out.contains("most at one time  2"), "{out}");

    let compared = [
        "replay",
        &one,
        &two,
        "--policy",
        "preset:default",
        "--policy",
        "preset:gke",
    ];
    let (code, out, _) = gpuwarden(&compared, "");
    assert_eq!(code, Some(1));
    assert!(
        out.starts_with("A  2026-07-01 12:00:07.000  gpu-2  quarantine"),
        "{out}"
    );
    assert!(
        out.contains("1 decision the same, 1 only by A, 0 only by B"),
        "{out}"
    );
    let (code, out, _) = gpuwarden(
        &[
            "replay",
            &one,
            "--policy",
            "preset:gke",
            "--policy",
            "preset:gke",
        ],
        "",
    );
    assert_eq!(code, Some(0), "{out}");

    let (_, out, _) = gpuwarden(&["replay", &one, &two, "-o", "json"], "");
    let decisions: Vec<Value> = serde_json::from_str(&out).unwrap();
    assert_eq!(decisions.len(), 2);
    assert_eq!(decisions[0]["node"], "gpu-2");
    assert_eq!(decisions[0]["decision"], "quarantine");
    assert_eq!(decisions[0]["cordon"], true);
    assert_eq!(decisions[0]["at"], "2026-07-01T12:00:07Z");

    // Nodes with their labels: one is opted out, and the other is missing in the list.
    let nodes = path("nodes.json");
    fs::write(&nodes, r#"{"items":[{"metadata":{"name":"gpu-1","labels":{"k8saas.nvidia.com/ManagedByNVSentinel":"false"}}}]}"#).unwrap();
    let (code, out, _) = gpuwarden(&["replay", &one, &two, "--nodes", &nodes], "");
    assert_eq!(code, Some(0), "{out}");
    assert!(
        out.contains("1 node of the events are not in the list"),
        "{out}"
    );
}

#[test]
fn rules_conclude_from_events_that_take_out_no_node_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let at = |minute: u32| {
        let line = xid(1, "0000:b3:00", 43);
        line.replace("12:00:01", &format!("12:{minute:02}:01"))
    };
    let log = |minutes: [u32; 5]| minutes.map(at).concat();
    fs::write(path("gpu-1.log"), log([0, 10, 20, 30, 40])).unwrap();
    fs::write(path("gpu-2.log"), log([0, 1, 2, 3, 4])).unwrap();
    let (one, two) = (path("gpu-1.log"), path("gpu-2.log"));
    let (code, out, err) = gpuwarden(&["replay", &one, &two], "");
    assert_eq!(code, Some(0), "{out}{err}");
    let (code, out, err) = gpuwarden(&["replay", &one, &two, "--rules", "built-in"], "");
    assert_eq!(code, Some(1), "{out}{err}");
    let first = "2026-07-01 12:40:01.000  gpu-1  quarantine by 'default': cordon: RepeatedXIDErrorOnSameGPU";
    assert!(out.starts_with(first), "{out}");
    assert!(out.contains("nodes taken out   1"), "{out}");

    fs::write(path("rules.toml"), "[[rules]]\nname = 1\n").unwrap();
    let (code, _, err) = gpuwarden(&["replay", &one, "--rules", &path("rules.toml")], "");
    assert_eq!(code, Some(2));
    assert!(err.contains("rules.toml:2: rules[0].name is 1"), "{err}");
}

#[test]
fn the_brake_holds_and_is_compared() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let names: Vec<String> = (0..30).map(|n| format!("gpu-{n}")).collect();
    let mut args = vec!["replay".to_owned()];
    for (second, name) in (0..).zip(&names) {
        let file = path(&format!("{name}.log"));
        fs::write(&file, xid(second, "0000:b3:00", 79)).unwrap();
        args.push(file);
    }
    let items: Vec<Value> = names
        .iter()
        .map(|name| serde_json::json!({"metadata": {"name": name}}))
        .collect();
    let nodes = path("nodes.json");
    fs::write(&nodes, serde_json::json!({"items": items}).to_string()).unwrap();
    let replay = |more: &[&str]| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        gpuwarden(&[&args, more].concat(), "")
    };

    // The built-in limit is 20 % of 30 nodes.
    let (code, out, err) = replay(&["--nodes", &nodes]);
    assert_eq!(code, Some(1), "{err}");
    for part in [
        "gpu-6  held by 'default': held back: 6 of 30 nodes are out of service",
        "nodes taken out   6",
        "nodes held back   24",
        "held at the end   24",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    let (_, out, _) = replay(&["--nodes", &nodes, "-o", "json"]);
    let decisions: Vec<Value> = serde_json::from_str(&out).unwrap();
    assert_eq!(decisions[5]["decision"], "quarantine");
    assert_eq!(decisions[6]["decision"], "held");
    assert!(decisions[6]["hold"].as_str().unwrap().contains("6 (20%)"));
    assert_eq!(decisions.len(), 30);

    // Without the list, 20 % is an unknown number of nodes. That is reported once.
    let (_, out, _) = replay(&[]);
    assert!(out.contains("nodes taken out   30"), "{out}");
    assert_eq!(
        out.matches("limits of the brake were not applied").count(),
        1,
        "{out}"
    );
    let (_, _, err) = replay(&["-o", "json"]);
    assert!(
        err.contains("unknown: 20%; name them with --nodes FILE"),
        "{err}"
    );

    // Policies with a single difference, with and without events.
    let max = |max: u32| {
        let file = path(&format!("{max}.toml"));
        let text = format!(
            "[brake]\nbudgets = [{{ max = {max} }}]\n[[rule-sets]]\nname = \"fatal\"\n\
             cordon = {{ shouldCordon = true }}\n[[rule-sets.match.all]]\n\
             kind = \"HealthEvent\"\nexpression = \"event.isFatal\"\n"
        );
        fs::write(&file, text).unwrap();
        file
    };
    let (one, many) = (max(1), max(30));
    let (code, out, _) = replay(&["--policy", &one, "--policy", &many]);
    assert_eq!(code, Some(1));
    assert!(
        out.contains("1 decision the same, 29 only by A, 29 only by B"),
        "{out}"
    );
    let (code, out, _) = gpuwarden(&["policy", "diff", &one, &many], "");
    assert_eq!(code, Some(1), "{out}");
    assert!(
        out.lines()
            .any(|line| line.split_whitespace().eq(["brake", "1", "30"])),
        "{out}"
    );
    let (_, out, _) = gpuwarden(&["policy", "diff", &one, &many, "-o", "json"], "");
    let found: Vec<Value> = serde_json::from_str(&out).unwrap();
    assert_eq!(
        found,
        [serde_json::json!({"setting": "brake", "a": "1", "b": "30"})]
    );
}

#[tokio::test]
async fn what_events_writes_is_what_replay_reads() -> anyhow::Result<()> {
    let product = Launch::new()?.node_name("n1").start().await?;
    for code in ["79", "13"] {
        product.client(["inject", "xid", code]).await?.expect(0)?;
    }
    taken_in(&product, 2).await?;
    product
        .client(["inject", "recovery", "--code", "79"])
        .await?
        .expect(0)?;
    let events = product.client(["events", "-o", "json"]).await?.stdout;
    let broken = events.replacen("\"nodeName\": \"n1\"", "\"nodeName\": \"\"", 1);
    assert_ne!(events, broken);
    tokio::task::spawn_blocking(move || {
        let (code, out, err) = gpuwarden(&["replay", "-"], &events);
        assert_eq!(code, Some(1), "{out}{err}");
        assert!(
            out.contains("n1  quarantine by 'default': cordon: SysLogsXIDError 79"),
            "{out}"
        );
        assert!(
            out.contains("n1  release: uncordon: SysLogsXIDError 79"),
            "{out}"
        );
        assert!(out.contains("3 events of 1 node"), "{out}");
        // A file given twice counts once. Unreadable files are named, and the others are read.
        let (code, out, err) = gpuwarden(&["replay", "-"], &format!("{events}\n{broken}\n{{\n"));
        assert_eq!(code, Some(2), "{err}");
        assert!(out.contains("2 were there twice"), "{out}");
        assert!(out.contains("2 could not be read"), "{out}");
        assert!(
            err.contains("2 records could not be read beside 3 events"),
            "{err}"
        );
        assert!(
            err.contains("nodeName: is empty") && err.contains("ends in the middle"),
            "{err}"
        );
    })
    .await?;
    Ok(())
}

#[tokio::test]
async fn a_store_of_any_size_is_exported_as_a_whole() -> anyhow::Result<()> {
    // More events than one response of the API holds.
    const EVENTS: usize = 10_100;
    let product = Launch::new()?.node_name("n1").start().await?;
    for first in (0..EVENTS).step_by(500) {
        let event = |n: usize| HealthEvent {
            version: 1,
            agent: "a".into(),
            component_class: "GPU".into(),
            check_name: "Check".into(),
            node_name: "n1".into(),
            message: format!("event {n}"),
            ..HealthEvent::default()
        };
        let batch = first..EVENTS.min(first + 500);
        send_to(&product, batch.map(event).collect()).await?;
    }
    let all = product.client(["events", "--all", "-o", "json"]).await?;
    let events: Vec<Value> = serde_json::from_str(all.expect(0)?)?;
    assert_eq!(events.len(), EVENTS);
    let message = |at: usize| events[at]["event"]["message"].as_str().unwrap_or_default();
    assert_eq!(message(0), "event 0", "the oldest first");
    assert_eq!(message(EVENTS - 1), format!("event {}", EVENTS - 1));
    let node = ["events", "--all", "--node", "n1"];
    let text = product.client(node).await?;
    assert_eq!(text.expect(0)?.lines().count(), EVENTS);
    let both = product.client(["events", "--all", "--limit", "5"]).await?;
    both.expect(2)?;
    Ok(())
}

#[test]
fn lines_that_cannot_be_read_are_counted_over_all_logs_and_the_first_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (one, two) = (path("gpu-1.log"), path("gpu-2.log"));
    let garbled = "NVRM: Xid (PCI:0000:b3:00): 7x, a";
    fs::write(&one, xid(1, "0000:b3:00", 79) + &line(2, garbled)).unwrap();
    let switch = line(0, "nvidia-nvswitch3: SXid (PCI:zz): 24007, Fatal, a");
    fs::write(&two, switch).unwrap();
    let named = format!("{one}:2: {garbled}");
    for (files, says) in [
        (
            &[&one, &two][..],
            "2 XID or SXid lines cannot be parsed, and report no fault; the first is",
        ),
        (
            &[&one][..],
            "an XID or SXid line cannot be parsed, and reports no fault:",
        ),
    ] {
        let mut args = vec!["replay", "-o", "json"];
        args.extend(files.iter().map(|file| file.as_str()));
        let (code, out, err) = gpuwarden(&args, "");
        let decisions: Vec<Value> = serde_json::from_str(&out).unwrap();
        assert_eq!((code, decisions.len()), (Some(1), 1));
        let first = err.lines().next().unwrap_or_default();
        assert_eq!(first, format!("warning: {says} {named}"));
    }
    fs::write(&one, xid(1, "0000:b3:00", 79)).unwrap();
    assert_eq!(gpuwarden(&["replay", &one], "").2, "");
}

#[test]
fn a_reader_that_has_gone_does_not_change_what_was_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (bad, well) = (path("bad.log"), path("well.log"));
    fs::write(&bad, xid(1, "0000:b3:00", 79)).unwrap();
    fs::write(&well, xid(1, "0000:b3:00", 43)).unwrap();
    for (args, code) in [
        (&["decode", &bad][..], 1),
        (&["decode", &well], 0),
        (&["replay", &bad], 1),
        (&["policy", "diff", "preset:default", "preset:gke"], 1),
        (&["policy", "diff", "preset:default", "preset:gke", &bad], 1),
        (&["policy", "diff", "preset:gke", "preset:gke"], 0),
    ] {
        // A pipe whose reader is closed before the first write.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let status = std::process::Command::new(testkit::binary().unwrap())
            .args(args)
            .stdout(writer)
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(code), "{args:?}");
    }
}

#[test]
fn what_cannot_be_replayed_is_said() {
    for (args, expected) in [
        (&["replay", "/does/not/exist"][..], "/does/not/exist"),
        (&["replay", "/tmp"], "is a directory"),
        (
            &["replay", "-", "--policy", "preset:gkee"],
            "did you mean preset:gke?",
        ),
        (
            &["replay", "-", "--policy", "/does/not/exist"],
            "cannot read the policy",
        ),
        (&["replay"], "<[NODE=]FILE|->"),
    ] {
        let (code, _, err) = gpuwarden(args, "");
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(expected), "{expected}: {err}");
    }
    assert_eq!(gpuwarden(&["replay", "-"], "nothing here\n").0, Some(0));
    for (input, expected) in [
        ("[", "begins a list without an end"),
        ("{\"event\":", "ends in the middle of an object"),
        ("\u{1}\u{2}\u{3}\u{4}", "is no text"),
        ("BZh91AY&SY", "bzcat FILE | gpuwarden replay NODE=-"),
        (
            "{\"__CURSOR\":\"s=1\",\"MESSAGE\":\"x\"}\n",
            "journalctl -k -o short-iso-precise",
        ),
    ] {
        let (code, _, err) = gpuwarden(&["replay", "-"], input);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(expected), "{expected}: {err}");
    }
    let journal = "{\"__CURSOR\":\"s=1\",\"__REALTIME_TIMESTAMP\":\"1795208400000000\",\
                   \"MESSAGE\":\"NVRM: Xid (PCI:0000:b3:00): 79, x\",\"_HOSTNAME\":\"n1\"}\n";
    // The journal's fault is found nevertheless.
    let (code, out, err) = gpuwarden(&["decode", "-"], journal);
    assert_eq!(code, Some(1), "{err}");
    assert!(out.contains("FATAL XID 79 on 0000:b3:00"), "{out}");
}

#[test]
fn a_simulation_follows_from_its_seed() {
    let run = |seed| {
        gpuwarden(
            &["simulate", "--steps", "2000", "--seed", seed, "-o", "json"],
            "",
        )
    };
    let (code, one, err) = run("7");
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(one, run("7").1);
    let report: Value = serde_json::from_str(&one).unwrap();
    assert_eq!(
        (&report["seed"], &report["steps"]),
        (&7.into(), &2000.into())
    );
    assert_eq!(report["violation"], Value::Null);
    for figure in ["/sessions", "/crashes", "/effects/patch of a node"] {
        assert!(
            report.pointer(figure).and_then(Value::as_u64) > Some(0),
            "{figure}: {one}"
        );
    }
    let (code, out, _) = gpuwarden(&["simulate", "--steps", "300", "--seed", "1"], "");
    assert_eq!(code, Some(0));
    assert!(out.starts_with("seed 1: 300 steps, "), "{out}");
    assert!(out.ends_with("no invariant was broken\n"), "{out}");
    let (code, _, err) = gpuwarden(&["simulate", "--steps", "0"], "");
    assert_eq!(code, Some(2), "{err}");
}
