//! Changes of the policy at run time, and manual overrides.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Version, unique};

use crate::support::{SOON, Scene, object, xid};

/// Quarantines nodes with fatal faults, except for nodes that choose another policy.
const FATAL: &str = r#"
[[rule-sets]]
name = "fatal"
cordon = { shouldCordon = true }
taint = { key = "gpu", value = "bad", effect = "NoSchedule" }
[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal"
[[policies]]
name = "lenient"
"#;

/// Waits until the status of the policy meets `holds`.
async fn policy_until(scene: &Scene, holds: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
    scene
        .product
        .wait_for("the policy", SOON, || async {
            let status = scene.status().await.map_err(|error| error.to_string())?;
            if holds(&status["policy"]) {
                Ok(())
            } else {
                Err(status["policy"].to_string())
            }
        })
        .await
}

/// Waits until an entry of the node's story contains these texts: the journal is written with a
/// delay.
async fn tells(scene: &Scene, texts: &[&str]) -> anyhow::Result<()> {
    let told = || async {
        let story = scene.story().await.map_err(|error| error.to_string())?;
        let has_all = |text: &String| texts.iter().all(|part| text.contains(part));
        if story.iter().any(|(_, text)| has_all(text)) {
            Ok(())
        } else {
            Err(format!("{story:?}"))
        }
    };
    scene
        .product
        .wait_for(&format!("{texts:?}"), SOON, told)
        .await
}

#[tokio::test]
async fn a_policy_in_a_config_map_is_followed() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    let maps: Api<ConfigMap> = Api::namespaced(client, "default");
    let name = unique("policy");
    let map = |text: &str| -> anyhow::Result<ConfigMap> {
        Ok(serde_json::from_value(json!({
            "metadata": {"name": name}, "data": {"config.toml": text},
        }))?)
    };
    let place = format!("configmap:default/{name}");
    let scene = Scene::new(
        &plane,
        |node| node,
        // Without a policy, events are stored and nothing is decided.
        |launch| launch.option("--policy", &place),
    )
    .await?;
    scene.product.append_kernel_log(&xid(79, "fell off"))?;
    scene.taken_in(1).await?;
    policy_until(&scene, |policy| {
        policy["loadedAt"].is_null() && policy["error"].to_string().contains("no such ConfigMap")
    })
    .await?;
    assert_ne!(
        object(&scene.nodes, &scene.node).await?["spec"]["unschedulable"],
        true
    );
    maps.create(&PostParams::default(), &map(FATAL)?).await?;
    scene.cordoned().await?;

    let edit = async |text: &str| -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({"data": {"config.toml": text}}));
        maps.patch(&name, &PatchParams::default(), &patch).await?;
        Ok(())
    };
    edit(&FATAL.replace("isFatal", "isFatl")).await?;
    policy_until(&scene, |policy| {
        policy["error"].to_string().contains("isFatl") && policy["ruleSets"] == json!(["fatal"])
    })
    .await?;
    edit(&FATAL.replace("\"bad\"", "\"worse\"")).await?;
    scene
        .node_until("the new policy's taint", |node| {
            let taints = node["spec"]["taints"].to_string();
            if taints.contains("worse") && !taints.contains("bad") {
                Ok(())
            } else {
                Err(taints)
            }
        })
        .await?;
    tells(&scene, &["has changed; its rule sets are: fatal"]).await?;
    maps.delete(&name, &kube::api::DeleteParams::default())
        .await?;
    policy_until(&scene, |policy| policy["error"].is_string()).await?;
    scene.cordoned().await?;

    // A node's choice of an existing policy.
    let choose = |name: &str| json!({"metadata": {"annotations": {"gpuwarden.dev/policy": name}}});
    scene.patch(choose("event.isFatal")).await?;
    scene
        .product
        .wait_for("the note of the unknown name", SOON, || async {
            let node = scene.shown().await.map_err(|error| error.to_string())?;
            let notes = node["notes"].to_string();
            if notes.contains("which the cluster's policy does not have") {
                Ok(())
            } else {
                Err(notes)
            }
        })
        .await?;
    scene.cordoned().await?;
    scene.patch(choose("lenient")).await?;
    scene
        .node_until("the release", |node| {
            if node["spec"]["unschedulable"] == true {
                Err(node["spec"].to_string())
            } else {
                Ok(())
            }
        })
        .await
}

