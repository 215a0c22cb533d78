//! Access to Node objects for the local providers, and the mapping of API errors to failures of
//! a signal.

use cluster::{ApiError, Cluster, ObjectKind};
use jiff::SignedDuration;
use maintenance::janitor::{Class, ProviderFailure};
use runtime::logging::chain;
use serde_json::Value;

/// Reads a node. Fails with a class that excludes any effect.
pub(crate) async fn node(cluster: &Cluster, name: &str) -> Result<Value, ProviderFailure> {
    let node = cluster.object(&nodes(), None, name).await;
    let missing = || {
        let message = format!("there is no node {name}");
        ProviderFailure::new(Class::Permanent, "RESOURCE_NOT_FOUND", message)
    };
    node.map_err(|error| unsent(failure(&error)))?
        .ok_or_else(missing)
}

pub(crate) fn nodes() -> ObjectKind {
    ObjectKind::new("", "v1", "nodes")
}

/// Returns the boot id of a node; empty if it is not set.
pub(crate) fn boot_of(node: &Value) -> &str {
    let id = node.pointer("/status/nodeInfo/bootID");
    id.and_then(Value::as_str).unwrap_or_default()
}

/// Returns the boot id of a node before a reboot. Without one, the reboot could not be
/// recognised.
pub(crate) fn known_boot(node: &Value) -> Result<&str, ProviderFailure> {
    let id = Some(boot_of(node)).filter(|id| !id.is_empty());
    id.ok_or_else(|| {
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let message = format!("the node {name} has no boot id");
        ProviderFailure::new(Class::Permanent, "INVALID_REQUEST", message)
    })
}

/// Returns true if a node has the condition `Ready`.
pub(crate) fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|one| one["type"] == "Ready" && one["status"] == "True")
}

/// Maps an error of the API server to the failure of a signal.
pub(crate) fn failure(error: &ApiError) -> ProviderFailure {
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
    let failure = ProviderFailure::new(class, reason, chain(error));
    match error {
        ApiError::Throttled {
            retry_after: Some(wait),
        } => SignedDuration::try_from(*wait).map_or(failure.clone(), |wait| failure.after(wait)),
        _ => failure,
    }
}

/// Marks a failure as certainly without effect, for requests that precede the signal.
pub(crate) fn unsent(failure: ProviderFailure) -> ProviderFailure {
    match failure.class {
        Class::Ambiguous => ProviderFailure {
            class: Class::Transient,
            ..failure
        },
        _ => failure,
    }
}
