//! The story of a fault that is back after each of two repairs, with a product that is killed after every
//! step. The test plays the machine's reboots; Kubernetes runs the Job of the diagnostics.

use std::collections::BTreeMap;

use contract::{RecommendedAction, keys};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use serde_json::json;
use testkit::{ControlPlane, Launch, Version};

use crate::group::{Group, concluded, from, of_gpu, xid};
use crate::janitor::resources;
use crate::remediation::{condition, of_node, validations};
use crate::support::{SOON, install_crds, object};

const REBOOT: &str = r#"
[remediationActions.RESTART_BM]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "RebootNode"
scope = "Cluster"
completeConditionType = "NodeReady"
templateFileName = "reboot"
equivalenceGroup = "restart"

[remediationActions.COLLECT]
apiGroup = "batch"
version = "v1"
kind = "Job"
namespace = "default"
completeConditionType = "Complete"
templateFileName = "collect"
equivalenceGroup = "diagnostics"

[templates]
reboot = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {name: "maintenance-{{ .NodeName }}-{{ .HealthEventID }}"}
spec: {nodeName: {{ .NodeName }}}
"""
collect = """
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
metadata: {name: "collect-{{ .HealthEventID }}"}
spec:
  template:
    spec:
      nodeName: {{ .NodeName }}
      restartPolicy: Never
      tolerations: [{operator: Exists}]
      containers: [{name: collect, image: collect}]
