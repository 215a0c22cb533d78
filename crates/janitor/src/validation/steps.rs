//! Steps of `ValidationRequest`s: what the decision about a request changes in the cluster.

use std::sync::Arc;

use cluster::ApiError;
use jiff::SignedDuration;
use maintenance::validation_request::{
    self as requests, Act, ClusterView, Status, ValidationRequest,
};
use runtime::logging::chain;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{Validator, requests_kind};

/// Delay before a failed step is retried.
const RETRY: SignedDuration = SignedDuration::from_secs(5);
/// Most steps before watch events are handled again.
const MOST_STEPS: usize = 1000;

// === impl Validator ===

impl Validator {
    /// Reconciles all changed requests until nothing is left to do. After each step, the oldest
    /// one is next, so that a younger one does not take the capacity that it waits for.
    pub(super) async fn reconcile_all(&mut self, cancel: &CancellationToken) {
        let now = (self.parts.clock)();
        let due = self.wakes.iter().filter(|(_, at)| **at <= now);
        let due: Vec<String> = due.map(|(name, _)| name.clone()).collect();
        for name in due {
            self.wakes.remove(&name);
            self.dirty.insert(name);
        }
        for _ in 0..MOST_STEPS {
            let created = |name: &&String| self.requests.get(*name).map(|one| one.created);
            let Some(name) = self.dirty.iter().min_by_key(created).cloned() else {
                return;
            };
            if cancel.is_cancelled() {
                return; // The rest waits for the next process.
            }
            self.dirty.remove(&name);
            if self.reconcile(&name).await {
                self.dirty.insert(name);
            }
        }
        // Watch events take precedence; the rest follows immediately after.
        for name in std::mem::take(&mut self.dirty) {
            self.wakes.insert(name, now);
        }
    }

    /// Carries out the next step of a request. Returns true if it succeeded and another may
    /// follow.
    async fn reconcile(&mut self, name: &str) -> bool {
        let now = (self.parts.clock)();
        let Some(request) = self.requests.get(name).cloned() else {
            return false;
        };
        if let Err(error) = self.fetch_runs(&request).await {
            let title = request.title();
            tracing::warn!(err = chain(&error), "{title}: cannot fetch a run");
            self.wakes.insert(name.to_owned(), now + RETRY);
            return false;
        }
        let view = ClusterView {
            nodes: self.nodes.states(),
            objects: &self.objects,
            namespace: &self.parts.namespace,
            requests: &self.requests,
            unreadable: &self.unreadable,
            now,
        };
        let step = requests::step(&request, &self.parts.config, &view);
        match step.wake {
            Some(wake) => drop(self.wakes.insert(name.to_owned(), wake)),
            None => drop(self.wakes.remove(name)),
        }
        let acts = !step.acts.is_empty();
        for act in step.acts {
            if let Err(error) = self.carry_out(&request, act).await {
                let title = request.title();
                if !matches!(error, ApiError::Conflict { .. }) {
                    tracing::warn!(err = chain(&error), "{title}: cannot carry out a step");
                }
                // A conflict means that a watch event will follow. The delay covers the case
                // that it was lost.
                self.wakes.insert(name.to_owned(), now + RETRY);
                return false;
            }
        }
        acts
    }

    /// Fetches runs that no watch has delivered: a list may be older than a run. One that does
    /// not exist counts as failed.
    async fn fetch_runs(&mut self, request: &ValidationRequest) -> Result<(), ApiError> {
        for (provider, name) in request.runs() {
            let key = (provider.to_owned(), name.to_owned());
            let Some(kind) = self
                .kind(provider)
                .filter(|_| !self.objects.contains_key(&key))
            else {
                continue;
            };
            let (cluster, namespace) = (&self.parts.cluster, Some(self.parts.namespace.as_str()));
            if let Some(object) = cluster.object(&kind, namespace, name).await? {
                self.objects.insert(key, object);
            }
        }
        Ok(())
    }

