//! Single nodes told of, for maintenance: with the pods of services on them that hold GPUs open, or with the
//! devices that drivers publish for them.

use std::sync::Arc;
use std::time::Duration;

use maintenance::gpu_reset::{SERVICES, ServicePod};
use model::listing::Listing;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::causes::chain;
use crate::connect::{Cluster, ConnectError};
use crate::connections::Connections;
use crate::follow::{FollowOne, One, take};
use crate::kind::Kind;
use crate::watch::Signal;

/// News that wait for their consumer; when it is slower, the API server waits.
const QUEUE: usize = 256;
/// Pause before a cluster that serves no slices is asked again: somebody may switch it on.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// News of a node.
#[derive(Clone, Debug)]
pub enum ServiceEvent {
    /// The node is this object; `None`: there is none of its name.
    Node(String, Option<Value>),
    /// These are the pods of services on it.
    Pods(String, Vec<ServicePod>),
    /// These are its `ResourceSlice`s.
    Slices(String, Vec<Value>),
}

/// Tells of single nodes and of what belongs to them, each by watches of its own: those under maintenance are
/// few.
#[derive(Debug)]
pub struct ServiceWatches {
    connections: Connections,
    news: mpsc::Sender<ServiceEvent>,
}

// === impl ServiceWatches ===

impl ServiceWatches {
    /// Returns what tells of no node yet, and where its news come.
    pub fn new(cluster: &Cluster) -> (Self, mpsc::Receiver<ServiceEvent>) {
        let (news, receiver) = mpsc::channel(QUEUE);
        let connections = Connections::new(cluster);
        (Self { connections, news }, receiver)
    }

    /// Tells of a node from now on. While its watch fails nothing is told. Takes the permissions `list` and
    /// `watch` on nodes. Must be called within a tokio runtime.
    pub fn follow(&mut self, node: &str, cancel: &CancellationToken) -> Result<(), ConnectError> {
        if let Some((connection, cancel)) = self.connections.begin(node, cancel)? {
            let kind = Kind::new("", "v1", "nodes");
            let signals = connection.watch_objects(&kind, None, |all| all.named(node), cancel);
            tokio::spawn(tell_of_node(node.to_owned(), signals, self.news.clone()));
        }
        Ok(())
    }

    /// Tells of the pods of services on a node from now on, with the same permissions on pods.
    pub fn follow_pods(
        &mut self,
        node: &str,
        cancel: &CancellationToken,
    ) -> Result<(), ConnectError> {
        // No node has such a name.
        let pods = format!("{node}/pods");
        if let Some((connection, cancel)) = self.connections.begin(&pods, cancel)? {
            let kind = Kind::new("", "v1", "pods");
            let apps: Vec<&str> = SERVICES.iter().map(|one| one.app).collect();
            let (fields, labels) = (
                format!("spec.nodeName={node}"),
                format!("app in ({})", apps.join(",")),
            );
            let select = |all: crate::Selection| all.with_fields(&fields).with_labels(&labels);
            let signals = connection.watch_objects(&kind, None, select, cancel);
            tokio::spawn(tell_of_pods(node.to_owned(), signals, self.news.clone()));
        }
        Ok(())
    }

    /// Tells of the `ResourceSlice`s of a node from now on, with the same permissions on them; of none where the
    /// cluster does not serve any.
    pub fn follow_slices(
        &mut self,
        node: &str,
        cancel: &CancellationToken,
    ) -> Result<(), ConnectError> {
        // No node has such a name.
        let slices = format!("{node}/slices");
        if let Some((connection, cancel)) = self.connections.begin(&slices, cancel)? {
            let (node, news) = (node.to_owned(), self.news.clone());
            tokio::spawn(
                cancel
                    .clone()
                    .run_until_cancelled_owned(tell_of_slices(connection, node, news, cancel)),
            );
        }
        Ok(())
    }

