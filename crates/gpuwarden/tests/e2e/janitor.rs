//! The janitor against a real API server: the schemas of its resources, and a fault that ends in
//! a reboot by a provider behind gRPC. The test plays the provider's machines and the kubelet.

use std::sync::Arc;

use ::janitor::client::Remote;
use ::janitor::{Provider, Signal};
use contract::{HealthEvent, RecommendedAction};
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use maintenance::janitor::{Action, ProviderPlace};
use serde_json::{Value, json};
use testkit::{ControlPlane, Version, unique};

use crate::machines::{self, Played, boots};
use crate::remediation::of_node;
use crate::stages::recovered;
use crate::support::{SOON, Scene, event, install_crds, own_port, send_to, xid};

const STATE: &str = "dgxc.nvidia.com/nvsentinel-state";

/// Returns the API of a custom resource of the janitor.
pub(crate) fn resources(client: &kube::Client, kind: &str, plural: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("janitor.dgxc.nvidia.com", "v1alpha1", kind);
    Api::all_with(
        client.clone(),
        &ApiResource::from_gvk_with_plural(&kind, plural),
    )
}

#[tokio::test]
async fn the_schemas_take_what_is_right_and_refuse_what_is_wrong() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    install_crds(&client).await?;
    for (kind, plural, done) in [
        ("RebootNode", "rebootnodes", "NodeReady"),
        ("TerminateNode", "terminatenodes", "NodeTerminated"),
    ] {
        let api = resources(&client, kind, plural);
        let name = unique("schema");
        let object = |spec: Value| {
            let object = json!({
                "apiVersion": "janitor.dgxc.nvidia.com/v1alpha1", "kind": kind,
                "metadata": {"name": name}, "spec": spec,
            });
            serde_json::from_value::<DynamicObject>(object)
        };
        let post = PostParams::default();
        for (spec, why) in [
            (Value::Null, "spec"),
            (json!({"force": true}), "spec.nodeName"),
            (json!({"nodeName": ""}), "spec.nodeName"),
            (json!({"nodeName": "Not a name"}), "spec.nodeName"),
            (json!({"nodeName": "n".repeat(254)}), "spec.nodeName"),
            (json!({"nodeName": "n", "force": "yes"}), "spec.force"),
        ] {
            let refused = api.create(&post, &object(spec.clone())?).await.unwrap_err();
            let kube::Error::Api(status) = &refused else {
                panic!("{refused}")
            };
            assert_eq!(status.code, 422, "{spec}: {refused}");
            assert!(status.message.contains(why), "{spec}: {refused}");
        }
        let made = api
            .create(&post, &object(json!({"nodeName": "n-1"}))?)
            .await?;
        // Omitted fields have their defaults.
        assert_eq!(made.data["spec"]["force"], false);
        let patch = PatchParams::default();
        let change = |change: Value| {
            let (api, name, patch) = (api.clone(), name.clone(), patch.clone());
            async move { api.patch(&name, &patch, &Patch::Merge(change)).await }
        };
        let moved = change(json!({"spec": {"nodeName": "n-2"}}))
            .await
            .unwrap_err();
        assert!(
            moved.to_string().contains("nodeName cannot be changed"),
            "{moved}"
        );
        change(json!({"spec": {"force": true}})).await?;
        let status = |status: Value| {
            let (api, name, patch) = (api.clone(), name.clone(), patch.clone());
            let status = json!({"status": status});
            async move { api.patch_status(&name, &patch, &Patch::Merge(status)).await }
        };
        let condition = |state: &str| {
            json!([{"type": done, "status": state, "reason": "R", "message": "",
                    "lastTransitionTime": "2026-11-25T00:00:00Z"}])
        };
        let wrong = status(json!({"conditions": condition("Perhaps")}))
            .await
            .unwrap_err();
        assert!(wrong.to_string().contains("status.conditions"), "{wrong}");
        let wrong = status(json!({"startTime": "soon"})).await.unwrap_err();
        assert!(wrong.to_string().contains("startTime"), "{wrong}");
        let begun = json!({"startTime": "2026-11-25T00:00:00Z", "conditions": condition("True")});
        status(begun).await?;
        let late = change(json!({"spec": {"force": false}})).await.unwrap_err();
        assert!(late.to_string().contains("once it has begun"), "{late}");
        // Also for a node that is gone: NVSentinel's webhook refuses any change then.
        change(json!({"metadata": {"annotations": {"a": "b"}}})).await?;
        let shown = plane.kubectl(["get", plural, &name]).await?;
        let head = shown.lines().next().unwrap_or_default();
        let columns: Vec<&str> = head.split_whitespace().collect();
        assert_eq!(
            columns,
            ["NAME", "NODE", "FORCE", &done.to_uppercase(), "AGE"]
        );
        assert!(shown.contains("n-1") && shown.contains("True"), "{shown}");
        api.delete(&name, &kube::api::DeleteParams::default())
            .await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_fault_ends_in_one_reboot_through_kills_and_the_node_comes_back() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    install_crds(&client).await?;
    let played = Played::silent();
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("janitor.yaml");
    let _guard = machines::serve(Arc::clone(&played) as Arc<dyn Provider>, &path).await?;
    let mut scene = Scene::new(
        &plane,
        |node| node,
        |launch| {
            let launch = launch.arg("--drain").arg("--remediate").arg("--janitor");
            launch.option("--janitor-config", path)
        },
    )
    .await?;
    let (nodes, node) = (scene.nodes.clone(), scene.node.clone());
    let boot = |id: &'static str| boots(&nodes, &node, id);
    boot("boot-1").await?;
    let line = xid(79, "GPU has fallen off the bus.");
    scene.product.append_kernel_log(&line)?;
    let signalled = || async {
        match played.signals().as_slice() {
            [_] => Ok(()),
            signals => Err(format!("{signals:?}")),
        }
    };
    scene
        .product
        .wait_for("the signal", SOON, signalled)
        .await?;
    // The product has sent the signal, and is killed before the response.
    let api = resources(&client, "RebootNode", "rebootnodes");
    let condition = |kind: &'static str, wanted: &'static str| {
        let (api, node) = (api.clone(), scene.node.clone());
        move || {
            let (api, node) = (api.clone(), node.clone());
            async move {
                let list = api.list(&ListParams::default()).await;
                let list = list.map_err(|error| error.to_string())?.items;
                let own = list
                    .into_iter()
                    .find(|it| it.data["spec"]["nodeName"] == node.as_str());
                let status = own
                    .map(|own| own.data["status"].clone())
                    .unwrap_or_default();
                let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
                let found = conditions.iter().find(|one| one["type"] == kind);
                if found.is_some_and(|one| one["status"] == wanted) {
                    Ok(status)
                } else {
                    Err(status.to_string())
                }
            }
        }
    };
    let (sending, sent) = (
        condition("SignalSent", "Unknown"),
        condition("SignalSent", "True"),
    );
    let complete = condition("AttemptComplete", "True");
    scene.product.wait_for("the record", SOON, sending).await?;
    scene.product.restart().await?;
    played.answer();
    scene
        .product
        .wait_for("the signal to be recorded as sent", SOON, &sent)
        .await?;
    scene.product.restart().await?;
    scene.product.wait_for("the same", SOON, &sent).await?;
    // The kubelet starts again.
    boot("boot-2").await?;
    let status = scene.product.wait_for("the end", SOON, &complete).await?;
    let reasons: Vec<&str> = (status["conditions"].as_array().into_iter().flatten())
        .filter(|one| one["type"] == "AttemptComplete" || one["type"] == "NodeReady")
        .filter_map(|one| one["reason"].as_str())
        .collect();
    assert_eq!(reasons, ["Succeeded", "Succeeded"], "{status}");
    let is = |node: &Value| match node["metadata"]["labels"][STATE].as_str() {
        Some("remediation-succeeded") => Ok(()),
        other => Err(format!("{other:?}")),
    };
    scene
        .node_until("the state remediation-succeeded", is)
        .await?;
    scene.product.restart().await?;
    recovered(&scene).await?;
    scene.restored().await?;
    assert_eq!(played.signals().len(), 1, "one request is one reboot");
    Ok(())
}

