//! Announced maintenance: from the notice on the Node object to the node's return, with a product that is
//! killed after every step. The test plays the cloud.

use std::time::Duration;

use contract::keys;
use jiff::{SignedDuration, Timestamp};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Version};

use crate::group::Group;
use crate::runbook::Reader;
use crate::support::{SOON, reboot};

const SCHEDULED: &str = "cloud.google.com/scheduled-maintenance-time";
const UPCOMING: &str = "node.gke.io/upcoming-maintenance";
const PERFORM: &str = "cloud.google.com/perform-maintenance";

/// The node goes out a minute before its maintenance, which may begin as soon as it is drained, and
/// returns as soon as it is over.
pub(crate) const CONFIG: &str = "
clusterName = 'test'
maintenanceEventPollIntervalSeconds = 10
triggerQuarantineWorkflowTimeLimitMinutes = 1
postMaintenanceHealthyDelayMinutes = 0
nodeReadinessTimeoutMinutes = 1
beginOnceDrained = true
";

/// A node with maintenances, and another node.
struct Cloud {
    group: Group,
    node: String,
}

impl Cloud {
    /// Changes the node as the cloud does, and kills the product.
    async fn changes(&mut self, change: Value) -> anyhow::Result<()> {
        let nodes = &self.group.nodes;
        nodes
            .patch(&self.node, &PatchParams::default(), &Patch::Merge(change))
            .await?;
        self.group.kill().await
    }

    /// Announces a maintenance that begins in this time.
    async fn announces(&mut self, within: SignedDuration) -> anyhow::Result<()> {
        let start = (Timestamp::now() + within).as_second().to_string();
        self.changes(json!({"metadata": {"labels": {SCHEDULED: start}}}))
            .await
    }

    /// Reboots the machine.
    async fn reboots(&self) -> anyhow::Result<()> {
        reboot(&self.group.nodes, &self.node).await
    }

    /// Waits until the node says that its maintenance may begin, or says so no longer.
    async fn may_begin(&self, expected: bool) -> anyhow::Result<()> {
        let is = || async {
            let node = self.group.nodes.get(&self.node).await?;
            let labels = node.metadata.labels.unwrap_or_default();
            let value = labels.get(PERFORM).map(String::as_str);
            anyhow::ensure!(value == expected.then_some("true"), "{value:?}");
            Ok(())
        };
        let what = format!("the label {PERFORM}: {expected}");
        self.group.product.wait_for(&what, SOON, is).await
    }

    /// Announces a maintenance, brings it forward, and reboots the machine.
    async fn brings_forward_and_reboots(&mut self) -> anyhow::Result<()> {
        let node = [self.node.clone()];
        self.reboots().await?;
        self.announces(SignedDuration::from_hours(2)).await?;
        self.are(&["DETECTED"]).await?;
        self.group.kill().await?;
        self.group.until_out(&[]).await?;
        // The begin is brought forward.
        self.announces(SignedDuration::from_secs(5)).await?;
        self.group.until_out(&node).await?;
        self.are(&["QUARANTINE_TRIGGERED"]).await?;
        self.may_begin(true).await?;
        self.group.kill().await?;
        tokio::time::sleep(Duration::from_secs(5)).await;
        self.reboots().await?;
        self.group.kill().await?;
        self.group.until_out(&node).await?;
        self.changes(json!({"metadata": {"labels": {SCHEDULED: null}}}))
            .await?;
        self.are(&["HEALTHY_TRIGGERED"]).await?;
        self.group.until_out(&[]).await?;
        self.may_begin(false).await?;
        self.group.kill().await?;
        self.are(&["HEALTHY_TRIGGERED"]).await?;
        self.was_out_once(&["announced", "fatal", "over"]).await
    }

    /// Announces an emergency, which waits for no time, and cancels it.
    async fn calls_off_an_emergency(&mut self) -> anyhow::Result<()> {
        let node = [self.node.clone()];
        let start = Timestamp::now() + SignedDuration::from_hours(2);
        let upcoming = |kind: &str, status: &str| {
            let notice = json!({
                "maintenanceStatus": status, "type": kind, "windowStartTime": start.to_string(),
            });
            json!({"metadata": {"annotations": {UPCOMING: notice.to_string()}}})
        };
        self.changes(upcoming("UNSCHEDULED", "PENDING")).await?;
        self.group.until_out(&node).await?;
        self.are(&["QUARANTINE_TRIGGERED"]).await?;
        self.group.kill().await?;
        self.changes(upcoming("UNSCHEDULED", "CANCELLED")).await?;
        self.are(&["CANCELLED"]).await?;
        self.group.until_out(&[]).await?;
        self.group.kill().await?;
        self.are(&["CANCELLED"]).await?;
        self.was_out_once(&["fatal", "over"]).await
    }

