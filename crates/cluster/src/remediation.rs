//! The custom resources that remediate a node: creating, watching and deleting them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fleet::{PlannedResource, ResourceUpdate};
use model::attempt::{Attempt, ResourceKind};
use model::resource::ResourceState;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::causes::chain;
use crate::connect::{Cluster, ConnectError};
use crate::error::ApiError;
use crate::follow::{Follower, Following};
use crate::kind::ObjectKind;
use crate::signals::{ObjectState, SingleObject};
use crate::watch::{Selection, Signal};

/// Events that wait for the consumer; when it is slower, the API server waits.
const QUEUE: usize = 256;
/// Pause before the API server is asked again under which path it serves a kind.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// The kinds of custom resources that the API server was asked for so far, with their paths. Cheap
/// to clone; all clones share them.
#[derive(Clone, Debug, Default)]
pub struct ResourceKinds {
    known: Arc<Mutex<BTreeMap<ResourceKind, ObjectKind>>>,
}

/// A change of a watched custom resource: its node, its name, and its state.
pub type ResourceEvent = (String, String, ResourceUpdate);

/// Watches of the custom resources of nodes under remediation. Each resource has a watch of its own:
/// most resources in a cluster belong to remediations that ended long ago.
#[derive(Debug)]
pub struct ResourceWatches {
    /// The watches by node and name of the resource.
    follower: Follower<(String, String), ResourceEvent>,
    kinds: ResourceKinds,
}

// === impl ResourceKinds ===

impl ResourceKinds {
    /// Returns a kind under the path that the API server serves. The error is
    /// [`ApiError::NotFound`] if the server does not serve the kind.
    async fn of(&self, cluster: &Cluster, kind: &ResourceKind) -> Result<ObjectKind, ApiError> {
        let known = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.get(kind).cloned()
        };
        if let Some(known) = known {
            return Ok(known);
        }
        let resource = cluster
            .resource_of(&kind.group, &kind.version, &kind.kind)
            .await?;
        let Some(resource) = resource else {
            let (name, version) = (&kind.kind, kind.api_version());
            let message = format!("the cluster has no kind {name} of {version}: install its CRD");
            return Err(ApiError::NotFound { message });
        };
        let found = ObjectKind::new(&kind.group, &kind.version, &resource);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(kind.clone(), found.clone());
        Ok(found)
    }
}

// === impl ResourceWatches ===

impl ResourceWatches {
    /// Creates a set of watches that follows no resource yet, and the receiver of its events.
    pub fn new(cluster: &Cluster, kinds: ResourceKinds) -> (Self, mpsc::Receiver<ResourceEvent>) {
        let (follower, events) = Follower::new(cluster, QUEUE);
        (Self { follower, kinds }, events)
    }

    /// Starts watching a custom resource of a node, unless it is watched. Takes the permissions
    /// `list` and `watch` on the kind. Must be called within a tokio runtime.
    pub fn follow(
        &mut self,
        node: &str,
        kind: &ResourceKind,
        name: &str,
        cancel: &CancellationToken,
    ) -> Result<(), ConnectError> {
        let key = (node.to_owned(), name.to_owned());
        let (kinds, kind, resource) = (self.kinds.clone(), kind.clone(), key.clone());
        (self.follower).start(key, cancel, |following| {
            watch(following, kinds, kind, resource)
        })
    }

    /// Stops watching a custom resource of a node. Events already queued are still delivered.
    pub fn leave(&mut self, node: &str, name: &str) {
        self.follower.leave(&(node.to_owned(), name.to_owned()));
    }
}

async fn watch(
    following: Following<ResourceEvent>,
    kinds: ResourceKinds,
    kind: ResourceKind,
    (node, name): (String, String),
) {
    let event = |news| (node.clone(), name.clone(), news);
    let served = loop {
        match kinds.of(&following.connection, &kind).await {
            Ok(served) => break served,
            Err(error) => {
                let failing = event(ResourceUpdate::Failing(chain(&error)));
                if !following.send(failing).await {
                    return;
                }
                tokio::time::sleep(ASK_AGAIN).await;
            }
        }
    };
    let selection = Selection::of_kind(&served, kind.namespace.as_deref()).named(&name);
    let mut object = SingleObject::default();
    let read = |signal: Signal<Value>| {
        Some(event(match object.apply(signal)? {
            ObjectState::Present(object) => {
                ResourceUpdate::There(Box::new(object.as_ref().clone()))
            }
            ObjectState::Missing => ResourceUpdate::Absent,
            ObjectState::Failing { error, .. } => ResourceUpdate::Failing(error),
            ObjectState::Recovered => return None,
        }))
    };
    following.watch(selection, read).await;
}

// === impl Cluster ===

impl Cluster {
    /// Creates the custom resource of a remediation. Returns the new resource, or the one that has
    /// its name already. Takes the permissions `create` and `get`. At most three requests.
    pub async fn create_resource(
        &self,
        kinds: &ResourceKinds,
        planned: &PlannedResource,
    ) -> Result<Value, ApiError> {
        let kind = kinds.of(self, &planned.kind).await?;
        let namespace = planned.kind.namespace.as_deref();
        match self.create_object(&kind, namespace, &planned.object).await {
            Err(ApiError::Conflict { .. }) => {}
            other => return other,
        }
        let there = self.object(&kind, namespace, &planned.name).await?;
        // Deleted between the two requests: the caller tries again.
        there.ok_or(ApiError::Conflict { status: 409 })
    }

    /// Deletes the custom resource of an attempt, if it exists, was created for this attempt, and its
    /// remediation has not begun; with `begun` also if it has. Returns true if the resource was
    /// deleted. Takes the permissions `get` and `delete`. At most three requests.
    pub async fn withdraw_resource(
        &self,
        kinds: &ResourceKinds,
        attempt: &Attempt,
        begun: bool,
    ) -> Result<bool, ApiError> {
        let kind = kinds.of(self, &attempt.resource).await?;
        let namespace = attempt.resource.namespace.as_deref();
        let Some(object) = self.object(&kind, namespace, &attempt.name).await? else {
            return Ok(false);
        };
        let state = ResourceState::read(&object, &attempt.resource);
        let ours = state.attempt.as_ref() == Some(&attempt.key());
        let has_begun = state.begun || state.end.is_some();
        if !ours || (has_begun && !begun) {
            return Ok(false);
        }
        self.delete_object(&kind, namespace, &attempt.name, &state.uid)
            .await
            .map(|()| true)
    }
}