#[tokio::test]
async fn a_machine_that_is_to_be_replaced_is_given_up_once_and_its_node_is_deleted()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    install_crds(&client).await?;
    let played = Played::new();
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("janitor.yaml");
    let _guard = machines::serve(Arc::clone(&played) as Arc<dyn Provider>, &path).await?;
    let arrange = |launch: testkit::Launch| {
        let launch = launch.arg("--drain").arg("--remediate").arg("--janitor");
        launch.option("--janitor-config", path)
    };
    let mut scene = Scene::new(&plane, testkit::NodeBuilder::without_kubelet, arrange).await?;
    let replace = HealthEvent {
        recommended_action: RecommendedAction::ReplaceVm.into(),
        ..event(&scene.node, "0")
    };
    send_to(&scene.product, vec![replace]).await?;
    let accepted = || async {
        let api = resources(&client, "TerminateNode", "terminatenodes");
        let made = of_node(&api, &scene.node).await;
        let made = made.map_err(|error| error.to_string())?;
        let conditions = made.first().map(|one| one["status"]["conditions"].clone());
        let conditions = conditions.unwrap_or_default();
        let mut sent = conditions.as_array().into_iter().flatten();
        if sent.any(|one| one["type"] == "SignalSent" && one["status"] == "True") {
            Ok(())
        } else {
            Err(conditions.to_string())
        }
    };
    let product = &scene.product;
    product.wait_for("the signal", SOON, accepted).await?;
    // A node whose machine still responds is kept.
    scene.product.restart().await?;
    scene.ready().await?;
    assert!(scene.nodes.get_opt(&scene.node).await?.is_some());
    // The machine disappears, as the cloud was asked.
    let silent = json!({"status": {"conditions": [{
        "type": "Ready", "status": "False", "reason": "Terminated", "message": "",
        "lastTransitionTime": "2026-11-25T00:00:00Z",
    }]}});
    let params = PatchParams::default();
    scene
        .nodes
        .patch_status(&scene.node, &params, &Patch::Strategic(silent))
        .await?;
    let gone = || async {
        let node = scene.nodes.get_opt(&scene.node).await;
        match node.map_err(|error| error.to_string())? {
            None => Ok(()),
            Some(node) => Err(format!("{:?}", node.status)),
        }
    };
    let product = &scene.product;
    product.wait_for("no node", SOON, gone).await?;
    assert_eq!(
        played.signals().len(),
        1,
        "one request gives one machine up"
    );
    Ok(())
}

