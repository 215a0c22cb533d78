//! `/api/v1/ledger`: the ledger of GPUs. `/api/v1/ledger/{name}`: one GPU or node of it.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use axum::response::Response;

use super::App;
use super::error::Refusal;
use super::node::checked;
use super::query::Parameters;
use crate::api::{LedgerEntry, LedgerView};

/// GPUs, and nodes, of a response that names no other number.
const DEFAULT_LIMIT: u64 = 100;
/// Most GPUs, and most nodes, of a response.
const MAX_LIMIT: u64 = 10_000;

pub(super) async fn ledger(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, Refusal> {
    let part = app.controller()?;
    let parameters = Parameters::read(&uri, &["limit"])?;
    let limit = parameters.number("limit", 1, MAX_LIMIT)?;
    let limit = usize::try_from(limit.unwrap_or(DEFAULT_LIMIT)).unwrap_or(usize::MAX);
    let turn = app.room.turn().await?;
    let view = LedgerView::of(&part.ledger.borrow(), limit, app.now());
    turn.json(&view).await
}

pub(super) async fn entry(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, Refusal> {
    let part = app.controller()?;
    let name = checked(name)?;
    let turn = app.room.turn().await?;
    let entry = LedgerEntry::of(&part.ledger.borrow(), &name, app.now());
    let Some(entry) = entry else {
        return Err(Refusal::new(
            StatusCode::NOT_FOUND,
            format!("the ledger has no GPU and no node {name:?}"),
            "`gpuwarden ledger` lists the GPUs. A GPU is known from its first event on.",
        ));
    };
    turn.json(&entry).await
}
