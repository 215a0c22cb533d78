//! Quarantine of a node after a fault, and its return to service after the recovery.

use contract::{BehaviourOverrides, HealthEvent};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, KernelLog, Launch, NodeBuilder, Version};

use crate::stages::recovered;
use crate::support::{SOON, Scene, event, send_to, shape, xid};

#[tokio::test]
async fn a_line_in_the_kernel_log_cordons_and_recovery_restores_to_the_byte() -> anyhow::Result<()>
{
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    cordon_and_restore(&plane).await
}

#[tokio::test]
async fn the_same_on_an_older_kubernetes() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_36).await? else {
        return Ok(());
    };
    cordon_and_restore(&plane).await
}

async fn cordon_and_restore(plane: &ControlPlane) -> anyhow::Result<()> {
    let scene = Scene::new(
        plane,
        |node| {
            node.label("zone", "a")
                .label("k8saas.nvidia.com/cordon-by", "somebody")
                .annotation("team", "x/y~z")
                .taint("dedicated", "ml", "NoSchedule")
        },
        |launch| launch,
    )
    .await?;
    scene
        .product
        .append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    let node = scene.cordoned().await?;
    let metadata = &node["metadata"];
    assert_eq!(
        metadata["labels"]["k8saas.nvidia.com/cordon-by"],
        "NVSentinel"
    );
    assert_eq!(
        metadata["labels"]["k8saas.nvidia.com/cordon-reason"],
        "default"
    );
    assert_eq!(
        metadata["labels"]["dgxc.nvidia.com/nvsentinel-state"],
        "quarantined"
    );
    let text = metadata["annotations"]["quarantineHealthEvent"]
        .as_str()
        .unwrap();
    let events: Value = serde_json::from_str(text)?;
    assert_eq!(events[0]["errorCode"], json!(["79"]));
    assert_eq!(events[0]["recommendedAction"], 24);

    scene
        .product
        .wait_for("the whole story", SOON, || async {
            let story = scene.story().await.map_err(|error| error.to_string())?;
            let told = [
                "line", "decoded", "event", "rules", "decision", "call", "answer",
            ];
            let mut rest = story.iter();
            match told
                .iter()
                .find(|kind| !rest.any(|(entry, _)| entry == *kind))
            {
                None => Ok(()),
                Some(kind) => Err(format!("{kind} is missing or out of order in {story:?}")),
            }
        })
        .await?;
    assert_eq!(scene.product.client(["status"]).await?.code, Some(1));

    recovered(&scene).await?;
    scene.restored().await?;
    scene
        .product
        .wait_for("health", SOON, || async {
            let output = scene
                .product
                .client(["status"])
                .await
                .map_err(|error| error.to_string())?;
            if output.code == Some(0) {
                Ok(())
            } else {
                Err(output.stdout)
            }
        })
        .await
}

#[tokio::test]
async fn a_node_that_another_gpuwarden_quarantined_is_left_alone() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let theirs = Scene::new(&plane, |node| node, |launch| launch).await?;
    send(&theirs, event(&theirs.node, "0")).await?;
    theirs.cordoned().await?;
    // A second product that starts later, for another node, with an empty store.
    let ours = Scene::new(&plane, |node| node, |launch| launch).await?;
    send(&ours, event(&ours.node, "0")).await?;
    ours.cordoned().await?;
    theirs.cordoned().await?;
    ours.taken_in(1).await?;
    assert_eq!(
        ours.status().await?["fleet"]["applied"],
        1,
        "it took over what is not its own"
    );
    // Each gpuwarden watches every node of the shared cluster, and logs the foreign session
    // once.
    let left_alone = || async {
        let story = ours.story_of(&theirs.node).await;
        let story = story.map_err(|error| error.to_string())?;
        match story
            .iter()
            .filter(|(_, text)| text.contains("left alone"))
            .count()
        {
            1 => Ok(()),
            _ => Err(format!("{story:?}")),
        }
    };
    ours.product.wait_for("the note", SOON, left_alone).await?;
    // A second evaluation logs nothing new.
    theirs
        .patch(json!({"metadata": {"annotations": {"looked": "at"}}}))
        .await?;
    theirs
        .patch(json!({"metadata": {"annotations": {"looked": null}}}))
        .await?;
    send(&ours, event(&ours.node, "1")).await?;
    ours.taken_in(2).await?;
    left_alone().await.map_err(anyhow::Error::msg)?;
    theirs
        .product
        .client(["inject", "recovery"])
        .await?
        .expect(0)?;
    theirs.restored().await?;
    ours.cordoned().await.map(drop)
}

