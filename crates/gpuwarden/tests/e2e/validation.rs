//! `ValidationRequest`s in a cluster with two controllers, one of them the leader. Kubernetes
//! runs the Jobs, on nodes that kwok keeps alive.

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Private, Product, Version, unique};

use crate::remediation::resume;
use crate::support::{SOON, install_crds, object};

/// Duration of a Lease, plus a poll of the standby, plus the delay of a very busy machine.
const EXPIRY: Duration = Duration::from_secs(15 + 2 + SOON.as_secs());
const STATE: &str = "nvsentinel.nvidia.com/validation-state";

struct Tests {
    plane: Private,
    requests: Api<DynamicObject>,
    nodes: Api<Node>,
    jobs: Api<Job>,
    directory: tempfile::TempDir,
}

impl Tests {
    async fn new() -> anyhow::Result<Option<Self>> {
        let Some(plane) = ControlPlane::private(Version::V1_37, Options::default()).await? else {
            return Ok(None);
        };
        let client = plane.client().await?;
        install_crds(&client).await?;
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let namespace = serde_json::from_value(json!({"metadata": {"name": "gpuwarden"}}))?;
        namespaces
            .create(&PostParams::default(), &namespace)
            .await?;
        let directory = tempfile::tempdir()?;
        // The published example, with suspended Jobs, on nodes without GPUs.
        let example = "../../examples/validation/validation.yaml";
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join(example);
        let text = std::fs::read_to_string(example)?;
        let text = text.replace("backoffLimit: 0", "backoffLimit: 0\n      suspend: true");
        let text = text.replace("limits: {nvidia.com/gpu: 8}", "limits: {}");
        std::fs::write(directory.path().join("validation.yaml"), text)?;
        std::fs::write(directory.path().join("janitor.yaml"), "{}\n")?;
        let kind = GroupVersionKind::gvk("nvsentinel.nvidia.com", "v1alpha1", "ValidationRequest");
        let kind = ApiResource::from_gvk_with_plural(&kind, "validationrequests");
        Ok(Some(Self {
            requests: Api::all_with(client.clone(), &kind),
            nodes: Api::all(client.clone()),
            jobs: Api::namespaced(client, "gpuwarden"),
            plane,
            directory,
        }))
    }

    /// Starts a controller with the janitor only.
    async fn controller(&self) -> anyhow::Result<Product> {
        let path = |name: &str| self.directory.path().join(name);
        Launch::controller()?
            .kubeconfig(self.plane.kubeconfig())
            .arg("--grpc-insecure")
            .option("--grpc-listen", "127.0.0.1:0")
            .arg("--janitor")
            .option("--janitor-config", path("janitor.yaml"))
            .option("--validation-config", path("validation.yaml"))
            .start()
            .await
    }

    /// Creates a cordoned node with GPUs, or with none yet.
    async fn node(&self, gpus: &str) -> anyhow::Result<String> {
        let name = unique("tested");
        let node = testkit::node(&name);
        node.create(&self.plane.client().await?).await?;
        let cordon = Patch::Merge(json!({"spec": {"unschedulable": true}}));
        let params = PatchParams::default();
        self.nodes.patch(&name, &params, &cordon).await?;
        self.allocates(&name, gpus).await?;
        Ok(name)
    }

    /// Sets the allocatable GPUs of a node, as its kubelet would.
    async fn allocates(&self, node: &str, gpus: &str) -> anyhow::Result<()> {
        let status = json!({"status": {"allocatable": {"nvidia.com/gpu": gpus},
            "capacity": {"nvidia.com/gpu": gpus}}});
        let params = PatchParams::default();
        self.nodes
            .patch_status(node, &params, &Patch::Merge(status))
            .await?;
        Ok(())
    }

    fn request(name: &str, spec: &Value) -> anyhow::Result<DynamicObject> {
        Ok(serde_json::from_value(json!({
            "apiVersion": "nvsentinel.nvidia.com/v1alpha1", "kind": "ValidationRequest",
            "metadata": {"name": name}, "spec": spec,
        }))?)
    }

    async fn ask(&self, name: &str, nodes: &[&str]) -> anyhow::Result<()> {
        let nodes: Vec<Value> = nodes.iter().map(|name| json!({"name": name})).collect();
        let request = Self::request(name, &json!({"nodes": nodes}))?;
        self.requests
            .create(&PostParams::default(), &request)
            .await?;
        Ok(())
    }

    /// Waits until the status of a request meets a predicate.
    async fn status(
        &self,
        by: &Product,
        name: &str,
        within: Duration,
        holds: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let seen = || async {
            let request = self.requests.get(name).await;
            let request = request.map_err(|error| error.to_string())?;
            let status = request.data["status"].clone();
            if holds(&status) {
                Ok(status)
            } else {
                Err(status.to_string())
            }
        };
        by.wait_for(&format!("the status of {name}"), within, seen)
            .await
    }

    /// Waits until there are `count` Jobs. Returns the Jobs.
    async fn made(&self, by: &Product, count: usize) -> anyhow::Result<Vec<Job>> {
        let seen = || async {
            let list = self.jobs.list(&ListParams::default()).await;
            let mut jobs = list.map_err(|error| error.to_string())?.items;
            jobs.retain(|job| job.metadata.deletion_timestamp.is_none());
            if jobs.len() == count {
                Ok(jobs)
            } else {
                Err(format!("{jobs:?}"))
            }
        };
        by.wait_for(&format!("{count} Jobs"), SOON, seen).await
    }

