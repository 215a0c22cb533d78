//! Drain of a quarantined node, according to the modes of the pods' namespaces.

use contract::keys::POD_DEVICES;
use contract::{BehaviourOverrides, Entity, HealthEvent, RecommendedAction};
use k8s_openapi::api::core::v1::{Event as CoreEvent, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Version, unique};

use crate::stages::recovered;
use crate::support::{SOON, Scene, event, send_to, xid};

const STATE: &str = "dgxc.nvidia.com/nvsentinel-state";

/// A node with pods in three namespaces, one per mode, and the product that drains it.
pub(crate) struct Drain {
    pub(crate) scene: Scene,
    pub(crate) client: kube::Client,
    /// Namespaces of the modes `Immediate`, `DeleteAfterTimeout` and `AllowCompletion`.
    pub(crate) namespaces: [String; 3],
    config: tempfile::TempDir,
    pub(crate) kubeconfig: std::path::PathBuf,
}

impl Drain {
    async fn new(plane: &ControlPlane) -> anyhow::Result<Self> {
        Self::with(plane, "").await
    }

    /// Arranges a drain with more keys in the configuration.
    async fn with(plane: &ControlPlane, keys: &str) -> anyhow::Result<Self> {
        let drain = Self::arranged(plane, keys, |launch| launch).await?;
        drain.pods_of_all_modes().await?;
        Ok(drain)
    }

    /// Arranges a drain without pods, with more options of the product.
    pub(crate) async fn arranged(
        plane: &ControlPlane,
        keys: &str,
        arrange: impl FnOnce(Launch) -> Launch,
    ) -> anyhow::Result<Self> {
        let namespaces = ["now", "late", "jobs"].map(unique);
        for namespace in &namespaces {
            plane.namespace(namespace).await?;
        }
        let [now, late, jobs] = &namespaces;
        let config = tempfile::tempdir()?;
        let path = config.path().join("drain.toml");
        let entry = |name: &str, mode: &str| {
            format!("[[userNamespaces]]\nname = \"{name}\"\nmode = \"{mode}\"\n")
        };
        let entries = [
            entry(now, "Immediate"),
            entry(late, "DeleteAfterTimeout"),
            entry(jobs, "AllowCompletion"),
        ];
        std::fs::write(
            &path,
            format!(
                "evictionTimeoutInSeconds = \"5\"\n{keys}{}",
                entries.concat()
            ),
        )?;
        let drained =
            |launch: Launch| arrange(launch.arg("--drain").option("--drain-config", &path));
        let scene = Scene::new(plane, |node| node, drained).await?;
        let client = plane.client().await?;
        Ok(Self {
            scene,
            client,
            namespaces,
            config,
            kubeconfig: plane.kubeconfig().into(),
        })
    }

    /// Creates the pod `a` in each namespace.
    pub(crate) async fn pods_of_all_modes(&self) -> anyhow::Result<()> {
        for namespace in &self.namespaces {
            self.pod(namespace, "a").await?;
        }
        Ok(())
    }

    pub(crate) fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Creates a pod on the node, and waits until it runs.
    pub(crate) async fn pod(&self, namespace: &str, name: &str) -> anyhow::Result<()> {
        let pod = testkit::pod(namespace, name)
            .label("app", name)
            .on(&self.scene.node);
        pod.create(&self.client).await?;
        let pods = self.pods(namespace);
        let runs = || async {
            let pod = pods.get(name).await.map_err(|error| error.to_string())?;
            let status = pod.status.unwrap_or_default();
            let ready = status
                .conditions
                .iter()
                .flatten()
                .any(|one| one.type_ == "Ready" && one.status == "True");
            if ready {
                Ok(())
            } else {
                Err(format!("{status:?}"))
            }
        };
        self.scene
            .product
            .wait_for("a pod that runs", SOON, runs)
            .await
    }

    /// Reports, as the node's agent would, that a pod holds this GPU.
    pub(crate) async fn holds(&self, namespace: &str, pod: &str, gpu: &str) -> anyhow::Result<()> {
        let devices = json!({"devices": {"nvidia.com/gpu": [gpu]}}).to_string();
        let patch = Patch::Merge(json!({"metadata": {"annotations": {POD_DEVICES: devices}}}));
        let pods = self.pods(namespace);
        pods.patch(pod, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Protects the pod `a` of a namespace with a disruption budget.
    pub(crate) async fn protect(
        &self,
        namespace: &str,
    ) -> anyhow::Result<Api<PodDisruptionBudget>> {
        let budgets: Api<PodDisruptionBudget> = Api::namespaced(self.client.clone(), namespace);
        let budget = serde_json::from_value(json!({
            "metadata": {"name": "keep"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "a"}}},
        }))?;
        budgets.create(&PostParams::default(), &budget).await?;
        let seen = || async {
            let budget = budgets
                .get("keep")
                .await
                .map_err(|error| error.to_string())?;
            match budget.status {
                Some(status) if status.current_healthy == Some(1) => Ok(()),
                status => Err(format!("{status:?}")),
            }
        };
        self.scene
            .product
            .wait_for("a budget that counts its pod", SOON, seen)
            .await?;
        Ok(budgets)
    }

