//! Taints of single devices, with `DeviceTaintRule`s on a real API server.

use std::path::PathBuf;

use contract::{Entity, HealthEvent};
use kube::api::{Api, ListParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, NodeBuilder, Options, Program, Version, unique};

use crate::chart::Helm;
use crate::support::{SOON, Scene, send_to};

/// A policy that taints a single faulty GPU, and quarantines a node with two.
const POLICY: &str = r#"
[device-taints]

[[rule-sets]]
name = "fatal"
taint-devices = 1
cordon = { shouldCordon = true }

[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal"
"#;

/// A policy without device taints, which quarantines for every faulty GPU.
const NODES_ONLY: &str = r#"
[[rule-sets]]
name = "fatal"
cordon = { shouldCordon = true }

[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal"
"#;

const DOCUMENT: &str = include_str!("../../../../docs/device-taints.md");

/// Client of the resource API in one version.
struct Devices {
    slices: Api<DynamicObject>,
    rules: Api<DynamicObject>,
    version: &'static str,
}

impl Devices {
    async fn new(plane: &ControlPlane, slices: &'static str, rules: &str) -> anyhow::Result<Self> {
        let client = plane.client().await?;
        let of = |kind: &str, plural: &str, version: &str| {
            let kind = GroupVersionKind::gvk("resource.k8s.io", version, kind);
            Api::all_with(
                client.clone(),
                &ApiResource::from_gvk_with_plural(&kind, plural),
            )
        };
        Ok(Self {
            slices: of("ResourceSlice", "resourceslices", slices),
            rules: of("DeviceTaintRule", "devicetaintrules", rules),
            version: slices,
        })
    }

    /// Publishes the GPUs of a node, as its driver would.
    async fn publish(&self, node: &str, gpus: u8) -> anyhow::Result<()> {
        let device = |index: u8| {
            json!({
                "name": format!("gpu-{index}"),
                "attributes": {
                    "type": {"string": "gpu"},
                    "uuid": {"string": uuid(node, index)},
                    "resource.kubernetes.io/pciBusID": {"string": format!("0000:{index:02x}:00.0")},
                },
            })
        };
        let slice = json!({
            "apiVersion": format!("resource.k8s.io/{}", self.version),
            "kind": "ResourceSlice",
            "metadata": {"name": format!("{node}-gpus")},
            "spec": {
                "driver": "gpu.nvidia.com",
                "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": (0..gpus).map(device).collect::<Vec<_>>(),
            },
        });
        let slice: DynamicObject = serde_json::from_value(slice)?;
        self.slices.create(&PostParams::default(), &slice).await?;
        Ok(())
    }

    /// Returns the rules for devices of a pool, in the form `device key=value:effect`.
    async fn rules_of(&self, pool: &str) -> Result<Vec<String>, String> {
        let rules = self.rules.list(&ListParams::default()).await;
        let rules = rules.map_err(|error| error.to_string())?;
        let mut found = Vec::new();
        for rule in rules {
            let spec = &rule.data["spec"];
            let (device, taint) = (&spec["deviceSelector"], &spec["taint"]);
            if device["pool"] != pool {
                continue;
            }
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            found.push(format!(
                "{} {}={}:{}",
                text(&device["device"]),
                text(&taint["key"]),
                text(&taint["value"]),
                text(&taint["effect"])
            ));
        }
        found.sort();
        Ok(found)
    }
}

fn uuid(node: &str, index: u8) -> String {
    format!("GPU-{index}-{node}")
}

fn xid(node: &str, index: u8, code: &str) -> HealthEvent {
    HealthEvent {
        version: 1,
        agent: "gpu-health-monitor".into(),
        component_class: "GPU".into(),
        check_name: "SysLogsXIDError".into(),
        is_fatal: true,
        node_name: node.into(),
        recommended_action: 2,
        error_code: vec![code.into()],
        entities_impacted: vec![Entity {
            entity_type: "GPU_UUID".into(),
            entity_value: uuid(node, index),
        }],
        ..HealthEvent::default()
    }
}

fn well(node: &str, index: u8, code: &str) -> HealthEvent {
    HealthEvent {
        is_fatal: false,
        is_healthy: true,
        recommended_action: 0,
        ..xid(node, index, code)
    }
}

/// Returns a scene with a node made by `describe`, its GPUs and a product with this policy, and
/// the policy's file.
async fn scene(
    plane: &ControlPlane,
    devices: &Devices,
    (gpus, policy): (u8, &str),
    describe: impl FnOnce(NodeBuilder) -> NodeBuilder,
) -> anyhow::Result<(Scene, PathBuf)> {
    let file = std::env::temp_dir().join(unique("policy"));
    std::fs::write(&file, policy)?;
    let mut scene = Scene::with(plane, describe, |node| {
        let launch = Launch::new()?
            .node_name(node)
            .kubeconfig(plane.kubeconfig())
            .quarantine();
        Ok(launch.option("--policy", &file))
    })
    .await?;
    devices.publish(&scene.node, gpus).await?;
    // The product has the devices from its list then, however late its watch is.
    scene.product.restart().await?;
    scene.ready().await?;
    Ok((scene, file))
}

/// Waits until the devices of the scene's node have these taints.
async fn tainted(scene: &Scene, devices: &Devices, taints: &[&str]) -> anyhow::Result<()> {
    scene
        .product
        .wait_for(&format!("the taints {taints:?}"), SOON, || async {
            let rules = devices.rules_of(&scene.node).await?;
            if rules == taints {
                Ok(())
            } else {
                Err(format!("{rules:?}"))
            }
        })
        .await
}

#[tokio::test]
async fn a_taint_appears_with_a_fault_follows_it_and_goes_with_it() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let devices = Devices::new(&plane, "v1", "v1").await?;
    let (mut scene, file) =
        scene(&plane, &devices, (2, POLICY), NodeBuilder::without_kubelet).await?;
    send_to(&scene.product, vec![xid(&scene.node, 0, "48")]).await?;
    tainted(
        &scene,
        &devices,
        &["gpu-0 gpu.nvidia.com/xid=48:NoSchedule"],
    )
    .await?;
    // The value is the newest XID.
    send_to(&scene.product, vec![xid(&scene.node, 0, "64")]).await?;
    tainted(
        &scene,
        &devices,
        &["gpu-0 gpu.nvidia.com/xid=64:NoSchedule"],
    )
    .await?;
    // The node stays in service, with a session.
    let node = scene.nodes.get(&scene.node).await?;
    assert_eq!(node.spec.unwrap_or_default().unschedulable, None);
    let annotations = node.metadata.annotations.unwrap_or_default();
    assert!(
        annotations.contains_key("gpuwarden.dev/session"),
        "{annotations:?}"
    );
    // The rule is removed although the fault has recovered while the product was down, and
    // although the new policy does not use taints.
    scene.product.kill9()?;
    std::fs::write(&file, NODES_ONLY)?;
    scene.product.restart().await?;
    scene.cordoned().await?;
    tainted(&scene, &devices, &[]).await?;
    std::fs::write(&file, POLICY)?;
    tainted(
        &scene,
        &devices,
        &["gpu-0 gpu.nvidia.com/xid=64:NoSchedule"],
    )
    .await?;
    let recovered = |code| well(&scene.node, 0, code);
    send_to(&scene.product, vec![recovered("48"), recovered("64")]).await?;
    tainted(&scene, &devices, &[]).await?;
    scene.restored_by_hand().await
}

#[tokio::test]
async fn older_versions_of_the_api_do_and_none_takes_the_node_out() -> anyhow::Result<()> {
    let gates = |options: Options| {
        [
            Program::ApiServer,
            Program::ControllerManager,
            Program::Scheduler,
        ]
        .into_iter()
        .fold(options, |options, program| {
            options.arg(program, "--feature-gates=DRADeviceTaintRules=true")
        })
    };
    for version in ["v1beta2", "v1alpha3", ""] {
        let serve = format!("--runtime-config=resource.k8s.io/{version}=true");
        let options = if version.is_empty() {
            Options::default()
        } else {
            gates(Options::default().arg(Program::ApiServer, serve))
        };
        let Some(plane) = ControlPlane::private(Version::V1_36, options).await? else {
            return Ok(());
        };
        let devices = Devices::new(&plane, "v1", version).await?;
        let (scene, _) = scene(&plane, &devices, (2, POLICY), NodeBuilder::without_kubelet).await?;
        send_to(&scene.product, vec![xid(&scene.node, 0, "48")]).await?;
        if version.is_empty() {
            scene.cordoned().await?;
            let said = scene.product.stderr();
            assert!(said.contains("does not serve devicetaintrules"), "{said}");
            continue;
        }
        tainted(
            &scene,
            &devices,
            &["gpu-0 gpu.nvidia.com/xid=48:NoSchedule"],
        )
        .await?;
        send_to(&scene.product, vec![xid(&scene.node, 0, "64")]).await?;
        tainted(
            &scene,
            &devices,
            &["gpu-0 gpu.nvidia.com/xid=64:NoSchedule"],
        )
        .await?;
        let well = ["48", "64"].map(|code| well(&scene.node, 0, code));
        send_to(&scene.product, well.to_vec()).await?;
        tainted(&scene, &devices, &[]).await?;
    }
    Ok(())
}

/// Returns the YAML blocks of the document that are Kubernetes objects.
fn examples() -> Vec<&'static str> {
    let blocks = DOCUMENT.split("```yaml\n").skip(1);
    blocks
        .filter_map(|block| block.split("```").next())
        .collect()
}

