//! The id of the store that the leader acts on, as an annotation of the Lease.
//!
//! Controllers may have a store each. Who leads next has to know whether its own is the one
//! that was acted on last. So it is written before anything is done on that store, and stays
//! when the Lease is given back.

use contract::keys;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::sync::watch;

/// The annotation, for who leads. Cheap to clone.
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

    /// Returns the store that was acted on last, as the Lease said when it was last seen; `None`:
    /// it did not say.
    pub fn seen(&self) -> Option<String> {
        self.seen.borrow().clone()
    }

    /// Writes `store` on the Lease with the next renewal, which is made now. Returns when it stands
    /// there; if the lead is lost, it never returns.
    pub async fn write(&self, store: &str) {
        self.wanted.send_replace(Some(store.to_owned()));
        let mut seen = self.seen.subscribe();
        let stands = |seen: &Option<String>| seen.as_deref() == Some(store);
        if seen.wait_for(stands).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Takes in what the Lease says.
    pub(super) fn read_from(&self, lease: &ObjectMeta) {
        let annotations = lease.annotations.as_ref();
        let store = annotations.and_then(|annotations| annotations.get(keys::LEASE_STORE));
        self.seen.send_replace(store.cloned());
    }

    /// Puts what is to stand there into a change of the Lease.
    pub(super) fn write_into(&self, change: &mut ObjectMeta) {
        if let Some(store) = self.wanted.borrow().clone() {
            change.annotations = Some([(keys::LEASE_STORE.to_owned(), store)].into());
        }
    }

    /// Waits until something is to be written that does not stand there.
    pub(super) async fn until_outstanding(&self) {
        let (mut wanted, seen) = (self.wanted.subscribe(), &self.seen);
        let outstanding = |wanted: &Option<String>| wanted.is_some() && *wanted != *seen.borrow();
        if wanted.wait_for(outstanding).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
