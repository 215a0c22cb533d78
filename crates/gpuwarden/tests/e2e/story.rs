//! The whole story of a node, from its fault to its return: quarantined, drained, rebooted by
//! our janitor, validated, returned. Variants of it have kills (`story_killed.rs`) and failures
//! on the way (`story_failing.rs`).
//!
//! The control plane, the Job controller and the janitor are real. kwok plays the kubelet of the
//! pods, and the test plays the machine's, with its provider.

use std::sync::Arc;

use ::janitor::Provider;
use contract::keys;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Version};
use tokio_util::sync::DropGuard;

use crate::drain::Drain;
use crate::janitor::resources;
use crate::machines::{self, Played, boots};
use crate::remediation::{of_node, validations, with_validation};
use crate::requests::has;
use crate::stages::recovered;
use crate::support::{SOON, install_crds, object};

/// Timeout of pods in the mode `DeleteAfterTimeout`: longer than a test, which ends it
/// explicitly.
pub(crate) const LATE: &str = "deleteAfterTimeoutMinutes = 10\n";
const DELETE_AFTER: SignedDuration = SignedDuration::from_mins(10);
/// Longest time from that timeout to the deletion: the longest grace period, and the time for
/// the kubelet to report the pod's end.
const LAST_RESORT: SignedDuration = SignedDuration::from_mins(2);

/// A node with a product that runs all stages, and the provider of its machine.
pub(crate) struct Story {
    pub(crate) drain: Drain,
    pub(crate) provider: Arc<Played>,
    reboots: Api<DynamicObject>,
    pub(crate) jobs: Api<Job>,
    _config: tempfile::TempDir,
    _provider: DropGuard,
}

impl Story {
    /// Creates a story with these keys for its drain, and this remediation configuration;
    /// without pods.
    pub(crate) async fn new(
        plane: &ControlPlane,
        drain: &str,
        remediation: &str,
        provider: Arc<Played>,
    ) -> anyhow::Result<Self> {
        let client = plane.client().await?;
        install_crds(&client).await?;
        let config = tempfile::tempdir()?;
        let place = |name: &str| config.path().join(name);
        let (remediations, janitor) = (place("remediation.toml"), place("janitor.yaml"));
        std::fs::write(&remediations, remediation)?;
        let served = Arc::clone(&provider) as Arc<dyn Provider>;
        let guard = machines::serve(served, &janitor).await?;
        let arrange = |launch: Launch| {
            let launch = launch.arg("--remediate").arg("--janitor");
            let launch = launch.option("--remediate-config", remediations);
            launch.option("--janitor-config", janitor)
        };
        let drain = Drain::arranged(plane, drain, arrange).await?;
        let story = Self {
            drain,
            provider,
            reboots: resources(&client, "RebootNode", "rebootnodes"),
            jobs: Api::namespaced(client, "default"),
            _config: config,
            _provider: guard,
        };
        story.boots("boot-1").await?;
        Ok(story)
    }

    /// Sets the boot id of the machine.
    pub(crate) async fn boots(&self, id: &str) -> anyhow::Result<()> {
        boots(&self.drain.scene.nodes, &self.drain.scene.node, id).await
    }

    /// Completes the containers of the pod `a`, as its kubelet would report.
    pub(crate) async fn ends(&self, namespace: &str) -> anyhow::Result<()> {
        let ended = Patch::Merge(json!({"status": {"phase": "Succeeded"}}));
        let pods = self.drain.pods(namespace);
        pods.patch_status("a", &PatchParams::default(), &ended)
            .await?;
        Ok(())
    }

    /// Waits until the pod `a` is gone.
    pub(crate) async fn left(&self, namespace: &str, pod: &str) -> anyhow::Result<()> {
        let pods = self.drain.pods(namespace);
        let gone = || async {
            match pods.get_opt(pod).await.map_err(|error| error.to_string())? {
                None => Ok(()),
                Some(pod) => Err(format!("{:?}", pod.metadata)),
            }
        };
        let product = &self.drain.scene.product;
        product.wait_for("a pod that has left", SOON, gone).await
    }

