//! Pods of drained nodes: watches of them, and their conversion for a drain and its plan.
//! `evict.rs` removes them.

use std::collections::{BTreeMap, BTreeSet};

use contract::keys;
use fleet::PodUpdate;
use fleet::drain::plan::PodFacts;
use fleet::drain::{Checkpoint, PodView};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod as Object;
use kube::api::ListParams;
use kube::core::Request;
use model::device::{Claim, GPU_DRIVER};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::connect::{Cluster, ConnectError};
use crate::error::ApiError;
use crate::follow::Follower;
use crate::pace::Urgency;
use crate::request::ask;
use crate::watch::{Selection, Signal};

/// Events that wait for the consumer; when it is slower, the API server waits.
const QUEUE: usize = 1024;
/// Prefixes of the names of resources that are GPUs, or parts of one.
const GPU_RESOURCES: [&str; 3] = ["nvidia.com/gpu", "nvidia.com/pgpu", "nvidia.com/mig-"];
/// Path of all pods.
const PODS: &str = "/api/v1/pods";
/// Annotation of the mirror of a pod that the kubelet runs from a file.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Labels or annotations of Kueue and Volcano on the pods of a gang.
const GANG_MARKS: [&str; 4] = [
    "kueue.x-k8s.io/pod-group-name",
    "kueue.x-k8s.io/workload-name",
    "kueue.x-k8s.io/workload",
    "scheduling.k8s.io/group-name",
];
/// Kinds whose pods are replicas that work alone.
const REPLICAS: [&str; 5] = [
    "ReplicaSet",
    "StatefulSet",
    "ReplicationController",
    "DaemonSet",
    "Node",
];

/// Watches of the pods of single nodes. Each node has a watch of its own: a process should not hold
/// all pods of a cluster in memory.
#[derive(Debug)]
pub struct PodWatches(Follower<String, (String, PodUpdate)>);

/// A list of pods as the API server sends it.
#[derive(Deserialize)]
struct Pods {
    items: Vec<Value>,
}

/// Value of the annotation with the devices of a pod, by resource.
#[derive(Deserialize)]
struct Devices {
    devices: BTreeMap<String, Vec<String>>,
}

/// The fields of a pod that a drain reads.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodObject {
    metadata: PodMetadata,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodMetadata {
    namespace: String,
    name: String,
    uid: String,
    deletion_timestamp: Option<Timestamp>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    owner_references: Vec<Owner>,
}