#[tokio::test]
async fn a_line_in_the_real_kernel_log_cordons() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let Some(log) = KernelLog::lock().await? else {
        return Ok(());
    };
    let scene = Scene::new(
        &plane,
        |node| node,
        |launch| {
            // The log also has lines of earlier tests.
            launch.kernel_log("kmsg").option("--history", "0s")
        },
    )
    .await?;
    scene
        .product
        .wait_for("the kernel log to be followed", SOON, || async {
            let status = scene.status().await.map_err(|error| error.to_string())?;
            let state = status["sources"][0]["state"].clone();
            if state == "following" {
                Ok(())
            } else {
                Err(state.to_string())
            }
        })
        .await?;
    let line = format!(
        "NVRM: Xid (PCI:0000:b3:00): 79, pid=1, name={}, GPU has fallen off the bus.",
        log.token()
    );
    log.write(&line)?;
    let node = scene.cordoned().await?;
    let events = node["metadata"]["annotations"]["quarantineHealthEvent"]
        .as_str()
        .unwrap();
    assert!(events.contains(log.token()), "{events}");
    // Lines written by programs are marked: user space cannot forge the kernel's facility.
    assert!(events.contains("from-user-space"), "{events}");
    recovered(&scene).await?;
    scene.restored().await
}

#[tokio::test]
async fn events_on_the_socket_cordon_and_the_last_recovery_restores() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    send(&scene, event(&scene.node, "0")).await?;
    scene.cordoned().await?;
    send(&scene, event(&scene.node, "1")).await?;
    scene
        .node_until("both faults on the node", |node| {
            let text = node["metadata"]["annotations"]["quarantineHealthEvent"].as_str();
            let events: Value = serde_json::from_str(text.unwrap_or("[]")).unwrap_or_default();
            let count = events.as_array().map_or(0, Vec::len);
            if count == 2 {
                Ok(())
            } else {
                Err(format!("{count} events"))
            }
        })
        .await?;
    let healthy = |gpu| HealthEvent {
        is_fatal: false,
        is_healthy: true,
        recommended_action: 0,
        ..event(&scene.node, gpu)
    };
    send(&scene, healthy("0")).await?;
    scene.taken_in(3).await?;
    scene.cordoned().await?;
    send(&scene, healthy("1")).await?;
    scene.restored().await
}

#[tokio::test]
async fn a_cordon_and_a_taint_that_were_there_before_stay() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let policy = policy_with_taint()?;
    let scene = Scene::new(
        &plane,
        |node| node.unschedulable().taint("gpu", "bad", "NoSchedule"),
        |launch| launch.option("--policy", policy.path()),
    )
    .await?;
    send(&scene, event(&scene.node, "0")).await?;
    let node = scene.cordoned().await?;
    let annotations = &node["metadata"]["annotations"];
    assert_eq!(
        annotations["quarantineHealthEventCordonPreExisting"],
        "True"
    );
    let applied = annotations["quarantineHealthEventAppliedTaints"]
        .as_str()
        .unwrap();
    assert_eq!(
        serde_json::from_str::<Value>(applied)?,
        json!([{"key": "gpu", "value": "bad", "effect": "NoSchedule", "preExisting": true}])
    );
    assert_eq!(node["spec"], scene.before["spec"]);
    recovered(&scene).await?;
    scene.restored().await
}

#[tokio::test]
async fn a_taint_comes_and_goes_while_others_change_theirs() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let policy = policy_with_taint()?;
    let scene = Scene::new(
        &plane,
        |node| node.taint("dedicated", "ml", "NoSchedule"),
        |launch| launch.option("--policy", policy.path()),
    )
    .await?;
    send(&scene, event(&scene.node, "0")).await?;
    let node = scene.cordoned().await?;
    assert!(
        node["spec"]["taints"].to_string().contains("\"gpu\""),
        "{}",
        node["spec"]
    );
    // Another writer replaces the whole list, with its own taint in front of ours.
    let mut taints = scene
        .node_until("the taints", |node| {
            let taints = node["spec"]["taints"]
                .as_array()
                .cloned()
                .unwrap_or_default();
            // The controller manager adds its taint for the cordon.
            if taints.len() == 3 {
                Ok(taints)
            } else {
                Err(format!("{taints:?}"))
            }
        })
        .await?;
    taints.insert(0, json!({"key": "theirs", "effect": "NoSchedule"}));
    scene.patch(json!({"spec": {"taints": taints}})).await?;
    recovered(&scene).await?;
    scene
        .node_until("only our taint to go", |node| {
            let keys: Vec<&str> = node["spec"]["taints"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|taint| taint["key"].as_str())
                .collect();
            if keys == ["theirs", "dedicated"] {
                Ok(())
            } else {
                Err(format!("{keys:?}"))
            }
        })
        .await
}