    /// Lets the timeout of the mode `DeleteAfterTimeout` pass.
    pub(crate) async fn is_late(&self) -> anyhow::Result<()> {
        self.begun_earlier(DELETE_AFTER).await
    }

    /// Lets the time pass after which protected pods are deleted as well.
    pub(crate) async fn is_too_late(&self) -> anyhow::Result<()> {
        self.begun_earlier(LAST_RESORT).await
    }

    async fn begun_earlier(&self, by: SignedDuration) -> anyhow::Result<()> {
        let scene = &self.drain.scene;
        begun_earlier(&scene.nodes, &scene.node, by).await
    }

    /// Returns the requested reboots of the node, oldest first.
    pub(crate) async fn made(&self) -> anyhow::Result<Vec<Value>> {
        of_node(&self.reboots, &self.drain.scene.node).await
    }

    /// Waits until `count` reboots are requested and the last meets `is`. Returns that one.
    pub(crate) async fn reboot(
        &self,
        what: &str,
        count: usize,
        is: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let looked = || async {
            let made = self.made().await.map_err(|error| error.to_string())?;
            match made.last() {
                Some(last) if made.len() == count && is(last) => Ok(last.clone()),
                _ => Err(json!(made).to_string()),
            }
        };
        let product = &self.drain.scene.product;
        product.wait_for(what, SOON, looked).await
    }

    /// Waits until the provider has received `count` signals.
    pub(crate) async fn signalled(&self, count: usize) -> anyhow::Result<()> {
        let sent = || async {
            let signals = self.provider.signals();
            if signals.len() == count {
                Ok(())
            } else {
                Err(format!("{signals:?}"))
            }
        };
        let product = &self.drain.scene.product;
        product.wait_for("the signal", SOON, sent).await
    }

    /// Returns the Jobs that validate the node.
    pub(crate) async fn validations(&self) -> anyhow::Result<Vec<Job>> {
        validations(&self.jobs, &self.drain.scene.node).await
    }

    /// Waits until the page of the node contains these texts in this order. Returns the page.
    pub(crate) async fn page(&self, told: &[&str]) -> anyhow::Result<String> {
        let (product, node) = (&self.drain.scene.product, &self.drain.scene.node);
        let tells = || async {
            let page = product.client(["explain", node.as_str()]).await;
            let page = page.map_err(|error| error.to_string())?.stdout;
            let mut rest = page.as_str();
            for text in told {
                match rest.split_once(text) {
                    Some((_, after)) => rest = after,
                    None => return Err(format!("{text:?} is missing or out of order in\n{page}")),
                }
            }
            Ok(page)
        };
        product.wait_for("the whole story", SOON, tells).await
    }
}

/// Moves the recorded start of a drain into the past, as if the time had elapsed.
pub(crate) async fn begun_earlier(
    nodes: &Api<Node>,
    name: &str,
    by: SignedDuration,
) -> anyhow::Result<()> {
    let written = || async {
        let why = |error: anyhow::Error| error.to_string();
        let node = object(nodes, name).await.map_err(why)?;
        let text = node["metadata"]["annotations"][keys::SESSION].as_str();
        let mut session: Value = text
            .and_then(|text| serde_json::from_str(text).ok())
            .ok_or_else(|| node.to_string())?;
        let since = session["drain"]["since"].as_str().map(str::parse);
        let Some(Ok(since)) = since else {
            return Err(session.to_string());
        };
        let since: Timestamp = since;
        session["drain"]["since"] = json!(since - by);
        // The product writes to the same annotations.
        let patch = Patch::Merge(json!({"metadata": {
            "resourceVersion": node["metadata"]["resourceVersion"],
            "annotations": {keys::SESSION: session.to_string()},
        }}));
        let written = nodes.patch(name, &PatchParams::default(), &patch).await;
        written.map(drop).map_err(|error| error.to_string())
    };
    testkit::wait_for("a drain that began earlier", SOON, written).await
}

