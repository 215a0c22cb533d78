//! Pods and `ConfigMap`s as received from watches, reduced to the fields in use. The watches
//! deliver every object of these kinds, whatever its author and size.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Pod without its containers and volumes: about a thirtieth of the JSON.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WatchedPod(pub(crate) Value);

/// Metadata of a `ConfigMap`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct WatchedMap {
    pub(crate) metadata: MapMetadata,
}

/// Fields of the metadata in use.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MapMetadata {
    pub(crate) namespace: String,
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) uid: String,
    #[serde(default)]
    pub(crate) resource_version: String,
}

/// Field that is omitted when absent.
type Field = Option<Value>;

#[derive(Deserialize, Serialize)]
struct Pod {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Field,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Field,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Field,
    #[serde(skip_serializing_if = "Option::is_none")]
    labels: Field,
    #[serde(skip_serializing_if = "Option::is_none")]
    annotations: Field,
    #[serde(skip_serializing_if = "Option::is_none")]
    creation_timestamp: Field,
    #[serde(skip_serializing_if = "Option::is_none")]
    deletion_timestamp: Field,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    #[serde(skip_serializing_if = "Option::is_none")]
    node_name: Field,
    #[serde(skip_serializing_if = "Option::is_none")]
    scheduling_group: Field,
    #[serde(skip_serializing_if = "Option::is_none")]
    workload_ref: Field,
    init_containers: Vec<Named>,
}

#[derive(Deserialize, Serialize)]
struct Named {
    #[serde(default)]
    name: Value,
}

#[derive(Default, Deserialize, Serialize)]
#[serde(default)]
struct Status {
    #[serde(skip_serializing_if = "Option::is_none")]
    phase: Field,
    #[serde(rename = "podIP", skip_serializing_if = "Option::is_none")]
    pod_ip: Field,
    #[serde(
        rename = "initContainerStatuses",
        skip_serializing_if = "Option::is_none"
    )]
    init_container_statuses: Field,
}

// === impl WatchedPod ===

impl<'de> Deserialize<'de> for WatchedPod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let pod = Pod::deserialize(deserializer)?;
        let pod = serde_json::to_value(pod).map_err(serde::de::Error::custom)?;
        Ok(Self(pod))
    }
}

#[cfg(test)]
mod tests {
    use preflight::config::{Config, Discovery};
    use preflight::failure::failed_checks;
    use preflight::gang::Gang;
    use preflight::inject::{checks_of, is_through, last_end};
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_left_of_a_pod_says_the_same_to_all_who_look() {
        let config = Config::parse("image: i", "test").expect("a configuration");
        let check = "preflight-nccl-allreduce";
        let ended = json!({"exitCode": 0, "finishedAt": "2026-01-01T00:00:00Z", "message": "m"});
        let failed = json!({"exitCode": 1, "finishedAt": "2026-01-01T00:00:00Z", "message": "m"});
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "namespace": "training", "name": "p", "uid": "u",
                "labels": {"a": "b"}, "annotations": {"c": "d"},
                "creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": [{"manager": "m"}],
            },
            "spec": {
                "nodeName": "n", "schedulingGroup": {"podGroupName": "g"},
                "initContainers": [{"name": check, "image": "i", "env": [{"name": "A", "value": "b"}]}],
                "containers": [{"name": "main", "env": [{"name": "A", "value": "b"}]}],
                "volumes": [{"name": "v"}],
            },
            "status": {
                "phase": "Pending", "podIP": "10.0.0.1",
                "initContainerStatuses": [
                    {"name": check, "state": {"terminated": ended}, "restartCount": 1,
                     "lastState": {"terminated": failed}},
                ],
            },
        });
        let seen: WatchedPod = serde_json::from_value(pod.clone()).expect("a pod");
        let checks = [check.to_owned()].into();
        let look = |pod: &Value| {
            let by = Discovery::Native;
            let gang = Gang::of(pod, "training", &by).expect("a gang");
            let end = last_end(pod, &config);
            let end = end.map(|(at, message)| (at.to_owned(), message.to_owned()));
            let through = is_through(pod, &config);
            let failed = failed_checks(pod, &checks);
            (gang, end, through, failed, checks_of(pod, &config))
        };
        assert_eq!(look(&seen.0), look(&pod));
        for (left, pointer) in [
            (true, "/status/podIP"),
            (true, "/metadata/annotations/c"),
            (true, "/metadata/creationTimestamp"),
            (false, "/metadata/managedFields"),
            (false, "/spec/containers"),
            (false, "/spec/volumes"),
            (false, "/spec/initContainers/0/env"),
            (false, "/metadata/deletionTimestamp"),
        ] {
            assert_eq!(seen.0.pointer(pointer).is_some(), left, "{pointer}");
        }
    }
}
