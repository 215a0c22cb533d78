//! The story of a node that a program uncordons during its remediation, such as an installer of
//! drivers: it is cordoned again, the uncordon is reported, and the node returns in the end. A
//! person's release ends the remediation at any time.

use contract::keys;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};
use testkit::{ControlPlane, Version};

use crate::machines::Played;
use crate::remediation::with_validation;
use crate::requests::has;
use crate::stages::recovered;
use crate::story::{LATE, Story};
use crate::support::SOON;

/// Uncordons the node; waits until it is cordoned again, and reported `times` times with these
/// words.
async fn uncordoned(story: &Story, why: &str, times: usize) -> anyhow::Result<()> {
    let scene = &story.drain.scene;
    scene
        .patch(json!({"spec": {"unschedulable": null}}))
        .await?;
    let told = || async {
        let entries = scene.story().await.map_err(|error| error.to_string())?;
        let text = format!("something uncordoned the node {why}");
        let told = entries
            .iter()
            .filter(|(kind, told)| kind == "attention" && told.starts_with(&text));
        if told.count() == times {
            Ok(())
        } else {
            Err(format!("{entries:?}"))
        }
    };
    let product = &scene.product;
    product
        .wait_for("the report of the uncordon", SOON, told)
        .await?;
    scene.cordoned().await?;
    Ok(())
}

/// Starts a remediation; waits until the product has recorded that the signal was sent.
async fn signalled(plane: &ControlPlane) -> anyhow::Result<Story> {
    let story = Story::new(plane, LATE, &with_validation(false), Played::new()).await?;
    story.drain.fault()?;
    story.drain.scene.cordoned().await?;
    story.signalled(1).await?;
    let under_way = |object: &Value| has(object, "SignalSent", "True");
    story.reboot("the signal's answer", 1, under_way).await?;
    // An uncordon would not return the node to service, so the page does not suggest it.
    let release = format!("`gpuwarden release {}", story.drain.scene.node);
    story.page(&[&release]).await?;
    Ok(story)
}

#[tokio::test]
async fn what_uncordons_a_node_in_its_repair_is_undone_until_it_has_passed() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let story = signalled(&plane).await?;
    uncordoned(&story, "while it is repaired: it is undone", 1).await?;
    story.boots("boot-2").await?;
    uncordoned(&story, "while it is repaired: it is undone", 2).await?;
    let done = |object: &Value| has(object, "AttemptComplete", "True");
    story.reboot("the end of the reboot", 1, done).await?;
    story.drain.state("remediation-succeeded").await?;
    uncordoned(&story, "while it is repaired: it is undone", 3).await?;
    let events: Api<Event> = Api::namespaced(plane.client().await?, "default");
    let of_node = format!("involvedObject.name={}", story.drain.scene.node);
    let undone = || async {
        let list = events.list(&ListParams::default().fields(&of_node)).await;
        let list = list.map_err(|error| error.to_string())?.items;
        let undone = list
            .iter()
            .filter(|event| event.reason.as_deref() == Some("QuarantineUndone"));
        if undone.count() == 3 {
            Ok(())
        } else {
            Err(format!("{list:?}"))
        }
    };
    let product = &story.drain.scene.product;
    product
        .wait_for("an Event of each", crate::support::SOON, undone)
        .await?;
    recovered(&story.drain.scene).await?;
    story.drain.scene.restored().await?;
    let page = story
        .page(&["the node has passed its validation", "release: uncordon"])
        .await?;
    assert!(!page.contains("the session ends"), "{page}");
    assert_eq!(story.provider.signals().len(), 1);
    Ok(())
}

/// A person reboots a node that is only cordoned, or the machine reboots by itself.
#[tokio::test]
async fn what_uncordons_a_node_after_a_boot_is_undone_also_by_who_comes_next() -> anyhow::Result<()>
{
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let mut story = Story::new(&plane, LATE, &with_validation(false), Played::new()).await?;
    let veto = json!({"by": "alice", "reason": "by hand", "until": "2100-01-01T00:00:00Z"});
    let veto = json!({"metadata": {"annotations": {keys::VETO: veto.to_string()}}});
    story.drain.scene.patch(veto).await?;
    story.drain.fault()?;
    story.drain.scene.cordoned().await?;
    // While the product is down: only the node records the boot.
    story.drain.scene.product.kill9()?;
    story.boots("boot-2").await?;
    story
        .drain
        .scene
        .patch(json!({"spec": {"unschedulable": null}}))
        .await?;
    story.drain.scene.product.restart().await?;
    let told = "something uncordoned the node within ten minutes of its boot: it is undone";
    story.drain.scene.told("attention", told).await?;
    story.drain.scene.cordoned().await?;
    Ok(())
}

#[tokio::test]
async fn a_release_ends_a_session_in_the_midst_of_its_repair() -> anyhow::Result<()> {
    let Some(plane) = ControlPlane::shared(Version::V1_37).await? else {
        return Ok(());
    };
    let story = signalled(&plane).await?;
    let scene = &story.drain.scene;
    let kubeconfig = plane.kubeconfig().display().to_string();
    let release = [
        "release",
        &scene.node,
        "--reason",
        "it was swapped",
        "--kubeconfig",
        &kubeconfig,
    ];
    scene.product.command(release).await?.expect(0)?;
    let ended = |node: &Value| {
        let released = node["metadata"]["annotations"][keys::UNCORDONED_MANUALLY] == "True";
        let in_service = node["spec"]["unschedulable"].is_null();
        (released && in_service)
            .then_some(())
            .ok_or_else(|| node.to_string())
    };
    scene.node_until("a node that was let in", ended).await
}
