//! Requests at a real API server: each condition and limit that a request names takes effect,
//! despite the client library.

use anyhow::{Context as _, Result, ensure};
use contract::keys;
use fleet::drain::{DrainMode, PodView};
use fleet::{PlannedCheckpoint, PlannedRemoval};
use gpuwarden_cluster::{ApiError, Cluster, ObjectKind};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt as _};
use model::condition::{ConditionChange, NodeCondition};
use model::node::NodeView;
use serde_json::{Value, json};
use testkit::{ControlPlane, Options, Private, Program, Version, node, unique};

use crate::connect;

/// Grace period of the pods in this file (seconds).
const OWN_GRACE: i64 = 3600;
/// UID that no object has.
const OTHER_UID: &str = "11111111-2222-4333-8444-555555555555";

/// Starts a control plane without controllers, where an object deleted with a grace period
/// stays.
async fn plane() -> Result<Option<(Private, Client, Cluster)>> {
    let Some(plane) = ControlPlane::private(Version::LATEST, Options::default()).await? else {
        return Ok(None);
    };
    plane.namespace("work").await?;
    for program in [Program::ControllerManager, Program::Kwok] {
        if plane.has(program) {
            plane.kill(program)?;
        }
    }
    let (client, cluster) = (plane.client().await?, connect(plane.kubeconfig()).await?);
    Ok(Some((plane, client, cluster)))
}

/// Creates a running pod on a node.
async fn pod(client: &Client, name: &str, node: &str) -> Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), "work");
    let pod = serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": OWN_GRACE,
            "containers": [{"name": "main", "image": "registry.example/work:1"}],
        },
    }))?;
    pods.create(&PostParams::default(), &pod).await?;
    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
    let params = PatchParams::default();
    Ok(pods.patch_status(name, &params, &running).await?)
}

/// Returns the removal of a pod: an eviction with this grace period, or else a deletion.
fn removal(pod: &Pod, evict: Option<i64>) -> PlannedRemoval {
    PlannedRemoval {
        node: "ill".to_owned(),
        session: None,
        namespace: "work".to_owned(),
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        mode: DrainMode::Immediate,
        evict: evict.map(SignedDuration::from_secs),
    }
}

/// Returns the grace period of a pod that is terminating (seconds).
async fn time_to_end(client: &Client, name: &str) -> Result<Option<i64>> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), "work");
    let metadata = pods.get(name).await?.metadata;
    let ending = metadata.deletion_timestamp;
    Ok(ending.and(metadata.deletion_grace_period_seconds))
}

fn conflicts<T>(result: Result<T, ApiError>) -> Result<()> {
    let error = result.err().context("it was done")?;
    ensure!(matches!(error, ApiError::Conflict { .. }), "{error:?}");
    Ok(())
}

#[tokio::test]
async fn only_the_pod_that_was_decided_about_is_removed_and_within_the_limit() -> Result<()> {
    let Some((_plane, client, cluster)) = plane().await? else {
        return Ok(());
    };
    let evicted = pod(&client, "evicted", "ill").await?;
    for evict in [Some(30), None] {
        let wrong = PlannedRemoval {
            uid: OTHER_UID.to_owned(),
            ..removal(&evicted, evict)
        };
        conflicts(cluster.remove_pod(&wrong).await)?;
        assert_eq!(time_to_end(&client, "evicted").await?, None, "{evict:?}");
    }
    // The pod's own grace period is longer than the limit.
    cluster.remove_pod(&removal(&evicted, Some(30))).await?;
    assert_eq!(time_to_end(&client, "evicted").await?, Some(30));
    // A deletion without a grace period ends the pod at once, before its grace period is over.
    cluster.remove_pod(&removal(&evicted, None)).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), "work");
    assert!(pods.get_opt("evicted").await?.is_none());

    // A pod of a StatefulSet is recreated elsewhere under its name before the watch shows it.
    let before = pod(&client, "db-0", "ill").await?;
    cluster.remove_pod(&removal(&before, Some(30))).await?;
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete("db-0", &at_once).await?;
    let now = pod(&client, "db-0", "well").await?;
    for evict in [Some(30), None] {
        conflicts(cluster.remove_pod(&removal(&before, evict)).await)?;
    }
    assert_eq!(time_to_end(&client, "db-0").await?, None);
    assert_eq!(pods.get("db-0").await?.uid(), now.uid());
    assert_eq!(cluster.requests().warned, 0);
    Ok(())
}

#[tokio::test]
async fn a_trial_of_an_eviction_tells_of_budgets_and_evicts_nothing() -> Result<()> {
    let Some((_plane, client, cluster)) = plane().await? else {
        return Ok(());
    };
    let view = |pod: &Pod| PodView {
        namespace: "work".to_owned(),
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        ..PodView::default()
    };
    let free = pod(&client, "free", "ill").await?;
    let held = pod(&client, "held", "ill").await?;
    let budget = json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "held", "namespace": "work"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "held"}}},
    });
    let budgets = ObjectKind::new("policy", "v1", "poddisruptionbudgets");
    cluster
        .create_object(&budgets, Some("work"), &budget)
        .await?;
    assert_eq!(cluster.refuses_eviction(&view(&free)).await?, None);
    let why = cluster.refuses_eviction(&view(&held)).await?;
    assert!(why.context("not refused")?.contains("disruption budget"));
    // A pod that only has the same name is not annotated.
    let gone = PodView {
        uid: OTHER_UID.to_owned(),
        ..view(&free)
    };
    assert_eq!(cluster.refuses_eviction(&gone).await?, None);
    for name in ["free", "held"] {
        assert_eq!(time_to_end(&client, name).await?, None, "{name}");
    }
    assert_eq!(cluster.requests().warned, 0);
    Ok(())
}

