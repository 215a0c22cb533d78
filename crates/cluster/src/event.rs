//! Kubernetes Events about a node, as `kubectl describe node` shows them.
//!
//! The name of an Event is chosen by who tells it, and follows from what it is about. So
//! telling it again finds it, after a restart too, and nobody has to list the namespace:
//! a repeat is a patch of its count.

use http::header::CONTENT_TYPE;
use http::{Method, Request};
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::apply::ApplyError;
use crate::connect::Cluster;
use crate::pace::Urgency;
use crate::status::seconds;

/// Where Events about nodes are: nodes have no namespace.
const EVENTS: &str = "/api/v1/namespaces/default/events";

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
    /// Who found it.
    pub agent: String,
    /// How often it was found.
    pub count: u64,
    /// When first.
    pub first_seen: Timestamp,
    /// When last.
    pub last_seen: Timestamp,
}

/// What became of telling an Event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventOutcome {
    /// It is there as asked.
    Told,
    /// [`Cluster::create_event`]: it was there before, and stays as it was.
    Exists,
    /// [`Cluster::repeat_event`]: it is gone; the API server keeps Events for an hour.
    Gone,
}

// === impl Cluster ===

impl Cluster {
    /// Makes a new Event. One request, after all that acts.
    pub async fn create_event(&self, event: &Event) -> Result<EventOutcome, ApplyError> {
        let body = body(event);
        match self
            .send_event(Method::POST, EVENTS.to_owned(), &body)
            .await
        {
            Err(ApplyError::Conflict { status: 409 }) => Ok(EventOutcome::Exists),
            outcome => outcome,
        }
    }

    /// Raises the count of an Event that was made before. One request, after all that acts.
    pub async fn repeat_event(&self, event: &Event) -> Result<EventOutcome, ApplyError> {
        let change = json!({
            "count": count(event),
            "message": event.message,
            "lastTimestamp": seconds(event.last_seen),
        });
        let path = format!("{EVENTS}/{}", event.name);
        match self.send_event(Method::PATCH, path, &change).await {
            Err(ApplyError::NotFound) => Ok(EventOutcome::Gone),
            outcome => outcome,
        }
    }

    async fn send_event(
        &self,
        method: Method,
        path: String,
        body: &Value,
    ) -> Result<EventOutcome, ApplyError> {
        let content = if method == Method::PATCH {
            "application/merge-patch+json"
        } else {
            "application/json"
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(CONTENT_TYPE, content)
            .body(body.to_string().into_bytes())
            .map_err(ApplyError::unavailable)?;
        let answer = self
            .exchange(Urgency::Tell, request)
            .await
            .map_err(ApplyError::unavailable)?;
        if answer.status.is_success() {
            Ok(EventOutcome::Told)
        } else {
            Err(ApplyError::from_reply(&answer, |_| false))
        }
    }
}

fn body(event: &Event) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event.name, "namespace": "default"},
        // The kubelet gives the name as the uid too, and that is what describing a node asks for.
        "involvedObject": {"kind": "Node", "name": event.node, "uid": event.node},
        "type": event.kind,
        "reason": event.reason,
        "message": event.message,
        "source": {"component": event.agent, "host": event.node},
        "reportingComponent": event.agent,
        "reportingInstance": event.node,
        "firstTimestamp": seconds(event.first_seen),
        "lastTimestamp": seconds(event.last_seen),
        "count": count(event),
    })
}

/// The field has 32 bits.
fn count(event: &Event) -> i32 {
    i32::try_from(event.count).unwrap_or(i32::MAX)
}