"""
"#;

/// A node whose fault comes back, another node, and what is made for the first one.
struct Story {
    group: Group,
    node: String,
    reboots: Api<DynamicObject>,
    jobs: Api<Job>,
    _config: tempfile::NamedTempFile,
}

impl Story {
    async fn new(plane: &ControlPlane, config: &str) -> anyhow::Result<Self> {
        let client = plane.client().await?;
        install_crds(&client).await?;
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), config)?;
        let arrange = |launch: Launch| {
            let launch = launch.quarantine().arg("--drain").arg("--remediate");
            launch.option("--remediate-config", file.path())
        };
        let group = Group::new(plane, 2, |_, node| node, arrange).await?;
        Ok(Self {
            node: group.names[0].clone(),
            group,
            reboots: resources(&client, "RebootNode", "rebootnodes"),
            jobs: Api::namespaced(client, "default"),
            _config: file,
        })
    }

    async fn report(&mut self, is_healthy: bool) -> anyhow::Result<()> {
        let mut event = of_gpu(xid(&self.node, "79", !is_healthy), 0);
        if is_healthy {
            event.is_healthy = true;
            event.error_code.clear();
        } else {
            event.recommended_action = RecommendedAction::RestartBm.into();
        }
        self.group
            .send_and_kill(from(Timestamp::now(), [event]))
            .await
    }

    /// Waits until `count` reboots of the node are requested. Returns the name of the last one.
    async fn requested(&self, count: usize) -> anyhow::Result<String> {
        let are = || async {
            let made = of_node(&self.reboots, &self.node).await?;
            anyhow::ensure!(made.len() == count, "{made:?}");
            let last = made.last().map(|last| &last["metadata"]["name"]);
            Ok(last
                .and_then(|name| name.as_str())
                .unwrap_or_default()
                .to_owned())
        };
        self.group.product.wait_for("a reboot", SOON, are).await
    }

    /// Waits until the node's label has this state.
    async fn is_in(&self, state: &str) -> anyhow::Result<()> {
        let is = || async {
            let node = object(&self.group.nodes, &self.node).await?;
            let found = &node["metadata"]["labels"][keys::STATE_LABEL];
            anyhow::ensure!(found == state, "{found}");
            Ok(())
        };
        self.group.product.wait_for(state, SOON, is).await
    }

    /// Waits until the success of `count` repairs is recorded.
    async fn repaired(&self, count: usize) -> anyhow::Result<()> {
        let are = || async {
            let events = self.group.events().await?;
            let repairs = events
                .iter()
                .filter(|one| one["checkName"] == keys::CHECK_REPAIRED);
            let repairs = repairs.count();
            anyhow::ensure!(repairs == count, "{repairs}");
            Ok(())
        };
        self.group
            .product
            .wait_for("the record of a repair", SOON, are)
            .await
    }

    /// Lets the fault come, the node be rebooted, and the fault be over.
    async fn round(&mut self, number: usize) -> anyhow::Result<()> {
        let node = [self.node.clone()];
        self.report(false).await?;
        self.group.until_out(&node).await?;
        let name = self.requested(number).await?;
        self.group.kill().await?;
        let done = json!({"status": {"conditions": [condition("NodeReady", "True", "Succeeded")]}});
        let params = PatchParams::default();
        self.reboots
            .patch_status(&name, &params, &Patch::Merge(done))
            .await?;
        self.group.kill().await?;
        self.is_in("remediation-succeeded").await?;
        self.repaired(number).await?;
        self.report(true).await
    }

    /// Checks what follows once the fault is back for the second time.
    async fn is_given_up(&mut self) -> anyhow::Result<()> {
        let said = [concluded(keys::CHECK_REPAIR_NOT_WORKING, &self.node)];
        for _ in 0..2 {
            self.group.until_said(&said).await?;
            self.is_in("remediation-failed").await?;
            self.requested(2).await?;
            let awaits = || async {
                let shown = self.group.shown(&["status"]).await?;
                let mut nodes = shown["fleet"]["nodes"].as_array().into_iter().flatten();
                let own = nodes.find(|node| node["name"] == self.node.as_str());
                let awaits = own.map(|own| own["session"]["awaits"].to_string());
                let awaits = awaits.unwrap_or_default();
                anyhow::ensure!(awaits.contains("a person"), "{awaits}");
                Ok(())
            };
            self.group
                .product
                .wait_for("a person to be asked", SOON, awaits)
                .await?;
            self.group.kill().await?;
        }
        let candidate = || async {
            let ledger = self.group.shown(&["ledger"]).await?;
            let gpu = &ledger["gpus"][0];
            anyhow::ensure!(gpu["isRmaCandidate"] == true, "{ledger}");
            Ok(gpu["id"].clone())
        };
        let product = &self.group.product;
        let gpu = product.wait_for("a candidate", SOON, candidate).await?;
        assert_eq!(gpu, format!("GPU-{}-0", self.node));
        self.group.until_said(&said).await?;
        self.requested(2).await?;
        self.repaired(2).await
    }
}

#[tokio::test]
async fn what_two_repairs_did_not_help_is_diagnosed_and_a_person_is_asked() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let config = format!("diagnosticsAction = \"COLLECT\"\n{REBOOT}");
    let mut story = Story::new(&plane, &config).await?;
    for number in 1..=2 {
        story.round(number).await?;
        // The second time half a minute later.
        story.group.until_out(&[]).await?;
    }
    story.report(false).await?;
    story.is_given_up().await?;
    let jobs = validations(&story.jobs, &story.node).await?;
    let ended = jobs.iter().filter(|job| {
        let status = job.status.as_ref();
        status.is_some_and(|status| status.completion_time.is_some())
    });
    // Each time, before anything else is done.
    assert_eq!((jobs.len(), ended.count()), (3, 3), "{jobs:?}");
    let outages = BTreeMap::from([(story.node.clone(), 3)]);
    assert_eq!(story.group.outages().await?, outages);
    Ok(())
}

#[tokio::test]
async fn what_two_repairs_did_not_help_gets_no_third_while_the_node_is_still_out()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut story = Story::new(&plane, REBOOT).await?;
    story.round(1).await?;
    story.group.until_out(&[]).await?;
    story.round(2).await?;
    // The node waits to return, drained as it is: nothing but the analysis is in the way of a repair.
    story.report(false).await?;
    story.is_given_up().await?;
    let outages = story.group.outages().await?;
    // Killed before it had saved the first return, the product does not let the node wait for the second.
    assert!(
        matches!(outages.get(&story.node), Some(2 | 3)),
        "{outages:?}"
    );
    Ok(())
}
