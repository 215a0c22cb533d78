//! Kubernetes Events about a node or a pod, as `kubectl describe` shows them.
//!
//! The name of an Event is chosen by who tells it, and follows from what it is about. So
//! telling it again finds it, after a restart too, and nobody has to list the namespace:
//! a repeat is a patch of its count.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as Object, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;

use crate::connect::Cluster;
use crate::error::ApiError;
use crate::kind::check_name;
use crate::pace::Urgency;

/// The namespace of Events about nodes: nodes have none.
const NAMESPACE: &str = "default";

/// A pod that an Event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventPod {
    /// Its namespace, in which the Event is made.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

/// An Event about a node, or a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `metadata.name`.
    pub name: String,
    /// The node.
    pub node: String,
    /// The pod of the node that it is about; `None`: it is about the node.
    pub pod: Option<EventPod>,
    /// `type`.
    pub kind: String,
    /// `reason`.
    pub reason: String,
    /// `message`.
    pub message: String,
    /// The monitor that found it.
    pub agent: String,
    /// Number of times that it was found.
    pub count: u64,
    /// The time when it was found first.
    pub first_seen: Timestamp,
    /// The time when it was found last.
    pub last_seen: Timestamp,
}

// === impl Cluster ===

impl Cluster {
    /// Makes a new Event; one of this name that is there stays as it is. One request, after
    /// all that acts.
    pub async fn create_event(&self, event: &Event) -> Result<(), ApiError> {
        let (events, params) = (self.events(event), PostParams::default());
        let created = events.create(&params, &object(event)).await;
        match created.map_err(ApiError::from) {
            Ok(_) | Err(ApiError::Conflict { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Raises the count of an Event that was made before. One request, after all that acts.
    /// The error is [`ApiError::NotFound`] where it is gone: the API server keeps Events for
    /// an hour.
    pub async fn repeat_event(&self, event: &Event) -> Result<(), ApiError> {
        let change = Patch::Merge(json!({
            "count": count(event),
            "message": event.message,
            "lastTimestamp": Time(event.last_seen),
        }));
        check_name(&event.name)?;
        let events = self.events(event);
        events
            .patch(&event.name, &PatchParams::default(), &change)
            .await?;
        Ok(())
    }

    fn events(&self, event: &Event) -> Api<Object> {
        Api::namespaced(self.client(Urgency::Tell), namespace(event))
    }
}

fn namespace(event: &Event) -> &str {
    let pod = event.pod.as_ref();
    pod.map_or(NAMESPACE, |pod| &pod.namespace)
}

fn involved(event: &Event) -> ObjectReference {
    match &event.pod {
        Some(pod) => ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(pod.namespace.clone()),
            name: Some(pod.name.clone()),
            uid: Some(pod.uid.clone()),
            ..ObjectReference::default()
        },
        // The kubelet gives the name as the uid too, and that is what describing a node asks for.
        None => ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(event.node.clone()),
            uid: Some(event.node.clone()),
            ..ObjectReference::default()
        },
    }
}

fn object(event: &Event) -> Object {
    Object {
        metadata: ObjectMeta {
            name: Some(event.name.clone()),
            namespace: Some(namespace(event).to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: involved(event),
        type_: Some(event.kind.clone()),
        reason: Some(event.reason.clone()),
        message: Some(event.message.clone()),
        source: Some(EventSource {
            component: Some(event.agent.clone()),
            host: Some(event.node.clone()),
        }),
        reporting_component: Some(event.agent.clone()),
        reporting_instance: Some(event.node.clone()),
        first_timestamp: Some(Time(event.first_seen)),
        last_timestamp: Some(Time(event.last_seen)),
        count: Some(count(event)),
        ..Object::default()
    }
}

/// Returns the count in the 32 bits that the field has.
fn count(event: &Event) -> i32 {
    i32::try_from(event.count).unwrap_or(i32::MAX)
}
