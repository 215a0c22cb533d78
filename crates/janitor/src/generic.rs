//! The generic provider: a privileged Job on the node reboots it. What the Job is, `domain` says.

use std::sync::Arc;

use async_trait::async_trait;
use cluster::{ApiError, Cluster, Kind};
use domain::janitor::generic::{GenericConfig, boot_before, failure_of, job_name};
use domain::janitor::{Action, Class, Failure, Found};
use jiff::SignedDuration;
use runtime::logging::chain;
use serde_json::Value;

use crate::provider::{Provider, Signal};

/// Reboots nodes by Jobs.
#[derive(Debug)]
pub struct Generic {
    cluster: Arc<Cluster>,
    config: GenericConfig,
}

// === impl Generic ===

impl Generic {
    /// Returns the provider. Its Jobs are made in `namespace` where the configuration names no other.
    pub fn new(cluster: Arc<Cluster>, mut config: GenericConfig, namespace: &str) -> Self {
        if config.namespace.is_empty() {
            namespace.clone_into(&mut config.namespace);
        }
        Self { cluster, config }
    }

    async fn node(&self, name: &str) -> Result<Value, Failure> {
        let nodes = Kind::new("", "v1", "nodes");
        let node = self.cluster.object(&nodes, None, name);
        let missing = || {
            let message = format!("there is no node {name}");
            Failure::new(Class::Permanent, "RESOURCE_NOT_FOUND", message)
        };
        // Nothing was changed, whatever went wrong.
        let read = node.await.map_err(|error| Failure {
            class: match failure(&error).class {
                Class::Ambiguous => Class::Transient,
                class => class,
            },
            ..failure(&error)
        });
        read?.ok_or_else(missing)
    }

    async fn job(&self, signal: &Signal) -> Result<Option<Value>, ApiError> {
        let name = job_name(&signal.node, &signal.operation);
        let namespace = Some(self.config.namespace.as_str());
        self.cluster.object(&jobs(), namespace, &name).await
    }
}

#[async_trait]
impl Provider for Generic {
    fn name(&self) -> &'static str {
        "generic"
    }

    async fn send(&self, signal: &Signal) -> Result<String, Failure> {
        if signal.action != Action::Reboot {
            let message = "the generic provider only reboots nodes";
            return Err(Failure::new(
                Class::Permanent,
                "UNSUPPORTED_OPERATION",
                message,
            ));
        }
        let node = self.node(&signal.node).await?;
        let boot_id = boot_of(&node);
        if boot_id.is_empty() {
            let message = format!("the node {} has no boot id", signal.node);
            return Err(Failure::new(Class::Permanent, "INVALID_REQUEST", message));
        }
        let job = self.config.job(&signal.node, boot_id, &signal.operation);
        let namespace = Some(self.config.namespace.as_str());
        match self.cluster.create_object(&jobs(), namespace, &job).await {
            Ok(_) => Ok(boot_id.to_owned()),
            Err(ApiError::Conflict { .. }) => match self.find(signal).await? {
                Found::Sent(request) => Ok(request),
                Found::NotSent | Found::CannotTell => {
                    let name = job_name(&signal.node, &signal.operation);
                    let message = format!("the Job {name} is another's, or has gone just now");
                    Err(Failure::new(Class::Transient, "RESOURCE_BUSY", message))
                }
            },
            Err(error) => Err(failure(&error)),
        }
    }

    async fn find(&self, signal: &Signal) -> Result<Found, Failure> {
        let job = self.job(signal).await.map_err(|error| failure(&error))?;
        let before = job.and_then(|job| boot_before(&job, &signal.operation));
        Ok(before.map_or(Found::NotSent, Found::Sent))
    }

    async fn is_ready(&self, signal: &Signal, request_id: &str) -> Result<bool, Failure> {
        let node = self.node(&signal.node).await?;
        let conditions = node["status"]["conditions"].as_array();
        let ready = (conditions.into_iter().flatten())
            .any(|one| one["type"] == "Ready" && one["status"] == "True");
        let boot_id = boot_of(&node);
        if !boot_id.is_empty() && boot_id != request_id {
            return Ok(ready);
        }
        let job = job_name(&signal.node, &signal.operation);
        let selector = format!("batch.kubernetes.io/job-name={job}");
        let pods = Kind::new("", "v1", "pods");
        let pods = self
            .cluster
            .some_objects(&pods, &self.config.namespace, &selector);
        let pods = pods.await.map_err(|error| failure(&error))?;
        failure_of(&pods).map_or(Ok(false), Err)
    }
}

fn jobs() -> Kind {
    Kind::new("batch", "v1", "jobs")
}

fn boot_of(node: &Value) -> &str {
    let id = node.pointer("/status/nodeInfo/bootID");
    id.and_then(Value::as_str).unwrap_or_default()
}

/// Returns what an error of the API server means for a signal.
pub(crate) fn failure(error: &ApiError) -> Failure {
    let (class, reason) = match error {
        ApiError::Throttled { .. } | ApiError::Held { .. } => (Class::Transient, "RATE_LIMITED"),
        ApiError::Conflict { .. } => (Class::Transient, "RESOURCE_BUSY"),
        ApiError::Forbidden { .. } => (Class::Permanent, "PERMISSION_DENIED"),
        ApiError::NotFound { .. } => (Class::Permanent, "RESOURCE_NOT_FOUND"),
        ApiError::Invalid { .. } => (Class::Permanent, "INVALID_REQUEST"),
        ApiError::Unavailable { .. } | ApiError::NotLeading => {
            (Class::Ambiguous, "AMBIGUOUS_RESULT")
        }
    };
    let failure = Failure::new(class, reason, chain(error));
    match error {
        ApiError::Throttled {
            retry_after: Some(wait),
        } => SignedDuration::try_from(*wait).map_or(failure.clone(), |wait| failure.after(wait)),
        _ => failure,
    }
}
