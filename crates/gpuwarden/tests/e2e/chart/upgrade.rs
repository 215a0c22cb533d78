//! Upgrades of the chart while a node is out: to a newer chart and back.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::chart;
use super::least::nothing_refused;
use super::release::{Release, in_namespace};
use crate::gangs::apply;
use crate::support::{event, recovery, send_to, shape};

/// A volume for the claim of the controller.
const VOLUME: &str = "
apiVersion: v1
kind: PersistentVolume
metadata: {name: history}
spec:
  accessModes: [ReadWriteOnce]
  capacity: {storage: 10Gi}
  hostPath: {path: /nonexistent}
";

/// Makes an older chart: no chart was published before this one. It differs in its version, which
/// labels all objects, and in a setting of the controller.
fn older(at: &Path) -> anyhow::Result<String> {
    let copied = Command::new("cp").arg("-r").arg(chart()).arg(at).status()?;
    ensure!(copied.success(), "cp: {copied}");
    let chart = at.join("gpuwarden");
    for (file, now, before) in [
        ("Chart.yaml", "ersion: 0.1.0", "ersion: 0.0.9"),
        ("values.yaml", "retention: 30d", "retention: 20d"),
    ] {
        let path = chart.join(file);
        let text = std::fs::read_to_string(&path)?;
        ensure!(text.contains(now), "{file} has no {now:?}");
        std::fs::write(&path, text.replace(now, before))?;
    }
    Ok(chart.display().to_string())
}

/// Returns what says of a node's session that it is the same one: its id, its begin and the ids of
/// its events.
fn identity(node: &Value) -> anyhow::Result<(Value, Value, Vec<Value>)> {
    let annotations = &node["metadata"]["annotations"];
    let read = |key: &str| -> anyhow::Result<Value> {
        let text = annotations[key].as_str().context("no session")?;
        Ok(serde_json::from_str(text)?)
    };
    let session = read("gpuwarden.dev/session")?;
    let events = read("quarantineHealthEvent")?;
    let events = events.as_array().into_iter().flatten();
    let ids = events.map(|event| event["id"].clone()).collect();
    Ok((session["id"].clone(), session["since"].clone(), ids))
}

fn state(node: &Value) -> &Value {
    &node["metadata"]["labels"]["dgxc.nvidia.com/nvsentinel-state"]
}

impl Release {
    /// Reports a fatal fault of the node, and waits until it is out.
    async fn quarantined(&self) -> anyhow::Result<()> {
        send_to(&self.agent, vec![event("gpu-1", "0")]).await?;
        self.node_is("quarantined", |node| {
            node["spec"]["unschedulable"] == true && state(node) == "quarantined"
        })
        .await
    }

    /// Waits until the node has this state, still or again in the session `of`.
    async fn still(&self, of: &(Value, Value, Vec<Value>), wanted: &str) -> anyhow::Result<()> {
        self.node_is(wanted, |node| state(node) == wanted).await?;
        assert_eq!(identity(&self.node().await?)?, *of);
        Ok(())
    }

    /// Reports the end of the fault, and waits until the node is as before.
    async fn returned(&self, before: &Value) -> anyhow::Result<()> {
        send_to(&self.agent, vec![recovery("gpu-1", "0")]).await?;
        self.node_is("as before", |node| shape(node) == *before)
            .await
    }
}

#[tokio::test]
async fn a_session_outlives_an_upgrade_and_a_rollback_in_the_middle_of_its_drain()
-> anyhow::Result<()> {
    let Some((plane, helm)) = Release::cluster().await? else {
        return Ok(());
    };
    apply(&plane, VOLUME).await?;
    let directory = tempfile::tempdir()?;
    let older = older(directory.path())?;
    // The story is to be kept, too.
    let keeps = "controller.replicas=1,controller.persistence.enabled=true";
    helm.deploy_from(&older, &["quarantine"], &["--set", keeps])
        .await?;
    let mut release = Release::of(plane, "127.77.1.4").await?;
    let before = shape(&release.node().await?);
    let client = release.plane.client().await?;
    let worker = testkit::pod("default", "worker").on("gpu-1");
    worker.create(&client).await?;
    release.quarantined().await?;
    let session = identity(&release.node().await?)?;

    release.ends().await?;
    helm.deploy(&["repair"], &["--set", keeps]).await?;
    release.starts_again().await?;
    // The pod is waited for until it has ended.
    release.still(&session, "draining").await?;

    release.ends().await?;
    let back = ["rollback", "gpuwarden", "1", "--wait"];
    helm.run(&in_namespace(back)).await?;
    release.starts_again().await?;
    release.still(&session, "quarantined").await?;
    release.returned(&before).await?;

    let story = release.controller.client(["explain", "gpu-1"]).await?;
    let mut rest = story.stdout.as_str();
    for told in [
        "opens the fault GpuMemWatch",
        "quarantine: cordon",
        "quarantined -> draining",
        "draining -> quarantined",
        "release: uncordon",
    ] {
        let (_, after) = rest
            .split_once(told)
            .with_context(|| format!("{told:?} is missing or out of order in\n{}", story.stdout))?;
        rest = after;
    }
    assert_eq!(story.stdout.matches("quarantine: cordon").count(), 1);
    let pods = release.plane.kubectl(["get", "pods", "-o", "name"]).await?;
    assert_eq!(pods, "pod/worker\n");
    nothing_refused(&release.plane, "gpuwarden-controller")?;
    nothing_refused(&release.plane, "gpuwarden-agent")
}
