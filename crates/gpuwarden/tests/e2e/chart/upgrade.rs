//! Upgrades of the chart while a node is out: to a newer chart and back, and to values that take a
//! power away.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use kube::Api;
use serde_json::Value;
use testkit::{ControlPlane, wait_for};

use super::least::{nothing_refused, refused_to, requested};
use super::release::{Release, in_namespace, state};
use super::{Helm, chart};
use crate::gangs::apply;
use crate::machines::boots;
use crate::support::{SOON, condition, event, recovery, send_to, shape};

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
        self.has_state(wanted).await?;
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

    // The journal is written with a delay.
    let told = || async {
        let story = release
            .controller
            .client(["explain", "gpu-1"])
            .await?
            .stdout;
        let mut rest = story.as_str();
        for told in [
            "opens the fault GpuMemWatch",
            "quarantine: cordon",
            "quarantined -> draining",
            "draining -> quarantined",
            "release: uncordon",
        ] {
            let (_, after) = rest
                .split_once(told)
                .with_context(|| format!("{told:?} is missing or out of order in\n{story}"))?;
            rest = after;
        }
        anyhow::Ok(story)
    };
    let story = wait_for("the story of the node", SOON, told).await?;
    assert_eq!(story.matches("quarantine: cordon").count(), 1);
    let pods = release.plane.kubectl(["get", "pods", "-o", "name"]).await?;
    assert_eq!(pods, "pod/worker\n");
    nothing_refused(&release.plane, "gpuwarden-controller")?;
    nothing_refused(&release.plane, "gpuwarden-agent")
}

/// How pods leave: those of the namespace `default` at once, all others when they have ended.
const MODES: &str = "
[[userNamespaces]]
name = \"default\"
mode = \"Immediate\"

[[userNamespaces]]
name = \"*\"
mode = \"AllowCompletion\"
";
/// Keeps the pods with its label.
const BUDGET: &str = "
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: keep}
spec:
  minAvailable: 1
  selector: {matchLabels: {app: kept}}
";

/// Evictions from the namespace that is drained at once.
const EVICTIONS: &str = "create pods/eviction in default";

