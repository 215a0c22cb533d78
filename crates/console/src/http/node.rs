//! `/api/v1/nodes/{name}/explain`: the timeline of a node. `/api/v1/nodes/{name}/why-not`: the
//! current reasons of the decision about it.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use model::event::{EventRecord, MAX_NAME_BYTES};
use prost::Message as _;
use store::{EventQuery, EventStore};
use trial::why_not::WhyNot;

use super::error::{Refusal, STORE_TIMEOUT, ask};
use super::{App, ControllerPart};
use crate::explain::{Material, explain as timeline};

/// Most events, and most journal entries, of a timeline: the newest ones.
const NEWEST: usize = 1000;
/// Bytes of events that end the reading for a timeline. One event may have over a megabyte.
const STORY_BYTES: usize = 8 * 1024 * 1024;
/// Events per read of the store.
const READ_AT_ONCE: usize = 8;
/// Most open faults whose older events are looked up.
const OLDER_FAULTS: usize = 20;

pub(super) async fn explain(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, Refusal> {
    let part = app.controller()?;
    let ControllerPart { store, fleet, .. } = part;
    let node = checked(name)?;
    let turn = app.room.turn().await?;
    let (mut records, complete) = newest(store.as_ref(), &node).await?;
    let journal = ask(store.timeline(&node, NEWEST)).await?;
    let fleet = Arc::clone(&fleet.borrow());
    let status = fleet.nodes.iter().find(|status| status.name == node);
    let faults = status.map_or(&[][..], |status| &status.faults);
    for fault in faults.iter().take(OLDER_FAULTS) {
        if !complete && records.iter().all(|record| record.id != fault.event_id) {
            records.extend(ask(store.event(&fault.event_id)).await?);
        }
    }
    let process = &app.console.process;
    let mut story = timeline(&Material {
        node: &node,
        data_dir: (!process.data_dir_is_default).then_some(process.data_dir.as_str()),
        records: &records,
        complete,
        journal: &journal,
        status,
    });
    if node == process.node_name {
        story.gpus = app.gpus();
    }
    if story.entries.is_empty() && story.status.is_none() {
        let why = why(&app, &node).await?;
        if !why.known {
            return Err(Refusal::unknown_node(&why));
        }
        story.in_cluster = why.in_cluster;
    }
    story.unhealthy_gpus = part.unhealthy_gpus(&node).await;
    turn.json(&story).await
}

/// Returns the newest events of a node, and true if there are no others.
async fn newest(store: &dyn EventStore, node: &str) -> Result<(Vec<EventRecord>, bool), Refusal> {
    let mut records: Vec<EventRecord> = Vec::new();
    let mut bytes = 0;
    while records.len() < NEWEST && bytes < STORY_BYTES {
        let query = EventQuery {
            node: Some(node.to_owned()),
            before: records.last().map(|record| record.seq),
            limit: READ_AT_ONCE,
            ..EventQuery::default()
        };
        let older = ask(store.events(query)).await?;
        let last = older.len() < READ_AT_ONCE;
        let sizes = older.iter().map(|record| record.event.encoded_len());
        bytes += sizes.sum::<usize>();
        records.extend(older);
        if last {
            return Ok((records, true));
        }
    }
    Ok((records, false))
}

pub(super) async fn why_not(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<WhyNot>, Refusal> {
    let store = app.store()?;
    let node = checked(name)?;
    let why = why(&app, &node).await?;
    if !why.known {
        let query = EventQuery {
            node: Some(node),
            limit: 1,
            ..EventQuery::default()
        };
        if ask(store.events(query)).await?.is_empty() {
            return Err(Refusal::unknown_node(&why));
        }
    }
    Ok(Json(why))
}

/// Returns the name in a path, if it can be one of a node or GPU.
pub(super) fn checked(name: Result<Path<String>, PathRejection>) -> Result<String, Refusal> {
    let Path(node) = name.map_err(|error| {
        Refusal::bad_request(
            error.body_text(),
            "Write the node name percent-encoded, as UTF-8.",
        )
    })?;
    if node.len() > MAX_NAME_BYTES {
        return Err(Refusal::bad_request(
            format!("the name has {} bytes: {node:?}", node.len()),
            format!("No name has more than {MAX_NAME_BYTES} bytes."),
        ));
    }
    Ok(node)
}

/// Returns the reasons of the decision about a node, from the controller.
async fn why(app: &App, node: &str) -> Result<WhyNot, Refusal> {
    let answer = (app.controller()?.why_not)(node.to_owned());
    match tokio::time::timeout(STORE_TIMEOUT, answer).await {
        Ok(Some(why)) => Ok(why),
        Ok(None) | Err(_) => Err(Refusal::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the controller does not answer",
            "Look at gpuwarden's log; then try again.",
        )),
    }
}
