//! Kubernetes Events about a node or a pod, as `kubectl describe` shows them.
//!
//! The caller chooses the name of an Event, which follows from its subject. So a repeat finds
//! the Event, even after a restart, without listing the namespace: it is a patch of the count.

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

/// Namespace of Events about nodes, which have no namespace themselves.
const NAMESPACE: &str = "default";

/// A pod that an Event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventPod {
    /// Namespace of the pod, which becomes that of the Event.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod.
    pub uid: String,
}

/// An Event about a node or a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Name of the Event (`metadata.name`).
    pub name: String,
    /// Name of the node.
    pub node: String,
    /// Pod on the node that the Event is about; `None` if it is about the node.
    pub pod: Option<EventPod>,
    /// Type, such as `Warning` (`type`).
    pub kind: String,
    /// Reason in one CamelCase word (`reason`).
    pub reason: String,
    /// Text for people (`message`).
    pub message: String,
    /// Monitor that reported the fault.
    pub agent: String,
    /// Number of reports so far.
    pub count: u64,
    /// Time of the first report.
    pub first_seen: Timestamp,
    /// Time of the last report.
    pub last_seen: Timestamp,
}

// === impl Cluster ===

impl Cluster {
    /// Creates an Event; an existing one of its name stays unchanged. One request, of
    /// [`Urgency::Report`].
    pub async fn create_event(&self, event: &Event) -> Result<(), ApiError> {
        let (events, params) = (self.events(event), PostParams::default());
        let created = events.create(&params, &object(event)).await;
        match created.map_err(ApiError::from) {
            Ok(_) | Err(ApiError::Conflict { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Updates the count, message and last time of an Event. One request, of
    /// [`Urgency::Report`]. The error is [`ApiError::NotFound`] if the Event is gone: the API
    /// server keeps Events for an hour.
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
        Api::namespaced(self.client(Urgency::Report), namespace(event))
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
        // The kubelet uses the name of a node as its UID as well, and `kubectl describe`
        // searches for it.
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

/// Returns the count, limited to the 32 bits of the field.
fn count(event: &Event) -> i32 {
    i32::try_from(event.count).unwrap_or(i32::MAX)
}