/// Returns a pod on this node that uses a claim.
fn pod(node: &str, claim: &str) -> Value {
    let on_node = json!([{"key": "metadata.name", "operator": "In", "values": [node]}]);
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": claim},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchFields": on_node}],
            }}},
            "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
            "containers": [{
                "name": "main",
                "image": "registry.k8s.io/pause:3.10",
                "resources": {"claims": [{"name": "gpu"}]},
            }],
        },
    })
}

/// A namespace, and the objects applied in it.
struct Namespace<'a> {
    plane: &'a ControlPlane,
    name: String,
}

impl Namespace<'_> {
    async fn apply(&self, text: &str) -> anyhow::Result<()> {
        let file = std::env::temp_dir().join(unique("object"));
        std::fs::write(&file, text)?;
        let file = file.display().to_string();
        self.plane
            .kubectl(["apply", "-n", &self.name, "-f", &file])
            .await?;
        Ok(())
    }

    /// Returns the device allocated to a claim; `null` if none is.
    async fn given(&self, claim: &str) -> Result<Value, String> {
        let get = [
            "get",
            "resourceclaim",
            "-n",
            &self.name,
            claim,
            "-o",
            "json",
        ];
        let object = self
            .plane
            .kubectl(get)
            .await
            .map_err(|error| error.to_string())?;
        let object: Value = serde_json::from_str(&object).map_err(|error| error.to_string())?;
        Ok(object["status"]["allocation"]["devices"]["results"][0]["device"].clone())
    }
}