    /// Tells of a node and what belongs to it no more. What was told before may still come.
    pub fn leave(&mut self, node: &str) {
        self.connections.end(node);
        self.connections.end(&format!("{node}/pods"));
        self.connections.end(&format!("{node}/slices"));
    }
}

async fn tell_of_node(
    name: String,
    mut signals: mpsc::Receiver<Signal<Value>>,
    news: mpsc::Sender<ServiceEvent>,
) {
    let mut follow = FollowOne::default();
    while let Some(signal) = signals.recv().await {
        let told = match follow.take(signal) {
            Some(One::There(object)) => Some(object.as_ref().clone()),
            Some(One::Missing) => None,
            Some(One::Failing { .. } | One::Recovered) | None => continue,
        };
        let told = ServiceEvent::Node(name.clone(), told);
        if news.send(told).await.is_err() {
            return;
        }
    }
}

async fn tell_of_pods(
    node: String,
    signals: mpsc::Receiver<Signal<Value>>,
    news: mpsc::Sender<ServiceEvent>,
) {
    let event = |pods: &[&Value]| {
        let pods = pods.iter().filter_map(|pod| service_pod(pod)).collect();
        ServiceEvent::Pods(node.clone(), pods)
    };
    tell_of_all(signals, news, event).await;
}

async fn tell_of_slices(
    cluster: Cluster,
    node: String,
    news: mpsc::Sender<ServiceEvent>,
    cancel: CancellationToken,
) {
    let mut told = false;
    let api = loop {
        match cluster.slices_api().await {
            Ok(Some(api)) => break api,
            Ok(None) if told => {}
            Ok(None) => {
                let none = ServiceEvent::Slices(node.clone(), Vec::new());
                if news.send(none).await.is_err() {
                    return;
                }
                told = true;
            }
            Err(error) => {
                tracing::warn!(
                    err = chain(&error),
                    "it is not known which devices there are"
                );
            }
        }
        tokio::time::sleep(ASK_AGAIN).await;
    };
    let kind = Kind::new(&api.group, &api.version, &api.plural);
    let fields = format!("spec.nodeName={node}");
    let signals = cluster.watch_objects(&kind, None, |all| all.with_fields(&fields), cancel);
    let event = |slices: &[&Value]| {
        let slices = slices.iter().map(|slice| (*slice).clone()).collect();
        ServiceEvent::Slices(node.clone(), slices)
    };
    tell_of_all(signals, news, event).await;
}

/// Tells all objects of a watch whenever they change, once all are known.
async fn tell_of_all(
    mut signals: mpsc::Receiver<Signal<Value>>,
    news: mpsc::Sender<ServiceEvent>,
    event: impl Fn(&[&Value]) -> ServiceEvent,
) {
    let mut objects = Listing::default();
    while let Some(signal) = signals.recv().await {
        let says = !matches!(signal, Signal::Failing { .. } | Signal::Recovered);
        take(&mut objects, signal, |object| {
            Some((title(object), Arc::clone(object)))
        });
        let known = says && objects.is_complete() && !objects.is_coming();
        let objects: Vec<&Value> = objects.values().map(Arc::as_ref).collect();
        if known && news.send(event(&objects)).await.is_err() {
            return;
        }
    }
}

/// Returns the name of an object, with its namespace where it has one.
fn title(object: &Value) -> String {
    let text = |key: &str| object["metadata"][key].as_str();
    let name = text("name").unwrap_or_default();
    match text("namespace") {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

/// Reads a pod.
fn service_pod(pod: &Value) -> Option<ServicePod> {
    let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str);
    let (namespace, name) = (text("/metadata/namespace")?, text("/metadata/name")?);
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array);
    let ready = |one: &Value| one["type"] == "Ready" && one["status"] == "True";
    Some(ServicePod {
        title: format!("{namespace}/{name}"),
        app: text("/metadata/labels/app")?.to_owned(),
        ready: conditions.into_iter().flatten().any(ready),
    })
}
