//! The pods of nodes that are drained: told of, and removed.

use std::collections::BTreeMap;

use contract::keys;
use domain::drain::PodView;
use domain::fleet::{PlannedRemoval, PodNews};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod as Object;
use kube::Api;
use kube::api::{DeleteParams, EvictParams, PostParams, Preconditions};
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::connect::{Cluster, ConnectError};
use crate::error::{ApiError, found};
use crate::pace::Urgency;
use crate::watch::{Selection, Signal};

/// Watches on one connection: fewer than the streams that an API server gives it
/// (`--http2-max-streams-per-connection`, 100 where nobody sets it).
const WATCHES: usize = 64;
/// News that wait for their consumer; when it is slower, the API server waits.
const QUEUE: usize = 1024;
/// Beginning of the names of resources that are GPUs, or parts of one.
const GPU_RESOURCES: [&str; 3] = ["nvidia.com/gpu", "nvidia.com/pgpu", "nvidia.com/mig-"];
/// Annotation by which a kubelet marks the mirror of a pod that it runs from a file.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Tells of the pods of single nodes, each by a watch of its own: a cluster has more pods than a process
/// should know.
#[derive(Debug)]
pub struct PodWatches {
    cluster: Cluster,
    /// Connections, and how many watches each of them has.
    connections: Vec<(Cluster, usize)>,
    /// The nodes that are told of: their connection, and what ends the watch.
    nodes: BTreeMap<String, (usize, CancellationToken)>,
    news: mpsc::Sender<(String, PodNews)>,
}

/// A pod, as far as a drain looks at it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodObject {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    namespace: String,
    name: String,
    uid: String,
    deletion_timestamp: Option<Timestamp>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    owner_references: Vec<Owner>,
}

#[derive(Debug, Deserialize)]
struct Owner {
    kind: String,
    #[serde(default)]
    controller: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    termination_grace_period_seconds: Option<i64>,
    containers: Vec<Container>,
    init_containers: Vec<Container>,
}

#[derive(Debug, Deserialize)]
struct Container {
    #[serde(default)]
    resources: Resources,
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
    conditions: Vec<Condition>,
    /// Of a claim that stands for an extended resource.
    extended_resource_claim_status: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    last_transition_time: Option<Timestamp>,
}

// === impl PodWatches ===

impl PodWatches {
    /// Returns what tells of no node yet, and where its news come: each with the name of its node.
    pub fn new(cluster: &Cluster) -> (Self, mpsc::Receiver<(String, PodNews)>) {
        let (news, receiver) = mpsc::channel(QUEUE);
        let watches = Self {
            cluster: cluster.clone(),
            connections: Vec::new(),
            nodes: BTreeMap::new(),
            news,
        };
        (watches, receiver)
    }

    /// Tells of the pods of a node from now on: all of them first. Takes the permissions `list` and
    /// `watch` on pods. Must be called within a tokio runtime.
    pub fn follow(&mut self, node: &str, cancel: &CancellationToken) -> Result<(), ConnectError> {
        if self.nodes.contains_key(node) {
            return Ok(());
        }
        let room = (self.connections.iter()).position(|(_, watches)| *watches < WATCHES);
        let place = room.unwrap_or(self.connections.len());
        if room.is_none() {
            let connection = self.cluster.with_own_connection()?;
            self.connections.push((connection, 0));
        }
        let Some((connection, watches)) = self.connections.get_mut(place) else {
            return Ok(()); // Not reached: it was found or made just now.
        };
        *watches += 1;
        let cancel = cancel.child_token();
        let selection =
            Selection::of::<Object>(&(), None).with_fields(&format!("spec.nodeName={node}"));
        let mut signals = connection.watch::<PodObject>(selection, cancel.clone());
        self.nodes.insert(node.to_owned(), (place, cancel));
        let (node, news) = (node.to_owned(), self.news.clone());
        tokio::spawn(async move {
            while let Some(signal) = signals.recv().await {
                let told = match signal {
                    Signal::Restarted => PodNews::ListBegun,
                    Signal::Listed => PodNews::Listed,
                    Signal::Applied(pod) => PodNews::Seen(Box::new(pod.view())),
                    Signal::Deleted(name) => PodNews::Gone(name),
                    Signal::Failing { error, .. } => PodNews::Failing(error),
                    Signal::Recovered => continue,
                };
                if news.send((node.clone(), told)).await.is_err() {
                    return;
                }
            }
        });
        Ok(())
    }

    /// Tells of the pods of a node no more. What was told before may still come.
    pub fn leave(&mut self, node: &str) {
        let Some((place, cancel)) = self.nodes.remove(node) else {
            return;
        };
        cancel.cancel();
        if let Some((_, watches)) = self.connections.get_mut(place) {
            *watches -= 1;
        }
        // The connections of a storm are not kept.
        while self
            .connections
            .last()
            .is_some_and(|(_, watches)| *watches == 0)
        {
            self.connections.pop();
        }
    }
}

// === impl Cluster ===

impl Cluster {
    /// Removes a pod from its node: evicts it, or deletes it without time to end. The error is
    /// [`ApiError::Held`] where a disruption budget keeps it, and [`ApiError::Conflict`] or
    /// [`ApiError::NotFound`] where the pod is gone. Takes the permission `create` on `pods/eviction`, or
    /// `delete` on pods. One request.
    pub async fn remove_pod(&self, planned: &PlannedRemoval) -> Result<(), ApiError> {
        let pods: Api<Object> = Api::namespaced(self.client(Urgency::Act), &planned.namespace);
        let mut params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: Some(planned.uid.clone()),
                ..Preconditions::default()
            }),
            ..DeleteParams::default()
        };
        let Some(grace) = planned.evict else {
            params.grace_period_seconds = Some(0);
            return found(pods.delete(&planned.name, &params).await).map(drop);
        };
        params.grace_period_seconds = Some(u32::try_from(grace.as_secs()).unwrap_or(u32::MAX));
        let evict = EvictParams {
            delete_options: Some(params),
            post_options: PostParams::default(),
        };
        pods.evict(&planned.name, &evict)
            .await
            .map(drop)
            .map_err(ApiError::from)
    }
}

// === impl PodObject ===

impl PodObject {
    fn view(&self) -> PodView {
        let (metadata, spec, status) = (&self.metadata, &self.spec, &self.status);
        let owners = metadata.owner_references.iter();
        let limits = (spec.containers.iter().chain(&spec.init_containers))
            .flat_map(|container| container.resources.limits.keys());
        let is_gpu = |name: &String| GPU_RESOURCES.iter().any(|one| name.starts_with(one));
        let ready = status.conditions.iter().find(|one| one.kind == "Ready");
        PodView {
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
            uid: metadata.uid.clone(),
            finished: matches!(status.phase.as_str(), "Succeeded" | "Failed"),
            of_daemon_set: (owners.clone()).any(|one| one.controller && one.kind == "DaemonSet"),
            is_static: metadata.annotations.contains_key(MIRROR),
            has_gpus: limits.clone().any(is_gpu)
                || metadata.annotations.contains_key(keys::POD_DEVICES)
                || status.extended_resource_claim_status.is_some(),
            grace: spec
                .termination_grace_period_seconds
                .map(SignedDuration::from_secs),
            ends_by: metadata.deletion_timestamp,
            unready_since: ready
                .filter(|one| one.status != "True")
                .and_then(|one| one.last_transition_time),
        }
    }
}