#[tokio::test]
async fn nothing_is_written_on_or_deleted_of_another_object_of_the_same_name() -> Result<()> {
    let Some((_plane, client, cluster)) = plane().await? else {
        return Ok(());
    };
    let made = pod(&client, "told", "ill").await?;
    let checkpoint = |uid: &str| PlannedCheckpoint {
        node: "ill".to_owned(),
        session: None,
        namespace: "work".to_owned(),
        name: "told".to_owned(),
        uid: uid.to_owned(),
        at: Timestamp::UNIX_EPOCH,
    };
    conflicts(cluster.ask_for_checkpoint(&checkpoint(OTHER_UID)).await)?;
    let uid = made.uid().unwrap_or_default();
    cluster.ask_for_checkpoint(&checkpoint(&uid)).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), "work");
    let told = pods.get("told").await?;
    let asked = told.annotations().get(keys::CHECKPOINT_REQUESTED);
    assert_eq!(asked.map(String::as_str), Some("1970-01-01T00:00:00Z"));

    let maps = ObjectKind::new("", "v1", "configmaps");
    let map = |name: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": "work"}})
    };
    for (name, foreground) in [("first", false), ("second", true)] {
        let made = cluster
            .create_object(&maps, Some("work"), &map(name))
            .await?;
        let delete = async |uid: &str| {
            if foreground {
                let within = Some("work");
                cluster
                    .delete_after_dependents(&maps, within, name, uid)
                    .await
            } else {
                cluster.delete_object(&maps, Some("work"), name, uid).await
            }
        };
        conflicts(delete(OTHER_UID).await)?;
        assert!(cluster.object(&maps, Some("work"), name).await?.is_some());
        delete(made["metadata"]["uid"].as_str().unwrap_or_default()).await?;
        let left = cluster.object(&maps, Some("work"), name).await?;
        // The garbage collector, which does not run here, would delete an object that waits for
        // its dependents.
        let waits = left.map(|left| left["metadata"]["finalizers"].clone());
        let expected = foreground.then(|| json!(["foregroundDeletion"]));
        assert_eq!(waits, expected, "{name}");
    }

    let mut old = cluster
        .create_object(&maps, Some("work"), &map("third"))
        .await?;
    let mut new = old.clone();
    new["data"] = json!({"a": "b"});
    cluster
        .replace_object(&maps, Some("work"), "third", &new)
        .await?;
    old["data"] = json!({"a": "c"});
    conflicts(
        cluster
            .replace_object(&maps, Some("work"), "third", &old)
            .await,
    )?;
    assert_eq!(cluster.requests().warned, 0);
    Ok(())
}

#[tokio::test]
async fn a_node_that_was_made_anew_gets_no_condition_of_the_one_before() -> Result<()> {
    let Some((_plane, client, cluster)) = plane().await? else {
        return Ok(());
    };
    let name = unique("anew");
    let make = || node(&name).without_kubelet().create(&client);
    let before = serde_json::to_value(make().await?)?;
    let before = NodeView::from_object(before).context("not a node")?;
    let change = [ConditionChange {
        condition: NodeCondition {
            kind: "GpuMemWatch".to_owned(),
            status: true,
            reason: "GpuMemWatchIsNotHealthy".to_owned(),
            message: "m".to_owned(),
        },
        transition: true,
    }];
    let now = Timestamp::now();
    cluster.set_conditions(&before, &change, now).await?;
    let nodes: Api<Node> = Api::all(client.clone());
    nodes.delete(&name, &DeleteParams::default()).await?;
    make().await?;
    let refused = cluster.set_conditions(&before, &change, now).await;
    let refused = refused.err().context("it was done")?;
    ensure!(refused.to_string().contains("metadata.uid"), "{refused:?}");
    let after: Value = serde_json::to_value(nodes.get(&name).await?)?;
    assert!(!after["status"].to_string().contains("GpuMemWatch"));
    assert_eq!(cluster.requests().warned, 0);
    Ok(())
}

#[tokio::test]
async fn a_field_that_the_api_server_does_not_know_is_counted_as_a_warning() -> Result<()> {
    let Some((_plane, _client, cluster)) = plane().await? else {
        return Ok(());
    };
    let maps = ObjectKind::new("", "v1", "configmaps");
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "date": {"a": "b"},
        "metadata": {"name": "misspelt", "namespace": "work"}});
    cluster.create_object(&maps, Some("work"), &map).await?;
    assert_eq!(cluster.requests().warned, 1);
    Ok(())
}
