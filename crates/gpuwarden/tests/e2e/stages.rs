//! Stages of a node's quarantine: a veto, a taint with the cordon, and a drain by a custom
//! resource. The test plays the controller of that resource.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use testkit::{ControlPlane, Launch, Version, unique};

use crate::support::{SOON, Scene, xid};

const STATE: &str = "dgxc.nvidia.com/nvsentinel-state";

/// A template in the form of NVSentinel's plugin for Slurm.
const TEMPLATE: &str = "\
apiVersion: {{ .ApiGroup }}/{{ .Version }}
kind: {{ .Kind }}
spec:
  nodeName: {{ .HealthEvent.NodeName }}
  healthEventID: {{ .EventID }}
  podsToDrain:
  {{- range $namespace, $pods := .PodsToDrain }}
    {{ $namespace }}:
    {{- range $pods }}
    - {{ . }}
    {{- end }}
  {{- end }}
";

async fn state(scene: &Scene, wanted: &str) -> anyhow::Result<()> {
    let what = format!("the state {wanted}");
    let is = |node: &Value| {
        let state = &node["metadata"]["labels"][STATE];
        if state == wanted {
            Ok(())
        } else {
            Err(state.to_string())
        }
    };
    scene.node_until(&what, is).await
}

async fn awaits(scene: &Scene, text: &str) -> anyhow::Result<()> {
    let is = |session: &Value| {
        let awaits = session["awaits"].as_str();
        awaits.is_some_and(|it| it.contains(text))
    };
    scene.session(text, is).await
}

fn fault(scene: &Scene) -> anyhow::Result<()> {
    let line = xid(79, "GPU has fallen off the bus.");
    scene.product.append_kernel_log(&line)
}

/// Reports the recovery of the node's faults, as a person would.
pub(crate) async fn recovered(scene: &Scene) -> anyhow::Result<()> {
    scene.faulty().await?;
    let recovered = scene.product.client(["inject", "recovery"]).await?;
    recovered.expect(0).map(drop)
}

/// A policy that drains no node.
const ROUTES: &str = r#"
[[rule-sets]]
name = "all"
cordon = { shouldCordon = true }
[[rule-sets.match.any]]
kind = "HealthEvent"
expression = "event.isFatal"

[[routes]]
name = "by hand"
drain = false
[[routes.match.all]]
kind = "HealthEvent"
expression = "true"
"#;

#[tokio::test]
async fn a_veto_holds_a_drain_back_until_it_is_taken_back() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node, |launch| launch.arg("--drain")).await?;
    let kubeconfig = plane.kubeconfig().display().to_string();
    let veto = async |more: &[&str]| {
        let mut args = vec!["veto", &scene.node, "--kubeconfig", &kubeconfig];
        args.extend(more);
        scene.product.command(args).await
    };
    let refused = veto(&["--for", "400h", "--reason", "x"]).await?;
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    let said = veto(&["--reason", "looking at the link"]).await?;
    assert!(
        said.expect(0)?
            .contains("no drain and no remediation begins")
    );
    let plan = ["drain", "--plan", &scene.node, "-o", "json"];
    let plan = [&plan[..], &["--kubeconfig", &kubeconfig]].concat();
    let plan: Value = serde_json::from_str(scene.product.command(plan).await?.expect(0)?)?;
    let held = plan["veto"].as_str().unwrap_or_default();
    assert!(held.contains("looking at the link"), "{plan}");
    fault(&scene)?;
    scene.cordoned().await?;
    awaits(&scene, "the end of the veto of").await?;
    state(&scene, "quarantined").await?;
    scene.told("session", "looking at the link").await?;
    // The plan lists the events of the node and, with a policy, the route that each takes.
    let routes = tempfile::NamedTempFile::new()?;
    std::fs::write(routes.path(), ROUTES)?;
    let policy = routes.path().display().to_string();
    let plan = [
        "drain",
        "--plan",
        &scene.node,
        "--policy",
        &policy,
        "--kubeconfig",
        &kubeconfig,
    ];
    let said = scene.product.command(plan).await?;
    let said = said.expect(0)?;
    let why = "There is no drain: skipped by policy route 'by hand'.";
    assert!(
        said.contains(why) && said.contains("Held back by"),
        "{said}"
    );
    let said = veto(&["--end"]).await?;
    assert!(said.expect(0)?.contains("the veto is withdrawn"));
    state(&scene, "drain-succeeded").await?;
    recovered(&scene).await?;
    scene.restored().await
}

