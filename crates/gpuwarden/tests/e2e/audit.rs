//! Audit log of writes: it has exactly the writes that the API server's own audit log has.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use testkit::{ControlPlane, Options, Version, wait_for};

use crate::drain::Drain;
use crate::stages::recovered;
use crate::support::SOON;

/// A write: method, path with its query, and status.
type Write = (String, String, u64);

/// Returns the number of each write of gpuwarden in the API server's audit log.
fn of_api_server(plane: &ControlPlane) -> anyhow::Result<BTreeMap<Write, u32>> {
    let log = std::fs::read_to_string(plane.dir().join("log/audit.json"))?;
    let mut writes = BTreeMap::new();
    for line in log.lines() {
        let entry: Value = serde_json::from_str(line)?;
        let agent = entry["userAgent"].as_str().unwrap_or_default();
        if !agent.starts_with("gpuwarden/") || entry["stage"] != "ResponseComplete" {
            continue;
        }
        let method = match entry["verb"].as_str().unwrap_or_default() {
            "create" => "POST",
            "update" => "PUT",
            "patch" => "PATCH",
            "delete" => "DELETE",
            _ => continue,
        };
        let path = entry["requestURI"].as_str().unwrap_or_default().to_owned();
        let code = entry["responseStatus"]["code"].as_u64().unwrap_or_default();
        *writes.entry((method.to_owned(), path, code)).or_default() += 1;
    }
    Ok(writes)
}

/// Returns the lines of gpuwarden's audit log.
fn lines(file: &Path) -> anyhow::Result<Vec<Value>> {
    let log = std::fs::read_to_string(file)?;
    let lines = log.lines().map(serde_json::from_str);
    Ok(lines.collect::<Result<_, _>>()?)
}

/// Returns the number of each write in gpuwarden's audit log.
fn of_gpuwarden(lines: &[Value], server: &str) -> BTreeMap<Write, u32> {
    let mut writes = BTreeMap::new();
    for line in lines {
        let text = |key: &str| line[key].as_str().unwrap_or_default();
        let path = text("url").strip_prefix(server).unwrap_or_default();
        let code = line["response_code"].as_u64().unwrap_or_default();
        let write = (text("method").to_owned(), path.to_owned(), code);
        *writes.entry(write).or_default() += 1;
    }
    writes
}

#[tokio::test]
async fn every_write_of_a_drain_is_in_both_logs_with_its_reason() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let audited = |launch: testkit::Launch| {
        launch
            .option("--audit-log-base-path", directory.path())
            .env("AUDIT_ENABLED", "true")
            .env("POD_NAME", "gpuwarden-0")
    };
    plane.namespace("gpuwarden").await?;
    let mut drain = Drain::arranged(&plane, "", audited).await?;
    let [now, ..] = drain.namespaces.clone();
    drain.pod(&now, "a").await?;
    drain.fault()?;
    drain.state("drain-succeeded").await?;
    drain.condition("Drained", "True").await?;
    recovered(&drain.scene).await?;
    drain.scene.restored().await?;
    let (exit, _) = drain.scene.product.terminate().await?;
    assert!(exit.success(), "{exit}");

    let lines = lines(&directory.path().join("gpuwarden-0-audit.log"))?;
    let ours = of_gpuwarden(&lines, plane.server());
    // The API server writes its log after the answer.
    wait_for("the same writes in both logs", SOON, || async {
        let theirs = of_api_server(&plane)?;
        anyhow::ensure!(ours == theirs, "{ours:#?} and not {theirs:#?}");
        Ok(())
    })
    .await?;
    for (method, reason) in [
        ("PATCH", "quarantine"),
        ("POST", "drain"),
        ("PATCH", "release"),
        ("PATCH", "report of faults"),
    ] {
        let found = lines.iter().find(|line| {
            let is_ours = line["component"] == "run" && line["instance"] == "gpuwarden-0";
            let named = line["node"] == drain.scene.node.as_str();
            is_ours && named && line["method"] == method && line["reason"] == reason
        });
        let line = found.ok_or_else(|| anyhow::anyhow!("no {method} {reason} in {lines:#?}"))?;
        assert_eq!(
            line["session"].is_string(),
            reason != "report of faults",
            "{line}"
        );
    }
    Ok(())
}
