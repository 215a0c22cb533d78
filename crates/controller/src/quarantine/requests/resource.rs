//! Creation and deletion of the custom resources that remediate, validate or drain a node.

use std::time::{Duration, Instant};

use cluster::ApiError;
use fleet::{CreateAnswer, DRAIN_ACTION, FleetInput, PlannedResource};
use model::attempt::Attempt;
use runtime::backoff::Backoff;
use runtime::logging::chain;
use serde_json::Value;

use super::{Client, RequestAnswer, retry_after, status_of};

/// First and longest pause between attempts to delete a custom resource, which may be carried
/// out meanwhile.
const DELETE_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Longest time of the attempts to delete a custom resource.
const DELETE_WITHIN: Duration = Duration::from_secs(15 * 60);

/// Creates a custom resource.
pub(crate) async fn create(client: Client, planned: PlannedResource) -> RequestAnswer {
    let began = Instant::now();
    let result = client
        .cluster
        .create_resource(&client.kinds, &planned)
        .await;
    if planned.action != DRAIN_ACTION {
        let metrics = &client.remediation_metrics;
        metrics.created(&planned, &result, began.elapsed());
    }
    let PlannedResource {
        node,
        session,
        key,
        action,
        kind,
        name,
        ..
    } = planned;
    let kind = kind.kind;
    let detail = status_of(&result, 201);
    let text = match &result {
        Ok(_) => format!("{kind} {name} exists"),
        Err(error) => {
            let err = chain(error);
            tracing::warn!(node, action, err, "{kind} {name} was not created");
            format!("{kind} {name}: {err}")
        }
    };
    let entry = client.entry(&node, session, text, detail);
    let answer = answer(result);
    RequestAnswer {
        input: Some(FleetInput::ResourceCreated { node, key, answer }),
        entry: Some(entry),
    }
}

/// Deletes the custom resource of an attempt. With `begun` also if its remediation has begun.
pub(crate) async fn delete(
    client: Client,
    node: String,
    attempt: Attempt,
    begun: bool,
) -> RequestAnswer {
    let until = Instant::now() + DELETE_WITHIN;
    let mut pauses = Backoff::new(DELETE_AGAIN.0, DELETE_AGAIN.1);
    let result = loop {
        let cluster = &client.cluster;
        let result = cluster
            .withdraw_resource(&client.kinds, &attempt, begun)
            .await;
        let again = result.as_ref().is_err_and(ApiError::is_retryable);
        if !again || Instant::now() >= until {
            break result;
        }
        tokio::select! {
            () = tokio::time::sleep(pauses.pause()) => {}
            () = client.cancel.cancelled() => break result,
        }
    };
    let title = attempt.title();
    let text = match result {
        Ok(true) => format!("{title} was withdrawn"),
        Ok(false) => format!("{title} was not withdrawn: it has begun, or does not exist"),
        Err(error) => {
            let err = chain(&error);
            tracing::warn!(
                node,
                err,
                "{title} could not be withdrawn: delete it by hand"
            );
            format!("{title} could not be withdrawn: {err}; delete it by hand")
        }
    };
    RequestAnswer {
        input: None,
        entry: Some(client.entry(&node, None, text, Value::Null)),
    }
}

fn answer(result: Result<Value, ApiError>) -> CreateAnswer {
    match result {
        Ok(object) => CreateAnswer::There(Box::new(object)),
        Err(ApiError::Invalid { message, .. }) => CreateAnswer::Refused(message),
        Err(error) => CreateAnswer::Failed {
            why: chain(&error),
            retry_after: retry_after(&error),
        },
    }
}
