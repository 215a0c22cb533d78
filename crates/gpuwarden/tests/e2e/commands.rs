//! Commands without a cluster: the first steps of a new user, and errors.

use serde_json::Value;
use testkit::{Launch, Product};

use crate::support::{SOON, gpuwarden, xid};

const LOG: &str = "\
[    1.000000] usb 1-1: new high-speed USB device\n\
[    2.000000] NVRM: GPU at PCI:0000:b3:00: GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee\n\
[    3.000000] NVRM: Xid (PCI:0000:b3:00): 48, pid=77, name=my train, DBE\n\
[    4.000000] NVRM: Xid (PCI:0000:3b:00): 31, pid='<unknown>', name=<unknown>, MMU Fault\n\
[    5.000000] NVRM: Xid (PCI:0000:3b:00): 999, from the future\n";

#[test]
fn decode_tells_each_fault_and_exits_1_on_a_fatal_one() {
    let (code, out, _) = gpuwarden(&["decode", "-o", "json"], LOG);
    assert_eq!(code, Some(1));
    let found: Vec<Value> = out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(found.len(), 3);
    let first = &found[0];
    assert_eq!(first["line"], 3);
    assert_eq!(first["check"], "SysLogsXIDError");
    assert_eq!(first["code"], "48");
    assert_eq!(first["pci"], "0000:b3:00");
    assert_eq!(
        first["gpu_uuid"],
        "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
    );
    assert_eq!(
        (&first["process"], &first["pid"]),
        (&Value::from("my train"), &Value::from(77))
    );
    assert_eq!(first["fatal"], true);
    assert_eq!(first["recommended_action"], "COMPONENT_RESET");
    assert!(first["meaning"].as_str().unwrap().len() > 10);
    assert_eq!(
        (&found[1]["fatal"], &found[1]["pid"]),
        (&Value::from(false), &Value::Null)
    );
    assert_eq!(found[2]["recommended_action"], "UNKNOWN");

    let (code, out, _) = gpuwarden(&["decode"], LOG);
    assert_eq!((code, out.lines().count()), (Some(1), 3));
    assert!(out.starts_with("3: FATAL XID 48 on 0000:b3:00"), "{out}");
    let harmless = "[1.0] NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name=a, Graphics Exception\n";
    assert_eq!(gpuwarden(&["decode", "-"], harmless).0, Some(0));
    assert_eq!(
        gpuwarden(&["decode"], "nothing here\n"),
        (Some(0), String::new(), String::new())
    );
}

#[test]
fn decode_says_what_it_could_not_read_beside_its_output() {
    let garbled = "[6.0] NVRM: Xid (PCI:0000:3b:00): 7x, a \u{1b}[2J\n\
                   [7.0] nvidia-nvswitch3: SXid (PCI:zz): 24007, Fatal, Link 44 a\n";
    let expected =
        "warning: 2 XID or SXid lines cannot be parsed, and report no fault; the first is ";
    let first = r"NVRM: Xid (PCI:0000:3b:00): 7x, a \x1b[2J";
    for format in ["text", "json", "yaml"] {
        let plain = gpuwarden(&["decode", "-o", format], LOG);
        assert_eq!(plain.2, "");
        let (code, out, err) = gpuwarden(&["decode", "-o", format], &format!("{LOG}{garbled}"));
        assert_eq!((code, out), (plain.0, plain.1), "{format}");
        assert_eq!(err, format!("{expected}standard input:6: {first}\n"));
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        file.path(),
        "x\nnvidia-nvswitch3: SXid (PCI:zz): 24007, a\n",
    )
    .unwrap();
    let path = file.path().to_str().unwrap();
    let (code, out, err) = gpuwarden(&["decode", path], "");
    assert_eq!((code, out.as_str()), (Some(0), ""));
    let one = "warning: an XID or SXid line cannot be parsed, and reports no fault: ";
    let line = "nvidia-nvswitch3: SXid (PCI:zz): 24007, a";
    assert_eq!(err, format!("{one}{path}:2: {line}\n"));
}

#[test]
fn decode_refuses_what_is_no_text() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"\x1f\x8b\x08\0abc").unwrap();
    let (code, out, err) = gpuwarden(&["decode", file.path().to_str().unwrap()], "");
    assert_eq!((code, out.as_str()), (Some(2), ""));
    assert!(err.contains("`zcat FILE | gpuwarden decode`"), "{err}");
}