#[tokio::test]
async fn an_uncordon_by_hand_ends_it_and_the_same_fault_does_not_start_it_again()
-> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    send(&scene, event(&scene.node, "0")).await?;
    scene.cordoned().await?;
    plane.kubectl(["uncordon", &scene.node]).await?;
    let released = |node: &Value| {
        let annotations = &node["metadata"]["annotations"];
        let marked = annotations["quarantinedNodeUncordonedManually"] == "True";
        let left = annotations
            .as_object()
            .is_some_and(|map| map.contains_key("quarantineHealthEvent"));
        if marked && !left && node["spec"]["unschedulable"].is_null() {
            Ok(())
        } else {
            Err(shape(node).to_string())
        }
    };
    scene.node_until("the session to end", released).await?;
    // Neither a restart nor an event without an effect changes that.
    scene.product.restart().await?;
    scene
        .product
        .client(["inject", "xid", "13"])
        .await?
        .expect(0)?;
    scene.taken_in(2).await?;
    scene
        .node_until("the node to stay released", released)
        .await?;
    // A new fault is judged separately.
    send(&scene, event(&scene.node, "1")).await?;
    scene.cordoned().await.map(drop)
}

#[tokio::test]
async fn the_program_that_cordoned_a_node_is_named() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    plane.kubectl(["cordon", &scene.node]).await?;
    for command in ["why-not", "explain"] {
        // Without a fault there is nothing to explain.
        if command == "explain" {
            send(&scene, event(&scene.node, "0")).await?;
            scene.cordoned().await?;
        }
        let is_named = || async {
            let output = scene.product.client([command, &scene.node]).await;
            let shown = output.map_err(|error| error.to_string())?.stdout;
            let is_named = shown.contains("cordoned by kubectl");
            is_named.then_some(()).ok_or(shown)
        };
        let what = format!("{command} to name it");
        scene.product.wait_for(&what, SOON, is_named).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_dry_run_decides_and_writes_nothing() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, |node| node, |launch| launch.arg("--dry-run")).await?;
    send(&scene, event(&scene.node, "0")).await?;
    let said = |what: &'static str| {
        let scene = &scene;
        async move {
            scene
                .product
                .wait_for("the dry decision", SOON, || async {
                    let story = scene.story().await.map_err(|error| error.to_string())?;
                    let decided = story
                        .iter()
                        .any(|(kind, text)| kind == "dry-run" && text.contains(what));
                    if decided {
                        Ok(())
                    } else {
                        Err(format!("{story:?}"))
                    }
                })
                .await
        }
    };
    said("quarantine: cordon").await?;
    scene.restored().await?;
    recovered(&scene).await?;
    said("release: uncordon").await?;
    let story = scene.story().await?;
    assert_eq!(
        story.iter().filter(|(kind, _)| kind == "dry-run").count(),
        2,
        "{story:?}"
    );
    scene.restored().await
}

#[tokio::test]
async fn observing_decides_nothing() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let client = plane.client().await?;
    let name = testkit::unique("observe");
    testkit::node(&name).create(&client).await?;
    let product = testkit::Launch::new()?
        .node_name(&name)
        .kubeconfig(plane.kubeconfig())
        .start()
        .await?;
    product.append_kernel_log(&xid(79, "GPU has fallen off the bus."))?;
    product
        .wait_for("the fault to be shown", SOON, || async {
            let output = product
                .client(["status"])
                .await
                .map_err(|error| error.to_string())?;
            if output.stdout.contains("observing only") {
                Ok(())
            } else {
                Err(output.stdout)
            }
        })
        .await?;
    let nodes: kube::Api<k8s_openapi::api::core::v1::Node> = kube::Api::all(client);
    let node = crate::support::object(&nodes, &name).await?;
    assert!(node["spec"]["unschedulable"].is_null());
    Ok(())
}

