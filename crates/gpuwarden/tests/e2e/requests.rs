//! Requests on a real control plane: GPUs are reset after a fault, and a node is handed over and
//! taken back. Each test has a private control plane, because a janitor handles all requests of
//! its cluster.

use contract::{HealthEvent, RecommendedAction};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, NodeBuilder, Options, Private, Version};

use crate::support::{HAND_OVER, JANITOR, SOON, Scene, event, gpuwarden, recovery, send_to, xid};

pub(crate) const UUID: &str = "GPU-d2e7c0ff-0000-4000-8000-000000000001";
const DCGM: &str = "nvidia.com/gpu.deploy.dcgm";
const PLUGIN: &str = "nvidia.com/gpu.deploy.device-plugin";
const MANAGED: &str = "nvsentinel.dgxc.nvidia.com/managed";
const STATE: &str = "dgxc.nvidia.com/nvsentinel-state";
const CRDS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../deploy/helm/gpuwarden/crds"
);

/// Asks for a reset of the GPU of a fault, before [`HAND_OVER`].
const RESET: &str = r#"
[remediationActions.COMPONENT_RESET]
apiGroup = "janitor.dgxc.nvidia.com"
version = "v1alpha1"
kind = "GPUReset"
scope = "Cluster"
completeConditionType = "Complete"
templateFileName = "gpu-reset.yaml"
equivalenceGroup = "reset"
impactedEntityScope = "GPU_UUID"

"#;
/// Template of that reset, after the templates of [`HAND_OVER`].
const RESET_TEMPLATE: &str = r#""gpu-reset.yaml" = """
apiVersion: janitor.dgxc.nvidia.com/v1alpha1
kind: GPUReset
metadata:
  name: maintenance-{{ .NodeName }}-{{ .HealthEventID }}
spec:
  nodeName: {{ .NodeName | printf "%q" }}
  selector:
    uuids: [{{ .ImpactedEntityScopeValue | printf "%q" }}]
