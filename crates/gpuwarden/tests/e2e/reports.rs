//! Reports of pods to the controller through the webhook: checks in pods that may not mount host
//! directories, and gangs with an unreachable member.

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use testkit::{Balancer, ControlPlane, Options, Version, wait_for};

use crate::apart::Tls;
use crate::gangs::give_address;
use crate::player::play;
use crate::support::{SOON, Scene};
use crate::webhook::{
    ALLREDUCE, DIAG, LOOPBACK, NAMESPACE, Webhook, create, names, opted_in, pod, registered,
};

const ACCOUNT: &str = "webhook";
const CONFIG: &str = "image: registry.example/gpuwarden:1\ninitContainers:\n  - name: preflight-dcgm-diag\n  - \
                      name: preflight-nccl-loopback\n  - name: preflight-nccl-allreduce\n    securityContext: \
                      {capabilities: {add: [IPC_LOCK]}}\ngangDiscovery: {method: labels, labels: {gangIdLabel: \
                      gang, gangSizeLabel: size}}\n";

#[tokio::test]
async fn what_pods_say_comes_to_the_controller_by_the_webhook() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::private(Version::LATEST, Options::default()).await? else {
        return Ok(());
    };
    plane.namespace(NAMESPACE).await?;
    let account = ["create", "serviceaccount", ACCOUNT, "-n", NAMESPACE];
    plane.kubectl(account).await?;
    let token = [
        "create",
        "token",
        ACCOUNT,
        "-n",
        NAMESPACE,
        "--audience",
        "gpuwarden",
    ];
    let token = plane.kubectl(token).await?;
    let tls = Tls::new()?;
    std::fs::write(tls.path("token"), token)?;
    let describe = testkit::NodeBuilder::without_kubelet;
    let scene = Scene::with(&plane, describe, |node| {
        tls.rotate(node)?;
        let central = format!("{NAMESPACE}/{ACCOUNT}");
        Ok(tls
            .controller(&plane)?
            .option("--central-monitors", central))
    })
    .await?;

    let balancer = Balancer::start().await?;
    let url = format!("https://{}", balancer.address());
    let (ca, token) = (tls.path("ca.crt"), tls.path("token"));
    let flags = [
        "--controller",
        &tls.address()?,
        "--tls-ca",
        &ca.display().to_string(),
        "--token-file",
        &token.display().to_string(),
    ];
    let webhook = Webhook::start_with(&plane, &url, CONFIG, &flags).await?;
    balancer.send_to(&[webhook.address]);
    registered(&plane).await?;
    a_check_that_may_mount_nothing_reports(&plane, &scene).await?;
    a_member_that_most_do_not_reach_is_reported(&plane, &scene).await?;
    webhook.end().await
}

/// A pod under the strictest level of Pod Security is admitted with its checks, whose reports
/// quarantine its node and return it.
async fn a_check_that_may_mount_nothing_reports(
    plane: &ControlPlane,
    scene: &Scene,
) -> anyhow::Result<()> {
    let (client, namespace) = (plane.client().await?, opted_in(plane).await?);
    let level = "pod-security.kubernetes.io/enforce=restricted";
    plane
        .kubectl(["label", "namespace", &namespace, level])
        .await?;
    let mut asked = pod(
        "slow",
        json!({"nvidia.com/gpu": "2", "nvidia.com/mlnxnics": "1"}),
    );
    asked["metadata"]["labels"] = json!({"gang": "one", "size": "1"});
    asked["spec"]["nodeName"] = scene.node.clone().into();
    asked["spec"]["securityContext"] =
        json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}});
    asked["spec"]["containers"][0]["securityContext"] =
        json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}});
    let made = create(&client, &namespace, &asked).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG, LOOPBACK, ALLREDUCE]);
    let volumes = made["spec"]["volumes"].as_array().cloned();
    let volumes = volumes.unwrap_or_default();
    let of_host = |volume: &Value| volume.get("hostPath").is_some();
    assert!(!volumes.iter().any(of_host), "{volumes:?}");

    let gpus = tempfile::tempdir()?;
    let library = |name: &str| gpus.path().join(name).display().to_string();
    let (cuda, nccl) = (library(fakes::CUDA_LIBRARY), library(fakes::NCCL_LIBRARY));
    let nvml = library(fakes::LIBRARY);
    let more = [
        // The node name in a check's report is ignored.
        ("NODE_NAME", "another"),
        ("GPUWARDEN_CUDA_LIBRARY", &*cuda),
        ("GPUWARDEN_NCCL_LIBRARY", &*nccl),
        ("GPUWARDEN_NVML_LIBRARY", &*nvml),
        ("TEST_SIZE_MB", "1"),
    ];
    let mut links = fakes::Scenario::healthy(2);
    links.nccl.bandwidth_gb_s = 20.0;
    fakes::install(gpus.path(), &links)?;
    let end = play(plane, &made, LOOPBACK, &more).await?;
    let said = String::from_utf8_lossy(&end.stdout) + String::from_utf8_lossy(&end.stderr);
    assert_eq!(end.status.code(), Some(1), "{said}");
    scene.cordoned().await?;
    let events = scene.product.client(["events", "-o", "json"]).await?;
    let events = events.expect(0)?.to_owned();
    assert!(events.contains("NCCL_BW_DEGRADED"), "{events}");
    // The report has the rank of a local user's, although the controller trusts the webhook.
    assert!(
        events.contains(&format!("pod {namespace}/slow")),
        "{events}"
    );

    links.nccl.bandwidth_gb_s = 400.0;
    fakes::write(gpus.path(), &links)?;
    let end = play(plane, &made, LOOPBACK, &more).await?;
    let said = String::from_utf8_lossy(&end.stdout) + String::from_utf8_lossy(&end.stderr);
    assert_eq!(end.status.code(), Some(0), "{said}");
    scene.restored().await
}

