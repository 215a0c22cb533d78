//! Counting of a check by the connector of its node, or by the webhook if the node has none.
//! They expose the counts as metrics, since the check itself has ended before a scrape.
//!
//! Counts are not worth a wait: there is one attempt.

use std::path::Path;
use std::time::Duration;

use contract::preflight::preflight_service_client::PreflightServiceClient;
use contract::preflight::{CheckResult, GangWait, ReportCheckRequest};
use hyper::{Method, StatusCode};
use preflight::rendezvous::COUNTS_PATH;
use prost::Message as _;
use tonic::Code;
use tonic::transport::Endpoint;

use crate::outcome::{CheckOutcome, Result as Meaning};
use crate::report::Way;
use crate::webhook::{Webhook, refusal};

/// Time limit for the attempt, since the pod waits for it.
const ATTEMPT: Duration = Duration::from_secs(2);

/// Returns the report of a check on a node. `error` is the cause if the check did not pass;
/// `gpus` are those that a pass is remembered for.
pub(crate) fn request(
    check: &str,
    node: &str,
    outcome: &CheckOutcome,
    error: &str,
    took: Duration,
    gpus: Vec<String>,
) -> ReportCheckRequest {
    let (result, error, was_checked) = match outcome.result {
        Meaning::Passed => (CheckResult::Passed, "", true),
        Meaning::Failed => (CheckResult::Failed, error, true),
        Meaning::NotTested => (CheckResult::NotTested, "", false),
        Meaning::Misconfigured => (CheckResult::ConfigError, error, false),
    };
    let gang_wait = outcome.gang_wait.as_ref().map(|wait| GangWait {
        gang_id: wait.gang.clone(),
        seconds: wait.waited.as_secs_f64(),
    });
    ReportCheckRequest {
        node: node.to_owned(),
        check: check.to_owned(),
        result: result as i32,
        error: error.to_owned(),
        seconds: was_checked.then_some(took.as_secs_f64()),
        gang_wait,
        gpu_uuids: if result == CheckResult::Passed {
            gpus
        } else {
            Vec::new()
        },
    }
}

/// Sends the report. A connector that is unreachable or counts nothing, such as NVSentinel's,
/// is no error.
pub(crate) async fn send(way: &Way, request: ReportCheckRequest) -> Result<(), String> {
    let sent = async {
        match way {
            Way::Socket(socket) => tell(socket, request).await,
            Way::Webhook(webhook) => post(webhook, &request).await,
        }
    };
    let sent = tokio::time::timeout(ATTEMPT, sent).await;
    sent.unwrap_or_else(|_| Err(format!("no answer within {ATTEMPT:?}")))
}

async fn tell(socket: &Path, request: ReportCheckRequest) -> Result<(), String> {
    let address = format!("unix://{}", socket.display());
    let Ok(endpoint) = Endpoint::try_from(address) else {
        return Ok(());
    };
    let Ok(channel) = endpoint.connect().await else {
        return Ok(());
    };
    let mut client = PreflightServiceClient::new(channel);
    match client.report_check(request).await {
        Err(status) if status.code() != Code::Unimplemented => {
            Err(format!("{:?}: {}", status.code(), status.message()))
        }
        _ => Ok(()),
    }
}

async fn post(webhook: &Webhook, request: &ReportCheckRequest) -> Result<(), String> {
    let body = request.encode_to_vec();
    let (status, body) = webhook.ask(Method::POST, COUNTS_PATH, body).await?;
    if status == StatusCode::OK {
        return Ok(());
    }
    Err(refusal(status, &body))
}