#[tokio::test]
async fn a_fault_ends_in_a_node_as_it_was_before_and_one_page_tells_it_all() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let story = Story::new(&plane, LATE, &with_validation(false), Played::new()).await?;
    let drain = &story.drain;
    let [now, late, jobs] = drain.namespaces.clone();
    drain.pods_of_all_modes().await?;
    drain.protect(&late).await?;
    drain.fault()?;
    drain.state("draining").await?;
    drain.scene.cordoned().await?;
    // Immediate: evicted. AllowCompletion: kept until it ends by itself.
    story.left(&now, "a").await?;
    drain
        .awaits(&format!(
            "{jobs}/a is waited for until it has ended, AllowCompletion"
        ))
        .await?;
    assert!(drain.is_there(&late).await? && drain.is_there(&jobs).await?);
    story.ends(&jobs).await?;
    // DeleteAfterTimeout: kept, then evicted, which its budget refuses, and finally deleted.
    drain
        .awaits(&format!("a pod to leave: {late}/a is waited for until 2"))
        .await?;
    story.is_late().await?;
    let refused = format!("pod {late}/a is not evicted");
    drain.scene.told("answer", &refused).await?;
    assert!(drain.is_there(&late).await?);
    assert!(story.made().await?.is_empty(), "its pods leave first");
    story.is_too_late().await?;
    story.left(&late, "a").await?;
    // The janitor's signal, and the boot after it.
    story.signalled(1).await?;
    let under_way = |object: &Value| has(object, "SignalSent", "True");
    let reboot = story.reboot("the signal's answer", 1, under_way).await?;
    drain.state("remediating").await?;
    story.boots("boot-2").await?;
    let done =
        |object: &Value| has(object, "AttemptComplete", "True") && has(object, "NodeReady", "True");
    story.reboot("the end of the reboot", 1, done).await?;
    drain.state("remediation-succeeded").await?;
    drain.scene.cordoned().await?;
    // Once its monitor reports the recovery, the node has to pass its validation.
    recovered(&drain.scene).await?;
    drain.scene.restored().await?;
    drain.condition("Drained", "False").await?;
    drain.condition("DrainInProgress", "False").await?;
    let validations = story.validations().await?;
    let passed = validations.iter().all(|job| {
        let status = job.status.clone().unwrap_or_default();
        status.succeeded == Some(1)
    });
    assert!(passed && validations.len() == 1, "{validations:?}");
    assert_eq!(story.provider.signals().len(), 1);
    let name = reboot["metadata"]["name"].as_str().unwrap_or_default();
    let drains = format!(
        "the drain begins: AllowCompletion: {jobs}/a; DeleteAfterTimeout: {late}/a; Immediate: {now}/a"
    );
    let page = story
        .page(&[
            "GPU has fallen off the bus",
            "fatal, recommended action RESTART_BM",
            "opens the fault SysLogsXIDError 79",
            "rule set 'default' matches",
            "quarantine: cordon",
            "quarantining -> quarantined",
            "quarantined -> draining",
            &drains,
            &refused,
            "draining -> drained",
            "drained -> remediating",
            &format!("repair 1: RebootNode {name} (RESTART_BM)"),
            &format!("RebootNode {name} exists"),
            &format!("RebootNode {name} has succeeded"),
            "closes the fault SysLogsXIDError 79",
            "the node was repaired: it is validated before it comes back",
            "Job validate-",
            "the node has passed its validation",
            "release: uncordon",
            "releasing -> idle",
            "awaited   nothing: no fault is open",
        ])
        .await?;
    // Each step is on the page once, however often it was evaluated.
    assert!(page.lines().count() < 100, "{page}");
    Ok(())
}
