//! Taints of single devices, by `DeviceTaintRule`s on a real API server.

use contract::{Entity, HealthEvent};
use kube::api::{Api, ListParams, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, NodeBuilder, Version, unique};

use crate::support::{SOON, Scene, send_to};

/// One faulty GPU is tainted; two take the node out.
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

/// What is asked of the API of devices.
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

    /// The rules for devices of a pool, as `device key=value:effect`.
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

/// A node with two GPUs, and a product whose policy is [`POLICY`].
async fn scene(plane: &ControlPlane, devices: &Devices) -> anyhow::Result<Scene> {
    let policy = std::env::temp_dir().join(unique("policy"));
    std::fs::write(&policy, POLICY)?;
    let scene = Scene::with(plane, NodeBuilder::without_kubelet, |node| {
        let launch = Launch::new()?
            .node_name(node)
            .kubeconfig(plane.kubeconfig())
            .quarantine();
        Ok(launch.option("--policy", policy.display().to_string()))
    })
    .await?;
    devices.publish(&scene.node, 2).await?;
    Ok(scene)
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
    let scene = scene(&plane, &devices).await?;
    scene.ready().await?;
    send_to(&scene.product, vec![xid(&scene.node, 0, "48")]).await?;
    tainted(
        &scene,
        &devices,
        &["gpu-0 gpu.nvidia.com/xid=48:NoSchedule"],
    )
    .await?;
    // The newest XID is the value.
    send_to(&scene.product, vec![xid(&scene.node, 0, "95")]).await?;
    tainted(
        &scene,
        &devices,
        &["gpu-0 gpu.nvidia.com/xid=95:NoSchedule"],
    )
    .await?;
    // The node stays in service, but says that it has a session.
    let node = scene.nodes.get(&scene.node).await?;
    assert_eq!(node.spec.unwrap_or_default().unschedulable, None);
    let annotations = node.metadata.annotations.unwrap_or_default();
    assert!(
        annotations.contains_key("gpuwarden.dev/session"),
        "{annotations:?}"
    );
    let recovered = |code| well(&scene.node, 0, code);
    send_to(&scene.product, vec![recovered("48"), recovered("95")]).await?;
    tainted(&scene, &devices, &[]).await?;
    scene.restored().await
}
