//! `/api/v1/events`: stored events, and new ones as they arrive.
//!
//! Responses are written page by page, so that the memory of a request does not grow with its
//! length; [`room`](super::room) limits the total.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream;
use model::event::{EventRecord, MAX_NAME_BYTES};
use store::{EventQuery, Position};
use tokio::sync::{OwnedSemaphorePermit, watch};

use super::App;
use super::error::{Refusal, ask};
use super::query::Parameters;
use crate::api::EventView;

/// Most concurrent requests with `follow=true`.
pub const MAX_FOLLOWERS: usize = 64;
/// Most events in one response.
const MAX_LIMIT: u64 = 10_000;
/// Events in one response if no limit is given.
const DEFAULT_LIMIT: u64 = 100;
/// Most events examined for a page.
const PAGE: usize = 100;
/// Bytes after which a page is complete. One event may have over a megabyte.
const PAGE_BYTES: usize = 1024 * 1024;
/// Most events per read of the store. Events that do not fit into the page are read again for
/// the next one, and an event needs several times its text in memory.
const READ_AT_ONCE: usize = 8;

const PARAMETERS: &[&str] = &["node", "limit", "before", "after", "follow"];

pub(super) async fn events(State(app): State<Arc<App>>, uri: Uri) -> Result<Response, Refusal> {
    // A process without events reports that before any other error in the request.
    app.store()?;
    let parameters = Parameters::read(&uri, PARAMETERS)?;
    let node = parameters.name("node", MAX_NAME_BYTES)?.map(str::to_owned);
    let limit = parameters.number("limit", 1, MAX_LIMIT)?;
    let before = parameters.position("before")?;
    let after = parameters.position("after")?;
    if !parameters.flag("follow")? {
        let left = usize::try_from(limit.unwrap_or(DEFAULT_LIMIT)).unwrap_or(PAGE);
        return list(
            app,
            List {
                node,
                before,
                after,
                left,
                first: true,
                at_once: READ_AT_ONCE,
            },
        )
        .await;
    }
    if let Some(before) = before {
        return Err(Refusal::bad_request(
            format!("parameter \"before\" is \"{before}\", which follow=true does not support"),
            "Leave it out; \"after\" says where to start.",
        ));
    }
    follow(app, node, limit, after).await
}

/// Remaining part of a listing.
struct List {
    node: Option<String>,
    before: Option<Position>,
    after: Option<Position>,
    left: usize,
    first: bool,
    /// Events per read: as many as the previous page had room for.
    at_once: usize,
}

/// Returns a JSON array, newest first.
async fn list(app: Arc<App>, mut list: List) -> Result<Response, Refusal> {
    // The first page is read before the response starts, so that most errors get an error
    // response.
    let first = list.page(&app).await?;
    let rest = stream::try_unfold((app, list), async |(app, mut list)| {
        if list.left == 0 {
            return Ok(None);
        }
        // The connection is cut, so that a partial listing is not taken for a complete one.
        let page = list.page(&app).await.map_err(|refusal| refusal.error)?;
        Ok::<_, String>(Some((page, (app, list))))
    });
    let body = futures::StreamExt::chain(stream::once(async { Ok(first) }), rest);
    Ok((
        [(header::CONTENT_TYPE, "application/json")],
        Body::from_stream(body),
    )
        .into_response())
}

/// Returns events as they arrive, one per line, oldest first. Starts with the stored events
/// after `after`, of these the newest `limit`; without either, with the newest 100.
async fn follow(
    app: Arc<App>,
    node: Option<String>,
    limit: Option<u64>,
    after: Option<Position>,
) -> Result<Response, Refusal> {
    let permit = Arc::clone(&app.followers)
        .try_acquire_owned()
        .map_err(|_| {
            Refusal::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("{MAX_FOLLOWERS} requests already follow the events, which is the limit"),
                "End one of them, or ask again without follow=true.",
            )
        })?;
    let latest = app.store()?.latest();
    let start = match (limit, after) {
        (None, Some(after)) => after,
        (limit, after) => {
            // If there are none, continue from the current end of the feed.
            let empty = after.unwrap_or(Position::START).max(*latest.borrow());
            let left = usize::try_from(limit.unwrap_or(DEFAULT_LIMIT)).unwrap_or(PAGE);
            let mut history = List {
                node: node.clone(),
                before: None,
                after,
                left,
                first: true,
                at_once: READ_AT_ONCE,
            };
            while history.left > 0 {
                let _turn = app.room.turn().await?;
                history.skip(&app).await?;
            }
            let oldest = history.before;
            oldest.map_or(empty, Position::before)
        }
    };
    let follower = Follower {
        app,
        node,
        latest,
        after: start,
        at_once: READ_AT_ONCE,
        ended: false,
        _permit: permit,
    };
    let body = stream::unfold(follower, async |mut follower| {
        let lines = follower.next().await?;
        Some((Ok::<_, Infallible>(lines), follower))
    });
    Ok((
        [(header::CONTENT_TYPE, "application/x-ndjson")],
        Body::from_stream(body),
    )
        .into_response())
}

