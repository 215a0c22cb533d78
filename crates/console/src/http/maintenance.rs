//! `/api/v1/maintenance`: the announced maintenances of the nodes.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;

use super::App;
use super::error::Refusal;
use crate::api::MaintenancesView;

pub(super) async fn maintenances(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let Some(records) = &app.controller()?.maintenances else {
        return Err(Refusal::new(
            StatusCode::NOT_FOUND,
            "notices of maintenance are not read",
            "`--maintenance FILE` of the controller switches that on.",
        ));
    };
    let turn = app.room.turn().await?;
    let view = MaintenancesView {
        now: app.now(),
        maintenances: records.borrow().to_vec(),
    };
    turn.json(&view).await
}
