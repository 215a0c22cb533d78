//! The part of a process that has events and decides: a whole gpuwarden, or a controller that
//! leads.

use std::sync::Arc;
use std::time::Duration;

use connector::Forwarding;
use fleet::view::FleetView;
use futures::future::BoxFuture;
use runtime::logging::chain;
use store::{EventStore, StatusPatch, StoreError};
use tokio::sync::watch;
use trial::why_not::WhyNot;

use super::error::ask;
use crate::api::{Mode, PolicyView, StoreView, UnhealthyGpuView};

/// Longest wait of a probe for the store's writer.
const WRITER_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait of an answer for the fleet's state to reflect the newest event: a little longer
/// than the controller takes to publish it.
const CATCH_UP: Duration = Duration::from_millis(700);
/// Longest wait of a story for the API server, without which it is told too.
const PODS_TIMEOUT: Duration = Duration::from_secs(2);

/// Answers why the node of a name is, or is not, quarantined; `None` where who knows it has
/// ended.
pub type WhyNotSource = Arc<dyn Fn(String) -> BoxFuture<'static, Option<WhyNot>> + Send + Sync>;

/// Answers which GPUs of a node's pods its kubelet calls unhealthy; none where that cannot be read.
pub type UnhealthyGpuSource =
    Arc<dyn Fn(String) -> BoxFuture<'static, Vec<UnhealthyGpuView>> + Send + Sync>;

/// The part of the console that a process has which stores events and decides.
#[derive(Clone)]
pub struct ControllerPart {
    /// State of the fleet.
    pub fleet: watch::Receiver<Arc<FleetView>>,
    /// The policy that decides about quarantine.
    pub policy: watch::Receiver<Arc<PolicyView>>,
    /// The source of answers to why a node is, or is not, quarantined.
    pub why_not: WhyNotSource,
    /// The source of what kubelets say of the GPUs of pods.
    pub unhealthy_gpus: UnhealthyGpuSource,
    /// Events and journal.
    pub store: Arc<dyn EventStore>,
    /// The delivery to another service, where that is asked for.
    pub forwarding: Option<Forwarding>,
}

/// The reason why the store's writer is of no use.
enum Writer {
    Hangs,
    Failed(StoreError),
}

// === impl ControllerPart ===

impl ControllerPart {
    /// Returns the GPUs of a node's pods that its kubelet calls unhealthy, as far as that is known soon.
    pub(super) async fn unhealthy_gpus(&self, node: &str) -> Vec<UnhealthyGpuView> {
        let asked = (self.unhealthy_gpus)(node.to_owned());
        let answer = tokio::time::timeout(PODS_TIMEOUT, asked).await;
        answer.unwrap_or_default()
    }

    /// Returns whether the store's writer answers, be it with an error: a restart frees a hung
    /// writer, but not a full disk.
    pub(super) async fn is_alive(&self) -> bool {
        let asked = self.ask_writer().await;
        !matches!(
            asked,
            Err(Writer::Hangs | Writer::Failed(StoreError::Closed))
        )
    }

    /// Returns why it does not decide about all that there is; empty where it does.
    pub(super) async fn not_ready(&self, mode: Mode) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.fleet.has_changed().is_err() {
            reasons.push("the keeper of the fleet's state has ended".to_owned());
        }
        let fleet = Arc::clone(&self.fleet.borrow());
        if !fleet.ready {
            reasons.push("the events stored before the start are not all taken in".to_owned());
        }
        reasons.extend(fleet.troubles.iter().cloned());
        if let Some(cluster) = fleet.cluster.as_ref().filter(|cluster| !cluster.connected) {
            let error = cluster
                .error
                .as_deref()
                .unwrap_or("the connection is being made");
            reasons.push(format!(
                "no connection to the cluster at {}: {error}",
                cluster.server
            ));
        }
        let policy = Arc::clone(&self.policy.borrow());
        if policy.loaded_at.is_none() && mode != Mode::Observe {
            let error = policy.error.as_deref().unwrap_or("it is not read yet");
            reasons.push(format!("no policy from {}: {error}", policy.source));
        }
        if let Some(trouble) = &*self.store.trouble().borrow() {
            reasons.push(format!(
                "the event store cannot write: {trouble}; events are refused and come again"
            ));
        }
        match self.ask_writer().await {
            Ok(()) => {}
            Err(Writer::Hangs) => reasons.push(format!(
                "the event store's writer has not answered for {} s",
                WRITER_TIMEOUT.as_secs()
            )),
            Err(Writer::Failed(error)) => reasons.push(chain(&error)),
        }
        reasons
    }

    /// Asks the writer for a change of nothing: no event has this id.
    async fn ask_writer(&self) -> Result<(), Writer> {
        let asked = (self.store).update_status("probe", StatusPatch::default());
        match tokio::time::timeout(WRITER_TIMEOUT, asked).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(Writer::Failed(error)),
            Err(_) => Err(Writer::Hangs),
        }
    }
    /// Waits, for a while, until what was stored before the question shows in the fleet's
    /// state: who has just seen a node cordoned asks for its fault, and is to find it.
    pub(super) async fn caught_up(&self) {
        let newest = *self.store.latest().borrow();
        let mut fleet = self.fleet.clone();
        let caught_up = fleet.wait_for(|fleet| fleet.applied >= newest);
        // Behind or not: what is known is told.
        drop(tokio::time::timeout(CATCH_UP, caught_up).await);
    }

    pub(super) async fn store_view(&self) -> StoreView {
        let latest = *self.store.latest().borrow();
        let unreadable = *self.store.unreadable().borrow();
        let notes = self.store.notes();
        match ask(self.store.stats()).await {
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
