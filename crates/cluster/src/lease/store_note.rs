//! Id of the store that the leader acts on, as an annotation of the Lease.
//!
//! Controllers may have a store each. The next leader has to know whether its own store is the
//! one that the last leader acted on. So the id is written before the leader acts on its store,
//! and stays when the Lease is released.

use contract::keys;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::sync::watch;

/// The annotation with the id of the leader's store. Cheap to clone.
#[derive(Clone, Debug)]
pub struct StoreNote {
    seen: watch::Sender<Option<String>>,
    wanted: watch::Sender<Option<String>>,
}

// === impl StoreNote ===

impl StoreNote {
    pub(super) fn new() -> Self {
        Self {
            seen: watch::Sender::default(),
            wanted: watch::Sender::default(),
        }
    }

    /// Returns the id of the store that the last leader acted on, from the last observed Lease;
    /// `None` if the Lease has none.
    pub fn seen(&self) -> Option<String> {
        self.seen.borrow().clone()
    }

    /// Writes the id of the store on the Lease, by a renewal that is made at once. Returns when
    /// the API server has confirmed it; never if the lead is lost.
    pub async fn write(&self, store: &str) {
        self.wanted.send_replace(Some(store.to_owned()));
        let mut seen = self.seen.subscribe();
        let confirmed = |seen: &Option<String>| seen.as_deref() == Some(store);
        if seen.wait_for(confirmed).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Reads the annotation of a Lease.
    pub(super) fn read_from(&self, lease: &ObjectMeta) {
        let annotations = lease.annotations.as_ref();
        let store = annotations.and_then(|annotations| annotations.get(keys::LEASE_STORE));
        self.seen.send_replace(store.cloned());
    }

    /// Adds the annotation to a change of the Lease.
    pub(super) fn write_into(&self, change: &mut ObjectMeta) {
        if let Some(store) = self.wanted.borrow().clone() {
            change.annotations = Some([(keys::LEASE_STORE.to_owned(), store)].into());
        }
    }

    /// Waits until an id is to be written that the Lease does not have.
    pub(super) async fn until_outstanding(&self) {
        let (mut wanted, seen) = (self.wanted.subscribe(), &self.seen);
        let outstanding = |wanted: &Option<String>| wanted.is_some() && *wanted != *seen.borrow();
        if wanted.wait_for(outstanding).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