#[tokio::test]
async fn a_pause_of_repairs_holds_back_what_has_not_begun_until_it_is_resumed() -> anyhow::Result<()>
{
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let namespace = unique("paused");
    plane.namespace(&namespace).await?;
    let arrange = |launch: Launch| launch.arg("--drain").option("--namespace", &namespace);
    let mut scene = Scene::new(&plane, |node| node, arrange).await?;
    let kubeconfig = plane.kubeconfig().display().to_string();
    let cluster = ["--kubeconfig", &kubeconfig];
    let place = ["--namespace", &namespace];
    // A veto of the node holds it until the pause begins, which holds new quarantines back as
    // well.
    let veto = ["veto", &scene.node, "--reason", "first"];
    let said = scene.product.command([&veto[..], &cluster].concat());
    said.await?.expect(0)?;
    fault(&scene)?;
    scene.cordoned().await?;
    let pause = ["pause", "--repairs", "--reason", "the store is moved"];
    let said = scene
        .product
        .command([&pause[..], &cluster, &place].concat())
        .await?;
    let said = said.expect(0)?;
    assert!(
        said.contains("New quarantines, drains and repairs"),
        "{said}"
    );
    // The node and the pause are watched separately: the veto ends once the pause holds.
    scene
        .product
        .wait_for("the pause in the status", SOON, || async {
            let status = scene.status().await.map_err(|error| error.to_string())?;
            let brake = &status["fleet"]["brake"];
            let is_paused = brake["paused"].is_string();
            is_paused.then_some(()).ok_or(brake.to_string())
        })
        .await?;
    let end = ["veto", &scene.node, "--end"];
    let said = scene.product.command([&end[..], &cluster].concat());
    said.await?.expect(0)?;
    scene
        .told("session", "all repairs are paused: the store is moved")
        .await?;
    awaits(&scene, "the end of the veto of").await?;
    scene.product.restart().await?;
    scene.ready().await?;
    awaits(&scene, "the end of the veto of").await?;
    state(&scene, "quarantined").await?;
    let resume = [&["resume"][..], &cluster, &place].concat();
    scene.product.command(resume).await?.expect(0)?;
    state(&scene, "drain-succeeded").await?;
    recovered(&scene).await?;
    scene.restored().await
}

#[tokio::test]
async fn a_taint_stands_beside_the_cordon_for_who_looks_at_taints_only() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let config = tempfile::tempdir()?;
    let policy = config.path().join("policy.toml");
    std::fs::write(
        &policy,
        r#"
        [[rule-sets]]
        name = "fatal"
        cordon = { shouldCordon = true }
        taint = { key = "gpuwarden.dev/out", value = "fault", effect = "NoSchedule" }
        [[rule-sets.match.all]]
        kind = "HealthEvent"
        expression = "event.isFatal"
        "#,
    )?;
    let arrange = |launch: Launch| launch.arg("--drain").option("--policy", &policy);
    let scene = Scene::new(&plane, |node| node, arrange).await?;
    fault(&scene)?;
    // Cordon and taint are set together, and last as long as the quarantine.
    let node = scene.cordoned().await?;
    let ours = |node: &Value| {
        let taints = node["spec"]["taints"].as_array().cloned();
        let mut taints = taints.unwrap_or_default().into_iter();
        taints.any(|taint| taint["key"] == "gpuwarden.dev/out" && taint["effect"] == "NoSchedule")
    };
    assert!(ours(&node), "{node}");
    state(&scene, "drain-succeeded").await?;
    let tainted = |node: &Value| ours(node).then_some(()).ok_or_else(|| node.to_string());
    scene.node_until("the taint", tainted).await?;
    recovered(&scene).await?;
    scene.restored().await
}

/// Installs the kind of the custom resource, if it is missing.
async fn install(client: &kube::Client) -> anyhow::Result<()> {
    let any = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let crd = json!({
        "metadata": {"name": "drainrequests.nvsentinel.nvidia.com"},
        "spec": {
            "group": "nvsentinel.nvidia.com",
            "scope": "Namespaced",
            "names": {"kind": "DrainRequest", "plural": "drainrequests", "singular": "drainrequest"},
            "versions": [{
                "name": "v1alpha1", "served": true, "storage": true,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                    "spec": any, "status": any,
                }}},
            }],
        },
    });
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let crd = serde_json::from_value(crd)?;
    match crds.create(&PostParams::default(), &crd).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        made => Ok(made.map(drop)?),
    }
}

