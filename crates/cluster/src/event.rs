//! Kubernetes Events about a node, as `kubectl describe node` shows them.
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
use crate::pace::Urgency;

/// The namespace of Events about nodes: nodes have none.
const NAMESPACE: &str = "default";

/// An Event about a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `metadata.name`.
    pub name: String,
    /// The node.
    pub node: String,
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
        let (events, params) = (self.events(), PostParams::default());
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
        let events = self.events();
        events
            .patch(&event.name, &PatchParams::default(), &change)
            .await?;
        Ok(())
    }

    fn events(&self) -> Api<Object> {
        Api::namespaced(self.client(Urgency::Tell), NAMESPACE)
    }
}

fn object(event: &Event) -> Object {
    Object {
        metadata: ObjectMeta {
            name: Some(event.name.clone()),
            namespace: Some(NAMESPACE.to_owned()),
            ..ObjectMeta::default()
        },
        // The kubelet gives the name as the uid too, and that is what describing a node asks for.
        involved_object: ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(event.node.clone()),
            uid: Some(event.node.clone()),
            ..ObjectReference::default()
        },
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