    pub(crate) fn fault(&self) -> anyhow::Result<()> {
        let line = xid(79, "GPU has fallen off the bus.");
        self.scene.product.append_kernel_log(&line)
    }

    pub(crate) async fn state(&self, wanted: &str) -> anyhow::Result<()> {
        let what = format!("the state {wanted}");
        let is = |node: &Value| {
            let state = &node["metadata"]["labels"][STATE];
            if state == wanted {
                Ok(())
            } else {
                Err(state.to_string())
            }
        };
        self.scene.node_until(&what, is).await
    }

    /// Waits until the session awaits `text`.
    pub(crate) async fn awaits(&self, text: &str) -> anyhow::Result<()> {
        let is = |session: &Value| {
            session["awaits"]
                .as_str()
                .is_some_and(|it| it.contains(text))
        };
        self.scene.session(text, is).await
    }

    /// Waits until a condition of the node has this status.
    pub(crate) async fn condition(&self, kind: &str, status: &str) -> anyhow::Result<()> {
        let what = format!("the condition {kind} {status}");
        let is = |node: &Value| {
            let conditions = node["status"]["conditions"].as_array();
            let mut conditions = conditions.into_iter().flatten();
            let found = conditions.find(|one| one["type"] == kind);
            match found {
                Some(one) if one["status"] == status && one["reason"] == "GpuwardenDrain" => Ok(()),
                found => Err(format!("{found:?}")),
            }
        };
        self.scene.node_until(&what, is).await
    }

    /// Waits until the record of the node's first event has this drain status.
    async fn recorded(&self, status: &str) -> anyhow::Result<()> {
        self.recorded_of(0, status).await
    }

    /// Waits until the record of an event, by index, has this drain status.
    async fn recorded_of(&self, event: usize, status: &str) -> anyhow::Result<()> {
        let says = || async {
            let output = self.scene.product.client(["events", "-o", "json"]).await;
            let output = output.map_err(|error| error.to_string())?;
            let events: Value =
                serde_json::from_str(&output.stdout).map_err(|error| error.to_string())?;
            let found = &events[event]["healtheventstatus"]["userpodsevictionstatus"];
            if found["status"] == status {
                Ok(())
            } else {
                Err(found.to_string())
            }
        };
        let what = format!("the record {status}");
        self.scene.product.wait_for(&what, SOON, says).await
    }

    /// Returns the plan of the node's drain.
    async fn plan(&self) -> anyhow::Result<Value> {
        let kubeconfig = self.kubeconfig.display().to_string();
        let config = self.config.path().join("drain.toml").display().to_string();
        let args = [
            "drain",
            "--plan",
            &self.scene.node,
            "--kubeconfig",
            &kubeconfig,
        ];
        let more = ["--drain-config", &config, "-o", "json"];
        let output = self
            .scene
            .product
            .command(args.into_iter().chain(more))
            .await?;
        Ok(serde_json::from_str(output.expect(0)?)?)
    }

    pub(crate) async fn is_there(&self, namespace: &str) -> anyhow::Result<bool> {
        let pod = self.pods(namespace).get_opt("a").await?;
        Ok(pod.is_some_and(|pod| pod.metadata.deletion_timestamp.is_none()))
    }
}

#[tokio::test]
async fn pods_leave_by_three_modes_through_kills_and_the_node_comes_back() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut drain = Drain::new(&plane).await?;
    let [now, late, jobs] = drain.namespaces.clone();
    let budgets = drain.protect(&now).await?;
    drain.fault()?;
    drain.state("draining").await?;
    drain.recorded("InProgress").await?;
    drain.condition("DrainInProgress", "True").await?;
    drain.awaits("disruption budget").await?;
    drain
        .awaits(&format!(
            "{jobs}/a is waited for until it has ended, AllowCompletion"
        ))
        .await?;
    drain
        .awaits(&format!("{late}/a is waited for until 2"))
        .await?;
    let events: Api<CoreEvent> = Api::namespaced(drain.client.clone(), "default");
    let of_node = format!("involvedObject.name={}", drain.scene.node);
    let of_node = ListParams::default().fields(&of_node);
    let waits = || async {
        let list = events.list(&of_node).await;
        let list = list.map_err(|error| error.to_string())?.items;
        let said = |reason: &str, pod: &str| {
            list.iter().any(|event| {
                let is = event.reason.as_deref() == Some(reason);
                let message = event.message.as_deref().unwrap_or_default();
                is && message.contains(&format!("[{pod}/a]"))
            })
        };
        let both = said("AwaitingPodCompletion", &jobs) && said("WaitingBeforeForceDelete", &late);
        both.then_some(()).ok_or_else(|| format!("{list:?}"))
    };
    let product = &drain.scene.product;
    product
        .wait_for("Events of who is waited for", SOON, waits)
        .await?;
    drain.scene.product.restart().await?;
    drain.awaits("disruption budget").await?;
    for namespace in [&now, &late, &jobs] {
        assert!(drain.is_there(namespace).await?, "{namespace}");
    }
    // The budget is removed. The other pods end by themselves.
    budgets.delete("keep", &DeleteParams::default()).await?;
    drain.awaits("2 pods to leave").await?;
    drain.scene.product.restart().await?;
    for namespace in [&late, &jobs] {
        assert!(drain.is_there(namespace).await?, "{namespace}");
        drain
            .pods(namespace)
            .delete("a", &DeleteParams::default())
            .await?;
    }
    drain.state("drain-succeeded").await?;
    drain.recorded("Succeeded").await?;
    drain.condition("DrainInProgress", "False").await?;
    drain.condition("Drained", "True").await?;
    // The watch may show the label before the response to its patch arrives.
    let told = || async {
        let explain = ["explain", drain.scene.node.as_str()];
        let story = drain.scene.product.client(explain).await;
        let story = story.map_err(|error| error.to_string())?.stdout;
        let texts = ["the drain begins: ", "draining -> drained"];
        if texts.iter().all(|text| story.contains(text)) {
            Ok(())
        } else {
            Err(story)
        }
    };
    drain
        .scene
        .product
        .wait_for("the story of the drain", SOON, told)
        .await?;
    recovered(&drain.scene).await?;
    drain.scene.restored().await?;
    drain.condition("Drained", "False").await
}

