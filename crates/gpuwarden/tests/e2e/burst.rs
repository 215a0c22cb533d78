//! Faults on many nodes at once, with a kill of the product in the middle.
//!
//! `GPUWARDEN_SOAK_NODES` sets the number of nodes. NVSentinel, killed at 100 of 375, never
//! cordoned 201 of them.

use std::net::TcpListener;
use std::ops::RangeInclusive;
use std::time::Duration;

use anyhow::ensure;
use contract::HealthEvent;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use testkit::{ControlPlane, Launch, Product, Version, unique, wait_for};

use crate::support::send_to;

/// Nodes outside of the soak.
const NODES: usize = 60;
/// Long enough for a busy machine with hundreds of nodes.
const LIMIT: Duration = Duration::from_secs(120);
/// Label of the nodes whose cordons the API server delays.
const SLOW: &str = "burst-slow";
/// Annotation of the requests that probe whether the API server knows the webhooks.
const PROBE: &str = "burst-probe";

/// Nodes of this test. Cordons of the last half can be delayed.
struct Burst {
    name: String,
    names: Vec<String>,
    nodes: Api<Node>,
    webhooks: Api<ValidatingWebhookConfiguration>,
    /// Port of the delaying webhook, which never responds.
    silent: TcpListener,
}

fn fault(node: &str, healthy: bool) -> HealthEvent {
    HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "GpuMemWatch".into(),
        is_fatal: !healthy,
        is_healthy: healthy,
        node_name: node.into(),
        message: "the power of a row has failed".into(),
        ..HealthEvent::default()
    }
}

// === impl Burst ===

impl Burst {
    async fn new(plane: &ControlPlane, count: usize) -> anyhow::Result<Self> {
        let client = plane.client().await?;
        let name = unique("burst");
        // Names in ascending order, which is the order of the decisions.
        let names = (0..count).map(|index| format!("{name}-{index:04}"));
        let burst = Self {
            names: names.collect(),
            nodes: Api::all(client.clone()),
            webhooks: Api::all(client),
            silent: TcpListener::bind("127.0.0.1:0")?,
            name,
        };
        for (index, node) in burst.names.iter().enumerate() {
            let part = if index < count / 2 { "no" } else { &burst.name };
            let labels = json!({"burst": burst.name, SLOW: part});
            let node = json!({"metadata": {"name": node, "labels": labels}});
            let node = serde_json::from_value(node)?;
            burst.nodes.create(&PostParams::default(), &node).await?;
        }
        Ok(burst)
    }

    /// Delays each cordon and uncordon of a slow node by nine seconds: the API server calls a
    /// webhook that does not respond, and ignores the failure.
    async fn slow(&self) -> anyhow::Result<()> {
        let rules = json!([{
            "operations": ["UPDATE"], "apiGroups": [""], "apiVersions": ["v1"],
            "resources": ["nodes"],
        }]);
        let webhook = |name: &str, policy: &str, url: String, when: &str| {
            json!({
                "name": format!("{name}.{}.example", self.name),
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": policy,
                // Below the ten seconds after which the product gives up a request.
                "timeoutSeconds": 9,
                "clientConfig": {"url": url},
                "rules": rules,
                "objectSelector": {"matchLabels": {SLOW: self.name}},
                "matchConditions": [{"name": name, "expression": when}],
            })
        };
        let silent = format!("https://{}/", self.silent.local_addr()?);
        let cordons = "has(object.spec.unschedulable) != has(oldObject.spec.unschedulable)";
        let probed =
            format!("has(object.metadata.annotations) && '{PROBE}' in object.metadata.annotations");
        let configuration = serde_json::from_value(json!({
            "metadata": {"name": self.name},
            "webhooks": [
                webhook("slow", "Ignore", silent, cordons),
                webhook("probe", "Fail", "https://127.0.0.1:1/".to_owned(), &probed),
            ],
        }))?;
        let params = PostParams::default();
        self.webhooks.create(&params, &configuration).await?;
        self.until_slow(true).await
    }

