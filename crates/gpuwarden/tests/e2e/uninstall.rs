//! `gpuwarden uninstall` on a real API server: afterwards all objects of the cluster equal those
//! before the installation, except for a literal list. `chart/removal.rs` does the same with the chart.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::ensure;
use contract::{HealthEvent, RecommendedAction};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::Client;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Options, Private, Product, Version, binary, wait_for};

use crate::doctor::kubeconfig_of;
use crate::snapshot::{differences, get, objects, restored, settled};
use crate::support::{HAND_OVER, JANITOR, SOON, condition, event, gpuwarden, object, send_to};
use crate::webhook::{NAMESPACE as WEBHOOK_NAMESPACE, Webhook};

const CRDS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../deploy/helm/gpuwarden/crds"
);

/// A policy that taints a single faulty GPU, and takes the node out for other faults.
const POLICY: &str = r#"
[device-taints]

[[rule-sets]]
name = "fatal"
taint-devices = 1
cordon = { shouldCordon = true }
taint = { key = "gpuwarden.dev/out", value = "fault", effect = "NoSchedule" }

[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal"
"#;

/// Objects that gpuwarden makes in the first story, by the beginnings of their paths.
const KINDS: [&str; 8] = [
    "lease gpuwarden/gpuwarden-controller",
    "lease gpuwarden-webhook-test/gpuwarden-webhook",
    "/api/v1/configmaps gpuwarden/gpuwarden",
    "/api/v1/secrets gpuwarden-webhook-test/gpuwarden-webhook-tls",
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations /gpuwarden-preflight",
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations /gpuwarden-requests",
    "/apis/resource.k8s.io/v1/devicetaintrules /",
    "/apis/nvsentinel.dgxc.nvidia.com/v1/externalremediationrequests /extrr-handed-over",
];

/// A cluster, and what was in it before gpuwarden.
struct Before {
    plane: Private,
    client: Client,
    nodes: Api<Node>,
    objects: BTreeMap<String, Value>,
}

impl Before {
    /// Starts a cluster with nodes of these names, and lets `prepare` add to it.
    async fn new(
        names: &[&str],
        prepare: impl AsyncFnOnce(&Client) -> anyhow::Result<()>,
    ) -> anyhow::Result<Option<Self>> {
        let plane = ControlPlane::private(Version::V1_37, Options::default()).await?;
        let Some(plane) = plane else {
            return Ok(None);
        };
        plane.kubectl(["apply", "-f", CRDS]).await?;
        for namespace in ["gpuwarden", "gpu-operator", WEBHOOK_NAMESPACE, "train"] {
            plane.namespace(namespace).await?;
        }
        let client = plane.client().await?;
        for name in names {
            testkit::node(*name).create(&client).await?;
        }
        prepare(&client).await?;
        let objects = settled(&client).await?;
        Ok(Some(Self {
            nodes: Api::all(client.clone()),
            plane,
            client,
            objects,
        }))
    }

    fn uninstall(&self, args: &[&str]) -> (Option<i32>, String) {
        uninstall(self.plane.kubeconfig(), args)
    }

    async fn controller(&self, more: &[&str]) -> anyhow::Result<Product> {
        let mut launch = Launch::controller()?
            .kubeconfig(self.plane.kubeconfig())
            .quarantine()
            .arg("--grpc-insecure")
            .option("--grpc-listen", "127.0.0.1:0");
        for arg in more {
            launch = launch.arg(arg);
        }
        let product = launch.start().await?;
        let leads = || async {
            match product.get("/readyz").await {
                Ok(ready) if ready == "ready\n" => Ok(()),
                other => Err(format!("{other:?}")),
            }
        };
        product.wait_for("the lead", SOON, leads).await?;
        Ok(product)
    }

    /// Waits until `holds` for a node.
    async fn node_until(
        &self,
        product: &Product,
        name: &str,
        holds: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<()> {
        let what = format!("a state of {name}");
        let look = || async {
            let node = object(&self.nodes, name).await;
            let node = node.map_err(|error| error.to_string())?;
            if holds(&node) {
                Ok(())
            } else {
                Err(node.to_string())
            }
        };
        product.wait_for(&what, SOON, look).await
    }

    /// Waits until all objects are as before, but for those that `allowed` lists.
    async fn restored(&self, allowed: &[&str]) -> anyhow::Result<()> {
        restored(&self.client, &self.objects, allowed).await
    }
}

/// Runs `gpuwarden uninstall` on a cluster. Returns its exit code, and both outputs.
pub(crate) fn uninstall(kubeconfig: &Path, args: &[&str]) -> (Option<i32>, String) {
    let kubeconfig = kubeconfig.display().to_string();
    let args = [&["uninstall", "--kubeconfig", &kubeconfig], args].concat();
    let (code, output, errors) = gpuwarden(&args, "");
    (code, output + &errors)
}

/// Writes as gpuwarden does, by the name in the API server's record.
fn as_gpuwarden() -> PatchParams {
    PatchParams {
        field_manager: Some("gpuwarden".to_owned()),
        ..PatchParams::default()
    }
}

fn is_out(node: &Value) -> bool {
    // The controller manager follows the cordon by a taint.
    let taints = node["spec"]["taints"].to_string();
    node["spec"]["unschedulable"] == true && taints.contains("node.kubernetes.io/unschedulable")
}

#[tokio::test]
async fn everything_is_as_it_was_before_gpuwarden_came() -> anyhow::Result<()> {
    // The session of a gpuwarden on the machine itself, which is another one.
    let theirs = json!({"metadata": {"annotations": {
        "quarantineHealthEvent": json!([{"checkName": "Other", "isFatal": true}]).to_string(),
        "gpuwarden.dev/session": json!({
            "id": "x", "since": "2026-01-01T00:00:00Z", "by": "node", "store": "s", "labels": {},
        }).to_string(),
    }}});
    let names = [
        "faulty",
        "cordoned",
        "released",
        "handed-over",
        "device",
        "theirs",
        "healthy",
    ];
    let Some(before) = Before::new(&names, async |client| {
        let nodes: Api<Node> = Api::all(client.clone());
        let (how, cordon) = (
            PatchParams::default(),
            json!({"spec": {"unschedulable": true}}),
        );
        nodes.patch("cordoned", &how, &Patch::Merge(cordon)).await?;
        nodes.patch("theirs", &how, &Patch::Merge(theirs)).await?;
        let label = json!({"metadata": {"labels": {"dgxc.nvidia.com/nvsentinel-state": "mine"}}});
        nodes.patch("faulty", &how, &Patch::Merge(label)).await?;
        for pod in ["checkpointed", "plain"] {
            testkit::pod("train", pod)
                .on("faulty")
                .create(client)
                .await?;
        }
        let asks = json!({"metadata": {"annotations": {"gpuwarden.dev/checkpoint": "9m"}}});
        let pods: Api<Pod> = Api::namespaced(client.clone(), "train");
        pods.patch("checkpointed", &how, &Patch::Merge(asks))
            .await?;
        slice(client).await
    })
    .await?
    else {
        return Ok(());
    };
    let config = tempfile::tempdir()?;
    let file = |name: &str, text: &str| {
        let path = config.path().join(name);
        std::fs::write(&path, text)?;
        anyhow::Ok(path.display().to_string())
    };
    let drain = "[[userNamespaces]]\nname = \"train\"\nmode = \"AllowCompletion\"\n";
    let (policy, drain) = (file("policy.toml", POLICY)?, file("drain.toml", drain)?);
    let (remediation, janitor) = (
        file("remediation.toml", HAND_OVER)?,
        file("janitor.yaml", JANITOR)?,
    );
    let more = [
        "--policy",
        &policy,
        "--drain",
        "--drain-config",
        &drain,
        "--remediate",
        "--remediate-config",
        &remediation,
        "--janitor",
        "--janitor-config",
        &janitor,
    ];
    let mut product = before.controller(&more).await?;
    // Registered by its Service, which keeps the registration when the webhook ends.
    let flags = ["--namespace", WEBHOOK_NAMESPACE, "--validate-requests"];
    let webhook = Webhook::start_reached(before.plane.kubeconfig(), "image: i:1\n", &flags);
    let webhook = webhook.await?;
    for node in ["faulty", "cordoned", "released"] {
        send_to(&product, vec![event(node, "0")]).await?;
    }
    let mut replaced = event("handed-over", "0");
    replaced.recommended_action = RecommendedAction::ReplaceVm.into();
    send_to(&product, vec![replaced, of_device()]).await?;
    let with_condition = |node: &Value| condition(node, "GpuMemWatch")["status"] == "True";
    for node in ["faulty", "cordoned", "released"] {
        before
            .node_until(&product, node, |node| is_out(node) && with_condition(node))
            .await?;
    }
    before
        .node_until(&product, "handed-over", |node| {
            node["metadata"]["labels"]["nvsentinel.dgxc.nvidia.com/managed"] == "false"
        })
        .await?;
    let draining = |node: &Value| condition(node, "DrainInProgress")["status"] == "True";
    before.node_until(&product, "faulty", draining).await?;
    before
        .node_until(&product, "device", with_condition)
        .await?;
    let kubeconfig = before.plane.kubeconfig().display().to_string();
    for command in [
        [
            "release",
            "released",
            "--reason",
            "x",
            "--kubeconfig",
            &kubeconfig,
        ],
        [
            "veto",
            "healthy",
            "--reason",
            "x",
            "--kubeconfig",
            &kubeconfig,
        ],
        [
            "pause",
            "--reason",
            "x",
            "--repairs",
            "--kubeconfig",
            &kubeconfig,
        ],
    ] {
        let said = product.command(command).await?;
        assert_ne!(said.code, Some(2), "{}", said.stderr);
    }
    by_others(&before.client).await?;
    wait_for("an object of each kind", SOON, || async {
        let there = objects(&before.client).await?;
        for kind in KINDS {
            let is_there = there.keys().any(|path| path.starts_with(kind));
            ensure!(is_there, "no {kind} of {:?}", there.keys());
        }
        Ok(())
    })
    .await?;

    // Nothing is changed while a gpuwarden acts, a request is under way, or nobody has decided
    // about the nodes.
    let (code, said) = before.uninstall(&["--nodes", "return", "--abandon"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(
        said.contains("holds the Lease gpuwarden/gpuwarden-controller"),
        "{said}"
    );
    let (status, _) = product.terminate().await?;
    assert!(status.success());
    webhook.end().await?;
    let (code, said) = before.uninstall(&[]);
    assert_eq!(code, Some(2), "{said}");
    for part in [
        "under way: ExternalRemediationRequest by-hand, ExternalRemediationRequest extrr-handed",
        "--nodes return returns",
        "--nodes leave keeps",
        "faulty: GpuMemWatch DCGM_FR_FAULTY_MEMORY",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let unchanged = settled(&before.client).await?;
    let (code, plan) = before.uninstall(&["--plan", "--nodes", "return", "--abandon"]);
    assert_eq!(code, Some(0), "{plan}");
    for part in [
        "Node faulty: uncordon, remove taint gpuwarden.dev/out=fault:NoSchedule",
        "(quarantined: GpuMemWatch DCGM_FR_FAULTY_MEMORY)",
        "Node theirs: is untouched: its session since 2026-01-01T00:00:00Z belongs to the \
         gpuwarden on theirs itself, with the store s",
        "CustomResourceDefinition rebootnodes.janitor.dgxc.nvidia.com: NVSentinel uses",
    ] {
        assert!(plan.contains(part), "{part}: {plan}");
    }
    assert_eq!(
        differences(&unchanged, &objects(&before.client).await?),
        [""; 0]
    );

    let (code, said) = before.uninstall(&["--nodes", "return", "--abandon", "-o", "json"]);
    assert_eq!(code, Some(0), "{said}");
    before
        .restored(&[
            // Made by a person; only gpuwarden's finalizer is off.
            "/apis/nvsentinel.dgxc.nvidia.com/v1/externalremediationrequests /by-hand is new",
        ])
        .await?;
    let by_hand = objects(&before.client).await?;
    let by_hand = by_hand.iter().find(|(path, _)| path.ends_with(" /by-hand"));
    assert!(by_hand.is_some_and(|(_, object)| object["metadata"]["finalizers"].is_null()));
    let (code, said) = before.uninstall(&["--plan"]);
    assert!(
        said.starts_with("Nothing of gpuwarden is to be removed."),
        "{code:?} {said}"
    );
    Ok(())
}

#[tokio::test]
async fn nodes_may_stay_out_of_service_without_a_mark() -> anyhow::Result<()> {
    let Some(before) = Before::new(&["faulty", "device"], slice).await? else {
        return Ok(());
    };
    let config = tempfile::tempdir()?;
    let policy = config.path().join("policy.toml");
    std::fs::write(&policy, POLICY)?;
    let policy = policy.display().to_string();
    let mut product = before.controller(&["--policy", &policy]).await?;
    send_to(&product, vec![event("faulty", "0"), of_device()]).await?;
    before.node_until(&product, "faulty", is_out).await?;
    let rules = "/apis/resource.k8s.io/v1/devicetaintrules";
    let rule = wait_for("a rule", SOON, || async {
        let rules = get(&before.client, rules)
            .await
            .map_err(|error| error.to_string())?;
        let name = rules["items"][0]["metadata"]["name"]
            .as_str()
            .map(str::to_owned);
        name.ok_or_else(|| rules.to_string())
    });
    let rule = rule.await?;
    product.kill9()?; // Its Lease has a holder, which no longer renews it.
    let (code, said) = before.uninstall(&["--nodes", "leave"]);
    assert_eq!(code, Some(0), "{said}");
    let uncordon =
        "kubectl uncordon faulty && kubectl taint node faulty gpuwarden.dev/out:NoSchedule-";
    let untaint = format!("kubectl delete devicetaintrule {rule}");
    for part in [uncordon, &untaint] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let node = object(&before.nodes, "faulty").await?;
    assert!(
        is_out(&node)
            && node["spec"]["taints"]
                .to_string()
                .contains("gpuwarden.dev/out")
    );
    let (code, said) = before.uninstall(&[]);
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.starts_with("Nothing of gpuwarden is to be removed."),
        "{said}"
    );
    // What it has named is all that is left.
    for command in uncordon.split(" && ").chain([untaint.as_str()]) {
        before.plane.kubectl(command.split(' ').skip(1)).await?;
    }
    before.restored(&[]).await
}

#[tokio::test]
async fn a_second_run_finishes_what_was_killed_or_not_permitted() -> anyhow::Result<()> {
    const NODES: usize = 150;
    let names: Vec<String> = (0..NODES).map(|number| format!("n{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let Some(before) = Before::new(&names, async |_| Ok(())).await? else {
        return Ok(());
    };
    // One session by the product, and its copies on all other nodes.
    let mut product = before.controller(&[]).await?;
    send_to(&product, vec![event("n0", "0")]).await?;
    before.node_until(&product, "n0", is_out).await?;
    let (status, _) = product.terminate().await?;
    assert!(status.success());
    let node = object(&before.nodes, "n0").await?;
    let copy = json!({
        "metadata": {
            "annotations": node["metadata"]["annotations"], "labels": node["metadata"]["labels"],
        },
        "spec": {"unschedulable": true},
    });
    for name in &names[1..] {
        before
            .nodes
            .patch(name, &as_gpuwarden(), &Patch::Merge(copy.clone()))
            .await?;
    }
    let kubeconfig = before.plane.kubeconfig().display().to_string();
    let pause = ["pause", "--reason", "x", "--kubeconfig", &kubeconfig];
    product.command(pause).await?.expect(0)?;
    // Killed half-way.
    let out = async || -> anyhow::Result<usize> {
        let nodes = before
            .nodes
            .list_metadata(&ListParams::default())
            .await?
            .items
            .into_iter();
        let in_session = nodes.filter(|node| {
            let annotations = node.metadata.annotations.as_ref();
            annotations.is_some_and(|all| all.contains_key("gpuwarden.dev/session"))
        });
        Ok(in_session.count())
    };
    let mut child = Command::new(binary()?)
        .args([
            "uninstall",
            "--nodes",
            "return",
            "--kubeconfig",
            &kubeconfig,
        ])
        .stdout(Stdio::null())
        .spawn()?;
    while out().await? == NODES {
        assert!(child.try_wait()?.is_none(), "it ended without a change");
    }
    child.kill()?;
    child.wait()?;
    let left = out().await?;
    assert!(0 < left && left < NODES, "{left} of {NODES}");
    // As somebody who may do all but delete.
    let home = tempfile::tempdir()?;
    let account = kubeconfig_of(&before.plane, "unprivileged", home.path()).await?;
    let (read, patch) = (
        "--verb=get,list --resource=*.*",
        "--verb=patch --resource=nodes,nodes/status",
    );
    for (role, rules) in [("reads", read), ("patches", patch)] {
        let create = format!("create clusterrole {role} {rules}");
        before.plane.kubectl(create.split(' ')).await?;
        let bind = format!(
            "create clusterrolebinding {role} --clusterrole={role} --serviceaccount=default:unprivileged"
        );
        before.plane.kubectl(bind.split(' ')).await?;
    }
    // The API server learns of a role with a delay; kubectl fails where it says no.
    for may in [
        "list nodes",
        "patch nodes",
        "patch nodes --subresource=status",
    ] {
        let may = format!("auth can-i {may} --as=system:serviceaccount:default:unprivileged");
        let asked = || before.plane.kubectl(may.split(' '));
        wait_for("the roles to hold", SOON, asked).await?;
    }
    let (code, said) = uninstall(&account, &["--nodes", "return"]);
    assert_eq!(code, Some(1), "{said}");
    let refused = "ConfigMap gpuwarden/gpuwarden: not allowed: configmaps \"gpuwarden\" is \
                   forbidden: User \"system:serviceaccount:default:unprivileged\" cannot delete \
                   resource \"configmaps\"";
    assert!(said.contains(refused), "{said}");
    assert_eq!(out().await?, 0);
    for kind in ["clusterrolebinding", "clusterrole"] {
        before
            .plane
            .kubectl(["delete", kind, "reads", "patches"])
            .await?;
    }
    before
        .plane
        .kubectl(["delete", "serviceaccount", "unprivileged"])
        .await?;
    let (code, said) = before.uninstall(&["--crds"]);
    assert_eq!(code, Some(0), "{said}");
    let crds = [
        "externalremediationrequests.nvsentinel.dgxc.nvidia.com",
        "gpuresets.janitor.dgxc.nvidia.com",
        "maintenancerequests.nvsentinel.dgxc.nvidia.com",
        "preflightconfigs.preflight.nvsentinel.nvidia.com",
        "rebootnodes.janitor.dgxc.nvidia.com",
        "terminatenodes.janitor.dgxc.nvidia.com",
        "validationrequests.nvsentinel.nvidia.com",
    ];
    let crds = crds.map(|crd| {
        format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions /{crd} is gone")
    });
    // Kinds that are served have an APIService each.
    let services = [
        "janitor.dgxc.nvidia.com",
        "nvsentinel.dgxc.nvidia.com",
        "nvsentinel.nvidia.com",
        "preflight.nvsentinel.nvidia.com",
    ];
    let versions = ["v1alpha1", "v1", "v1alpha1", "v1alpha1"];
    let services = versions.iter().zip(services).map(|(version, group)| {
        format!("/apis/apiregistration.k8s.io/v1/apiservices /{version}.{group} is gone")
    });
    let gone: Vec<String> = crds.into_iter().chain(services).collect();
    let gone: Vec<&str> = gone.iter().map(String::as_str).collect();
    before.restored(&gone).await
}

/// Returns a fault of the GPU of the node `device`.
fn of_device() -> HealthEvent {
    let mut event = event("device", "GPU-1");
    event.entities_impacted[0].entity_type = "GPU_UUID".into();
    event
}

/// Publishes a GPU of the node `device`.
async fn slice(client: &Client) -> anyhow::Result<()> {
    let kind = GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceSlice");
    let slices: Api<DynamicObject> = Api::all_with(
        client.clone(),
        &ApiResource::from_gvk_with_plural(&kind, "resourceslices"),
    );
    let slice = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "device-gpus"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "device",
            "pool": {"name": "device", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": "GPU-1"}}}],
        },
    });
    slices
        .create(&PostParams::default(), &serde_json::from_value(slice)?)
        .await?;
    Ok(())
}

/// Writes what agents, kubelets and pods would bring about, and a request by a person.
async fn by_others(client: &Client) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), "train");
    let devices = json!({"metadata": {"annotations": {"dgxc.nvidia.com/devices": "{}"}}});
    pods.patch("plain", &as_gpuwarden(), &Patch::Merge(devices))
        .await?;
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "train");
    let gang = json!({"metadata": {
        "name": "preflight-gang", "labels": {"nvsentinel.nvidia.com/managed-by": "preflight"},
    }});
    let params = PostParams {
        field_manager: Some("gpuwarden".to_owned()),
        ..PostParams::default()
    };
    maps.create(&params, &serde_json::from_value(gang)?).await?;
    let kind = GroupVersionKind::gvk(
        "nvsentinel.dgxc.nvidia.com",
        "v1",
        "ExternalRemediationRequest",
    );
    let resource = ApiResource::from_gvk_with_plural(&kind, "externalremediationrequests");
    let requests: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
    let request = json!({
        "apiVersion": "nvsentinel.dgxc.nvidia.com/v1",
        "kind": "ExternalRemediationRequest",
        "metadata": {"name": "by-hand"},
        "spec": {"healthEvent": {"nodeName": "healthy"}},
    });
    requests
        .create(&PostParams::default(), &serde_json::from_value(request)?)
        .await?;
    wait_for("the finalizer of a request", SOON, || async {
        let request = requests
            .get("by-hand")
            .await
            .map_err(|error| error.to_string())?;
        if request.metadata.finalizers.is_some() {
            Ok(())
        } else {
            Err(format!("{request:?}"))
        }
    })
    .await
}