#[tokio::test]
async fn tolerations_of_the_document_work_and_pods_are_named_and_deleted() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    if !plane.has(Program::Scheduler) || !plane.has(Program::ControllerManager) {
        testkit::skip("a scheduler and a controller manager");
        return Ok(());
    }
    let devices = Devices::new(&plane, "v1", "v1").await?;
    let policy = POLICY.replace("taint-devices = 1", "taint-devices = 8");
    let policy = policy.replace(
        "[device-taints]",
        "[device-taints]\ngpu-lost = \"NoExecute\"",
    );
    let (scene, _) = scene(&plane, &devices, (4, &policy), |node| node).await?;
    let events = (0..4).map(|gpu| xid(&scene.node, gpu, "48"));
    send_to(&scene.product, events.collect()).await?;
    let all = [0, 1, 2, 3].map(|gpu| format!("gpu-{gpu} gpu.nvidia.com/xid=48:NoSchedule"));
    tainted(&scene, &devices, &all.each_ref().map(String::as_str)).await?;

    let namespace = Namespace {
        plane: &plane,
        name: unique("taints"),
    };
    plane.namespace(&namespace.name).await?;
    let class = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "gpu.nvidia.com"},
        "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}]},
    });
    namespace.apply(&class.to_string()).await?;
    let examples = examples();
    assert_eq!(examples.len(), 3);
    let plain = "          tolerations:\n            - operator: Exists\n";
    let plain = examples[2]
        .replace(plain, "")
        .replace("name: whatever", "name: plain");
    for claim in examples.iter().copied().chain([plain.as_str()]) {
        namespace.apply(claim).await?;
    }
    for claim in ["plain", "any-xid", "one-xid", "whatever"] {
        namespace
            .apply(&pod(&scene.node, claim).to_string())
            .await?;
    }
    let mut lost = Value::Null;
    for claim in ["whatever", "one-xid", "any-xid"] {
        lost = testkit::wait_for("a device for the claim", SOON, || async {
            let given = namespace.given(claim).await?;
            if given.is_null() {
                Err(claim.to_owned())
            } else {
                Ok(given)
            }
        })
        .await?;
    }
    assert_eq!(namespace.given("plain").await, Ok(Value::Null));

    // The message names the pods. The pod on the absent GPU is deleted, because it tolerates
    // XIDs only.
    let pod = format!("{}/any-xid", namespace.name);
    let index = lost
        .as_str()
        .and_then(|name| name.strip_prefix("gpu-"))
        .unwrap_or_default();
    scene
        .product
        .wait_for("the pod in the status", SOON, || async {
            let shown = scene.shown().await.map_err(|error| error.to_string())?;
            if shown["devices"].to_string().contains(&pod) {
                Ok(())
            } else {
                Err(shown.to_string())
            }
        })
        .await?;
    let gone = HealthEvent {
        check_name: "SysLogsGPUFallenOff".into(),
        error_code: vec!["GPU_FALLEN_OFF_BUS".into()],
        ..xid(&scene.node, index.parse()?, "")
    };
    send_to(&scene.product, vec![gone]).await?;
    testkit::wait_for("the pod's deletion", SOON, || async {
        let get = ["get", "pod", "-n", &namespace.name, "any-xid", "-o", "json"];
        match plane.kubectl(get).await {
            Ok(pod) if pod.contains("deletionTimestamp") => Ok(()),
            Ok(pod) => Err(pod),
            Err(error) if error.to_string().contains("NotFound") => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    })
    .await?;
    scene
        .product
        .wait_for("the eviction status of the rule", SOON, || async {
            let shown = scene.shown().await.map_err(|error| error.to_string())?;
            if shown["devices"].to_string().contains("\"evictions\"") {
                Ok(())
            } else {
                Err(shown["devices"].to_string())
            }
        })
        .await
}