    async fn fast(&self) -> anyhow::Result<()> {
        let params = DeleteParams::default();
        self.webhooks.delete(&self.name, &params).await?;
        self.until_slow(false).await
    }

    /// Waits until the API server applies the webhooks, which a probe detects: the second
    /// webhook refuses it.
    async fn until_slow(&self, slow: bool) -> anyhow::Result<()> {
        let probe = Patch::Merge(json!({"metadata": {"annotations": {PROBE: ""}}}));
        let params = PatchParams {
            dry_run: true,
            ..PatchParams::default()
        };
        let node = self.names.last().map_or("", String::as_str);
        wait_for("the API server to know of the webhook", LIMIT, || async {
            match self.nodes.patch(node, &params, &probe).await {
                Err(error) if slow && error.to_string().contains("webhook") => Ok(()),
                Ok(_) if !slow => Ok(()),
                other => Err(format!("{:?}", other.map(|_| ()))),
            }
        })
        .await
    }

    async fn cordoned(&self) -> Result<usize, String> {
        let mine = ListParams::default().labels(&format!("burst={}", self.name));
        let list = self.nodes.list(&mine).await;
        let list = list.map_err(|error| error.to_string())?;
        let cordoned = |node: &&Node| {
            let spec = node.spec.as_ref();
            spec.is_some_and(|spec| spec.unschedulable == Some(true))
        };
        Ok(list.items.iter().filter(cordoned).count())
    }

    /// Waits until the number of cordoned nodes is in this range.
    async fn reach(&self, product: &Product, wanted: RangeInclusive<usize>) -> anyhow::Result<()> {
        let what = format!("{wanted:?} nodes cordoned");
        product
            .wait_for(&what, LIMIT, || async {
                match self.cordoned().await? {
                    now if wanted.contains(&now) => Ok(()),
                    now => Err(now.to_string()),
                }
            })
            .await
    }

    /// Reports faults on all nodes, and kills the product once a third of them has changed,
    /// while the API server delays half of them. Returns the number of nodes cordoned before the
    /// restart.
    async fn killed_in_the_middle(
        &self,
        product: &mut Product,
        healthy: bool,
    ) -> anyhow::Result<usize> {
        let count = self.names.len();
        let third = count.div_ceil(3);
        self.slow().await?;
        let events = self.names.iter().map(|name| fault(name, healthy));
        send_to(product, events.collect()).await?;
        let begun = if healthy {
            0..=count - third
        } else {
            third..=count
        };
        self.reach(product, begun).await?;
        product.kill9()?;
        self.fast().await?;
        let cordoned = self.cordoned().await.map_err(anyhow::Error::msg)?;
        ensure!(
            (third..=count - third).contains(&cordoned),
            "{cordoned} of {count} is not in the middle"
        );
        product.restart().await?;
        let all = if healthy { 0 } else { count };
        self.reach(product, all..=all).await?;
        Ok(cordoned)
    }

    async fn delete(&self) -> anyhow::Result<()> {
        let params = DeleteParams::default();
        // Already deleted, unless the test has failed.
        drop(self.webhooks.delete(&self.name, &params).await);
        let mine = ListParams::default().labels(&format!("burst={}", self.name));
        self.nodes.delete_collection(&params, &mine).await?;
        Ok(())
    }
}

#[tokio::test]
async fn killed_in_the_middle_of_a_burst_it_leaves_no_node_behind() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let count = std::env::var("GPUWARDEN_SOAK_NODES").map_or(Ok(NODES), |text| text.parse())?;
    let burst = Burst::new(&plane, count).await?;
    let mut product = Launch::new()?
        .node_name(&burst.name)
        .kubeconfig(plane.kubeconfig())
        .quarantine()
        .option("--accept-nodes", "any")
        .start()
        .await?;
    let killed = async {
        let there = burst.killed_in_the_middle(&mut product, false).await?;
        let back = burst.killed_in_the_middle(&mut product, true).await?;
        anyhow::Ok((there, back))
    };
    let killed = killed.await;
    let deleted = burst.delete().await;
    let (there, back) = killed?;
    println!("of {count}, killed with {there} cordoned, and in the recovery with {back}");
    deleted
}
