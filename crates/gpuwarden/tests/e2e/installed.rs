//! The webhook of the chart: its account has exactly the permissions that the webhook needs.

use std::path::{Path, PathBuf};

use kube::Client;
use kube::api::{Api, PostParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use serde_json::{Value, json};
use testkit::{Balancer, ControlPlane, Version, wait_for};

use crate::chart::{Helm, least};
use crate::gangs::{
    POD_GROUPS, apply, by_osmo_with_kai, by_volcano, give_address, is_used, peers, serving,
};
use crate::player::{note_end, play};
use crate::support::SOON;
use crate::webhook::{
    ALLREDUCE, DIAG, LOOPBACK, Webhook, claims, create, names, opted_in, pod, registered,
};

const ACCOUNT: &str = "gpuwarden-webhook";
/// Permission that this story does not use: only Kubernetes 1.35 has the kind.
const UNUSED: [&str; 1] = ["get workloads scheduling.k8s.io"];
const INSTALLED_IN: &str = crate::chart::NAMESPACE;

/// Returns a control plane with the chart and its webhook.
async fn plane(version: Version, serve: &str) -> anyhow::Result<Option<testkit::Private>> {
    let Some(plane) = ControlPlane::private(version, serving(serve)).await? else {
        return Ok(None);
    };
    let Some(helm) = Helm::of(Some(&plane)) else {
        return Ok(None);
    };
    let node = testkit::node("gpu-1").label("nvidia.com/gpu.present", "true");
    node.create(&plane.client().await?).await?;
    let topologies = "preflight.ncclTopology.instanceTypeMapping.known=azure-ndv5.xml";
    helm.deploy(&["preflight"], &["--set", topologies]).await?;
    Ok(Some(plane))
}

/// Writes a kubeconfig with the token of the webhook's account.
pub(crate) async fn kubeconfig(plane: &ControlPlane, into: &Path) -> anyhow::Result<PathBuf> {
    let token = ["create", "token", ACCOUNT, "-n", INSTALLED_IN];
    let token = plane.kubectl(token).await?;
    let config = plane
        .kubectl(["config", "view", "--raw", "-o", "json"])
        .await?;
    let mut config: Value = serde_json::from_str(&config)?;
    config["users"][0]["user"] = json!({"token": token.trim()});
    let path = into.join("kubeconfig");
    std::fs::write(&path, config.to_string())?;
    Ok(path)
}

/// Returns the configuration of the webhook's pods.
pub(crate) async fn config(plane: &ControlPlane) -> anyhow::Result<String> {
    let data = "jsonpath={.data.config\\.yaml}";
    let get = ["get", "configmap", ACCOUNT, "-n", INSTALLED_IN, "-o", data];
    plane.kubectl(get).await
}

/// Returns whether the account has a permission: verb, API group, resource, name and namespace,
/// each empty for any.
async fn may(
    client: &Client,
    [verb, group, resource, name, namespace]: [&str; 5],
) -> anyhow::Result<bool> {
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": format!("system:serviceaccount:{INSTALLED_IN}:{ACCOUNT}"),
            "resourceAttributes": {
                "verb": verb, "group": group, "resource": resource, "name": name,
                "namespace": namespace,
            },
        },
    });
    let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let request = kube::core::Request::new(path);
    let request = request.create(&PostParams::default(), serde_json::to_vec(&review)?)?;
    let answer: Value = client.request(request).await?;
    Ok(answer["status"]["allowed"] == true)
}

fn group(namespace: &str) -> String {
    format!(
        "apiVersion: scheduling.k8s.io/v1beta1\nkind: PodGroup\n\
         metadata: {{name: workers, namespace: {namespace}}}\n\
         spec: {{schedulingPolicy: {{gang: {{minCount: 2}}}}}}\n"
    )
}

fn preflight_config(namespace: &str) -> String {
    format!(
        "apiVersion: preflight.nvsentinel.nvidia.com/v1alpha1\nkind: PreflightConfig\n\
         metadata: {{name: own, namespace: {namespace}}}\n\
         spec: {{gangDiscovery: {{method: workloadRef}}}}\n"
    )
}