#[tokio::test]
async fn the_role_of_the_chart_is_enough() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let Some(helm) = Helm::of(None) else {
        return Ok(());
    };
    let name = unique("gpuwarden");
    plane.namespace(&name).await?;
    let namespace = Namespace {
        plane: &plane,
        name,
    };
    let values = "quarantine.enabled=true,policy.deviceTaints=true";
    let rendered = helm.template(&["--set", values]).await?;
    let roles = rendered.split("\n---\n").filter(|it| {
        it.contains("\nkind: ClusterRole") && it.contains("\n  name: gpuwarden-controller\n")
    });
    // All names derive from the namespace, because other tests use the same control plane.
    let roles = roles.collect::<Vec<_>>().join("\n---\n");
    let role = roles
        .replace("gpuwarden-controller", &namespace.name)
        .replace(
            "namespace: gpuwarden",
            &format!("namespace: {}", namespace.name),
        );
    namespace.apply(&role).await?;
    let who = format!("--as=system:serviceaccount:{0}:{0}", namespace.name);
    for verb in ["list", "watch", "create", "patch", "delete"] {
        let may = [
            "auth",
            "can-i",
            verb,
            "devicetaintrules.resource.k8s.io",
            &who,
        ];
        // The API server learns of a role with a delay; kubectl fails where it says no.
        testkit::wait_for(verb, SOON, || plane.kubectl(may)).await?;
    }
    let may = [
        "auth",
        "can-i",
        "watch",
        "resourceclaims.resource.k8s.io",
        "-A",
        &who,
    ];
    testkit::wait_for("the watch of claims", SOON, || plane.kubectl(may)).await?;
    Ok(())
}
