//! Marks of GPUs in the product's `ConfigMap`, beside the pause: a controller with another store has a
//! ledger of its own, and takes them over.
//!
//! ```text
//! ConfigMap --> marks of the cluster --> LedgerKeeper
//!     ^                                      |
//!     +------- marks of both, merged <-------+
//! ```

use std::sync::Arc;
use std::time::Duration;

use analysis::ledger::{GpuMark, Ledger};
use cluster::{Cluster, ConfigMap, ConfigMapChange, ConfigMapEvent};
use contract::keys;
use runtime::logging::chain;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// Pause before a failed write is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Keeper of the marks; see the [module](self).
pub struct MarksKeeper {
    cluster: Arc<Cluster>,
    namespace: String,
    /// True if this process may write to the cluster.
    may_write: bool,
    ledger: watch::Receiver<Ledger>,
    /// Marks of the cluster, for the ledger.
    found: mpsc::Sender<Vec<GpuMark>>,
}

// === impl MarksKeeper ===

impl MarksKeeper {
    pub(super) fn new(
        cluster: Arc<Cluster>,
        namespace: String,
        may_write: bool,
        ledger: watch::Receiver<Ledger>,
        found: mpsc::Sender<Vec<GpuMark>>,
    ) -> Self {
        Self {
            cluster,
            namespace,
            may_write,
            ledger,
            found,
        }
    }

    /// Keeps the marks until `cancel`, or until the ledger's keeper has ended.
    pub async fn run(self, cancel: CancellationToken) {
        let stop = cancel.clone();
        stop.run_until_cancelled(self.keep(cancel)).await;
    }

    async fn keep(mut self, cancel: CancellationToken) {
        let name = keys::CONFIG_MAP;
        let mut events = self.cluster.watch_config_map(&self.namespace, name, cancel);
        // State of the `ConfigMap` once it was read; `None` in it if there is none.
        let mut seen: Option<Option<ConfigMap>> = None;
        let mut retry = None;
        loop {
            let again = async {
                match retry {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                event = events.recv() => match event {
                    Some(ConfigMapEvent::Seen(map)) => match marks_in(&map) {
                        Ok(marks) => {
                            if self.found.send(marks).await.is_err() {
                                return;
                            }
                            seen = Some(Some(map));
                        }
                        Err(error) => {
                            tracing::error!(
                                %error,
                                "the marks of GPUs in the ConfigMap gpuwarden, key gpu-marks, cannot be read: \
                                 correct them or remove the key; until then none is kept there"
                            );
                            // What cannot be read is not written over.
                            seen = None;
                        }
                    },
                    Some(ConfigMapEvent::Missing) => seen = Some(None),
                    Some(ConfigMapEvent::Failing { .. }) => {}
                    None => return,
                },
                changed = self.ledger.changed() => if changed.is_err() {
                    return;
                },
                () = again => {}
            }
            retry = None;
            if let Some(map) = seen.as_ref().filter(|_| self.may_write) {
                match self.write(map.as_ref()).await {
                    Ok(Some(written)) => seen = Some(Some(written)),
                    Ok(None) => {}
                    Err(error) => {
                        tracing::warn!(
                            err = error,
                            "the marks of GPUs cannot be kept in the cluster"
                        );
                        retry = Some(RETRY);
                    }
                }
            }
        }
    }

    /// Writes the marks that the `ConfigMap` lacks. Returns its new state; `None` if it has all.
    async fn write(&mut self, map: Option<&ConfigMap>) -> Result<Option<ConfigMap>, String> {
        let mut both = Ledger::default();
        if let Some(map) = map {
            both.take_marks(marks_in(map).map_err(|error| chain(&error))?);
        }
        both.take_marks(self.ledger.borrow_and_update().marks());
        let text = serde_json::to_string(&both.marks()).map_err(|error| chain(&error))?;
        let known = map.and_then(|map| map.data.get(keys::GPU_MARKS));
        if known.map_or("[]", String::as_str) == text {
            return Ok(None);
        }
        let change = ConfigMapChange {
            data: [(keys::GPU_MARKS.to_owned(), Some(text))].into(),
            ..ConfigMapChange::default()
        };
        let name = keys::CONFIG_MAP;
        let changed = self
            .cluster
            .change_config_map(&self.namespace, name, map, &change);
        changed.await.map(Some).map_err(|error| chain(&error))
    }
}

/// Returns the marks in a `ConfigMap`.
fn marks_in(map: &ConfigMap) -> serde_json::Result<Vec<GpuMark>> {
    let text = map.data.get(keys::GPU_MARKS);
    text.map_or(Ok(Vec::new()), |text| serde_json::from_str(text))
}