/// Waits until the records of the node's events have these statuses, oldest first.
async fn words_until(scene: &Scene, words: &[&str]) -> anyhow::Result<()> {
    scene
        .product
        .wait_for("the statuses of the events", SOON, || async {
            let output = scene.product.client(["events", "-o", "json"]).await;
            let output = output.map_err(|error| error.to_string())?;
            let events: Value =
                serde_json::from_str(&output.stdout).map_err(|error| error.to_string())?;
            let found: Vec<&str> = events
                .as_array()
                .into_iter()
                .flatten()
                .map(|event| {
                    let word = &event["healtheventstatus"]["nodequarantined"];
                    word.as_str().unwrap_or("null")
                })
                .collect();
            if found == words {
                Ok(())
            } else {
                Err(format!("{found:?}"))
            }
        })
        .await
}

#[tokio::test]
async fn the_records_say_what_became_of_the_events() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    scene.product.append_kernel_log(&xid(79, "fell off"))?;
    scene.cordoned().await?;
    words_until(&scene, &["Quarantined"]).await?;
    // The records survive a kill, with the state needed to update them.
    scene.product.kill9()?;
    scene.product.restart().await?;
    scene
        .product
        .append_kernel_log(&xid(48, "double bit error"))?;
    words_until(&scene, &["Quarantined", "AlreadyQuarantined"]).await?;
    // `inject` reads the published view, which follows with a delay.
    scene.taken_in(2).await?;
    let recovered = scene.product.client(["inject", "recovery"]).await?;
    let recovered = recovered.expect(0)?;
    assert!(
        recovered.contains("79") && recovered.contains("48"),
        "{recovered}"
    );
    scene.restored().await?;
    words_until(
        &scene,
        &[
            "Quarantined",
            "AlreadyQuarantined",
            "AlreadyQuarantined",
            "UnQuarantined",
        ],
    )
    .await
}

#[tokio::test]
async fn an_operator_releases_a_node_and_says_why() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node.label("zone", "a"), |launch| launch).await?;
    let kubeconfig = plane.kubeconfig().display().to_string();
    let release = async |more: &[&str]| {
        let mut args = vec!["release", &scene.node, "--kubeconfig", &kubeconfig];
        args.extend(more);
        scene.product.command(args).await
    };
    let refused = release(&["--reason", "x"]).await?;
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("is not quarantined by gpuwarden"));

    scene.product.append_kernel_log(&xid(79, "fell off"))?;
    scene.cordoned().await?;
    let released = release(&["--reason", "GPU 3 was swapped"]).await?;
    let said = released.expect(0)?;
    assert!(
        said.contains("uncordoned")
            && said.contains("dismissed until it is reported again: SysLogsXIDError 79"),
        "{said}"
    );
    // Kubernetes taints a cordoned node, and removes the taint with a delay after the uncordon.
    scene
        .node_until("the spec and labels as before", |node| {
            let now = (&node["spec"], &node["metadata"]["labels"]);
            let before = (&scene.before["spec"], &scene.before["labels"]);
            if now == before {
                Ok(())
            } else {
                Err(format!("{now:?}"))
            }
        })
        .await?;
    let node = object(&scene.nodes, &scene.node).await?;
    let annotations = &node["metadata"]["annotations"];
    assert!(annotations["gpuwarden.dev/released-at"].is_string());
    assert!(annotations["gpuwarden.dev/release"].is_null());
    tells(&scene, &["released by", "GPU 3 was swapped"]).await?;
    words_until(&scene, &["Cancelled"]).await?;
    // Later events are judged separately.
    scene
        .product
        .append_kernel_log(&xid(48, "double bit error"))?;
    scene.cordoned().await.map(drop)
}