#[tokio::test]
async fn overrides_and_the_opt_out_label_are_respected() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(
        &plane,
        |node| node.label("k8saas.nvidia.com/ManagedByNVSentinel", "false"),
        |launch| launch,
    )
    .await?;
    send(&scene, event(&scene.node, "0")).await?;
    let skipped = HealthEvent {
        quarantine_overrides: Some(BehaviourOverrides {
            force: false,
            skip: true,
        }),
        ..event(&scene.node, "1")
    };
    send(&scene, skipped).await?;
    scene.taken_in(2).await?;
    let story = scene.story().await?;
    assert!(
        !story.iter().any(|(kind, _)| kind == "decision"),
        "{story:?}"
    );
    scene.restored().await?;
    let forced = HealthEvent {
        is_fatal: false,
        quarantine_overrides: Some(BehaviourOverrides {
            force: true,
            skip: false,
        }),
        metadata: [("creator_id".to_owned(), "alice".to_owned())].into(),
        ..event(&scene.node, "2")
    };
    send(&scene, forced).await?;
    let node = scene.cordoned().await?;
    let by = &node["metadata"]["labels"]["k8saas.nvidia.com/cordon-by"];
    assert_eq!(by, "gpu-health-monitor-alice");
    Ok(())
}

#[tokio::test]
async fn a_node_that_comes_later_is_quarantined_then() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let collecting = |launch: Launch| launch.option("--accept-nodes", "any");
    let mut scene = Scene::new(&plane, |node| node, collecting).await?;
    let later = testkit::unique("later");
    send(&scene, event(&later, "0")).await?;
    scene
        .product
        .wait_line("the cluster does not have", SOON)
        .await?;
    testkit::node(&later).create(&plane.client().await?).await?;
    scene.node = later;
    scene.cordoned().await.map(drop)
}

#[tokio::test]
async fn a_lost_store_does_not_give_a_quarantined_node_back() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut scene = Scene::new(&plane, |node| node, |launch| launch).await?;
    send(&scene, event(&scene.node, "0")).await?;
    scene.cordoned().await?;
    scene.restart_without_store().await?;
    // The product takes the fault over from the node, and the recovery still closes it.
    scene.taken_in(1).await?;
    scene.cordoned().await?;
    recovered(&scene).await?;
    scene.restored().await
}

/// Writes a policy that also taints.
fn policy_with_taint() -> anyhow::Result<tempfile::NamedTempFile> {
    let file = tempfile::NamedTempFile::new()?;
    std::fs::write(
        file.path(),
        r#"
label-prefix = "k8saas.nvidia.com/"
[[rule-sets]]
name = "fatal"
cordon = { shouldCordon = true }
taint = { key = "gpu", value = "bad", effect = "NoSchedule" }
[[rule-sets.match.all]]
kind = "HealthEvent"
expression = "event.isFatal"
"#,
    )?;
    Ok(file)
}

async fn send(scene: &Scene, event: HealthEvent) -> anyhow::Result<()> {
    send_to(&scene.product, vec![event]).await
}

#[tokio::test]
async fn a_node_that_is_replaced_by_another_machine_is_given_back() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let scene = Scene::new(&plane, NodeBuilder::without_kubelet, |launch| launch).await?;
    // Sets the node's info as its kubelet does.
    let machine = async |uuid: &str, boot: &str| -> anyhow::Result<()> {
        let status = json!({"status": {"nodeInfo": {"systemUUID": uuid, "bootID": boot}}});
        let (how, status) = (PatchParams::default(), Patch::Strategic(status));
        scene.nodes.patch_status(&scene.node, &how, &status).await?;
        Ok(())
    };
    machine("old", "boot-1").await?;
    let mut fault = event(&scene.node, "0");
    let boot = ("gpuwarden.dev/boot-id".to_owned(), "boot-1".to_owned());
    fault.metadata.extend([boot]);
    // A person must close this fault; a reboot does not.
    fault.recommended_action = 5;
    send(&scene, fault).await?;
    scene.told("session", "seen on the node").await?;

    machine("old", "boot-2").await?;
    scene
        .patch(json!({"metadata": {"labels": {"rebooted": "yes"}}}))
        .await?;
    scene.cordoned().await?;
    machine("new", "boot-3").await?;
    scene
        .told("attention", "the node is another machine now")
        .await?;
    scene
        .patch(json!({"metadata": {"labels": {"rebooted": null}}}))
        .await?;
    scene.restored().await?;
    let line = "the node is another machine now (system UUID new; the fault was found on old)";
    scene.told("line", line).await
}
