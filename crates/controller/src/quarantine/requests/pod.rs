//! Removal of a pod from a drained node, and the request for its checkpoint.

use std::time::Instant;

use cluster::ApiError;
use fleet::{FleetInput, PlannedCheckpoint, PlannedRemoval, RemovalAnswer};
use runtime::logging::chain;

use super::{Client, RequestAnswer, retry_after};

/// Evicts or deletes a pod.
pub(crate) async fn remove(client: Client, planned: PlannedRemoval) -> RequestAnswer {
    let began = Instant::now();
    let result = client.cluster.remove_pod(&planned).await;
    let PlannedRemoval {
        node,
        namespace,
        name,
        uid,
        evict,
        ..
    } = planned;
    let metrics = &client.drain_metrics;
    metrics.removed(&node, &namespace, evict.is_some(), &result, began.elapsed());
    if let Err(error) = &result {
        let err = chain(error);
        tracing::debug!(node, namespace, pod = name, err = %err, "a pod is not removed");
    }
    let answer = answer(result);
    FleetInput::PodAnswered { node, uid, answer }.into()
}

/// Asks a pod to write a checkpoint before it leaves.
pub(crate) async fn request_checkpoint(
    client: Client,
    planned: PlannedCheckpoint,
) -> RequestAnswer {
    let result = client.cluster.ask_for_checkpoint(&planned).await;
    let PlannedCheckpoint { node, uid, .. } = planned;
    let answer = answer(result);
    FleetInput::PodAnswered { node, uid, answer }.into()
}

fn answer(result: Result<(), ApiError>) -> RemovalAnswer {
    let Err(error) = result else {
        return RemovalAnswer::Taken;
    };
    let retry_after = retry_after(&error);
    match error {
        // Also if another pod has this name by now.
        ApiError::NotFound { .. } | ApiError::Conflict { .. } => RemovalAnswer::Gone,
        ApiError::Held { message, .. } => RemovalAnswer::Held {
            why: message,
            retry_after,
        },
        error => RemovalAnswer::Failed {
            why: chain(&error),
            retry_after,
        },
    }
}
