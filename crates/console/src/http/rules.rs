//! `/api/v1/rules`: the rules of the analysis in effect, as text.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;

use super::App;
use super::error::Refusal;

pub(super) async fn rules(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let Some(rules) = &app.controller()?.rules else {
        return Err(Refusal::new(
            StatusCode::NOT_FOUND,
            "nothing is analysed, so there are no rules".to_owned(),
            "`--analyze=false` switches the analysis off.",
        ));
    };
    let turn = app.room.turn().await?;
    let rules = Arc::clone(&rules.borrow());
    turn.json(&*rules).await
}
