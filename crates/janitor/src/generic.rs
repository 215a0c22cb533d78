//! Generic provider: reboots a node, or resets its GPUs, by a privileged Job on the node.
//! `maintenance` builds the Jobs.

use std::sync::Arc;

use async_trait::async_trait;
use cluster::{ApiError, Cluster, ObjectKind};
use maintenance::gpu_reset::ResetSettings;
use maintenance::janitor::generic::{
    GenericConfig, boot_before, failure_of, is_of, is_reset, job_name, reset_job, reset_job_name,
};
use maintenance::janitor::{Action, Class, FoundOperation, ProviderFailure};
use serde_json::Value;

use crate::node::{boot_of, failure, is_ready, known_boot, node};
use crate::provider::{Provider, Signal};
use crate::watches::termination_message;

/// Provider that reboots nodes and resets GPUs by Jobs.
#[derive(Debug)]
pub struct Generic {
    cluster: Arc<Cluster>,
    config: GenericConfig,
    resets: Option<ResetSettings>,
}

// === impl Generic ===

impl Generic {
    /// Creates the provider. `namespace` is the default for its Jobs.
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

    /// Enables resets of GPUs, with Jobs in the same namespace.
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

    /// Creates the Job of a signal and returns the request id. An existing Job counts if it
    /// belongs to the same operation.
    async fn make(
        &self,
        signal: &Signal,
        job: &Value,
        request: String,
    ) -> Result<String, ProviderFailure> {
        let namespace = Some(self.config.namespace.as_str());
        match self.cluster.create_object(&jobs(), namespace, job).await {
            Ok(_) => Ok(request),
            Err(ApiError::Conflict { .. }) => match self.find(signal).await? {
                FoundOperation::Sent(request) => Ok(request),
                FoundOperation::NotSent | FoundOperation::CannotTell => {
                    let name = job["metadata"]["name"].as_str().unwrap_or_default();
                    let message =
                        format!("the Job {name} belongs to another operation, or was just deleted");
                    Err(ProviderFailure::new(
                        Class::Transient,
                        "RESOURCE_BUSY",
                        message,
                    ))
                }
            },
            Err(error) => Err(failure(&error)),
        }
    }

    async fn reboot(&self, signal: &Signal) -> Result<String, ProviderFailure> {
        let node = node(&self.cluster, &signal.node).await?;
        let boot_id = known_boot(&node)?;
        let job = self.config.job(&signal.node, boot_id, &signal.operation);
        self.make(signal, &job, boot_id.to_owned()).await
    }

    async fn reset(
        &self,
        signal: &Signal,
        resets: &ResetSettings,
    ) -> Result<String, ProviderFailure> {
        node(&self.cluster, &signal.node).await?;
        let job = reset_job(&signal.node, &signal.operation, &signal.gpus, resets);
        let name = reset_job_name(&signal.node, &signal.operation);
        self.make(signal, &job, name).await
    }

    /// Returns true if the Job with this name has reset the GPUs.
    async fn is_reset(&self, node: &str, name: &str) -> Result<bool, ProviderFailure> {
        // Only the Job knows the result of a reset, so a failed read gives no result.
        let job = self.job(name).await.map_err(|error| ProviderFailure {
            class: Class::Transient,
            ..failure(&error)
        });
        let is_its = |job: &Value| job["spec"]["template"]["spec"]["nodeName"] == node;
        let Some(job) = job?.filter(is_its) else {
            let message =
                format!("the node has no Job {name}, so the result of the reset is unknown");
            return Err(ProviderFailure::new(
                Class::Ambiguous,
                "AMBIGUOUS_RESULT",
                message,
            ));
        };
        match is_reset(&job, None) {
            Err(failure) if failure.class == Class::Permanent => {
                let reason = termination_message(&self.cluster, &self.config.namespace, name).await;
                is_reset(&job, reason.as_deref())
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

    async fn send(&self, signal: &Signal) -> Result<String, ProviderFailure> {
        let message = match (signal.action, &self.resets) {
            (Action::Reboot, _) => return self.reboot(signal).await,
            (Action::Reset, Some(resets)) => return self.reset(signal, resets).await,
            (Action::Reset, None) => "the provider has no image of a Job that resets GPUs",
            (Action::Terminate, _) => "the generic provider cannot terminate machines",
        };
        Err(ProviderFailure::new(
            Class::Permanent,
            "UNSUPPORTED_OPERATION",
            message,
        ))
    }

    async fn find(&self, signal: &Signal) -> Result<FoundOperation, ProviderFailure> {
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
        Ok(request.map_or(FoundOperation::NotSent, FoundOperation::Sent))
    }

    async fn is_ready(&self, signal: &Signal, request_id: &str) -> Result<bool, ProviderFailure> {
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
        let pods = ObjectKind::new("", "v1", "pods");
        let pods = self
            .cluster
            .some_objects(&pods, &self.config.namespace, &selector);
        let pods = pods.await.map_err(|error| failure(&error))?;
        failure_of(&pods).map_or(Ok(false), Err)
    }
}

fn jobs() -> ObjectKind {
    ObjectKind::new("batch", "v1", "jobs")
}
