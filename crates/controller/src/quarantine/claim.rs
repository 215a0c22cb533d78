//! Taking over what a node carries and the store does not know.
//!
//! The store may be new: lost, replaced, or this cluster was NVSentinel's until today.
//! The events that a quarantined node lists are then put into the store first, so that
//! its faults are open, and the node is not given back because we have forgotten why.

use contract::ProcessingStrategy;
use domain::node::NodeView;
use domain::session::ownership::Ownership;
use store::{NewEvent, StoreError};

use super::Quarantine;

impl Quarantine {
    /// Whether all events that the node lists are in the store. Those that are not are
    /// put there, and the feed will bring them.
    pub(super) async fn adopt(&mut self, view: &NodeView) -> bool {
        let Some(own) = Ownership::read(view) else {
            return true;
        };
        let mut unknown = Vec::new();
        for mut event in own.events {
            if self.entry(&view.name).adopted.contains(&event.id) {
                continue;
            }
            match self.store.event(&event.id).await {
                Ok(Some(_)) => self.entry(&view.name).adopted.push(event.id),
                Ok(None) => {
                    if event.processing_strategy == ProcessingStrategy::Unspecified as i32 {
                        event.processing_strategy = ProcessingStrategy::ExecuteRemediation as i32;
                    }
                    unknown.push(event);
                }
                Err(error) => return self.cannot_adopt(&view.name, &error),
            }
        }
        if unknown.is_empty() {
            return true;
        }
        tracing::info!(
            node = view.name,
            events = unknown.len(),
            "taking over the faults that the node lists and the store does not know"
        );
        let received_at = (self.clock)();
        let events = unknown
            .into_iter()
            .map(|event| NewEvent { event, received_at })
            .collect();
        match self.store.append(events).await {
            Ok(_) => false,
            Err(error) => self.cannot_adopt(&view.name, &error),
        }
    }

    fn cannot_adopt(&mut self, node: &str, error: &StoreError) -> bool {
        tracing::error!(node, err = %error, "the store does not answer; the node is left as it is");
        self.metrics.error("adopt_error");
        // Another look when the store next has something, or the node changes.
        self.dirty_later(node);
        false
    }

    fn dirty_later(&mut self, node: &str) {
        let now = (self.clock)();
        let entry = self.entry(node);
        entry
            .session
            .failed(domain::session::Failure::Error { retry_after: None }, now);
        self.remember_wake(node);
    }
}
