//! The pods of a node that is out of service leave as their namespaces wish.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Version, unique};

use crate::support::{SOON, Scene, xid};

const STATE: &str = "dgxc.nvidia.com/nvsentinel-state";

/// A node with pods in three namespaces, one for each mode, and the product that drains it.
struct Drain {
    scene: Scene,
    client: kube::Client,
    /// Namespaces of the modes `Immediate`, `DeleteAfterTimeout` and `AllowCompletion`.
    namespaces: [String; 3],
    _config: tempfile::TempDir,
}

impl Drain {
    async fn new(plane: &ControlPlane) -> anyhow::Result<Self> {
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
            format!("evictionTimeoutInSeconds = \"5\"\n{}", entries.concat()),
        )?;
        let drained =
            |launch: testkit::Launch| launch.arg("--drain").option("--drain-config", &path);
        let scene = Scene::new(plane, |node| node, drained).await?;
        let client = plane.client().await?;
        let drain = Self {
            scene,
            client,
            namespaces,
            _config: config,
        };
        for namespace in &drain.namespaces {
            drain.pod(namespace, "a").await?;
        }
        Ok(drain)
    }

    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Makes a pod on the node, and waits until it runs.
    async fn pod(&self, namespace: &str, name: &str) -> anyhow::Result<()> {
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

    /// Has a budget keep the pod `a` of a namespace.
    async fn protect(&self, namespace: &str) -> anyhow::Result<Api<PodDisruptionBudget>> {
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

    fn fault(&self) -> anyhow::Result<()> {
        let line = xid(79, "GPU has fallen off the bus.");
        self.scene.product.append_kernel_log(&line)
    }

    async fn state(&self, wanted: &str) -> anyhow::Result<()> {
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
    async fn awaits(&self, text: &str) -> anyhow::Result<()> {
        let is = |session: &Value| {
            session["awaits"]
                .as_str()
                .is_some_and(|it| it.contains(text))
        };
        self.scene.session(text, is).await
    }

    async fn is_there(&self, namespace: &str) -> anyhow::Result<bool> {
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
    drain.awaits("disruption budget").await?;
    drain
        .awaits(&format!(
            "{jobs}/a is waited for until it has ended, AllowCompletion"
        ))
        .await?;
    drain
        .awaits(&format!("{late}/a is waited for until 2"))
        .await?;
    drain.scene.product.restart().await?;
    drain.awaits("disruption budget").await?;
    for namespace in [&now, &late, &jobs] {
        assert!(drain.is_there(namespace).await?, "{namespace}");
    }
    // The budget lets go; the others end by themselves.
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
    // The label is seen before the answer to the patch that has set it.
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
    drain
        .scene
        .product
        .client(["inject", "recovery"])
        .await?
        .expect(0)?;
    drain.scene.restored().await
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
    let ended = |session: &Value| session.is_null();
    drain.scene.session("a session that ends", ended).await?;
    // Nothing is in the way of an eviction any more.
    budgets.delete("keep", &DeleteParams::default()).await?;
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    for namespace in [&now, &jobs] {
        assert!(drain.is_there(namespace).await?, "{namespace}");
    }
    Ok(())
}