/// Checks the registration of a webhook that is reached by its URL and fails open.
async fn is_registered_rightly(plane: &ControlPlane) -> anyhow::Result<()> {
    let name = "gpuwarden-preflight";
    let shown = ["get", "mutatingwebhookconfiguration", name, "-o", "json"];
    let registration: Value = serde_json::from_str(&plane.kubectl(shown).await?)?;
    let webhook = &registration["webhooks"][0];
    for (key, expected) in [
        ("name", json!("preflight.nvsentinel.nvidia.com")),
        ("failurePolicy", json!("Ignore")),
        ("sideEffects", json!("None")),
        ("admissionReviewVersions", json!(["v1"])),
        ("reinvocationPolicy", json!("IfNeeded")),
        // The API server's form of no selector.
        ("objectSelector", json!({})),
    ] {
        assert_eq!(webhook[key], expected, "{key}: {webhook}");
    }
    assert_eq!(webhook["rules"][0]["operations"], json!(["CREATE"]));
    assert_eq!(webhook["rules"][0]["resources"], json!(["pods"]));
    let selector = &webhook["namespaceSelector"];
    let label = json!({"nvsentinel.nvidia.com/preflight": "enabled"});
    assert_eq!(selector["matchLabels"], label);
    let never = json!([
        "nvsentinel",
        "kube-system",
        "kube-public",
        "kube-node-lease",
        INSTALLED_IN
    ]);
    let by_name = json!([
        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": never},
    ]);
    assert_eq!(selector["matchExpressions"], by_name);
    Ok(())
}

/// Makes the webhook look up a claim, and the security level of a namespace.
async fn looks_up(plane: &ControlPlane, client: &Client, namespace: &str) -> anyhow::Result<()> {
    claims(client, namespace).await?;
    let mut claimed = pod("claimed", json!({}));
    claimed["spec"]["resourceClaims"] = json!([{"name": "g", "resourceClaimTemplateName": "gpus"}]);
    claimed["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "g"}]});
    let made = create(client, namespace, &claimed).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG, LOOPBACK]);
    apply(plane, &claim(namespace)).await?;
    claimed["metadata"]["name"] = json!("claimed-by-name");
    claimed["spec"]["resourceClaims"] = json!([{"name": "g", "resourceClaimName": "own"}]);
    let made = create(client, namespace, &claimed).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG]);
    // Without the permission to read namespaces, the webhook would not know the level.
    let strict = opted_in(plane).await?;
    let baseline = "pod-security.kubernetes.io/enforce=baseline";
    plane
        .kubectl(["label", "namespace", &strict, baseline])
        .await?;
    let made = create(
        client,
        &strict,
        &pod("strict", json!({"nvidia.com/gpu": "1"})),
    )
    .await?;
    assert_eq!(names(&made, "initContainers"), [] as [&str; 0]);
    Ok(())
}

/// Makes the webhook bring a gang together.
async fn keeps_a_gang(
    plane: &ControlPlane,
    client: &Client,
    namespace: &str,
) -> anyhow::Result<()> {
    // A node whose kubelet is not played: kwok would complete the checks.
    let machine = testkit::node("machine").without_kubelet();
    machine.create(client).await?;
    apply(plane, &group(namespace)).await?;
    for name in ["w-a", "w-b"] {
        let limits = json!({"nvidia.com/gpu": "8", "nvidia.com/mlnxnics": "8"});
        let mut member = pod(name, limits);
        member["spec"]["schedulingGroup"] = json!({"podGroupName": "workers"});
        member["spec"]["nodeName"] = json!("machine");
        let made = create(client, namespace, &member).await?;
        assert_eq!(names(&made, "initContainers"), [DIAG, LOOPBACK, ALLREDUCE]);
    }
    give_address(client, namespace, "w-a", "127.77.2.1").await?;
    give_address(client, namespace, "w-b", "127.77.2.2").await?;
    let map = format!("preflight-kubernetes-{namespace}-workers");
    let both = ["w-a;127.77.2.1;0", "w-b;127.77.2.2;1"];
    peers(client, namespace, &map, &both).await
}

/// A claim of a pod's own.
fn claim(namespace: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\n\
         metadata: {{name: own, namespace: {namespace}}}\n\
         spec: {{devices: {{requests: [{{name: gpu, exactly: {{deviceClassName: gpu.nvidia.com}}}}]}}}}\n"
    )
}

