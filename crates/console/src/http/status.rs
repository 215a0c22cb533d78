//! `/api/v1/status`: all that is known right now.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use connector::Forwarding;
use domain::view::FleetView;

use super::App;
use super::error::{Refusal, ask};
use crate::api::{ForwardView, PolicyView, Status, StoreView, XidView};
use crate::explain::catalogue_row;

/// How long an answer waits for the fleet's state to reflect the newest event: a little longer
/// than the controller takes to publish it.
const CATCH_UP: Duration = Duration::from_millis(700);

pub(super) async fn status(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    app.caught_up().await;
    let (store, not_ready) = futures::join!(app.store_view(), app.not_ready());
    // Of a large cluster it is large.
    let turn = app.room.turn().await?;
    let fleet = Arc::clone(&app.console.fleet.borrow());
    let now = app.now();
    let status = Status {
        policy: PolicyView::clone(&app.console.policy.borrow()),
        xids: open_xids(&fleet),
        fleet: FleetView::clone(&fleet),
        sources: app.console.sources.statuses(),
        store,
        leadership: app.console.leadership.as_ref().map(|source| source()),
        forward: app.console.forwarding.as_ref().map(forward_view),
        ready: not_ready.is_empty(),
        not_ready,
        ..app.console.info.status(now)
    };
    turn.json(&status).await
}

fn forward_view(forwarding: &Forwarding) -> ForwardView {
    let status = forwarding.status();
    ForwardView {
        target: status.target,
        waiting: status.waiting as u64,
        delivered: status.delivery.delivered,
        missed: status.missed,
        aside: status.aside,
        failing: status.delivery.failing,
    }
}

fn open_xids(fleet: &FleetView) -> BTreeMap<String, XidView> {
    let mut xids = BTreeMap::new();
    let nodes = fleet.nodes.iter();
    for fault in nodes.flat_map(|node| node.faults.iter().chain(&node.notices)) {
        if let Some(row) = catalogue_row(&fault.check, &fault.code) {
            xids.entry(fault.code.clone()).or_insert_with(|| XidView {
                mnemonic: row.mnemonic.to_string(),
                meaning: row.meaning.to_string(),
                note: row.note.to_string(),
                source: row.source.to_string(),
            });
        }
    }
    xids
}

// === impl App ===

impl App {
    /// Waits, for a while, until what was stored before the question shows in the fleet's
    /// state: who has just seen a node cordoned asks for its fault, and is to find it.
    async fn caught_up(&self) {
        let newest = *self.console.store.latest().borrow();
        let mut fleet = self.console.fleet.clone();
        let caught_up = fleet.wait_for(|fleet| fleet.applied >= newest);
        // Behind or not: what is known is told.
        drop(tokio::time::timeout(CATCH_UP, caught_up).await);
    }

    async fn store_view(&self) -> StoreView {
        let latest = *self.console.store.latest().borrow();
        let unreadable = *self.console.store.unreadable().borrow();
        let notes = self.console.store.notes();
        match ask(self.console.store.stats()).await {
            Ok(stats) => StoreView {
                events: stats.events,
                bytes: stats.bytes,
                latest,
                unreadable,
                notes,
                oldest: stats.oldest,
                newest: stats.newest,
                error: None,
            },
            Err(refusal) => StoreView {
                latest,
                unreadable,
                notes,
                error: Some(refusal.error),
                ..StoreView::default()
            },
        }
    }
}