    /// Puts a maintenance off once it may begin: the node returns, and it may not begin any longer.
    async fn puts_off(&mut self) -> anyhow::Result<()> {
        let node = [self.node.clone()];
        self.announces(SignedDuration::from_secs(50)).await?;
        self.group.until_out(&node).await?;
        self.may_begin(true).await?;
        self.announces(SignedDuration::from_hours(2)).await?;
        self.group.until_out(&[]).await?;
        self.may_begin(false).await
    }

    /// Takes a notice back after its begin, without a trace of the maintenance: a person has to say
    /// that it is over.
    async fn loses_sight(&mut self, plane: &ControlPlane) -> anyhow::Result<()> {
        let node = [self.node.clone()];
        self.announces(SignedDuration::from_secs(5)).await?;
        self.group.until_out(&node).await?;
        tokio::time::sleep(Duration::from_secs(5)).await;
        self.changes(json!({"metadata": {"labels": {SCHEDULED: null}}}))
            .await?;
        self.are(&["ERROR"]).await?;
        self.group.kill().await?;
        self.are(&["ERROR"]).await?;
        let shown = self.group.shown(&["maintenance"]).await?;
        let mut all = shown["maintenances"].as_array().into_iter().flatten();
        let lost = all.find(|record| record["status"] == "ERROR");
        let id = lost.and_then(|record| record["eventId"].as_str());
        let mut reader = Reader::beside(&self.group.product, Some(plane))?;
        let names = [("ID", id.unwrap_or_default()), ("NODE", &self.node)];
        reader
            .runbook("GpuwardenMaintenanceUnclear", &names)
            .await?;
        self.are(&["HEALTHY_TRIGGERED"]).await?;
        self.group.until_out(&[]).await
    }

    async fn are(&self, states: &[&str]) -> anyhow::Result<()> {
        are(&self.group, &self.node, states).await
    }

    async fn was_out_once(&self, reports: &[&str]) -> anyhow::Result<()> {
        was_out_once(&self.group, &self.node, reports).await
    }
}

/// Waits until the maintenances of a node are in these states.
pub(crate) async fn are(group: &Group, node: &str, states: &[&str]) -> anyhow::Result<()> {
    let are = || async {
        let shown = group.shown(&["maintenance"]).await?;
        let all = shown["maintenances"].as_array().into_iter().flatten();
        let own = all.filter(|record| record["nodeName"] == node);
        let found: Vec<&str> = own.filter_map(|record| record["status"].as_str()).collect();
        anyhow::ensure!(found == states, "{shown}");
        Ok(())
    };
    let what = format!("the maintenances {states:?}");
    group.product.wait_for(&what, SOON * 2, are).await
}

/// Checks that a node went out once, and that these are the reports of its maintenance: `announced`, `fatal` or
/// `over`.
pub(crate) async fn was_out_once(
    group: &Group,
    node: &str,
    reports: &[&str],
) -> anyhow::Result<()> {
    let events = group.events().await?.into_iter();
    let own = events.filter(|event| event["checkName"] == keys::CHECK_CSP_MAINTENANCE);
    let own = own.filter(|event| event["nodeName"] == node);
    let told = own.map(
        |event| match (event["isHealthy"] == true, event["isFatal"] == true) {
            (true, _) => "over",
            (false, true) => "fatal",
            (false, false) => "announced",
        },
    );
    assert_eq!(told.collect::<Vec<_>>(), reports);
    assert_eq!(group.outages().await?.get(node), Some(&1));
    Ok(())
}

#[tokio::test]
async fn a_node_leaves_before_its_maintenance_and_returns_after_it() -> anyhow::Result<()> {
    // A control plane of its own: the product reads the notices on all nodes.
    let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
        return Ok(());
    };
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(file.path(), CONFIG)?;
    let arrange = |launch: Launch| {
        let launch = launch.quarantine().arg("--drain");
        launch.option("--maintenance", file.path())
    };
    let group = Group::new(&plane, 3, |_, node| node, arrange).await?;
    let [first, second, third] = [0, 1, 2].map(|number| group.names[number].clone());
    let mut cloud = Cloud { group, node: first };
    cloud.brings_forward_and_reboots().await?;
    cloud.node = second;
    cloud.calls_off_an_emergency().await?;
    cloud.node = third;
    cloud.puts_off().await?;
    cloud.loses_sight(&plane).await
}
