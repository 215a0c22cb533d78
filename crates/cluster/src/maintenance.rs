//! What the janitor needs of the API server: single nodes told of, and merge patches of its resources.

use kube::api::{ListParams, Patch, PatchParams};
use kube::core::Request;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::connect::{Cluster, ConnectError};
use crate::connections::Connections;
use crate::error::ApiError;
use crate::kind::Kind;
use crate::pace::Urgency;
use crate::request::ask;
use crate::watch::Signal;

/// News that wait for their consumer; when it is slower, the API server waits.
const QUEUE: usize = 256;
/// Most objects that a look at some returns.
const SOME: u32 = 20;

/// News of a node: its object; `None`: there is none of its name.
pub type OneNodeEvent = (String, Option<Value>);

/// Tells of single nodes, each by a watch of its own: those under maintenance are few.
#[derive(Debug)]
pub struct OneNodeWatches {
    connections: Connections,
    news: mpsc::Sender<OneNodeEvent>,
}

#[derive(Deserialize)]
struct Items {
    items: Vec<Value>,
}

// === impl OneNodeWatches ===

impl OneNodeWatches {
    /// Returns what tells of no node yet, and where its news come.
    pub fn new(cluster: &Cluster) -> (Self, mpsc::Receiver<OneNodeEvent>) {
        let (news, receiver) = mpsc::channel(QUEUE);
        let connections = Connections::new(cluster);
        (Self { connections, news }, receiver)
    }

    /// Tells of a node from now on. While its watch fails nothing is told. Takes the permissions `list` and
    /// `watch`. Must be called within a tokio runtime.
    pub fn follow(&mut self, node: &str, cancel: &CancellationToken) -> Result<(), ConnectError> {
        let Some((connection, cancel)) = self.connections.begin(node, cancel)? else {
            return Ok(());
        };
        let kind = Kind::new("", "v1", "nodes");
        let selected = |all: crate::Selection| all.named(node);
        let mut signals = connection.watch_objects(&kind, None, selected, cancel);
        let (name, news) = (node.to_owned(), self.news.clone());
        tokio::spawn(async move {
            let mut listed = false;
            while let Some(signal) = signals.recv().await {
                let told = match signal {
                    Signal::Restarted => {
                        listed = false;
                        continue;
                    }
                    Signal::Applied(object) => {
                        listed = true;
                        Some(object.as_ref().clone())
                    }
                    Signal::Listed if listed => continue,
                    Signal::Listed | Signal::Deleted(_) => None,
                    Signal::Failing { .. } | Signal::Recovered => continue,
                };
                if news.send((name.clone(), told)).await.is_err() {
                    return;
                }
            }
        });
        Ok(())
    }

    /// Tells of a node no more. What was told before may still come.
    pub fn leave(&mut self, node: &str) {
        self.connections.end(node);
    }
}

// === impl Cluster ===

impl Cluster {
    /// Merges `change` into the status of an object without a namespace, and returns the object. Where
    /// `change` names a version in its metadata, the error is [`ApiError::Conflict`] for an object that is
    /// in another one.
    pub async fn merge_status(
        &self,
        kind: &Kind,
        name: &str,
        change: &Value,
    ) -> Result<Value, ApiError> {
        let patch = Patch::Merge(change);
        let request = Request::new(kind.path(None));
        let request = request.patch_subresource("status", name, &PatchParams::default(), &patch);
        Ok(ask(&self.client(Urgency::Act), request).await?)
    }

    /// Does the same with the object but for its status.
    pub async fn merge_object(
        &self,
        kind: &Kind,
        name: &str,
        change: &Value,
    ) -> Result<Value, ApiError> {
        let patch = Patch::Merge(change);
        let request = Request::new(kind.path(None)).patch(name, &PatchParams::default(), &patch);
        Ok(ask(&self.client(Urgency::Act), request).await?)
    }

    /// Returns some objects of a namespace that a label selector selects: 20 at most. Takes the permission
    /// `list`.
    pub async fn some_objects(
        &self,
        kind: &Kind,
        namespace: &str,
        labels: &str,
    ) -> Result<Vec<Value>, ApiError> {
        let params = ListParams::default().labels(labels).limit(SOME);
        let request = Request::new(kind.path(Some(namespace))).list(&params);
        let found: Items = ask(&self.client(Urgency::Act), request).await?;
        Ok(found.items)
    }
}
