//! The custom resources of repairs: made, watched one by one, and withdrawn.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fleet::{PlannedResource, ResourceNews};
use model::attempt::{Attempt, ResourceKind};
use model::resource::ResourceState;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::causes::chain;
use crate::connect::{Cluster, ConnectError};
use crate::connections::Connections;
use crate::error::ApiError;
use crate::follow::{FollowOne, One};
use crate::kind::Kind;

/// News that wait for their consumer; when it is slower, the API server waits.
const QUEUE: usize = 256;
/// Pause before it is asked again where the API server serves a kind.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// The kinds of custom resources, as the API server serves them.
#[derive(Clone, Debug, Default)]
pub struct ResourceKinds {
    known: Arc<Mutex<BTreeMap<ResourceKind, Kind>>>,
}

/// News of a custom resource: its node, its name, and the news.
pub type ResourceEvent = (String, String, ResourceNews);

/// Tells of the custom resources of nodes that are repaired, each by a watch of its own: most of those that
/// are there ended long ago.
#[derive(Debug)]
pub struct ResourceWatches {
    connections: Connections,
    kinds: ResourceKinds,
    news: mpsc::Sender<ResourceEvent>,
}

// === impl ResourceKinds ===

impl ResourceKinds {
    /// Returns a kind as the API server serves it: its resource is the server's to say. The error is
    /// [`ApiError::NotFound`] where it does not serve it.
    async fn of(&self, cluster: &Cluster, kind: &ResourceKind) -> Result<Kind, ApiError> {
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
        let found = Kind::new(&kind.group, &kind.version, &resource);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(kind.clone(), found.clone());
        Ok(found)
    }
}

// === impl ResourceWatches ===

impl ResourceWatches {
    /// Returns what tells of no node yet, and where its news come.
    pub fn new(cluster: &Cluster, kinds: ResourceKinds) -> (Self, mpsc::Receiver<ResourceEvent>) {
        let (news, receiver) = mpsc::channel(QUEUE);
        let connections = Connections::new(cluster);
        let watches = Self {
            connections,
            kinds,
            news,
        };
        (watches, receiver)
    }

    /// Starts watching a custom resource of a node, unless it is watched. Takes the permissions `list` and `watch`. Must be
    /// called within a tokio runtime.
    pub fn follow(
        &mut self,
        node: &str,
        kind: &ResourceKind,
        name: &str,
        cancel: &CancellationToken,
    ) -> Result<(), ConnectError> {
        let key = key(node, name);
        let Some((connection, cancel)) = self.connections.begin(&key, cancel)? else {
            return Ok(());
        };
        let watched = Watched {
            connection,
            kinds: self.kinds.clone(),
            kind: kind.clone(),
            name: name.to_owned(),
            node: node.to_owned(),
            news: self.news.clone(),
        };
        tokio::spawn(async move {
            cancel
                .clone()
                .run_until_cancelled(watched.run(cancel))
                .await;
        });
        Ok(())
    }

    /// Stops watching a custom resource of a node. Events already queued are still delivered.
    pub fn leave(&mut self, node: &str, name: &str) {
        self.connections.end(&key(node, name));
    }
}

/// Returns what names the watch of a custom resource of a node.
fn key(node: &str, name: &str) -> String {
    format!("{node}/{name}")
}

/// A custom resource that is watched.
struct Watched {
    connection: Cluster,
    kinds: ResourceKinds,
    kind: ResourceKind,
    name: String,
    node: String,
    news: mpsc::Sender<ResourceEvent>,
}

// === impl Watched ===

impl Watched {
    async fn run(self, cancel: CancellationToken) {
        let kind = loop {
            match self.kinds.of(&self.connection, &self.kind).await {
                Ok(kind) => break kind,
                Err(error) => {
                    if !self.tell(ResourceNews::Failing(chain(&error))).await {
                        return;
                    }
                    tokio::time::sleep(ASK_AGAIN).await;
                }
            }
        };
        let select = format!("metadata.name={}", self.name);
        let mut signals = self.connection.watch_objects(
            &kind,
            self.kind.namespace.as_deref(),
            |selection| selection.with_fields(&select),
            cancel,
        );
        let mut follow = FollowOne::default();
        while let Some(signal) = signals.recv().await {
            let news = match follow.take(signal) {
                Some(One::There(object)) => ResourceNews::There(Box::new(object.as_ref().clone())),
                Some(One::Missing) => ResourceNews::Absent,
                Some(One::Failing { error, .. }) => ResourceNews::Failing(error),
                Some(One::Recovered) | None => continue,
            };
            if !self.tell(news).await {
                return;
            }
        }
    }

    /// Tells news; `false` where nobody listens any more.
    async fn tell(&self, news: ResourceNews) -> bool {
        let event = (self.node.clone(), self.name.clone(), news);
        self.news.send(event).await.is_ok()
    }
}

// === impl Cluster ===

impl Cluster {
    /// Makes the custom resource of a repair. Returns it, or the one of its name that is there already.
    /// Takes the permissions `create` and `get`. At most three requests.
    pub async fn make_resource(
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
        // Gone in between: it is tried again.
        there.ok_or(ApiError::Conflict { status: 409 })
    }

    /// Deletes the custom resource of an attempt, if it is there, ours, and nothing has begun; with `begun`
    /// also if something has. Returns whether it was. Takes the permissions `get` and `delete`. At most three requests.
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