/// Creates a pod that its budget keeps, and one that has not ended. The budget has to count its pod
/// first: Kubernetes evicts a pod that does not run yet whatever its budget says.
async fn lasting_pods(plane: &ControlPlane) -> anyhow::Result<()> {
    let client = plane.client().await?;
    let kept = testkit::pod("default", "kept").label("app", "kept");
    kept.on("gpu-1").create(&client).await?;
    plane.namespace("jobs").await?;
    let job = testkit::pod("jobs", "job").on("gpu-1");
    job.create(&client).await?;
    apply(plane, BUDGET).await?;
    wait_for("a budget that counts its pod", SOON, || async {
        let healthy = "jsonpath={.status.currentHealthy}";
        match plane.kubectl(["get", "pdb", "keep", "-o", healthy]).await {
            Ok(healthy) if healthy == "1" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

#[tokio::test]
async fn a_drain_that_is_taken_away_stops_and_the_node_returns_as_it_was() -> anyhow::Result<()> {
    let modes = tempfile::NamedTempFile::new()?;
    std::fs::write(modes.path(), MODES)?;
    let modes = format!("drain.config={}", modes.path().display());
    let more = ["--set-file", &modes];
    let Some(mut release) = Release::start("127.77.1.5", &["repair"], &more).await? else {
        return Ok(());
    };
    let helm = Helm::of(Some(&release.plane)).context("Helm, as above")?;
    let before = shape(&release.node().await?);
    lasting_pods(&release.plane).await?;
    send_to(&release.agent, vec![event("gpu-1", "0")]).await?;
    release.has_state("draining").await?;
    let session = identity(&release.node().await?)?;
    let evictions = || requested(&release.plane, "gpuwarden-controller", EVICTIONS);
    wait_for("an eviction that the budget refuses", SOON, || async {
        match evictions() {
            Ok(0) => Err("no eviction".to_owned()),
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    })
    .await?;

    release.ends().await?;
    helm.deploy(&["quarantine"], &[]).await?;
    // The last ones may come late into the audit log.
    let before_upgrade = requested(&release.plane, "gpuwarden-controller", EVICTIONS)?;
    release.starts_again().await?;
    release.still(&session, "quarantined").await?;
    let no_drain = |node: &Value| condition(node, "DrainInProgress")["status"] == "False";
    release.node_is("without a drain", no_drain).await?;
    release.returned(&before).await?;
    for (namespace, pod) in [("default", "kept"), ("jobs", "job")] {
        let ends = "jsonpath={.status.phase} {.metadata.deletionTimestamp}";
        let get = ["-n", namespace, "get", "pod", pod, "-o", ends];
        assert_eq!(release.plane.kubectl(get).await?, "Running ", "{pod}");
    }
    let evictions = requested(&release.plane, "gpuwarden-controller", EVICTIONS)?;
    assert_eq!(evictions, before_upgrade);
    nothing_refused(&release.plane, "gpuwarden-controller")
}

/// Waits until a field of all `RebootNode`s has this value.
async fn reboots(plane: &ControlPlane, is: &str, path: &str) -> anyhow::Result<()> {
    wait_for("the state of the reboot", SOON, || async {
        match plane.kubectl(["get", "rebootnodes", "-o", path]).await {
            Ok(found) if found == is => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

/// The way back of docs/install.md waits until no repair is under way: this is why.
#[tokio::test]
async fn a_repair_that_is_taken_away_in_the_middle_is_not_seen_to_its_end_and_the_node_returns()
-> anyhow::Result<()> {
    let Some(mut release) = Release::start("127.77.1.6", &["repair"], &[]).await? else {
        return Ok(());
    };
    let helm = Helm::of(Some(&release.plane)).context("Helm, as above")?;
    let nodes = Api::all(release.plane.client().await?);
    boots(&nodes, "gpu-1", "boot-1").await?;
    let before = shape(&release.node().await?);
    send_to(&release.agent, vec![event("gpu-1", "0")]).await?;
    let sent = "jsonpath={.items[*].status.conditions[?(@.type=='SignalSent')].status}";
    reboots(&release.plane, "True", sent).await?;
    let session = identity(&release.node().await?)?;

    release.ends().await?;
    helm.deploy(&["quarantine"], &[]).await?;
    release.starts_again().await?;
    release.still(&session, "remediating").await?;
    let told = || async {
        let story = release.controller.client(["explain", "gpu-1"]).await;
        let story = story.map_err(|error| error.to_string())?.stdout;
        let mut lines = story.lines().filter(|line| line.starts_with("awaited"));
        let is = lines.any(|line| line.contains("cannot list resource \"rebootnodes\""));
        is.then_some(()).ok_or(story)
    };
    wait_for("the reason why the reboot is not seen", SOON, told).await?;
    release.returned(&before).await?;

    // The janitor of the next upgrade sees the reboot to its end, and begins no other.
    release.ends().await?;
    helm.deploy(&["repair"], &[]).await?;
    release.starts_again().await?;
    boots(&nodes, "gpu-1", "boot-2").await?;
    let ended = "jsonpath={.items[*].status.conditions[?(@.type=='AttemptComplete')].reason}";
    reboots(&release.plane, "Succeeded", ended).await?;
    assert_eq!(shape(&release.node().await?), before);
    let refused = refused_to(&release.plane, "gpuwarden-controller")?;
    let of_reboots = "rebootnodes janitor.dgxc.nvidia.com";
    let expected = ["get", "list"].map(|verb| format!("{verb} {of_reboots}"));
    let known = |one: &String| expected.iter().any(|it| one.starts_with(it));
    assert!(refused.iter().all(known), "{refused:?}");
    Ok(())
}