/// Changes the registration, and waits until the webhook has restored it.
async fn registration_returns(plane: &ControlPlane) -> anyhow::Result<()> {
    let name = "mutatingwebhookconfiguration/gpuwarden-preflight";
    let changed = r#"[{"op": "replace", "path": "/webhooks/0/timeoutSeconds", "value": 7}]"#;
    plane
        .kubectl(["patch", name, "--type", "json", "-p", changed])
        .await?;
    let seconds = "jsonpath={.webhooks[0].timeoutSeconds}";
    wait_for("the registration as it was", SOON, || async {
        match plane.kubectl(["get", name, "-o", seconds]).await {
            Ok(seconds) if seconds == "10" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

/// Lets a check of a pod fail twice: the second time changes the Event of the first.
async fn fails_twice(plane: &ControlPlane, client: &Client, namespace: &str) -> anyhow::Result<()> {
    // No node has the other device, so that no kubelet is played for the pod.
    let limits = json!({"nvidia.com/gpu": "1", "nvidia.com/mlnxnics": "1"});
    let made = create(client, namespace, &pod("failing", limits)).await?;
    let count = async |wanted: &str| {
        wait_for("the Event on the pod", SOON, || async {
            let of_pod = "involvedObject.name=failing,reason=PreflightCheckFailed";
            let count = "jsonpath={.items[*].count}";
            let list = [
                "get",
                "events",
                "-n",
                namespace,
                "--field-selector",
                of_pod,
                "-o",
                count,
            ];
            match plane.kubectl(list).await {
                Ok(count) if count == wanted => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await
    };
    note_end(client, &made, DIAG, 1, "no").await?;
    count("1").await?;
    let path = "/status/initContainerStatuses/0/restartCount";
    let again = json!([{"op": "replace", "path": path, "value": 1}]).to_string();
    let patch = [
        "patch",
        "pod",
        "failing",
        "-n",
        namespace,
        "--subresource",
        "status",
    ];
    let patch = [&patch[..], &["--type", "json", "-p", &again]].concat();
    plane.kubectl(patch).await?;
    count("2").await
}

/// Lets a pod of a gang ask for its gang: it waits for the others in vain.
async fn asks_for_its_gang(
    client: &Client,
    plane: &ControlPlane,
    namespace: &str,
) -> anyhow::Result<()> {
    let pods: Api<DynamicObject> = Api::namespaced_with(
        client.clone(),
        namespace,
        &ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("", "v1", "Pod"), "pods"),
    );
    let member = serde_json::to_value(pods.get("w-a").await?)?;
    let more = [
        ("GPUWARDEN_COLLECTIVE", "tcp"),
        ("GANG_TIMEOUT_SECONDS", "15"),
    ];
    let end = play(plane, &member, ALLREDUCE, &more).await?;
    let said = String::from_utf8_lossy(&end.stdout) + String::from_utf8_lossy(&end.stderr);
    assert!(said.contains("missing: w-b"), "{said}");
    Ok(())
}

/// Lets a gang of Kueue form, whose size is that of its Workload.
async fn by_kueue(plane: &ControlPlane, client: &Client) -> anyhow::Result<()> {
    let workloads = [
        ("podgroups", "workloads"),
        ("podgroup", "workload"),
        ("PodGroup", "Workload"),
        ("scheduling.volcano.sh", "kueue.x-k8s.io"),
    ];
    let crd = workloads
        .iter()
        .fold(POD_GROUPS.to_owned(), |text, (from, to)| {
            text.replace(from, to)
        });
    apply(plane, &crd).await?;
    let namespace = opted_in(plane).await?;
    let metadata = format!("metadata: {{name: own, namespace: {namespace}}}");
    let objects = format!(
        "apiVersion: preflight.nvsentinel.nvidia.com/v1alpha1\nkind: PreflightConfig\n{metadata}\n\
         spec: {{gangDiscovery: {{method: kueue}}}}\n---\n\
         apiVersion: kueue.x-k8s.io/v1beta1\nkind: Workload\n{metadata}\n\
         spec: {{podSets: [{{name: main, count: 2}}]}}\n"
    );
    apply(plane, &objects).await?;
    is_used(plane, &namespace).await?;
    let limits = json!({"nvidia.com/gpu": "1", "nvidia.com/mlnxnics": "1"});
    let mut member = pod("q-0", limits);
    member["metadata"]["labels"] = json!({"kueue.x-k8s.io/workload-name": "own"});
    let made = create(client, &namespace, &member).await?;
    assert_eq!(names(&made, "initContainers"), [DIAG, ALLREDUCE]);
    Ok(())
}

/// Claims, a gang from its first pod to the end of its `ConfigMap`, the gangs of other schedulers, a
/// failed check, a `PreflightConfig` of a namespace, and new certificates.
#[tokio::test]
async fn the_account_of_the_chart_may_do_all_that_the_webhook_does() -> anyhow::Result<()> {
    let Some(plane) = plane(Version::V1_37, "v1beta1").await? else {
        return Ok(());
    };
    let directory = tempfile::tempdir()?;
    let speaks = kubeconfig(&plane, directory.path()).await?;
    let config = config(&plane).await?;
    let balancer = Balancer::start().await?;
    let url = format!("https://{}", balancer.address());
    let flags = [
        "--namespace",
        INSTALLED_IN,
        "--keep-registration",
        // Renewed when ten seconds are left, also by a busy machine in time.
        "--certificate-lifetime",
        "30s",
    ];
    let webhook = Webhook::start_as(&speaks, &url, &config, &flags).await?;
    balancer.send_to(&[webhook.address]);
    registered(&plane).await?;
    let (client, namespace) = (plane.client().await?, opted_in(&plane).await?);

    is_registered_rightly(&plane).await?;
    looks_up(&plane, &client, &namespace).await?;
    keeps_a_gang(&plane, &client, &namespace).await?;
    asks_for_its_gang(&client, &plane, &namespace).await?;
    let members = ["delete", "pod", "w-a", "w-b", "-n", &namespace];
    plane
        .kubectl([&members[..], &["--grace-period", "0", "--force"]].concat())
        .await?;
    registration_returns(&plane).await?;
    fails_twice(&plane, &client, &namespace).await?;
    by_volcano(&plane).await?;
    by_osmo_with_kai(&plane).await?;
    by_kueue(&plane, &client).await?;
    apply(&plane, &preflight_config(&namespace)).await?;
    let ready = "jsonpath={.status.conditions[0].status}";
    wait_for("the word on the PreflightConfig", SOON, || async {
        let said = [
            "get",
            "preflightconfig",
            "own",
            "-n",
            &namespace,
            "-o",
            ready,
        ];
        match plane.kubectl(said).await {
            Ok(said) if said == "True" => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await?;
    wait_for("another certificate", SOON, || async {
        match webhook.log().matches("a new certificate is made").count() {
            0 | 1 => Err(webhook.log()),
            _ => Ok(()),
        }
    })
    .await?;
    let log = webhook.log();
    assert!(!log.to_lowercase().contains("forbidden"), "{log}");
    assert!(!log.contains("cannot"), "{log}");
    // A minute after the last pod of the gang, the webhook deletes its ConfigMap.
    wait_for("the deletion of a ConfigMap", SOON * 2, || async {
        let deleted = format!("delete configmaps in {namespace}");
        match least::requested(&plane, ACCOUNT, &deleted) {
            Ok(0) => Err(webhook.log()),
            other => other.map(drop).map_err(|error| error.to_string()),
        }
    })
    .await?;
    least::check(&plane, ACCOUNT, &UNUSED).await?;
    webhook.end().await
}

#[tokio::test]
async fn the_account_of_the_chart_may_do_no_more() -> anyhow::Result<()> {
    let Some(plane) = plane(Version::LATEST, "").await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    let (secret, webhooks) = ("gpuwarden-webhook-tls", "mutatingwebhookconfigurations");
    let admission = "admissionregistration.k8s.io";
    for (asked, expected) in [
        (["get", "", "secrets", secret, INSTALLED_IN], true),
        (["delete", "", "configmaps", "preflight-a", "default"], true),
        (
            ["create", "authentication.k8s.io", "tokenreviews", "", ""],
            true,
        ),
        (
            ["get", "scheduling.volcano.sh", "podgroups", "a", "default"],
            true,
        ),
        (
            ["get", "scheduling.run.ai", "podgroups", "a", "default"],
            true,
        ),
        (["get", "kueue.x-k8s.io", "workloads", "a", "default"], true),
        (
            ["get", "scheduling.k8s.io", "workloads", "a", "default"],
            true,
        ),
        (["get", "", "secrets", "another", INSTALLED_IN], false),
        (["get", "", "secrets", secret, "default"], false),
        (["list", "", "secrets", "", INSTALLED_IN], false),
        (["delete", "", "secrets", secret, INSTALLED_IN], false),
        (["create", "", "secrets", "", "default"], false),
        (["update", admission, webhooks, "another", ""], false),
        (
            ["delete", admission, webhooks, "gpuwarden-preflight", ""],
            false,
        ),
        (["get", "", "pods", "a", "default"], true),
        (["create", "", "pods", "", "default"], false),
        (["patch", "", "pods", "a", "default"], false),
        (["get", "", "nodes", "a", ""], true),
        (["list", "", "nodes", "", ""], false),
        (["patch", "", "nodes", "a", ""], false),
    ] {
        assert_eq!(may(&client, asked).await?, expected, "{asked:?}");
    }
    Ok(())
}