/// Records the end of a check with its message, as a kubelet does.
async fn ended(client: &Client, namespace: &str, pod: &str, message: &str) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let at = jiff::Timestamp::now().round(jiff::Unit::Second)?;
    let terminated = json!({
        "exitCode": 1, "reason": "Error", "message": message, "finishedAt": at.to_string(),
    });
    let status = json!({
        "name": ALLREDUCE, "image": "i", "imageID": "", "ready": false, "restartCount": 1,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": terminated},
    });
    let patch = Patch::Merge(json!({"status": {"initContainerStatuses": [status]}}));
    pods.patch_status(pod, &PatchParams::default(), &patch)
        .await?;
    Ok(())
}

/// Two of three members report that they cannot reach the third, which sends no report.
async fn a_member_that_most_do_not_reach_is_reported(
    plane: &ControlPlane,
    scene: &Scene,
) -> anyhow::Result<()> {
    let (client, namespace) = (plane.client().await?, opted_in(plane).await?);
    for number in 1..=3 {
        let name = format!("m-{number}");
        let limits = json!({"nvidia.com/gpu": "1", "nvidia.com/mlnxnics": "1"});
        let mut member = pod(&name, limits);
        member["metadata"]["labels"] = json!({"gang": "cut", "size": "3"});
        member["spec"]["nodeName"] = scene.node.clone().into();
        create(&client, &namespace, &member).await?;
        give_address(&client, &namespace, &name, &format!("127.78.0.{number}")).await?;
    }
    // The API server's times are in whole seconds.
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    for name in ["m-1", "m-2"] {
        let message = "NCCL_GANG_TIMEOUT: m-3 is missing; not reached from here: m-3";
        ended(&client, &namespace, name, message).await?;
    }
    let text = "do not reach m-3, which says nothing itself: m-1, m-2";
    wait_for("the word on m-3", SOON * 2, || async {
        let events = scene.product.client(["events", "-o", "json"]).await;
        let events = events.and_then(|events| Ok(events.expect(0)?.to_owned()));
        let events = events.map_err(|error| error.to_string())?;
        let told: Vec<Value> = (serde_json::Deserializer::from_str(&events).into_iter())
            .collect::<Result<_, _>>()
            .map_err(|error| error.to_string())?;
        let event = told.iter().find_map(|one| saying(one, text));
        match event {
            Some(event) if event["isFatal"] != true && event["nodeName"] == scene.node.as_str() => {
                Ok(())
            }
            Some(event) => Err(event.to_string()),
            None => Err(events),
        }
    })
    .await
}

/// Returns the object in `value` whose message contains `text`.
fn saying<'a>(value: &'a Value, text: &str) -> Option<&'a Value> {
    let says = value["message"]
        .as_str()
        .is_some_and(|message| message.contains(text));
    match value {
        Value::Object(_) if says => Some(value),
        Value::Object(fields) => fields.values().find_map(|one| saying(one, text)),
        Value::Array(all) => all.iter().find_map(|one| saying(one, text)),
        _ => None,
    }
}