/// State of a request with `follow=true`.
struct Follower {
    app: Arc<App>,
    node: Option<String>,
    latest: watch::Receiver<Position>,
    after: Position,
    /// Events per read: as many as the previous page had room for.
    at_once: usize,
    ended: bool,
    _permit: OwnedSemaphorePermit,
}

// === impl List ===

impl List {
    /// Returns the next page, including the brackets of the array at its start and end.
    async fn page(&mut self, app: &App) -> Result<Bytes, Refusal> {
        let turn = app.room.turn().await?;
        let mut text = Vec::new();
        let mut examined = 0;
        while self.left > 0 && examined < PAGE && text.len() < PAGE_BYTES {
            let records = self.read(app).await?;
            for view in views(app, &records).await? {
                if text.len() >= PAGE_BYTES {
                    break;
                }
                text.push(if std::mem::take(&mut self.first) {
                    b'['
                } else {
                    b','
                });
                self.pass(view.seq);
                write(&view, &mut text);
                examined += 1;
            }
        }
        self.at_once = examined.clamp(1, READ_AT_ONCE);
        if std::mem::take(&mut self.first) {
            text.push(b'[');
        }
        if self.left == 0 {
            text.push(b']');
        }
        turn.hold(text).await
    }

    /// Skips the next events.
    async fn skip(&mut self, app: &App) -> Result<(), Refusal> {
        for record in self.read(app).await? {
            self.pass(record.seq);
        }
        Ok(())
    }

    /// Reads the next events. If there are fewer than requested, they are the last.
    async fn read(&mut self, app: &App) -> Result<Vec<EventRecord>, Refusal> {
        let limit = self.left.min(self.at_once);
        let query = EventQuery {
            node: self.node.clone(),
            id: None,
            before: self.before,
            after: self.after,
            limit,
        };
        let records = ask(app.store()?.events(query)).await?;
        if records.len() < limit {
            self.left = records.len();
        }
        Ok(records)
    }

    fn pass(&mut self, seq: Position) {
        self.left -= 1;
        self.before = Some(seq);
    }
}

// === impl Follower ===

impl Follower {
    /// Returns the next lines; `None` when the process ends.
    async fn next(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        let cancel = self.app.cancel.clone();
        cancel.run_until_cancelled(self.wait()).await.flatten()
    }

    async fn wait(&mut self) -> Option<Bytes> {
        loop {
            // Marked before reading the store, so that events stored meanwhile wake this task.
            let newest = *self.latest.borrow_and_update();
            if self.after >= newest {
                self.latest.changed().await.ok()?;
                continue;
            }
            match self.page().await {
                Ok(Some(lines)) => return Some(lines),
                Ok(None) => {}
                Err(refusal) => {
                    self.ended = true;
                    let mut line = serde_json::to_vec(&refusal.body()).ok()?;
                    line.push(b'\n');
                    return Some(line.into());
                }
            }
        }
    }

    /// Returns the next lines; `None` if no examined event matches.
    async fn page(&mut self) -> Result<Option<Bytes>, Refusal> {
        let turn = self.app.room.turn().await?;
        let mut lines = Vec::new();
        let mut examined = 0;
        while examined < PAGE && lines.len() < PAGE_BYTES {
            let mut records = ask(self.app.store()?.feed(self.after, self.at_once)).await?;
            let Some(last) = records.last().map(|record| record.seq) else {
                break;
            };
            let wanted = |record: &EventRecord| {
                let node = self.node.as_ref();
                node.is_none_or(|node| *node == record.event.node_name)
            };
            let read = records.len();
            records.retain(wanted);
            self.after = last;
            examined += read - records.len();
            for view in views(&self.app, &records).await? {
                if lines.len() >= PAGE_BYTES {
                    // The event is read again for the next page.
                    self.after = view.seq.before();
                    break;
                }
                write(&view, &mut lines);
                lines.push(b'\n');
                examined += 1;
            }
        }
        self.at_once = examined.clamp(1, READ_AT_ONCE);
        if lines.is_empty() {
            return Ok(None);
        }
        turn.hold(lines).await.map(Some)
    }
}

/// Returns the events with their statuses.
async fn views(app: &App, records: &[EventRecord]) -> Result<Vec<EventView>, Refusal> {
    let ids = records.iter().map(|record| record.id.clone()).collect();
    let statuses = ask(app.store()?.statuses(ids)).await?;
    let pairs = records.iter().zip(statuses);
    Ok(pairs
        .map(|(record, status)| EventView::of(record, status))
        .collect())
}

fn write(view: &EventView, into: &mut Vec<u8>) {
    // Writing to memory cannot fail, nor can serializing this type.
    drop(serde_json::to_writer(into, view));
}