#[tokio::test]
async fn the_provider_as_a_process_makes_the_job_that_it_is_asked_for() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    let (name, namespace) = (unique("provider"), unique("provider"));
    plane.namespace(&namespace).await?;
    testkit::node(&name)
        .without_kubelet()
        .create(&client)
        .await?;
    boots(&Api::all(client), &name, "boot-1").await?;
    let port = own_port()?;
    let address = port.local_addr()?.to_string();
    let mut process = tokio::process::Command::new(testkit::binary()?)
        .args([
            "janitor-provider",
            "--listen",
            &address,
            "--anybody",
            "--namespace",
            &namespace,
        ])
        .arg("--kubeconfig")
        .arg(plane.kubeconfig())
        .kill_on_drop(true)
        .spawn()?;
    let place = ProviderPlace::Open { host: address };
    let remote = Remote::open(&place)?;
    let signal = Signal::new(Action::Reboot, &name, &format!("operation-of-{name}"));
    let answers = || async { remote.send(&signal).await.map_err(|failure| failure.text()) };
    // Several attempts until the provider listens are one signal.
    let request = testkit::wait_for("the provider", SOON, answers).await?;
    assert_eq!(request, "boot-1");
    let jobs = plane
        .kubectl(["-n", &namespace, "get", "jobs", "-o", "name"])
        .await?;
    assert_eq!(jobs.lines().count(), 1, "{jobs}");
    let pid = process.id().and_then(|pid| i32::try_from(pid).ok());
    let pid = pid.and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(pid.unwrap(), rustix::process::Signal::TERM)?;
    assert!(process.wait().await?.success());
    Ok(())
}
