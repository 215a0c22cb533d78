//! Console of a process that stores events and makes decisions: a standalone gpuwarden, or the
//! leading controller.

use std::sync::Arc;
use std::time::Duration;

use analysis::RulesText;
use analysis::ledger::Ledger;
use connector::Forwarding;
use fleet::view::FleetView;
use futures::future::BoxFuture;
use model::status::SessionChange;
use notices::Record;
use runtime::logging::chain;
use store::{EventStore, StoreError};
use tokio::sync::watch;
use trial::why_not::WhyNot;

use super::error::ask;
use crate::api::{Mode, PolicyView, StoreView, UnhealthyGpuView};

/// Longest wait of a probe for the store's writer.
const WRITER_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for the fleet's state to include the newest event: slightly longer than the
/// controller takes to publish it.
const CATCH_UP: Duration = Duration::from_millis(700);
/// Longest wait of a timeline for the API server; after that it is returned without unhealthy
/// GPUs.
const PODS_TIMEOUT: Duration = Duration::from_secs(2);

/// Explains why a node is, or is not, quarantined; `None` if the controller has ended.
pub type WhyNotSource = Arc<dyn Fn(String) -> BoxFuture<'static, Option<WhyNot>> + Send + Sync>;

/// Returns the GPUs of a node's pods that its kubelet reports as unhealthy; empty if unknown.
pub type UnhealthyGpuSource =
    Arc<dyn Fn(String) -> BoxFuture<'static, Vec<UnhealthyGpuView>> + Send + Sync>;

/// Part of the console of a process that stores events and makes decisions.
#[derive(Clone)]
pub struct ControllerPart {
    /// State of the fleet.
    pub fleet: watch::Receiver<Arc<FleetView>>,
    /// Policy that decides about quarantine.
    pub policy: watch::Receiver<Arc<PolicyView>>,
    /// Explains why a node is, or is not, quarantined.
    pub why_not: WhyNotSource,
    /// Finds the GPUs of pods that kubelets report as unhealthy.
    pub unhealthy_gpus: UnhealthyGpuSource,
    /// Rules of the analysis; `None` where it is switched off.
    pub rules: Option<watch::Receiver<Arc<RulesText>>>,
    /// Ledger of GPUs.
    pub ledger: watch::Receiver<Ledger>,
    /// Announced maintenances; `None` where notices are not read.
    pub maintenances: Option<watch::Receiver<Arc<[Record]>>>,
    pub store: Arc<dyn EventStore>,
    /// Delivery to another service, if configured.
    pub forwarding: Option<Forwarding>,
}

/// Failure of the store's writer.
enum WriterFailure {
    Hangs,
    Failed(StoreError),
}

// === impl ControllerPart ===

impl ControllerPart {
    /// Returns the GPUs of a node's pods that its kubelet reports as unhealthy, unless that
    /// takes too long.
    pub(super) async fn unhealthy_gpus(&self, node: &str) -> Vec<UnhealthyGpuView> {
        let asked = (self.unhealthy_gpus)(node.to_owned());
        let answer = tokio::time::timeout(PODS_TIMEOUT, asked).await;
        answer.unwrap_or_default()
    }

    /// Returns true if the store's writer answers, even with an error: a restart frees a hung
    /// writer, but not a full disk.
    pub(super) async fn is_alive(&self) -> bool {
        let asked = self.ask_writer().await;
        !matches!(
            asked,
            Err(WriterFailure::Hangs | WriterFailure::Failed(StoreError::Closed))
        )
    }

    /// Returns the reasons why decisions may lack input; empty if there are none.
    pub(super) async fn not_ready(&self, mode: Mode) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.fleet.has_changed().is_err() {
            reasons.push("the controller of the fleet has ended".to_owned());
        }
        let fleet = Arc::clone(&self.fleet.borrow());
        if !fleet.ready {
            reasons.push("not all events stored before the start are recorded yet".to_owned());
        }
        reasons.extend(fleet.troubles.iter().cloned());
        if let Some(cluster) = fleet.cluster.as_ref().filter(|cluster| !cluster.connected) {
            let error = cluster.error.as_deref().unwrap_or("connecting");
            reasons.push(format!(
                "no connection to the cluster at {}: {error}",
                cluster.server
            ));
        }
        let policy = Arc::clone(&self.policy.borrow());
        if policy.loaded_at.is_none() && mode != Mode::Observe {
            let error = policy.error.as_deref().unwrap_or("not read yet");
            reasons.push(format!("no policy from {}: {error}", policy.source));
        }
        if let Some(trouble) = &*self.store.trouble().borrow() {
            reasons.push(format!(
                "the event store cannot write: {trouble}; events are refused, and senders retry"
            ));
        }
        match self.ask_writer().await {
            Ok(()) => {}
            Err(WriterFailure::Hangs) => reasons.push(format!(
                "the event store's writer has not answered for {} s",
                WRITER_TIMEOUT.as_secs()
            )),
            Err(WriterFailure::Failed(error)) => reasons.push(chain(&error)),
        }
        reasons
    }

    /// Requests a change from the writer that changes nothing; no session has this id.
    async fn ask_writer(&self) -> Result<(), WriterFailure> {
        let asked = (self.store).change_session("probe", "probe", SessionChange::Cancelled);
        match tokio::time::timeout(WRITER_TIMEOUT, asked).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(WriterFailure::Failed(error)),
            Err(_) => Err(WriterFailure::Hangs),
        }
    }
    /// Waits briefly until the fleet's state includes everything stored before the call: a
    /// client that just observed a cordon asks for the fault behind it.
    pub(super) async fn caught_up(&self) {
        let newest = *self.store.latest().borrow();
        let mut fleet = self.fleet.clone();
        let caught_up = fleet.wait_for(|fleet| fleet.applied >= newest);
        // After the timeout, the known state is returned.
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