    /// Waits until the label of a node has this state; the node is cordoned.
    async fn is_marked(&self, by: &Product, node: &str, state: &str) -> anyhow::Result<()> {
        let seen = || async {
            let node = object(&self.nodes, node).await?;
            let found = &node["metadata"]["labels"][STATE];
            anyhow::ensure!(found == state, "{found}");
            assert_eq!(node["spec"]["unschedulable"], true, "{node}");
            Ok(())
        };
        by.wait_for(state, SOON, seen).await
    }

    /// Waits until a node is admitted, without marks of requests.
    async fn let_in(&self, by: &Product, node: &str) -> anyhow::Result<()> {
        let seen = || async {
            let node = object(&self.nodes, node).await;
            let node = node.map_err(|error| error.to_string())?;
            let held = node["metadata"]
                .to_string()
                .contains("nvsentinel.nvidia.com/");
            if held || node["spec"]["unschedulable"] == true {
                Err(node.to_string())
            } else {
                Ok(())
            }
        };
        by.wait_for("the admission of the node", SOON, seen).await
    }
}

#[tokio::test]
async fn nodes_are_tested_through_the_death_of_who_leads_and_let_in() -> anyhow::Result<()> {
    let Some(tests) = Tests::new().await? else {
        return Ok(());
    };
    let mut first = tests.controller().await?;
    let (one, other) = (tests.node("8").await?, tests.node("0").await?);
    tests.ask("both", &[&one, &other]).await?;
    // The request waits for the node's GPUs.
    let waits = |status: &Value| {
        let message = status["message"].as_str().unwrap_or_default();
        message.contains("is not ready: gpu-allocatable does not hold")
    };
    tests.status(&first, "both", SOON, waits).await?;
    tests.is_marked(&first, &one, "validation-pending").await?;
    let shown = tests.plane.kubectl(["get", "validationrequests"]).await?;
    assert!(
        shown.contains("Pending") && shown.contains("gpu-allocatable"),
        "{shown}"
    );
    tests.allocates(&other, "8").await?;
    let runs = |status: &Value| {
        let groups = status["testGroups"].as_array().cloned().unwrap_or_default();
        groups.len() == 2 && groups.iter().all(|group| group["phase"] == "Running")
    };
    tests.status(&first, "both", SOON, runs).await?;
    let jobs = tests.made(&first, 2).await?;
    // The leader is killed, and the other controller continues with the same Jobs.
    let second = tests.controller().await?;
    first.kill9()?;
    for job in &jobs {
        resume(&tests.jobs, job).await?;
    }
    let over = |status: &Value| status["completionTime"].is_string();
    let status = tests.status(&second, "both", EXPIRY, over).await?;
    assert_eq!(status["phase"], "Succeeded", "{status}");
    assert_eq!(status["message"], Value::Null, "{status}");
    for group in status["testGroups"].as_array().into_iter().flatten() {
        assert_eq!(
            group["attempts"].as_array().map(Vec::len),
            Some(1),
            "{status}"
        );
    }
    tests.made(&second, 0).await?;
    tests.let_in(&second, &one).await?;
    tests.let_in(&second, &other).await?;
    a_failed_request_holds_its_node(&tests, &second).await?;
    what_is_wrong_is_refused(&tests).await
}

/// Checks that a failed request is retried, and holds its node until it is deleted.
async fn a_failed_request_holds_its_node(tests: &Tests, by: &Product) -> anyhow::Result<()> {
    let node = tests.node("8").await?;
    tests.ask("fails", &[&node]).await?;
    for attempt in 1..=2 {
        let begun = |status: &Value| {
            let group = &status["testGroups"][0];
            let attempts = group["attempts"].as_array().map(Vec::len);
            group["phase"] == "Running" && attempts == Some(attempt)
        };
        tests.status(by, "fails", SOON, begun).await?;
        let jobs = tests.made(by, 1).await?;
        let name = jobs[0].metadata.name.clone().unwrap_or_default();
        assert!(name.starts_with("fails-dcgm-diag-test-group-1-"), "{name}");
        let params = DeleteParams::background();
        tests.jobs.delete(&name, &params).await?;
    }
    let over = |status: &Value| status["phase"] == "Failed";
    let status = tests.status(by, "fails", SOON, over).await?;
    let last = &status["testGroups"][0]["attempts"][1];
    assert_eq!(last["failureReason"], "TestFailed", "{status}");
    assert_eq!(last["message"], "its object was deleted", "{status}");
    tests.is_marked(by, &node, "validation-failed").await?;
    let params = DeleteParams::default();
    tests.requests.delete("fails", &params).await?;
    tests.let_in(by, &node).await?;
    let gone = || async {
        match tests.requests.get_opt("fails").await {
            Ok(None) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    by.wait_for("the request to be gone", SOON, gone).await
}

async fn what_is_wrong_is_refused(tests: &Tests) -> anyhow::Result<()> {
    let post = PostParams::default();
    for (spec, why) in [
        (json!({}), "spec.nodes"),
        (json!({"nodes": []}), "spec.nodes"),
        (json!({"nodes": [{"name": "Not a name"}]}), "spec.nodes"),
        (
            json!({"nodes": [{"name": "n"}], "tests": [""]}),
            "spec.tests",
        ),
    ] {
        let request = Tests::request("wrong", &spec)?;
        let refused = tests.requests.create(&post, &request).await.unwrap_err();
        assert!(refused.to_string().contains(why), "{spec}: {refused}");
    }
    let change = Patch::Merge(json!({"spec": {"nodes": [{"name": "other"}]}}));
    let params = PatchParams::default();
    let patched = tests.requests.patch("both", &params, &change);
    let refused = patched.await.unwrap_err().to_string();
    assert!(refused.contains("once it has begun"), "{refused}");
    Ok(())
}
