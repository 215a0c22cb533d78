//! `/api/v1/incidents`: the incidents with open faults. `/api/v1/incidents/{name}`: one of them.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use fleet::view::IncidentView;

use super::App;
use super::error::Refusal;
use super::node::checked;
use crate::api::IncidentsView;

pub(super) async fn incidents(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let part = app.controller()?;
    part.caught_up().await;
    let turn = app.room.turn().await?;
    let fleet = Arc::clone(&part.fleet.borrow());
    let view = IncidentsView {
        now: app.now(),
        incidents: IncidentView::all(&fleet.nodes),
    };
    turn.json(&view).await
}

pub(super) async fn incident(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, Refusal> {
    let part = app.controller()?;
    let name = checked(name)?;
    part.caught_up().await;
    let turn = app.room.turn().await?;
    let fleet = Arc::clone(&part.fleet.borrow());
    let mut all = IncidentView::all(&fleet.nodes).into_iter();
    let Some(incident) = all.find(|incident| incident.id == name) else {
        return Err(Refusal::new(
            StatusCode::NOT_FOUND,
            format!("there is no incident {name:?} with open faults"),
            "`gpuwarden incidents` lists them. An incident ends with its last fault; `gpuwarden \
             explain NODE` has the past of a node.",
        ));
    };
    let view = IncidentsView {
        now: app.now(),
        incidents: vec![incident],
    };
    turn.json(&view).await
}