#[tokio::test]
async fn a_plan_says_what_a_drain_would_do_and_does_nothing() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let drain = Drain::new(&plane).await?;
    let [now, late, jobs] = drain.namespaces.clone();
    drain.protect(&now).await?;
    let plan = drain.plan().await?;
    assert_eq!(plan["leaving"], 3, "{plan}");
    let of = |namespace: &str| {
        let pods = plan["pods"].as_array().into_iter().flatten();
        let mut pods = pods.filter(|pod| pod["namespace"] == namespace);
        pods.next().cloned().unwrap_or_default()
    };
    assert_eq!(of(&now)["what"], "is evicted, with 1 s to end");
    let held = of(&now)["heldBy"].as_str().unwrap_or_default().to_owned();
    assert!(held.contains("disruption budget"), "{plan}");
    assert_eq!(of(&jobs)["mode"], "AllowCompletion");
    assert!(
        of(&late)["what"]
            .as_str()
            .is_some_and(|what| what.starts_with("is waited for until 2"))
    );
    for namespace in [&now, &late, &jobs] {
        assert!(drain.is_there(namespace).await?, "{namespace}");
    }
    // The plan of a drain in progress shows its start.
    drain.fault()?;
    drain.state("draining").await?;
    assert!(drain.plan().await?["since"].is_string());
    Ok(())
}

#[tokio::test]
async fn of_a_gpu_that_is_to_be_reset_only_its_pods_leave() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let drain = Drain::with(&plane, "partialDrainEnabled = true\n").await?;
    let [now, ..] = drain.namespaces.clone();
    drain.pod(&now, "b").await?;
    for (name, gpu) in [("a", "GPU-1"), ("b", "GPU-0")] {
        drain.holds(&now, name, gpu).await?;
    }
    let event = HealthEvent {
        recommended_action: RecommendedAction::ComponentReset.into(),
        entities_impacted: vec![Entity {
            entity_type: "GPU_UUID".to_owned(),
            entity_value: "GPU-0".to_owned(),
        }],
        ..event(&drain.scene.node, "0")
    };
    send_to(&drain.scene.product, vec![event]).await?;
    drain.state("drain-succeeded").await?;
    drain.recorded("Succeeded").await?;
    assert!(drain.is_there(&now).await?);
    assert!(drain.pods(&now).get_opt("b").await?.is_none());
    Ok(())
}

#[tokio::test]
async fn an_uncordon_half_way_stops_the_drain() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let drain = Drain::new(&plane).await?;
    let [now, _, jobs] = drain.namespaces.clone();
    let budgets = drain.protect(&now).await?;
    drain.fault()?;
    drain.awaits("disruption budget").await?;
    drain
        .scene
        .patch(json!({"spec": {"unschedulable": null}}))
        .await?;
    drain.recorded("Cancelled").await?;
    drain.condition("DrainInProgress", "False").await?;
    let ended = |session: &Value| session.is_null();
    drain.scene.session("a session that ends", ended).await?;
    // Without the budget nothing blocks an eviction. The node is quarantined again, for an event
    // whose sender asks to keep the pods.
    budgets.delete("keep", &DeleteParams::default()).await?;
    let spares = HealthEvent {
        drain_overrides: Some(BehaviourOverrides {
            force: false,
            skip: true,
        }),
        ..event(&drain.scene.node, "3")
    };
    send_to(&drain.scene.product, vec![spares]).await?;
    drain.scene.cordoned().await?;
    drain.recorded_of(1, "AlreadyDrained").await?;
    for namespace in [&now, &jobs] {
        assert!(drain.is_there(namespace).await?, "{namespace}");
    }
    Ok(())
}
