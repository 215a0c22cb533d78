//! Changes of a `DeviceTaintRule`, which taints a single device.

use std::sync::Arc;

use cluster::{ApiError, DeviceApi};
use fleet::session::RequestFailure;
use fleet::{FleetInput, PlannedRule};
use model::device::DeviceTaintRule;
use runtime::logging::chain;

use super::{Client, RequestAnswer, retry_after, status_of};

/// Creates, updates or deletes a rule, in the API version that the cluster serves.
pub(crate) async fn change(
    client: Client,
    api: Arc<DeviceApi>,
    planned: PlannedRule,
) -> RequestAnswer {
    let result = client.cluster.change_rule(&api, &planned.change).await;
    answered(&client, planned, result)
}

/// Counts and logs the result, and returns the answer.
pub(crate) fn answered(
    client: &Client,
    planned: PlannedRule,
    result: Result<Option<DeviceTaintRule>, ApiError>,
) -> RequestAnswer {
    let (node, rule) = (planned.node.clone(), planned.change.rule_name());
    let detail = status_of(&result, 200);
    let (text, counted) = match &result {
        Ok(Some(_)) => (format!("DeviceTaintRule {rule} is written"), "written"),
        Ok(None) => (format!("DeviceTaintRule {rule} is deleted"), "deleted"),
        Err(error) => {
            let counted = match failure(error) {
                RequestFailure::Conflict => "conflict",
                RequestFailure::Error { .. } => "failed",
            };
            (format!("DeviceTaintRule {rule}: {}", chain(error)), counted)
        }
    };
    client.metrics.rule_changed(counted);
    let result = result.map(|rule| rule.map(Box::new)).map_err(|error| {
        let failure = failure(&error);
        if failure != RequestFailure::Conflict {
            tracing::warn!(node, rule, err = %chain(&error), "a device taint failed; trying again");
            client.metrics.error("device_taint_error");
        }
        failure
    });
    let entry = client.entry(&node, planned.session, text, detail);
    RequestAnswer {
        input: Some(FleetInput::RuleChanged { node, rule, result }),
        entry: Some(entry),
    }
}

/// Classifies a failed change. A change with an unknown outcome is repeated, since it is
/// conditional.
fn failure(error: &ApiError) -> RequestFailure {
    match error {
        // The watch will show the deletion of the rule, after which no change is left.
        ApiError::Conflict { .. } | ApiError::NotFound { .. } => RequestFailure::Conflict,
        error => RequestFailure::Error {
            retry_after: retry_after(error),
        },
    }
}