#[tokio::test]
async fn a_custom_resource_drains_a_node_through_kills_and_goes_with_its_session()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    install(&client).await?;
    let namespace = unique("slinky");
    plane.namespace(&namespace).await?;
    let config = tempfile::tempdir()?;
    let (path, place) = (config.path().join("drain.toml"), config.path().display());
    std::fs::write(config.path().join("drain.yaml"), TEMPLATE)?;
    std::fs::write(
        &path,
        format!(
            r#"
            [customDrain]
            enabled = true
            templateMountPath = "{place}"
            templateFileName = "drain.yaml"
            namespace = "{namespace}"
            apiGroup = "nvsentinel.nvidia.com"
            version = "v1alpha1"
            kind = "DrainRequest"
            statusConditionType = "DrainComplete"
            statusConditionStatus = "True"
            timeout = "30m"
            "#
        ),
    )?;
    let arrange = |launch: Launch| launch.arg("--drain").option("--drain-config", &path);
    let mut scene = Scene::new(&plane, |node| node, arrange).await?;
    let pod = testkit::pod(&namespace, "a").on(&scene.node);
    pod.create(&client).await?;
    let kind = GroupVersionKind::gvk("nvsentinel.nvidia.com", "v1alpha1", "DrainRequest");
    let resource = ApiResource::from_gvk_with_plural(&kind, "drainrequests");
    let requests: Api<DynamicObject> = Api::namespaced_with(client, &namespace, &resource);
    fault(&scene)?;
    state(&scene, "draining").await?;
    scene.product.restart().await?;
    awaits(&scene, "the end of DrainRequest drain-").await?;
    let made = requests.list(&kube::api::ListParams::default()).await?;
    let made = made.items.iter().map(serde_json::to_value);
    let made = made.collect::<Result<Vec<Value>, _>>()?;
    assert_eq!(made.len(), 1, "{made:?}");
    let made = &made[0];
    assert_eq!(made["spec"]["nodeName"], scene.node.as_str());
    assert_eq!(made["spec"]["podsToDrain"][&namespace], json!(["a"]));
    let label = &made["metadata"]["labels"]["nvsentinel.nvidia.com/node-name"];
    assert_eq!(label, scene.node.as_str());
    let id = made["spec"]["healthEventID"].as_str().unwrap_or_default();
    let name = format!("drain-{}-{id}", scene.node);
    assert_eq!(made["metadata"]["name"], name);
    scene.product.restart().await?;
    let conditions = json!([{"type": "DrainComplete", "status": "True", "reason": "DrainComplete",
        "message": "", "lastTransitionTime": "2026-11-24T00:00:00Z"}]);
    let status = Patch::Merge(json!({"status": {"conditions": conditions}}));
    requests
        .patch_status(&name, &PatchParams::default(), &status)
        .await?;
    // The resource's controller decides when its pods have left.
    state(&scene, "drain-succeeded").await?;
    assert!(requests.get_opt(&name).await?.is_some());
    recovered(&scene).await?;
    scene.restored().await?;
    let gone = || async {
        let there = requests.get_opt(&name).await;
        match there.map_err(|error| error.to_string())? {
            None => Ok(()),
            Some(object) => Err(format!("{object:?}")),
        }
    };
    scene.product.wait_for("no request", SOON, gone).await
}

#[tokio::test]
async fn a_gang_leaves_once_its_checkpoint_is_written() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    let namespace = unique("train");
    plane.namespace(&namespace).await?;
    let config = tempfile::tempdir()?;
    let path = config.path().join("drain.toml");
    let modes = format!("[[userNamespaces]]\nname = \"{namespace}\"\nmode = \"Immediate\"\n");
    std::fs::write(&path, modes)?;
    let arrange = |launch: Launch| launch.arg("--drain").option("--drain-config", &path);
    let mut scene = Scene::new(&plane, |node| node, arrange).await?;
    for name in ["a", "b"] {
        let pod = testkit::pod(&namespace, name).on(&scene.node);
        pod.create(&client).await?;
    }
    let pods: Api<Pod> = Api::namespaced(client, &namespace);
    let annotate = async |name: &str, annotations: Value| {
        let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
        pods.patch(name, &PatchParams::default(), &patch).await
    };
    let volcano = "scheduling.k8s.io/group-name";
    annotate(
        "a",
        json!({volcano: "big", "gpuwarden.dev/checkpoint": "9m"}),
    )
    .await?;
    annotate("b", json!({volcano: "big"})).await?;
    fault(&scene)?;
    let requested = || async {
        let pod = pods.get("a").await.map_err(|error| error.to_string())?;
        let annotations = pod.metadata.annotations.unwrap_or_default();
        let at = annotations.get("gpuwarden.dev/checkpoint-requested");
        at.cloned().ok_or_else(|| format!("{annotations:?}"))
    };
    let product = &scene.product;
    let at = product.wait_for("a request", SOON, requested).await?;
    scene.product.restart().await?;
    awaits(&scene, "until its checkpoint is written").await?;
    for name in ["a", "b"] {
        let pod = pods.get(name).await?;
        assert!(pod.metadata.deletion_timestamp.is_none(), "{name}");
    }
    annotate("a", json!({"gpuwarden.dev/checkpoint-done": at})).await?;
    state(&scene, "drain-succeeded").await?;
    recovered(&scene).await?;
    scene.restored().await
}
