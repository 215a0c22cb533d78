//! All objects of a cluster, to be compared with those of another time.

use std::collections::BTreeMap;
use std::time::Duration;

use kube::Client;
use kube::api::ListParams;
use serde_json::{Value, json};
use testkit::wait_for;

use crate::support::SOON;

/// Kinds whose objects others change all the time, or delete by themselves.
const RESTLESS: [&str; 4] = ["events", "leases", "endpointslices", "endpoints"];

/// Reads a path of the API server.
pub(crate) async fn get(client: &Client, path: &str) -> anyhow::Result<Value> {
    let request = kube::core::Request::new(path).list(&ListParams::default())?;
    Ok(client.request(request).await?)
}

/// Returns all objects of the cluster by their paths, without what others change all the time.
pub(crate) async fn objects(client: &Client) -> anyhow::Result<BTreeMap<String, Value>> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut roots = vec!["/api/v1".to_owned()];
    for group in list(&get(client, "/apis").await?["groups"]) {
        for version in list(&group["versions"]) {
            let version = version["groupVersion"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            roots.push(format!("/apis/{version}"));
        }
    }
    let mut objects = BTreeMap::new();
    for root in roots {
        for resource in list(&get(client, &root).await?["resources"]) {
            let name = resource["name"].as_str().unwrap_or_default();
            let listed = list(&resource["verbs"]).contains(&json!("list"));
            let is_object = list(&resource["verbs"]).contains(&json!("delete"));
            if !listed || !is_object || RESTLESS.contains(&name) {
                continue;
            }
            let path = format!("{root}/{name}");
            for mut object in list(&get(client, &path).await?["items"]) {
                clean(&mut object);
                let metadata = &object["metadata"];
                let text = |key: &str| metadata[key].as_str().unwrap_or_default();
                let path = format!("{path} {}/{}", text("namespace"), text("name"));
                objects.insert(path, object);
            }
        }
    }
    // Leases of Kubernetes itself are renewed all the time.
    for lease in list(&get(client, "/apis/coordination.k8s.io/v1/leases").await?["items"]) {
        let text = |key: &str| {
            lease["metadata"][key]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        if !text("namespace").starts_with("kube-") {
            objects.insert(
                format!("lease {}/{}", text("namespace"), text("name")),
                json!({}),
            );
        }
    }
    Ok(objects)
}

/// Removes what the API server keeps about writes, and the times of heartbeats.
fn clean(object: &mut Value) {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        for key in ["managedFields", "resourceVersion", "generation"] {
            metadata.remove(key);
        }
    }
    // The controller manager changes this annotation with the number of nodes, from a hundred on.
    if let Some(ttl) = object.pointer_mut("/metadata/annotations/node.alpha.kubernetes.io~1ttl") {
        *ttl = json!("any");
    }
    let conditions = object.pointer_mut("/status/conditions");
    for condition in conditions
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        if let Some(condition) = condition.as_object_mut() {
            condition.remove("lastHeartbeatTime");
        }
    }
}

/// Returns all objects once the controllers of Kubernetes change nothing any longer.
pub(crate) async fn settled(client: &Client) -> anyhow::Result<BTreeMap<String, Value>> {
    wait_for("a cluster at rest", SOON, || async {
        let text = |error: anyhow::Error| error.to_string();
        let first = objects(client).await.map_err(text)?;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let second = objects(client).await.map_err(text)?;
        let marked = |(path, node): (&String, &Value)| {
            let ttl = &node["metadata"]["annotations"]["node.alpha.kubernetes.io/ttl"];
            !path.starts_with("/api/v1/nodes ") || ttl.is_string()
        };
        let differences = differences(&first, &second);
        if differences.is_empty() && second.iter().all(marked) {
            Ok(second)
        } else {
            Err(differences.join("\n"))
        }
    })
    .await
}

/// Returns the differences between two states of a cluster, one per object.
pub(crate) fn differences(
    before: &BTreeMap<String, Value>,
    now: &BTreeMap<String, Value>,
) -> Vec<String> {
    let mut differences = Vec::new();
    for (path, object) in before {
        match now.get(path) {
            None => differences.push(format!("{path} is gone")),
            Some(other) if other != object => {
                differences.push(format!("{path}: {other}\n  before: {object}"));
            }
            Some(_) => {}
        }
    }
    let new = now.iter().filter(|(path, _)| !before.contains_key(*path));
    differences.extend(new.map(|(path, object)| format!("{path} is new: {object}")));
    differences
}

/// Waits until all objects are as before, but for the differences that `allowed` lists by their
/// beginnings.
pub(crate) async fn restored(
    client: &Client,
    before: &BTreeMap<String, Value>,
    allowed: &[&str],
) -> anyhow::Result<()> {
    wait_for("all objects as before", SOON, || async {
        let now = objects(client).await.map_err(|error| error.to_string())?;
        let differences = differences(before, &now);
        let expected = |text: &String| allowed.iter().any(|one| text.starts_with(one));
        if differences.len() == allowed.len() && differences.iter().all(expected) {
            Ok(())
        } else {
            Err(differences.join("\n"))
        }
    })
    .await
}
