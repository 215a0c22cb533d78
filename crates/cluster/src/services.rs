//! Watches of single nodes under maintenance, of the pods on them that hold GPUs open, and of the
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
use crate::follow::{Follower, Following};
use crate::kind::ObjectKind;
use crate::signals::{ObjectState, SingleObject, apply_signal};
use crate::watch::{Selection, Signal};

/// Events that wait for the consumer; when it is slower, the API server waits.
const QUEUE: usize = 256;
/// Pause before the API server is asked again for slices that it does not serve: an operator may
/// enable them.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// A change of a watched node, or of the objects that belong to it. The first field is the name of
/// the node.
#[derive(Clone, Debug)]
pub enum ServiceEvent {
    /// The node's object; `None` if there is no such node.
    Node(String, Option<Value>),
    /// All pods of services on the node.
    Pods(String, Vec<ServicePod>),
    /// All `ResourceSlice`s of the node.
    Slices(String, Vec<Value>),
}

/// Watches of single nodes. Each has watches of its own, since few nodes are under maintenance.
#[derive(Debug)]
pub struct ServiceWatches(Follower<(String, WatchedObjects), ServiceEvent>);

/// The objects of a node that one watch is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum WatchedObjects {
    Node,
    Pods,
    Slices,
}

// === impl ServiceWatches ===

impl ServiceWatches {
    /// Creates a set of watches that follows no node yet, and the receiver of its events.
    pub fn new(cluster: &Cluster) -> (Self, mpsc::Receiver<ServiceEvent>) {
        let (follower, events) = Follower::new(cluster, QUEUE);
        (Self(follower), events)
    }

    /// Starts watching a node. While the watch fails, no event is sent. Takes the permissions
    /// `list` and `watch` on nodes. Must be called within a tokio runtime.
    pub fn follow(&mut self, node: &str, cancel: &CancellationToken) -> Result<(), ConnectError> {
        let selection = Selection::of_kind(&ObjectKind::new("", "v1", "nodes"), None).named(node);
        let (name, mut object) = (node.to_owned(), SingleObject::default());
        let read = move |signal: Signal<Value>| {
            let node = match object.apply(signal)? {
                ObjectState::Present(node) => Some(node.as_ref().clone()),
                ObjectState::Missing => None,
                ObjectState::Failing { .. } | ObjectState::Recovered => return None,
            };
            Some(ServiceEvent::Node(name.clone(), node))
        };
        let key = (node.to_owned(), WatchedObjects::Node);
        self.0.follow(key, selection, read, cancel)
    }

    /// Starts watching the pods of services on a node. Takes the permissions `list` and `watch` on
    /// pods.
    pub fn follow_pods(
        &mut self,
        node: &str,
        cancel: &CancellationToken,
    ) -> Result<(), ConnectError> {
        let apps: Vec<&str> = SERVICES.iter().map(|one| one.app).collect();
        let selection = Selection::of_kind(&ObjectKind::new("", "v1", "pods"), None)
            .with_fields(&on_node(node))
            .with_labels(&format!("app in ({})", apps.join(",")));
        let name = node.to_owned();
        let read = whole_list(move |pods: &[&Value]| {
            let pods = pods.iter().filter_map(|pod| service_pod(pod)).collect();
            ServiceEvent::Pods(name.clone(), pods)
        });
        let key = (node.to_owned(), WatchedObjects::Pods);
        self.0.follow(key, selection, read, cancel)
    }

    /// Starts watching the `ResourceSlice`s of a node. Where the cluster does not serve slices, the
    /// list is empty. Takes the permissions `list` and `watch` on slices.
    pub fn follow_slices(
        &mut self,
        node: &str,
        cancel: &CancellationToken,
    ) -> Result<(), ConnectError> {
        let key = (node.to_owned(), WatchedObjects::Slices);
        let node = node.to_owned();
        (self.0).start(key, cancel, |following| watch_slices(following, node))
    }

    /// Stops watching a node and the objects that belong to it. Events already queued are still
    /// delivered.
    pub fn leave(&mut self, node: &str) {
        for part in [
            WatchedObjects::Node,
            WatchedObjects::Pods,
            WatchedObjects::Slices,
        ] {
            self.0.leave(&(node.to_owned(), part));
        }
    }
}

async fn watch_slices(following: Following<ServiceEvent>, node: String) {
    let mut reported = false;
    let api = loop {
        match following.connection.slices_api().await {
            Ok(Some(api)) => break api,
            Ok(None) if reported => {}
            Ok(None) => {
                let none = ServiceEvent::Slices(node.clone(), Vec::new());
                if !following.send(none).await {
                    return;
                }
                reported = true;
            }
            Err(error) => {
                tracing::warn!(
                    err = chain(&error),
                    node,
                    "cannot find out whether the cluster serves ResourceSlices; trying again"
                );
            }
        }
        tokio::time::sleep(ASK_AGAIN).await;
    };
    let kind = ObjectKind::new(&api.group, &api.version, &api.plural);
    let selection = Selection::of_kind(&kind, None).with_fields(&on_node(&node));
    let read = whole_list(move |slices: &[&Value]| {
        let slices = slices.iter().map(|slice| (*slice).clone()).collect();
        ServiceEvent::Slices(node.clone(), slices)
    });
    following.watch(selection, read).await;
}

fn on_node(node: &str) -> String {
    format!("spec.nodeName={node}")
}

/// Returns a reader of signals that makes an event of all objects of the watch after each change,
/// once the list is complete.
fn whole_list(
    event: impl Fn(&[&Value]) -> ServiceEvent,
) -> impl FnMut(Signal<Value>) -> Option<ServiceEvent> {
    let mut objects = Listing::default();
    move |signal| {
        let may_change = !matches!(signal, Signal::Failing { .. } | Signal::Recovered);
        apply_signal(&mut objects, signal, |object: &Arc<Value>| {
            Some((title(object), Arc::clone(object)))
        });
        if !may_change || !objects.is_complete() || objects.is_arriving() {
            return None;
        }
        let objects: Vec<&Value> = objects.values().map(Arc::as_ref).collect();
        Some(event(&objects))
    }
}

/// Returns the name of an object, as `NAMESPACE/NAME` where it has a namespace.
fn title(object: &Value) -> String {
    let text = |key: &str| object["metadata"][key].as_str();
    let name = text("name").unwrap_or_default();
    match text("namespace") {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

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
