//! Patches of nodes: one conditional JSON patch per node at a time.

use std::sync::Arc;
use std::time::Instant;

use cluster::ApiError;
use contract::keys;
use fleet::session::{Intent, Patch};
use fleet::{FleetInput, PatchAnswer, Planned};
use jiff::Timestamp;
use model::journal::{EntryKind, JournalEntry};
use model::node::NodeChange;
use runtime::logging::chain;
use serde_json::json;

use super::{Client, RequestAnswer, retry_after};

/// Returns the journal entry about a patch, to be written before the request.
pub(crate) fn call(planned: &Planned, at: Timestamp) -> JournalEntry {
    let call = cluster::patch::describe(&planned.view, &planned.patch.change);
    JournalEntry {
        at,
        node: planned.node.clone(),
        session: planned.session.clone(),
        kind: EntryKind::Call,
        text: format!("{} {}", call.verb, call.path),
        detail: json!({"patch": call.patch}),
    }
}

/// Sends the patch of a node.
pub(crate) async fn patch(client: Client, planned: Planned) -> RequestAnswer {
    let began = Instant::now();
    let result = client
        .cluster
        .apply(&planned.view, &planned.patch.change)
        .await;
    let took_ms = began.elapsed().as_secs_f64() * 1_000.0;
    let (node, metrics) = (planned.node.clone(), &client.metrics);
    let Patch { intent, change } = &planned.patch;
    let (answer, text, status) = match result {
        Ok(view) => {
            if change.dropped(&view).is_empty() {
                metrics.applied(&node, *intent, change);
                let first_seen = planned.first_seen;
                if let Some(first_seen) = first_seen.filter(|_| *intent == Intent::Quarantine) {
                    metrics.taken_out((client.clock)().duration_since(first_seen));
                }
            } else {
                metrics.error(error_type(*intent, change));
            }
            let text = format!("200 OK in {took_ms:.1} ms");
            (PatchAnswer::Made(Arc::new(view)), text, json!(200))
        }
        Err(error) => {
            let answer = answer(&error);
            if !matches!(answer, PatchAnswer::Conflict) {
                let what = intent.name();
                tracing::warn!(node, err = %chain(&error), "{what} failed; trying again");
                metrics.error(error_type(*intent, change));
            }
            let text = format!("failed in {took_ms:.1} ms: {}", chain(&error));
            (answer, text, json!(error.status()))
        }
    };
    let detail = json!({"status": status, "tookMs": took_ms});
    let entry = client.entry(&node, planned.session, text, detail);
    RequestAnswer {
        input: Some(FleetInput::NodePatched { node, answer }),
        entry: Some(entry),
    }
}

/// Classifies a failed patch: whether it may have been applied, and when to retry.
fn answer(error: &ApiError) -> PatchAnswer {
    match error {
        ApiError::Conflict { .. } => PatchAnswer::Conflict,
        ApiError::NotFound { .. } => PatchAnswer::NotFound,
        error if error.is_in_doubt() => PatchAnswer::Unknown,
        error => PatchAnswer::Refused {
            retry_after: retry_after(error),
        },
    }
}

/// Returns NVSentinel's name for the failure, a label of the metric of errors.
fn error_type(intent: Intent, change: &NodeChange) -> &'static str {
    match intent {
        Intent::Quarantine | Intent::Update => "taint_and_cordon_error",
        Intent::Return => "untaint_and_uncordon_error",
        Intent::StandDown if change.annotations.contains_key(keys::UNTAINTED_MANUALLY) => {
            "manual_untaint_cleanup_error"
        }
        Intent::StandDown => "manual_uncordon_cleanup_error",
    }
}