    async fn carry_out(&mut self, request: &ValidationRequest, act: Act) -> Result<(), ApiError> {
        let cluster = Arc::clone(&self.parts.cluster);
        let namespace = self.parts.namespace.clone();
        match act {
            Act::Finalizers(finalizers) => {
                let change = json!({"metadata": {
                    "resourceVersion": self.version(request), "finalizers": finalizers}});
                let kind = requests_kind();
                let merged = cluster.merge_object(&kind, &request.name, &change).await?;
                self.update_request(&merged);
            }
            Act::Node(view, change) => {
                let what = change.summary();
                let after = cluster.apply(&view, &change).await?;
                let (node, title) = (&view.name, request.title());
                tracing::info!(node, "{title}: {what}");
                let (config, now) = (&self.parts.config, (self.parts.clock)());
                if self.nodes.update(node, Some(after.object()), config, now) {
                    self.mark_requests_of(node);
                }
            }
            Act::Make {
                provider,
                group,
                object,
            } => {
                let Some(kind) = self.kind(&provider) else {
                    return Ok(()); // Unreachable: the object was rendered for this provider.
                };
                let made = cluster
                    .create_object(&kind, Some(&namespace), &object)
                    .await;
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                let object = match made {
                    Ok(object) => Some(object),
                    // The object was created before, or belongs to somebody else; its contents
                    // decide.
                    Err(ApiError::Conflict { .. }) => {
                        cluster.object(&kind, Some(&namespace), name).await?
                    }
                    Err(ApiError::Invalid { message, .. }) => {
                        let (config, now) = (&self.parts.config, (self.parts.clock)());
                        let status = requests::refused(request, config, group, &message, now);
                        self.write(request, &status).await?;
                        // The rest of the step is about an object that does not exist.
                        return Err(ApiError::Conflict { status: 409 });
                    }
                    Err(error) => return Err(error),
                };
                tracing::info!("{}: {name} started", request.title());
                if let Some(object) = object {
                    self.objects.insert((provider, name.to_owned()), object);
                }
            }
            Act::Delete {
                provider,
                name,
                uid,
            } => {
                if let Some(kind) = self.kind(&provider) {
                    let deleted =
                        cluster.delete_after_dependents(&kind, Some(&namespace), &name, &uid);
                    deleted.await?;
                }
                // The object may remain for a while; then the watch reports its end.
                let key = (provider, name);
                if let Some(object) = self.objects.get_mut(&key) {
                    object["metadata"]["deletionTimestamp"] = json!((self.parts.clock)());
                }
            }
            Act::Status(status) => self.write(request, &status).await?,
        }
        Ok(())
    }

    async fn write(
        &mut self,
        request: &ValidationRequest,
        status: &Status,
    ) -> Result<(), ApiError> {
        let change = json!({
            "metadata": {"resourceVersion": self.version(request)},
            "status": status,
        });
        let cluster = Arc::clone(&self.parts.cluster);
        let kind = requests_kind();
        let merged = cluster.merge_status(&kind, &request.name, &change).await?;
        self.update_request(&merged);
        self.metrics.changed(request, status);
        if request.status.phase != status.phase
            && let Some(phase) = status.phase
        {
            let why = status.message.as_deref().unwrap_or_default();
            tracing::info!("{}: {} {why}", request.title(), phase.name());
        }
        if status.running() < request.status.running() {
            self.mark_all(); // Others may wait for capacity.
        }
        if status.phase.is_some_and(requests::Phase::is_over) {
            // Other requests may wait for its nodes.
            self.mark_all();
            self.follow_nodes();
        }
        Ok(())
    }

    /// Returns the version of a request after earlier writes in the same step.
    fn version(&self, request: &ValidationRequest) -> String {
        let known = self.requests.get(&request.name).unwrap_or(request);
        known.version.clone()
    }
}
