//! Pods that use all GPUs of a node still fit with their checks, according to the real
//! scheduler.

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams};
use serde_json::{Value, json};
use testkit::{Balancer, ControlPlane, Options, Program, Version, node, unique, wait_for};

use crate::gangs::apply;
use crate::support::SOON;
use crate::webhook::{
    ALLREDUCE, DIAG, LOOPBACK, NAMESPACE, Webhook, claims, create, names, opted_in, pod, registered,
};

/// Waits until the scheduler has placed a pod, and deletes the pod.
async fn finds_a_place(client: &Client, namespace: &str, name: &str) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    wait_for("a place for the pod", SOON, || async {
        let found = pods.get(name).await.map_err(|error| error.to_string())?;
        let is_placed = found.spec.is_some_and(|spec| spec.node_name.is_some());
        let conditions = found.status.and_then(|status| status.conditions);
        is_placed
            .then_some(())
            .ok_or_else(|| format!("{name}: {conditions:?}"))
    })
    .await?;
    let now = DeleteParams::default().grace_period(0);
    pods.delete(name, &now).await?;
    wait_for("the end of the pod", SOON, || async {
        match pods.get_opt(name).await {
            Ok(None) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

/// Publishes eight devices of a driver on a node, for claims.
async fn offer_devices(plane: &ControlPlane, node: &str) -> anyhow::Result<()> {
    let devices: Vec<Value> = (0..8)
        .map(|gpu| json!({"name": format!("gpu-{gpu}")}))
        .collect();
    let slice = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": node},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    });
    apply(plane, &slice.to_string()).await
}

#[tokio::test]
async fn a_pod_that_fitted_on_its_node_fits_with_its_checks() -> anyhow::Result<()> {
    let serve = "--runtime-config=scheduling.k8s.io/v1beta1=true";
    let gates = "--feature-gates=GenericWorkload=true,DRAWorkloadResourceClaims=true";
    let options = Options::default()
        .arg(Program::ApiServer, serve)
        .arg(Program::ApiServer, gates);
    fits(Version::LATEST, options).await
}

#[tokio::test]
async fn a_pod_of_1_35_that_fitted_on_its_node_fits_with_its_checks() -> anyhow::Result<()> {
    // In that version, classes that map to a resource are behind a feature gate.
    let gate = "--feature-gates=DRAExtendedResource=true";
    let options = Options::default()
        .arg(Program::ApiServer, gate)
        .arg(Program::ControllerManager, gate)
        .arg(Program::Scheduler, gate);
    fits(Version::V1_35, options).await
}

async fn fits(version: Version, options: Options) -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(version, options).await? else {
        return Ok(());
    };
    if !plane.has(Program::Scheduler) {
        testkit::skip("a scheduler");
        return Ok(());
    }
    plane.namespace(NAMESPACE).await?;
    let balancer = Balancer::start().await?;
    let webhook = Webhook::start(&plane, &format!("https://{}", balancer.address()), &[]).await?;
    balancer.send_to(&[webhook.address]);
    registered(&plane).await?;
    let (client, namespace) = (plane.client().await?, opted_in(&plane).await?);
    // A node with eight GPUs, and as many devices for claims.
    let node_name = unique("full");
    node(&node_name).create(&client).await?;
    offer_devices(&plane, &node_name).await?;
    claims(&client, &namespace).await?;

    let gpus = |count: &str| json!({"limits": {"nvidia.com/gpu": count}});
    let container = |name: &str, resources: &Value| json!({"name": name, "image": "training", "resources": resources});
    // All GPUs of the node, in two containers.
    let mut halves = pod("halves", json!({"nvidia.com/gpu": "4"}));
    let containers = halves["spec"]["containers"].as_array_mut();
    containers.unwrap().push(container("other", &gpus("4")));
    // One GPU is a sidecar's, which runs at the same time as the checks.
    let mut beside = pod("beside", json!({"nvidia.com/gpu": "7"}));
    let mut sidecar = container("sidecar", &gpus("1"));
    sidecar["restartPolicy"] = "Always".into();
    beside["spec"]["initContainers"] = json!([sidecar]);
    // All CPUs, shared through a limit of the whole pod.
    let mut bounded = pod("bounded", json!({"nvidia.com/gpu": "8"}));
    bounded["spec"]["resources"] =
        json!({"requests": {"cpu": "120", "memory": "64Gi"}, "limits": {"cpu": "120"}});
    let processors = json!({"limits": {"cpu": "60", "nvidia.com/gpu": "4"}});
    let mut busy = pod("busy", processors["limits"].clone());
    let containers = busy["spec"]["containers"].as_array_mut();
    containers.unwrap().push(container("other", &processors));
    // With a claim from the template `gpus`, and with the resource that maps to the class.
    let mut claimed = pod("claimed", json!({}));
    claimed["spec"]["resourceClaims"] = json!([{"name": "g", "resourceClaimTemplateName": "gpus"}]);
    claimed["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "g"}]});
    let by_class = pod("by-class", json!({"vendor.example/gpu": "8"}));
    let implicit = "deviceclass.resource.kubernetes.io/gpu.nvidia.com";
    let implied = pod("implied", json!({implicit: "8"}));

    for (pod, sidecars) in [
        (&halves, &[][..]),
        (&beside, &["sidecar"]),
        (&bounded, &[]),
        (&busy, &[]),
        (&claimed, &[]),
        (&by_class, &[]),
        (&implied, &[]),
    ] {
        let made = create(&client, &namespace, pod).await?;
        let expected = [sidecars, &[DIAG, LOOPBACK]].concat();
        assert_eq!(names(&made, "initContainers"), expected, "{made}");
        let name = made["metadata"]["name"].as_str().unwrap_or_default();
        finds_a_place(&client, &namespace, name).await?;
    }
    if version == Version::LATEST {
        a_claim_of_the_group(&plane, &namespace, &claimed).await?;
    }
    webhook.end().await
}

/// Checks a claim of the pod's `PodGroup`, which the pod lists as its own and shares with its
/// checks.
async fn a_claim_of_the_group(
    plane: &ControlPlane,
    namespace: &str,
    claimed: &Value,
) -> anyhow::Result<()> {
    let group = json!({
        "apiVersion": "scheduling.k8s.io/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": "workers", "namespace": namespace},
        "spec": {
            "schedulingPolicy": {"gang": {"minCount": 2}},
            "resourceClaims": [{"name": "g", "resourceClaimTemplateName": "gpus"}],
        },
    });
    apply(plane, &group.to_string()).await?;
    let mut member = claimed.clone();
    member["metadata"]["name"] = "of-group".into();
    member["spec"]["schedulingGroup"] = json!({"podGroupName": "workers"});
    member["spec"]["hostNetwork"] = true.into();
    let made = create(&plane.client().await?, namespace, &member).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG, LOOPBACK, ALLREDUCE]);
    for check in made["spec"]["initContainers"].as_array().unwrap() {
        assert_eq!(
            check["resources"]["claims"],
            json!([{"name": "g"}]),
            "{check}"
        );
    }
    Ok(())
}
