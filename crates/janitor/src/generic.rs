//! The generic provider: a privileged Job on the node reboots it, and another resets its GPUs. What the Jobs
//! are, `domain` says.

use std::sync::Arc;

use async_trait::async_trait;
use cluster::{ApiError, Cluster, Kind};
use maintenance::gpu_reset::ResetSettings;
use maintenance::janitor::generic::{
    GenericConfig, boot_before, failure_of, is_of, is_reset, job_name, reset_job, reset_job_name,
};
use maintenance::janitor::{Action, Class, Failure, Found};
use serde_json::Value;

use crate::node::{boot_of, failure, is_ready, known_boot, node};
use crate::provider::{Provider, Signal};
use crate::watches::why;

/// Reboots nodes and resets GPUs by Jobs.
#[derive(Debug)]
pub struct Generic {
    cluster: Arc<Cluster>,
    config: GenericConfig,
    resets: Option<ResetSettings>,
}

// === impl Generic ===

impl Generic {
    /// Returns the provider. Its Jobs are made in `namespace` where the configuration names no other.
    pub fn new(cluster: Arc<Cluster>, mut config: GenericConfig, namespace: &str) -> Self {
        if config.namespace.is_empty() {
            namespace.clone_into(&mut config.namespace);
        }
        Self {
            cluster,
            config,
            resets: None,
        }
    }

    /// Returns the same provider, which resets GPUs as well. Its Jobs are made where the others are.
    #[must_use]
    pub fn with_resets(self, resets: Option<ResetSettings>) -> Self {
        let namespace = &self.config.namespace;
        let resets = resets.map(|resets| ResetSettings {
            namespace: namespace.clone(),
            ..resets
        });
        Self { resets, ..self }
    }

    async fn job(&self, name: &str) -> Result<Option<Value>, ApiError> {
        let namespace = Some(self.config.namespace.as_str());
        self.cluster.object(&jobs(), namespace, name).await
    }

    /// Makes the Job of a signal, and returns the request id. Where there is one already, it is that of the
    /// operation, or another's.
    async fn make(&self, signal: &Signal, job: &Value, request: String) -> Result<String, Failure> {
        let namespace = Some(self.config.namespace.as_str());
        match self.cluster.create_object(&jobs(), namespace, job).await {
            Ok(_) => Ok(request),
            Err(ApiError::Conflict { .. }) => match self.find(signal).await? {
                Found::Sent(request) => Ok(request),
                Found::NotSent | Found::CannotTell => {
                    let name = job["metadata"]["name"].as_str().unwrap_or_default();
                    let message = format!("the Job {name} is another's, or has gone just now");
                    Err(Failure::new(Class::Transient, "RESOURCE_BUSY", message))
                }
            },
            Err(error) => Err(failure(&error)),
        }
    }

    async fn reboot(&self, signal: &Signal) -> Result<String, Failure> {
        let node = node(&self.cluster, &signal.node).await?;
        let boot_id = known_boot(&node)?;
        let job = self.config.job(&signal.node, boot_id, &signal.operation);
        self.make(signal, &job, boot_id.to_owned()).await
    }

    async fn reset(&self, signal: &Signal, resets: &ResetSettings) -> Result<String, Failure> {
        node(&self.cluster, &signal.node).await?;
        let job = reset_job(&signal.node, &signal.operation, &signal.gpus, resets);
        let name = reset_job_name(&signal.node, &signal.operation);
        self.make(signal, &job, name).await
    }

    /// Returns whether the Job of this name has reset its GPUs.
    async fn is_reset(&self, node: &str, name: &str) -> Result<bool, Failure> {
        // Only the Job says how a reset has ended: what keeps it from being read does not.
        let job = self.job(name).await.map_err(|error| Failure {
            class: Class::Transient,
            ..failure(&error)
        });
        let is_its = |job: &Value| job["spec"]["template"]["spec"]["nodeName"] == node;
        let Some(job) = job?.filter(is_its) else {
            let message = format!("the node has no Job {name}, and nobody knows how it ended");
            return Err(Failure::new(Class::Ambiguous, "AMBIGUOUS_RESULT", message));
        };
        match is_reset(&job, None) {
            Err(failure) if failure.class == Class::Permanent => {
                let said = why(&self.cluster, &self.config.namespace, name).await;
                is_reset(&job, said.as_deref())
            }
            other => other,
        }
    }
}

#[async_trait]
impl Provider for Generic {
    fn name(&self) -> &'static str {
        "generic"
    }

    async fn send(&self, signal: &Signal) -> Result<String, Failure> {
        let message = match (signal.action, &self.resets) {
            (Action::Reboot, _) => return self.reboot(signal).await,
            (Action::Reset, Some(resets)) => return self.reset(signal, resets).await,
            (Action::Reset, None) => "the provider has no image of a Job that resets GPUs",
            (Action::Terminate, _) => "the generic provider cannot take machines away",
        };
        Err(Failure::new(
            Class::Permanent,
            "UNSUPPORTED_OPERATION",
            message,
        ))
    }

    async fn find(&self, signal: &Signal) -> Result<Found, Failure> {
        let (node, operation) = (signal.node.as_str(), signal.operation.as_str());
        let is_reset = signal.action == Action::Reset;
        let name = if is_reset {
            reset_job_name(node, operation)
        } else {
            job_name(node, operation)
        };
        let job = self.job(&name).await.map_err(|error| failure(&error))?;
        let request = if is_reset {
            job.filter(|job| is_of(job, operation)).map(|_| name)
        } else {
            job.and_then(|job| boot_before(&job, operation))
        };
        Ok(request.map_or(Found::NotSent, Found::Sent))
    }

    async fn is_ready(&self, signal: &Signal, request_id: &str) -> Result<bool, Failure> {
        if signal.action == Action::Reset {
            return self.is_reset(&signal.node, request_id).await;
        }
        let node = node(&self.cluster, &signal.node).await?;
        let boot_id = boot_of(&node);
        if !boot_id.is_empty() && boot_id != request_id {
            return Ok(is_ready(&node));
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