#[test]
fn catalog_says_what_a_code_means_and_where_from() {
    let (code, out, _) = gpuwarden(&["catalog", "xid", "79"], "");
    assert_eq!(code, Some(0));
    let lines: Vec<Vec<&str>> = out
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    for (name, value) in [
        ("action", "RESTART_BM:"),
        ("fatal", "yes"),
        ("source", "NVIDIA"),
    ] {
        assert!(
            lines.iter().any(|line| line.starts_with(&[name, value])),
            "{name} in {out}"
        );
    }
    let (code, out, _) = gpuwarden(&["catalog", "-o", "json"], "");
    let rows: Vec<Value> = serde_json::from_str(&out).unwrap();
    let xids = rows.iter().filter(|row| row["kind"] == "xid").count();
    assert_eq!((code, xids), (Some(0), 172));
    assert_eq!(gpuwarden(&["catalog", "xid", "9999"], "").0, Some(2));
    // The code of events, the code of older versions of DCGM, and the number.
    for code in [
        "DCGM_FR_CLOCKS_EVENT_THERMAL",
        "DCGM_FR_CLOCK_THROTTLE_THERMAL",
        "10",
    ] {
        let (status, out, _) = gpuwarden(&["catalog", "dcgm", code, "-o", "json"], "");
        let row: Value = serde_json::from_str(&out).unwrap();
        let told = ["name", "severity", "recommended_action"].map(|key| row[key].as_str());
        let expected = ["DCGM_FR_CLOCKS_EVENT_THERMAL", "MONITOR", "NONE"].map(Some);
        assert_eq!((status, told), (Some(0), expected), "{code}");
    }
    let (status, out, _) = gpuwarden(&["catalog", "dcgm", "GPU_UNMONITORED"], "");
    assert_eq!(status, Some(0));
    assert!(out.starts_with("DCGM GPU_UNMONITORED\n"), "{out}");
    let (status, out, _) = gpuwarden(&["catalog", "dcgm", "DCGM_FR_NEVER"], "");
    assert_eq!(status, Some(2));
    assert!(
        out.starts_with("DCGM code DCGM_FR_NEVER is not in the catalogue"),
        "{out}"
    );
    assert_eq!(gpuwarden(&["catalog", "disease"], "").0, Some(2));
}

#[test]
fn what_is_wrong_is_said_and_ends_with_2() {
    let dir = tempfile::tempdir().unwrap();
    let policy = dir.path().join("p.toml");
    std::fs::write(&policy, "[[rule-sets]]\nname = \"x\"\n[[rule-sets.match.any]]\nkind = \"HealthEvent\"\nexpression = \"event.isFatl\"\n").unwrap();
    let connector = dir.path().join("config.json");
    let dedup =
        r#"{"pipeline": [{"name": "Deduplicator", "enabled": true, "config": "dedup.toml"}]}"#;
    std::fs::write(&connector, dedup).unwrap();
    std::fs::write(
        dir.path().join("dedup.toml"),
        "\nsuppressionWindow = \"soon\"\n",
    )
    .unwrap();
    let connector = connector.to_str().unwrap();
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    let policy = policy.to_str().unwrap();
    let table: [(&[&str], &str); 9] = [
        (&["run", "--frobnicate"], "--frobnicate"),
        (&["run", "--quarantine", "--data-dir", data], "--kubeconfig"),
        (&["run", "--history", "soon", "--data-dir", data], "15m"),
        (&["run", "--policy", policy, "--data-dir", data], "p.toml:5"),
        (
            &["run", "--connector-config", connector, "--data-dir", data],
            "dedup.toml:2: suppressionWindow is \"soon\"",
        ),
        (
            &["run", "--kubeconfig", "/does/not/exist", "--data-dir", data],
            "/does/not/exist",
        ),
        (
            &["status", "--server", "http://127.0.0.1:9"],
            "gpuwarden run",
        ),
        (&["decode", "/does/not/exist"], "/does/not/exist"),
        (
            &["inject", "xid", "79", "--pci", "here", "--data-dir", data],
            "--pci",
        ),
    ];
    for (args, expected) in table {
        let (code, _, err) = gpuwarden(args, "");
        assert_eq!(code, Some(2), "{args:?}: {err}");
        assert!(err.contains(expected), "{args:?}: {err}");
        assert!(!err.contains('\x1b'), "no colour off a terminal: {err}");
    }
}

#[tokio::test]
async fn another_nodes_faults_are_refused_unless_this_one_collects_for_others() -> anyhow::Result<()>
{
    let other = ["inject", "xid", "79", "--node-name", "n2"];
    let product = Launch::new()?.node_name("n1").start().await?;
    let refused = product.client(other).await?;
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(
        refused.stderr.contains("--accept-nodes any"),
        "{}",
        refused.stderr
    );
    let collecting = Launch::new()?.node_name("n1");
    let collecting = collecting.option("--accept-nodes", "any").start().await?;
    collecting.client(other).await?.expect(0)?;
    Ok(())
}

