//! `/api/v1/nodes/{name}/explain`: one node's story. `/api/v1/nodes/{name}/why-not`: what
//! decides about it right now.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use domain::event::MAX_NAME_BYTES;
use domain::why_not::WhyNot;
use store::EventQuery;

use super::App;
use super::error::{Refusal, STORE_TIMEOUT, ask};
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
    let node = checked(name)?;
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
    let info = &app.console.info;
    let mut story = tell(&Material {
        node: &node,
        data_dir: (!info.data_dir_is_default).then_some(info.data_dir.as_str()),
        records: &records,
        complete,
        journal: &journal,
        status,
    });
    if story.entries.is_empty() && story.status.is_none() {
        let why = decided(&app, &node).await?;
        if !why.known {
            return Err(Refusal::unknown_node(&why));
        }
        story.in_cluster = why.in_cluster;
    }
    Ok(Json(story))
}

pub(super) async fn why_not(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<WhyNot>, Refusal> {
    let node = checked(name)?;
    let why = decided(&app, &node).await?;
    if !why.known {
        let query = EventQuery {
            node: Some(node),
            limit: 1,
            ..EventQuery::default()
        };
        if ask(app.console.store.events(query)).await?.is_empty() {
            return Err(Refusal::unknown_node(&why));
        }
    }
    Ok(Json(why))
}

fn checked(name: Result<Path<String>, PathRejection>) -> Result<String, Refusal> {
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
    Ok(node)
}

/// What decides about a node, from who decides.
async fn decided(app: &App, node: &str) -> Result<WhyNot, Refusal> {
    let answer = (app.console.why_not)(node.to_owned());
    match tokio::time::timeout(STORE_TIMEOUT, answer).await {
        Ok(Some(why)) => Ok(why),
        Ok(None) | Err(_) => Err(Refusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "who decides about nodes does not answer",
            "Look at gpuwarden's log; then try again.",
        )),
    }
}
