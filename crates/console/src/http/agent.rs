//! Console of an agent: the events that wait for the controller. Faults and decisions are shown
//! by the controller.

use std::time::Duration;

use connector::DeliveryStatus;
use connector::outbox::{Outbox, OutboxError};
use tokio::sync::watch;

use crate::api::{DeliveryView, StoreView};

/// Longest wait of a probe for the outbox.
const OUTBOX_TIMEOUT: Duration = Duration::from_secs(2);

/// Part of the console that an agent has.
#[derive(Clone)]
pub struct AgentPart {
    /// Address of the controller.
    pub controller: String,
    /// Events that wait for delivery.
    pub outbox: Outbox,
    /// State of the delivery.
    pub delivery: watch::Receiver<DeliveryStatus>,
}

// === impl AgentPart ===

impl AgentPart {
    /// Returns true if the outbox answers, even with an error: a restart frees a hung thread,
    /// but not a full disk.
    pub(super) async fn is_alive(&self) -> bool {
        let request = self.outbox.waiting(u64::MAX, 1, 1);
        let answered = tokio::time::timeout(OUTBOX_TIMEOUT, request).await;
        answered.is_ok_and(|answer| is_thread_alive(answer.err().as_ref()))
    }

    /// Returns why events are not delivered to the controller, if they are not.
    pub(super) fn not_ready(&self) -> Option<String> {
        let waiting = self.outbox.status().borrow().events;
        let failing = self.delivery.borrow().failing.clone()?;
        Some(format!(
            "the controller at {} does not take events, {waiting} wait: {failing}",
            self.controller
        ))
    }

    pub(super) fn store_view(&self) -> StoreView {
        let outbox = *self.outbox.status().borrow();
        StoreView {
            events: outbox.events as u64,
            bytes: outbox.bytes,
            latest: outbox.newest.into(),
            oldest: outbox.oldest,
            ..StoreView::default()
        }
    }

    pub(super) fn delivery_view(&self) -> DeliveryView {
        let (outbox, delivery) = (*self.outbox.status().borrow(), self.delivery.borrow());
        DeliveryView {
            controller: self.controller.clone(),
            delivered: delivery.delivered,
            refused: delivery.refused,
            not_taken: delivery.not_taken,
            suspects: delivery.suspects as u64,
            aside: outbox.aside,
            store: delivery.store.clone(),
            store_changes: delivery.store_changes,
            resent: delivery.resent,
            kept: outbox.kept as u64,
            failing: delivery.failing.clone(),
        }
    }
}

/// Returns true if the outbox's thread is running, judged by how a request to it failed.
fn is_thread_alive(failed: Option<&OutboxError>) -> bool {
    !matches!(failed, Some(OutboxError::Closed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_fails_is_no_reason_to_start_again_and_a_thread_that_is_gone_is() {
        let failed = || std::sync::Arc::new(std::io::Error::other("no space left on device"));
        let disk = OutboxError::Disk {
            action: "read",
            source: failed(),
        };
        let full = OutboxError::Full { what: "it".into() };
        assert!(
            [None, Some(&disk), Some(&full)]
                .into_iter()
                .all(is_thread_alive)
        );
        assert!(!is_thread_alive(Some(&OutboxError::Closed)));
    }
}