#[tokio::test]
async fn inject_status_events_explain_and_recovery() -> anyhow::Result<()> {
    let product = Launch::new()?.node_name("n1").start().await?;
    product
        .client(["inject", "xid", "79", "--pci", "0000:3B:00.0"])
        .await?
        .expect(0)?;
    let status = product
        .wait_for("the fault in status", SOON, || async {
            let output = product
                .client(["status"])
                .await
                .map_err(|error| error.to_string())?;
            if output.stdout.contains("unhealthy") {
                Ok(output)
            } else {
                Err(output.stdout)
            }
        })
        .await?;
    assert_eq!(status.code, Some(1));
    assert!(
        status
            .stdout
            .contains("SysLogsXIDError 79 on PCI 0000:3b:00"),
        "{}",
        status.stdout
    );

    let explain = product.client(["explain"]).await?;
    assert_eq!(explain.code, Some(1));
    for part in [
        "line",
        "decoded",
        "accepted as #1",
        "gpuwarden inject recovery",
        "note      observing only: nothing is done about it; --quarantine acts",
    ] {
        assert!(
            explain.stdout.contains(part),
            "{part} in {}",
            explain.stdout
        );
    }
    let why = product.client(["why-not"]).await?;
    let why = why.expect(0)?;
    for part in [
        "n1 is not quarantined: no cluster is given: only this machine is watched (and one more",
        "stop  mode     observing only",
        "SysLogsXIDError 79 on PCI 0000:3b:00: a rule set asks for it",
        "event.isFatal -> true",
    ] {
        assert!(why.contains(part), "{part} in {why}");
    }
    for command in ["explain", "why-not"] {
        let unknown = product.client([command, "n2"]).await?;
        assert_eq!(unknown.code, Some(2));
        for part in [
            "neither the cluster nor any event knows a node \"n2\"",
            "Did you mean n1?",
        ] {
            assert!(unknown.stderr.contains(part), "{}", unknown.stderr);
        }
    }
    let events = product.client(["events", "-o", "json"]).await?.json(0)?;
    assert_eq!(events[0]["event"]["recommendedAction"], "RESTART_BM");
    for format in ["yaml", "wide"] {
        assert!(
            product
                .client(["events", "-o", format])
                .await?
                .expect(0)?
                .contains("79")
        );
        assert!(
            product
                .client(["status", "-o", format])
                .await?
                .stdout
                .contains("79")
        );
    }

    // A recovery of another GPU closes no fault.
    let none = product
        .client(["inject", "recovery", "--pci", "0000:99:00"])
        .await?;
    assert!(none.expect(0)?.contains("nothing to recover"));
    product
        .client(["inject", "recovery", "--code", "79"])
        .await?
        .expect(0)?;
    is_healthy(&product).await
}

/// Waits until `status` finds nothing wrong. A process that has just started is not ready at once.
async fn is_healthy(product: &Product) -> anyhow::Result<()> {
    product
        .wait_for("health", SOON, || async {
            let output = product.client(["status"]).await;
            let output = output.map_err(|error| error.to_string())?;
            (output.code == Some(0)).then_some(()).ok_or(output.stdout)
        })
        .await
}

#[tokio::test]
async fn a_notice_is_shown_and_the_machine_counts_as_well() -> anyhow::Result<()> {
    let product = Launch::new()?.node_name("n1").start().await?;
    product.client(["inject", "xid", "13"]).await?.expect(0)?;
    product
        .wait_for("the notice", SOON, || async {
            let output = product.client(["status"]).await;
            let output = output.map_err(|error| error.to_string())?;
            let is_shown = output.stdout.contains("notice");
            (is_shown && output.code == Some(0))
                .then_some(())
                .ok_or(output.stdout)
        })
        .await
}

/// Waits until exactly `count` events are stored.
async fn stored(product: &Product, count: usize) -> anyhow::Result<()> {
    product
        .wait_for("the events", SOON, || async {
            let output = product.client(["events", "-o", "json"]).await;
            let events = output
                .and_then(|output| output.json(0))
                .map_err(|error| error.to_string())?;
            let found = events.as_array().map_or(0, Vec::len);
            if found == count {
                Ok(())
            } else {
                Err(format!("{found} of {count}"))
            }
        })
        .await
}

#[tokio::test]
async fn it_ends_in_order_and_goes_on_where_it_was() -> anyhow::Result<()> {
    let mut product = Launch::new()?.node_name("n1").start().await?;
    product.append_kernel_log(&xid(48, "DBE"))?;
    stored(&product, 1).await?;
    let (status, _) = product.terminate().await?;
    assert!(status.success(), "{status}");
    // The line is written while the product is down.
    product.append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    product.restart().await?;
    stored(&product, 2).await
}

#[tokio::test]
async fn a_second_one_on_the_same_data_is_refused() -> anyhow::Result<()> {
    let product = Launch::new()?.start().await?;
    let data = product.data_dir();
    let data = data.to_str().unwrap();
    let args = [
        "run",
        "--data-dir",
        data,
        "--listen",
        "127.0.0.1:0",
        "--kernel-log",
        "-",
    ];
    let (code, _, err) = gpuwarden(&args, "");
    assert_eq!(code, Some(2));
    assert!(
        err.contains("in use") && err.contains(&product.pid().to_string()),
        "{err}"
    );
    // The first process still runs.
    is_healthy(&product).await
}
