//! `/api/v1/nodes/{name}/explain`: one node's story.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use domain::event::MAX_NAME_BYTES;
use store::EventQuery;

use super::App;
use super::error::{Refusal, ask};
use crate::api::Explain;
use crate::explain::{Material, explain as tell};

/// Most events, and most journal entries, that a story is made of: the newest.
const NEWEST: usize = 1000;
/// Most open faults whose events are looked up where they are older than that.
const OLDER_FAULTS: usize = 20;

pub(super) async fn explain(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Explain>, Refusal> {
    let Path(node) = name.map_err(|error| {
        Refusal::bad_request(
            error.body_text(),
            "Write the node name percent-encoded, as UTF-8.",
        )
    })?;
    if node.len() > MAX_NAME_BYTES {
        return Err(Refusal::bad_request(
            format!("the node name has {} bytes: {node:?}", node.len()),
            format!("No node's name has more than {MAX_NAME_BYTES} bytes."),
        ));
    }
    let store = &app.console.store;
    let query = EventQuery {
        node: Some(node.clone()),
        limit: NEWEST,
        ..EventQuery::default()
    };
    let mut records = ask(store.events(query)).await?;
    let journal = ask(store.timeline(&node, NEWEST)).await?;
    let complete = records.len() < NEWEST;
    let fleet = Arc::clone(&app.console.fleet.borrow());
    let status = fleet.nodes.iter().find(|status| status.name == node);
    let faults = status.map_or(&[][..], |status| &status.faults);
    for fault in faults.iter().take(OLDER_FAULTS) {
        if !complete && records.iter().all(|record| record.id != fault.event_id) {
            records.extend(ask(store.event(&fault.event_id)).await?);
        }
    }
    Ok(Json(tell(&Material {
        node: &node,
        records: &records,
        complete,
        journal: &journal,
        status,
    })))
}