"""
"#;

struct Requests {
    plane: Private,
    scene: Scene,
    client: kube::Client,
    _config: tempfile::TempDir,
}

impl Requests {
    async fn new(
        describe: impl FnOnce(NodeBuilder) -> NodeBuilder,
    ) -> anyhow::Result<Option<Self>> {
        let plane = ControlPlane::private(Version::V1_37, Options::default()).await?;
        let Some(plane) = plane else {
            return Ok(None);
        };
        plane.kubectl(["apply", "-f", CRDS]).await?;
        for namespace in ["gpuwarden", "gpu-operator"] {
            plane.namespace(namespace).await?;
        }
        let config = tempfile::tempdir()?;
        let file = |name: &str, text: &str| {
            let path = config.path().join(name);
            std::fs::write(&path, text)?;
            anyhow::Ok(path)
        };
        let drain = file("drain.toml", "partialDrainEnabled = true\n")?;
        let (remediation, janitor) = (
            file(
                "remediation.toml",
                &format!("{RESET}{HAND_OVER}{RESET_TEMPLATE}"),
            )?,
            file("janitor.yaml", JANITOR)?,
        );
        let arrange = |launch: Launch| {
            let launch = launch.arg("--drain").arg("--remediate").arg("--janitor");
            let launch = launch.option("--drain-config", drain);
            let launch = launch.option("--remediate-config", remediation);
            launch.option("--janitor-config", janitor)
        };
        let scene = Scene::new(&plane, describe, arrange).await?;
        let client = plane.client().await?;
        Ok(Some(Self {
            plane,
            scene,
            client,
            _config: config,
        }))
    }

    fn of(&self, group: &str, version: &str, kind: &str, plural: &str) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk(group, version, kind);
        let resource = ApiResource::from_gvk_with_plural(&kind, plural);
        Api::all_with(self.client.clone(), &resource)
    }

    fn resets(&self) -> Api<DynamicObject> {
        self.of(
            "janitor.dgxc.nvidia.com",
            "v1alpha1",
            "GPUReset",
            "gpuresets",
        )
    }

    fn hand_overs(&self) -> Api<DynamicObject> {
        let (group, plural) = ("nvsentinel.dgxc.nvidia.com", "externalremediationrequests");
        self.of(group, "v1", "ExternalRemediationRequest", plural)
    }

    async fn label_is(&self, label: &str, value: &str) -> anyhow::Result<Value> {
        let is = |node: &Value| {
            let found = &node["metadata"]["labels"][label];
            if found == value {
                Ok(node.clone())
            } else {
                Err(node["metadata"].to_string())
            }
        };
        self.scene.node_until(&format!("{label}={value}"), is).await
    }

    /// Starts or ends the pod of DCGM, as its `DaemonSet` would.
    async fn dcgm(&self, runs: bool) -> anyhow::Result<()> {
        if runs {
            let pod = testkit::pod("gpu-operator", "dcgm").label("app", "nvidia-dcgm");
            pod.on(&self.scene.node).create(&self.client).await?;
            return Ok(());
        }
        let now = [
            "delete",
            "pod",
            "-n",
            "gpu-operator",
            "dcgm",
            "--grace-period=0",
            "--force",
        ];
        self.plane.kubectl(now).await.map(drop)
    }

    /// Waits until an object meets a predicate.
    async fn is(
        &self,
        what: &str,
        api: &Api<DynamicObject>,
        name: &str,
        holds: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let looked = || async {
            let found = api.get_opt(name).await.map_err(|error| error.to_string())?;
            let found = serde_json::to_value(found).map_err(|error| error.to_string())?;
            if holds(&found) {
                Ok(found)
            } else {
                Err(found.to_string())
            }
        };
        self.scene.product.wait_for(what, SOON, looked).await
    }
}

/// Returns true if a custom resource has this condition.
pub(crate) fn has(object: &Value, kind: &str, status: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    let is = |one: &Value| one["type"] == kind && one["status"] == status;
    conditions.into_iter().flatten().any(is)
}

#[tokio::test]
async fn gpus_are_reset_and_services_and_the_node_are_as_they_were() -> anyhow::Result<()> {
    let labels = |node: NodeBuilder| node.label(DCGM, "true").label(PLUGIN, "false");
    let Some(mut requests) = Requests::new(labels).await? else {
        return Ok(());
    };
    requests.dcgm(true).await?;
    let name = format!("[  100.000000] NVRM: GPU at PCI:0000:b3:00: {UUID}\n");
    let fault = name + &xid(48, "DBE (double bit error) ECC Error");
    requests.scene.product.append_kernel_log(&fault)?;
    // The service is stopped, and its previous state is recorded on the node.
    let node = requests.label_is(DCGM, "false").await?;
    let stopped = node["metadata"]["annotations"]["gpuwarden.dev/gpu-reset"].to_string();
    assert!(
        stopped.contains(DCGM) && !stopped.contains(PLUGIN),
        "{stopped}"
    );
    let name = format!("maintenance-{}-", requests.scene.node);
    let resets = requests.resets();
    let made = resets.list(&ListParams::default()).await?.items;
    let made = made[0].metadata.name.clone().unwrap();
    assert!(made.starts_with(&name), "{made}");
    // A new process continues after a kill.
    requests.scene.product.restart().await?;
    requests.dcgm(false).await?;
    let job = ["get", "jobs", "-n", "gpuwarden", "-o", "json"];
    let plane = &requests.plane;
    let jobs = || async {
        let jobs = plane
            .kubectl(job)
            .await
            .map_err(|error| error.to_string())?;
        let jobs: Value = serde_json::from_str(&jobs).map_err(|error| error.to_string())?;
        match jobs["items"].as_array().map(Vec::as_slice) {
            Some([job]) => Ok(job.clone()),
            _ => Err(jobs.to_string()),
        }
    };
    let job = requests
        .scene
        .product
        .wait_for("the Job", SOON, jobs)
        .await?;
    let pod = &job["spec"]["template"]["spec"];
    let env = json!({"name": "NVIDIA_GPU_RESETS", "value": UUID});
    assert_eq!(pod["containers"][0]["env"][0], env);
    assert_eq!(pod["nodeName"], requests.scene.node.as_str());
    assert_eq!(job["metadata"]["ownerReferences"][0]["name"], made.as_str());
    // kwok plays the kubelet, which runs the pod of the Job to its end. Then the services are
    // restored.
    requests.label_is(DCGM, "true").await?;
    requests.dcgm(true).await?;
    let done = |object: &Value| {
        let ended = object["status"]["phase"] == "Succeeded";
        ended && object["metadata"]["finalizers"].is_null()
    };
    let reset = requests.is("the reset", &resets, &made, done).await?;
    assert!(
        has(&reset, "Complete", "True") && has(&reset, "AttemptComplete", "True"),
        "{reset}"
    );
    requests.label_is(STATE, "remediation-succeeded").await?;
    // The kernel log line of the Job returns the node to service.
    let line = format!("[  200.000000] GPU reset executed: {UUID}, success: true\n");
    requests.scene.product.append_kernel_log(&line)?;
    requests.scene.restored().await?;
    let counted = || async {
        let metrics = requests.scene.product.get("/metrics").await;
        let metrics = metrics.map_err(|error| error.to_string())?;
        let is_counted = metrics.contains("gpu_reset_requests_completed_total");
        is_counted.then_some(()).ok_or(metrics)
    };
    let product = &requests.scene.product;
    product
        .wait_for("the count of the reset", SOON, counted)
        .await
}

#[tokio::test]
async fn a_reset_that_is_deleted_half_way_puts_everything_back() -> anyhow::Result<()> {
    let Some(mut requests) = Requests::new(|node| node.label(DCGM, "true")).await? else {
        return Ok(());
    };
    requests.dcgm(true).await?;
    let resets = requests.resets();
    let ask = |name: &str, spec: Value| {
        json!({"apiVersion": "janitor.dgxc.nvidia.com/v1alpha1", "kind": "GPUReset",
               "metadata": {"name": name}, "spec": spec})
    };
    // Invalid requests are refused on creation.
    let node = requests.scene.node.clone();
    for spec in [
        json!({}),
        json!({"nodeName": node, "selector": {"uuids": ["GPU-1"]}}),
    ] {
        let wrong = serde_json::from_value(ask("wrong", spec))?;
        let refused = resets
            .create(&PostParams::default(), &wrong)
            .await
            .unwrap_err();
        assert!(
            matches!(&refused, kube::Error::Api(status) if status.code == 422),
            "{refused}"
        );
    }
    let reset = serde_json::from_value(ask("half", json!({"nodeName": node})))?;
    resets.create(&PostParams::default(), &reset).await?;
    requests.label_is(DCGM, "false").await?;
    // Deleted while the product is down: the finalizer keeps the request until the services are
    // restored.
    requests.scene.product.kill9()?;
    resets.delete("half", &DeleteParams::default()).await?;
    assert!(resets.get_opt("half").await?.is_some());
    requests.scene.product.restart().await?;
    requests.scene.restored().await?;
    requests
        .is("its end", &resets, "half", Value::is_null)
        .await?;
    // Removed with its finalizer: the node still records the services to restore.
    let reset = serde_json::from_value(ask("gone", json!({"nodeName": node})))?;
    resets.create(&PostParams::default(), &reset).await?;
    requests.label_is(DCGM, "false").await?;
    requests.scene.product.kill9()?;
    resets.delete("gone", &DeleteParams::default()).await?;
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    resets
        .patch("gone", &PatchParams::default(), &patch)
        .await?;
    requests.scene.product.restart().await?;
    requests.scene.restored().await
}

/// Returns the status of a hand-over as an external system writes it.
/// Returns the status of a hand-over whose system is done, or is not.
pub(crate) fn external(status: &str) -> Value {
    json!({"status": {"conditions": [
        {"type": "NVSentinelOwnershipReleased", "status": "True", "reason": "ReleaseTaintApplied",
         "message": "", "lastTransitionTime": "2026-11-24T00:00:00Z"},
        {"type": "ExternalRemediationComplete", "status": status, "reason": "Vendor",
         "message": "", "lastTransitionTime": "2026-11-24T00:00:00Z"},
    ]}})
}

#[tokio::test]
async fn a_fault_hands_its_node_over_to_the_vendor_and_it_comes_back() -> anyhow::Result<()> {
    let Some(mut requests) = Requests::new(|node| node.label(MANAGED, "true")).await? else {
        return Ok(());
    };
    let hand_overs = requests.hand_overs();
    let node = requests.scene.node.clone();
    let replace = HealthEvent {
        recommended_action: RecommendedAction::ReplaceVm.into(),
        ..event(&node, "0")
    };
    send_to(&requests.scene.product, vec![replace]).await?;
    requests.scene.cordoned().await?;
    requests.label_is(MANAGED, "false").await?;
    let made = hand_overs.list(&ListParams::default()).await?.items;
    let names: Vec<&str> = made
        .iter()
        .filter_map(|one| one.metadata.name.as_deref())
        .collect();
    let [name] = names.as_slice() else {
        panic!("{names:?}")
    };
    let spec = &made[0].data["spec"]["healthEvent"];
    assert_eq!(spec["recommendedAction"], "REPLACE_VM");
    // A request that the vendor postpones has not failed, and the successor keeps waiting.
    let how = PatchParams::default();
    let parked = Patch::Merge(external("False"));
    hand_overs.patch_status(name, &how, &parked).await?;
    requests.scene.product.restart().await?;
    requests.scene.ready().await?;
    requests.label_is(STATE, "remediating").await?;
    let done = Patch::Merge(external("True"));
    hand_overs.patch_status(name, &how, &done).await?;
    requests.label_is(MANAGED, "true").await?;
    requests.label_is(STATE, "remediation-succeeded").await?;
    send_to(&requests.scene.product, vec![recovery(&node, "0")]).await?;
    requests.scene.restored().await?;
    let made = hand_overs.list(&ListParams::default()).await?.items;
    assert_eq!(made.len(), 1, "{made:?}");
    Ok(())
}

#[tokio::test]
async fn a_node_is_handed_over_left_alone_and_taken_back() -> anyhow::Result<()> {
    let Some(mut requests) = Requests::new(|node| node.label(MANAGED, "true")).await? else {
        return Ok(());
    };
    let requests_of = requests.hand_overs();
    let node = requests.scene.node.clone();
    let object = |name: &str, event: Value| {
        json!({"apiVersion": "nvsentinel.dgxc.nvidia.com/v1", "kind": "ExternalRemediationRequest",
               "metadata": {"name": name}, "spec": {"healthEvent": event}})
    };
    let wrong = serde_json::from_value(object("wrong", json!({"checkName": "x"})))?;
    assert!(
        requests_of
            .create(&PostParams::default(), &wrong)
            .await
            .is_err()
    );
    let event_of = json!({"nodeName": node, "checkName": "x", "recommendedAction": 24});
    let made = serde_json::from_value(object("x1", event_of))?;
    requests_of.create(&PostParams::default(), &made).await?;
    let found = requests.label_is(MANAGED, "false").await?;
    let taints = found["spec"]["taints"].to_string();
    assert!(
        taints.contains("nvsentinel.dgxc.nvidia.com/external-remediation"),
        "{taints}"
    );
    let released = |object: &Value| has(object, "NVSentinelOwnershipReleased", "True");
    requests
        .is("the hand-over", &requests_of, "x1", released)
        .await?;
    // The node name of a request is immutable.
    let other = Patch::Merge(json!({"spec": {"healthEvent": {"nodeName": "other"}}}));
    let changed = requests_of
        .patch("x1", &PatchParams::default(), &other)
        .await;
    assert!(changed.is_err());
    // A fault during the hand-over quarantines the node once it is back.
    send_to(&requests.scene.product, vec![event(&node, "0")]).await?;
    requests.scene.told("rules", "handed over").await?;
    let how = PatchParams::default();
    requests_of
        .patch_status("x1", &how, &Patch::Merge(external("False")))
        .await?;
    requests.scene.product.restart().await?;
    let node_now = crate::support::object(&requests.scene.nodes, &node).await?;
    assert_eq!(node_now["metadata"]["labels"][MANAGED], "false");
    assert!(node_now["spec"]["unschedulable"].is_null());
    requests_of
        .patch_status("x1", &how, &Patch::Merge(external("True")))
        .await?;
    requests.label_is(MANAGED, "true").await?;
    requests.scene.cordoned().await?;
    let closed = |object: &Value| object["status"]["completionTime"].is_string();
    requests.is("its end", &requests_of, "x1", closed).await?;
    send_to(&requests.scene.product, vec![recovery(&node, "0")]).await?;
    requests.scene.restored().await?;
    requests_of.delete("x1", &DeleteParams::default()).await?;
    requests
        .is("its deletion", &requests_of, "x1", Value::is_null)
        .await?;
    // Events are written beside everything else.
    let told = || async {
        let events = ["get", "events", "-o", "name"];
        let events = requests.plane.kubectl(events).await;
        let events = events.map_err(|error| error.to_string())?;
        let mut reasons = ["releasetaintapplied", "releasetaintremoved"].iter();
        let all = reasons.all(|reason| events.contains(&format!("x1.{reason}")));
        all.then_some(()).ok_or(events)
    };
    let product = &requests.scene.product;
    product.wait_for("both Events", SOON, told).await
}

#[test]
fn the_program_of_the_job_resets_what_it_is_told_and_says_so() -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir()?;
    let library = fakes::install(directory.path(), &fakes::Scenario::healthy(2))?;
    let tool = directory.path().join("nvidia-smi");
    std::fs::write(
        &tool,
        "#!/bin/sh\necho \"$@\" > \"$(dirname \"$0\")/asked\"\n",
    )?;
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755))?;
    let log = directory.path().join("log");
    let socket = std::os::unix::net::UnixDatagram::bind(&log)?;
    let text = |path: &std::path::Path| path.display().to_string();
    let (library, tool, log) = (text(&library), text(&tool), text(&log));
    let places = [
        "--nvml",
        &library,
        "--nvidia-smi",
        &tool,
        "--system-log",
        &log,
    ];
    let reset = |gpus: &[&str]| gpuwarden(&[&["gpu-reset"], &places[..], gpus].concat(), "");
    let uuid = "GPU-fa4e0000-0000-4000-8000-000000000001";
    let (code, said, why) = reset(&["--gpu", uuid]);
    let line = format!("GPU reset executed: {uuid}, success: true");
    assert_eq!((code, said.trim()), (Some(0), line.as_str()), "{why}");
    let asked = std::fs::read_to_string(directory.path().join("asked"))?;
    assert_eq!(asked.trim(), format!("--gpu-reset -i {uuid}"));
    let mut told = [0; 256];
    let length = socket.recv(&mut told)?;
    assert_eq!(
        told[..length],
        *format!("<27>nvsentinel-gpu-reset: {line}").as_bytes()
    );
    // The UUID of an absent GPU, an invalid UUID, and none.
    let other = "GPU-fa4e0000-0000-4000-8000-000000000009";
    let (code, said, _) = reset(&["--gpu", other]);
    assert!(
        code == Some(1) && said.contains("success: false: the driver has no such GPU"),
        "{said}"
    );
    for wrong in [&["--gpu", "0"][..], &[]] {
        assert_eq!(reset(wrong).0, Some(2), "{wrong:?}");
    }
    Ok(())
}
