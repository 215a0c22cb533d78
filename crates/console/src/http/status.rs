//! `/api/v1/status`: the current state of all parts of the process.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use connector::Forwarding;
use fleet::view::FleetView;

use super::App;
use super::error::Refusal;
use crate::api::{ForwardView, PolicyView, StatusView, StoreView, XidView};
use crate::explain::catalogue_row;

pub(super) async fn status(State(app): State<Arc<App>>) -> Result<Response, Refusal> {
    let console = &app.console;
    let store = async {
        match (&console.controller, &console.agent) {
            (Some(controller), _) => controller.store_view().await,
            (None, Some(agent)) => agent.store_view(),
            (None, None) => StoreView::default(),
        }
    };
    if let Some(controller) = &console.controller {
        controller.caught_up().await;
    }
    let (store, not_ready) = futures::join!(store, app.not_ready());
    // The response of a large cluster is large.
    let turn = app.room.turn().await?;
    let mut status = StatusView {
        process: console.process.clone(),
        now: app.now(),
        policy: PolicyView::default(),
        fleet: FleetView::default(),
        xids: BTreeMap::new(),
        gpus: app.gpus(),
        sources: console.sources.statuses(),
        store,
        delivery: None,
        leadership: console.leadership.as_ref().map(|source| source()),
        forward: None,
        ready: not_ready.is_empty(),
        not_ready,
    };
    if let Some(controller) = &console.controller {
        status.policy = PolicyView::clone(&controller.policy.borrow());
        status.fleet = FleetView::clone(&controller.fleet.borrow());
        status.xids = open_xids(&status.fleet);
        status.forward = controller.forwarding.as_ref().map(forward_view);
    }
    if let Some(agent) = &console.agent {
        // An agent makes no decisions, so it has nothing to catch up with.
        status.fleet.ready = true;
        status.delivery = Some(agent.delivery_view());
    }
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