#[derive(Debug, Deserialize)]
struct Owner {
    kind: String,
    name: String,
    #[serde(default)]
    controller: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodSpec {
    termination_grace_period_seconds: Option<i64>,
    containers: Vec<Container>,
    init_containers: Vec<Container>,
    resource_claims: Vec<IgnoredAny>,
    /// Gang of Kubernetes 1.36 and later.
    scheduling_group: Option<SchedulingGroup>,
    /// Gang of Kubernetes 1.35.
    workload_ref: Option<WorkloadRef>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct SchedulingGroup {
    pod_group_name: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct WorkloadRef {
    name: String,
    pod_group: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Container {
    #[serde(default)]
    resources: Resources,
    /// `Always` for an init container that keeps running beside the others.
    restart_policy: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Resources {
    limits: BTreeMap<String, String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodStatus {
    phase: String,
    start_time: Option<Timestamp>,
    conditions: Vec<PodCondition>,
    /// Set if a claim stands for an extended resource.
    extended_resource_claim_status: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    last_transition_time: Option<Timestamp>,
}

// === impl PodWatches ===

impl PodWatches {
    /// Creates a set of watches that follows no node yet, and the receiver of its events, each with
    /// the name of its node.
    pub fn new(cluster: &Cluster) -> (Self, mpsc::Receiver<(String, PodUpdate)>) {
        let (follower, events) = Follower::new(cluster, QUEUE);
        (Self(follower), events)
    }

    /// Starts watching the pods of a node; the first events list all of them. Takes the permissions
    /// `list` and `watch` on pods. Must be called within a tokio runtime.
    pub fn follow(&mut self, node: &str, cancel: &CancellationToken) -> Result<(), ConnectError> {
        let selection =
            Selection::of::<Object>(&(), None).with_fields(&format!("spec.nodeName={node}"));
        let name = node.to_owned();
        let read = move |signal: Signal<PodObject>| {
            let news = match signal {
                Signal::Restarted => PodUpdate::ListBegun,
                Signal::Listed => PodUpdate::Listed,
                Signal::Applied(pod) => PodUpdate::Observed(Box::new(pod.view())),
                Signal::Deleted(pod) => PodUpdate::Gone(pod),
                Signal::Failing { error, .. } => PodUpdate::Failing(error),
                Signal::Recovered => PodUpdate::Recovered,
            };
            Some((name.clone(), news))
        };
        self.0.follow(node.to_owned(), selection, read, cancel)
    }

    /// Stops watching the pods of a node. Events already queued are still delivered.
    pub fn leave(&mut self, node: &str) {
        self.0.leave(&node.to_owned());
    }
}

// === impl Cluster ===

impl Cluster {
    /// Lists the pods of a node: the facts of each for a plan, without gang and budget, and its
    /// object. Takes the permission `list` on pods, and on claims if pods have any.
    pub async fn pods_to_plan(&self, node: &str) -> Result<Vec<(PodFacts, Value)>, ApiError> {
        let fields = format!("spec.nodeName={node}");
        let request = Request::new(PODS).list(&ListParams::default().fields(&fields));
        let listed: Pods = ask(&self.client(Urgency::Report), request).await?;
        let mut claims: BTreeMap<String, Vec<Claim>> = BTreeMap::new();
        let mut found = Vec::new();
        for value in listed.items {
            let pod = PodObject::deserialize(&value).map_err(ApiError::unavailable)?;
            let mut facts = pod.facts();
            if facts.gpus == 0 && pod.has_claims() {
                let namespace = &pod.metadata.namespace;
                if !claims.contains_key(namespace) {
                    claims.insert(namespace.clone(), self.claims_in(namespace).await?);
                }
                let title = facts.pod.title();
                let of_pod = (claims.get(namespace).into_iter().flatten())
                    .filter(|claim| claim.pods.contains(&title));
                let gpus = of_pod.flat_map(|claim| &claim.devices);
                let gpus = gpus.filter(|device| device.driver == GPU_DRIVER).count();
                facts.gpus = u64::try_from(gpus).unwrap_or(u64::MAX);
            }
            found.push((facts, value));
        }
        Ok(found)
    }
}

// === impl PodObject ===

impl PodObject {
    /// Returns the facts for a plan, without the GPUs of claims.
    fn facts(&self) -> PodFacts {
        let metadata = &self.metadata;
        let owner = metadata.owner_references.iter().find(|one| one.controller);
        PodFacts {
            pod: self.view(),
            gpus: self.gpus(),
            started_at: self.status.start_time,
            owner: owner.map(|one| format!("{} {}/{}", one.kind, metadata.namespace, one.name)),
            gang: None,
            held_by: None,
        }
    }

    /// Returns true if the pod may have devices by a claim.
    fn has_claims(&self) -> bool {
        let of_resource = self.status.extended_resource_claim_status.is_some();
        of_resource || !self.spec.resource_claims.is_empty()
    }

    /// Returns the number of GPUs: those of the annotation, or else of the limits.
    fn gpus(&self) -> u64 {
        let written = (metadata_devices(&self.metadata).into_iter()).collect::<BTreeSet<_>>();
        if !written.is_empty() {
            return u64::try_from(written.len()).unwrap_or(u64::MAX);
        }
        let (mut beside, mut largest) = (0_u64, 0);
        for one in &self.spec.init_containers {
            if one.restart_policy.as_deref() == Some("Always") {
                beside = beside.saturating_add(one.gpus());
            } else {
                largest = largest.max(beside.saturating_add(one.gpus()));
            }
        }
        let work = self.spec.containers.iter().map(Container::gpus);
        work.fold(beside, u64::saturating_add).max(largest)
    }

    fn view(&self) -> PodView {
        let (metadata, spec, status) = (&self.metadata, &self.spec, &self.status);
        let owners = metadata.owner_references.iter();
        let limits = (spec.containers.iter().chain(&spec.init_containers))
            .flat_map(|container| container.resources.limits.keys());
        let ready = status.conditions.iter().find(|one| one.kind == "Ready");
        PodView {
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
            uid: metadata.uid.clone(),
            labels: metadata.labels.clone(),
            finished: matches!(status.phase.as_str(), "Succeeded" | "Failed"),
            of_daemon_set: (owners.clone()).any(|one| one.controller && one.kind == "DaemonSet"),
            is_static: metadata.annotations.contains_key(MIRROR),
            gpus: metadata_devices(metadata).into_iter().collect(),
            has_gpus: limits.clone().any(|name| is_gpu(name))
                || metadata.annotations.contains_key(keys::POD_DEVICES)
                // Only the driver of a claim knows whether its devices are GPUs.
                || !spec.resource_claims.is_empty()
                || status.extended_resource_claim_status.is_some(),
            grace: spec
                .termination_grace_period_seconds
                .map(SignedDuration::from_secs),
            ends_by: metadata.deletion_timestamp,
            unready_since: ready
                .filter(|one| one.status != "True")
                .and_then(|one| one.last_transition_time),
            gang: self.gang(),
            checkpoint: self.checkpoint(),
        }
    }

    /// Returns the gang or job that the pod belongs to, as `NAMESPACE/NAME`.
    fn gang(&self) -> Option<String> {
        let (metadata, spec) = (&self.metadata, &self.spec);
        let group = spec.scheduling_group.as_ref();
        let native = group.map(|group| group.pod_group_name.clone());
        let workload = spec.workload_ref.as_ref();
        let native =
            native.or_else(|| workload.map(|one| format!("{}/{}", one.name, one.pod_group)));
        let marks = || {
            let mut places = GANG_MARKS.iter().map(|mark| {
                let there = metadata.labels.get(*mark);
                there.or_else(|| metadata.annotations.get(*mark)).cloned()
            });
            places.find_map(|name| name.filter(|name| !name.is_empty()))
        };
        let owner = || {
            let mut owners = metadata.owner_references.iter();
            let owner = owners.find(|one| one.controller && !REPLICAS.contains(&one.kind.as_str()));
            owner.map(|one| format!("{} {}", one.kind, one.name))
        };
        let name = native
            .filter(|name| !name.is_empty())
            .or_else(marks)
            .or_else(owner)?;
        Some(format!("{}/{name}", metadata.namespace))
    }

    /// Returns the state of the pod's checkpoint, if the pod asks for time to write one.
    fn checkpoint(&self) -> Option<Checkpoint> {
        let annotations = &self.metadata.annotations;
        let asks = annotations.get(keys::CHECKPOINT)?.trim();
        let takes = asks.parse::<SignedDuration>().ok();
        let time = |key: &str| annotations.get(key)?.trim().parse().ok();
        Some(Checkpoint {
            takes: takes.filter(SignedDuration::is_positive),
            requested: time(keys::CHECKPOINT_REQUESTED),
            done: time(keys::CHECKPOINT_DONE),
        })
    }
}

// === impl Container ===

impl Container {
    /// Returns the number of GPUs, or parts of one, in the limits.
    fn gpus(&self) -> u64 {
        let limits = self.resources.limits.iter();
        let gpus = limits.filter(|(name, _)| is_gpu(name));
        let counts = gpus.filter_map(|(_, count)| count.parse::<u64>().ok());
        counts.fold(0, u64::saturating_add)
    }
}

fn is_gpu(name: &str) -> bool {
    GPU_RESOURCES.iter().any(|one| name.starts_with(one))
}

/// Returns the UUIDs of the devices in the annotation of a pod.
fn metadata_devices(metadata: &PodMetadata) -> Vec<String> {
    let text = metadata.annotations.get(keys::POD_DEVICES);
    let written = text.and_then(|text| serde_json::from_str::<Devices>(text).ok());
    let devices = written.map(|written| written.devices).unwrap_or_default();
    devices.into_values().flatten().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_a_pod_is_follows_from_its_object() {
        let view = |mut pod: Value| {
            for (key, value) in [("namespace", "a"), ("name", "b"), ("uid", "u")] {
                pod["metadata"][key] = json!(value);
            }
            serde_json::from_value::<PodObject>(pod).unwrap().view()
        };
        let plain = view(
            json!({"metadata": {"namespace": "a", "name": "b", "uid": "u"},
            "spec": {"terminationGracePeriodSeconds": 7, "containers": [{"name": "c"}]},
            "status": {"phase": "Running", "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:01:00Z"}]}}),
        );
        let expected = PodView {
            namespace: "a".to_owned(),
            name: "b".to_owned(),
            uid: "u".to_owned(),
            grace: Some(SignedDuration::from_secs(7)),
            ..PodView::default()
        };
        assert_eq!(plain, expected);
        let owner = |kind: &str, controller: bool| {
            view(json!({"metadata": {"ownerReferences": [
                {"kind": kind, "name": "o", "controller": controller}]}}))
            .of_daemon_set
        };
        assert!(owner("DaemonSet", true));
        assert!(!owner("DaemonSet", false) && !owner("ReplicaSet", true));
        let mirror = json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "hash"}}});
        assert!(view(mirror).is_static);
        for (phase, finished) in [
            ("Succeeded", true),
            ("Failed", true),
            ("Pending", false),
            ("Unknown", false),
        ] {
            assert_eq!(view(json!({"status": {"phase": phase}})).finished, finished);
        }
        let at = Timestamp::from_second(60).ok();
        let ending = json!({"metadata": {"deletionTimestamp": "1970-01-01T00:01:00Z"}});
        assert_eq!(view(ending).ends_by, at);
        for (status, unready_since) in [("False", at), ("Unknown", at), ("True", None)] {
            let pod = view(json!({"status": {"conditions": [
                {"type": "Ready", "status": status, "lastTransitionTime": "1970-01-01T00:01:00Z"}]}}));
            assert_eq!(pod.unready_since, unready_since);
        }
        for (pod, has_gpus) in [
            (
                json!({"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}),
                true,
            ),
            (
                json!({"spec": {"initContainers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}),
                true,
            ),
            (
                json!({"spec": {"containers": [{"resources": {"limits": {"cpu": "1"}}}]}}),
                false,
            ),
            (
                json!({"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]}}),
                true,
            ),
            (
                json!({"status": {"extendedResourceClaimStatus": {"resourceClaimName": "c"}}}),
                true,
            ),
            (
                json!({"metadata": {"annotations": {keys::POD_DEVICES: "{}"}}}),
                true,
            ),
        ] {
            assert_eq!(view(pod.clone()).has_gpus, has_gpus, "{pod}");
        }
    }

    #[test]
    fn a_pod_says_of_which_gang_it_is_and_whether_it_writes_checkpoints() {
        let pod = |labels: Value, annotations: Value, spec: Value, owner: &str| {
            let owners = json!([{"kind": owner, "name": "o", "controller": true}]);
            let pod: PodObject = serde_json::from_value(json!({
                "metadata": {"namespace": "a", "name": "b", "uid": "u", "labels": labels,
                    "annotations": annotations, "ownerReferences": owners},
                "spec": spec,
            }))
            .unwrap();
            pod.view()
        };
        let none = || json!({});
        for (labels, annotations, spec, owner, gang) in [
            (none(), none(), none(), "ReplicaSet", None),
            (none(), none(), none(), "StatefulSet", None),
            (none(), none(), none(), "Job", Some("a/Job o")),
            (
                none(),
                json!({"scheduling.k8s.io/group-name": "g"}),
                none(),
                "Job",
                Some("a/g"),
            ),
            (
                json!({"kueue.x-k8s.io/pod-group-name": "k"}),
                json!({"scheduling.k8s.io/group-name": "g"}),
                none(),
                "Job",
                Some("a/k"),
            ),
            (
                json!({"kueue.x-k8s.io/pod-group-name": "k"}),
                none(),
                json!({"schedulingGroup": {"podGroupName": "n"}}),
                "Job",
                Some("a/n"),
            ),
            (
                none(),
                none(),
                json!({"workloadRef": {"name": "w", "podGroup": "p"}}),
                "Job",
                Some("a/w/p"),
            ),
        ] {
            assert_eq!(pod(labels, annotations, spec, owner).gang.as_deref(), gang);
        }
        let at = Timestamp::from_second(60).ok();
        for (annotations, expected) in [
            (json!({keys::CHECKPOINT_DONE: "1970-01-01T00:01:00Z"}), None),
            (
                json!({keys::CHECKPOINT: "10m", keys::CHECKPOINT_REQUESTED: "1970-01-01T00:01:00Z",
                    keys::CHECKPOINT_DONE: "1970-01-01T00:01:00Z"}),
                Some(Checkpoint {
                    takes: Some(SignedDuration::from_mins(10)),
                    requested: at,
                    done: at,
                }),
            ),
            (
                json!({keys::CHECKPOINT: "true", keys::CHECKPOINT_DONE: "yes"}),
                Some(Checkpoint::default()),
            ),
        ] {
            let pod = pod(none(), annotations, none(), "Job");
            assert_eq!(pod.checkpoint, expected);
        }
    }

    #[test]
    fn the_gpus_of_a_pod_are_counted_as_they_are_given() {
        let container = |name: &str, count: &str| json!({"resources": {"limits": {name: count}}});
        let beside = json!({
            "resources": {"limits": {"nvidia.com/gpu": "1"}}, "restartPolicy": "Always",
        });
        let gpu = |count| container("nvidia.com/gpu", count);
        for (init, work, annotation, gpus) in [
            (
                json!([]),
                json!([gpu("2"), gpu("1"), container("cpu", "8")]),
                "",
                3,
            ),
            (json!([gpu("4")]), json!([gpu("2")]), "", 4),
            (json!([beside, gpu("4")]), json!([gpu("2")]), "", 5),
            (json!([beside]), json!([gpu("2")]), "", 3),
            (
                json!([]),
                json!([container("nvidia.com/mig-1g.10gb", "2")]),
                "",
                2,
            ),
            (json!([]), json!([container("cpu", "2")]), "", 0),
            (
                json!([]),
                json!([container("cpu", "2")]),
                r#"{"devices":{"nvidia.com/gpu":["GPU-1","GPU-2"],"gpu.nvidia.com":["GPU-2"]}}"#,
                2,
            ),
        ] {
            let pod = json!({
                "metadata": {
                    "namespace": "a", "name": "b", "uid": "u",
                    "annotations": {keys::POD_DEVICES: annotation},
                    "ownerReferences": [
                        {"kind": "Job", "name": "j", "controller": true},
                        {"kind": "Other", "name": "o"},
                    ],
                },
                "spec": {"initContainers": init, "containers": work},
                "status": {"startTime": "2026-01-01T00:00:00Z"},
            });
            let pod: PodObject = serde_json::from_value(pod).unwrap();
            let facts = pod.facts();
            assert_eq!(facts.gpus, gpus, "{pod:?}");
            assert_eq!(facts.owner.as_deref(), Some("Job a/j"));
            assert!(facts.started_at.is_some());
        }
    }
}
