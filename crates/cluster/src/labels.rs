//! Watches of the objects that labels of nodes depend on: pods of DCGM and of drivers, and the
//! `ResourceSlice`s of all nodes.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::causes::chain;
use crate::connect::Cluster;
use crate::kind::ObjectKind;
use crate::signals::forward;
use crate::watch::{Selection, Signal};

/// Slices that wait for the consumer. One may have several 100 KiB.
const QUEUE: usize = 32;
/// Pause before the API server is asked again for slices that it does not serve: an operator may
/// enable them.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// Pause after a temporary failure.
const RETRY: Duration = Duration::from_secs(1);

// === impl Cluster ===

impl Cluster {
    /// Watches the pods with these labels in all namespaces, without those that have finished, as
    /// [`Self::watch`] does.
    pub fn watch_pods_with<T: DeserializeOwned + Send + Sync + 'static>(
        &self,
        labels: &str,
        cancel: CancellationToken,
    ) -> mpsc::Receiver<Signal<T>> {
        let selection = Selection::of::<Pod>(&(), None)
            .with_labels(labels)
            .with_fields("status.phase!=Succeeded,status.phase!=Failed");
        self.watch(selection, cancel)
    }

    /// Watches the `ResourceSlice`s of all nodes, as [`Self::watch`] does. Where the cluster does
    /// not serve slices, the list is empty.
    pub fn watch_slices(&self, cancel: CancellationToken) -> mpsc::Receiver<Signal<Value>> {
        let (signals, receiver) = mpsc::channel(QUEUE);
        let cluster = self.clone();
        let until = cancel.clone();
        tokio::spawn(async move {
            let follow = async {
                let Some(kind) = cluster.served_slices(&signals).await else {
                    return;
                };
                let slices = cluster.watch(Selection::of_kind(&kind, None), cancel);
                forward(slices, &signals, Some).await;
            };
            until.run_until_cancelled(follow).await;
        });
        receiver
    }

    /// Waits until the cluster serves slices; `None` if the receiver was dropped.
    async fn served_slices(&self, signals: &mpsc::Sender<Signal<Value>>) -> Option<ObjectKind> {
        loop {
            let (told, pause) = match self.slices_api().await {
                Ok(Some(api)) => {
                    return Some(ObjectKind::new(&api.group, &api.version, &api.plural));
                }
                Ok(None) => (vec![Signal::Restarted, Signal::Listed], ASK_AGAIN),
                Err(error) => {
                    let refused = !error.is_retryable();
                    let error = chain(&error);
                    let pause = if refused { ASK_AGAIN } else { RETRY };
                    (vec![Signal::Failing { error, refused }], pause)
                }
            };
            for signal in told {
                signals.send(signal).await.ok()?;
            }
            tokio::time::sleep(pause).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fake::{FakeAnswer, serve};

    #[tokio::test]
    async fn a_cluster_that_serves_no_slices_has_none() {
        let missing = json!({"code": 404, "reason": "NotFound"}).to_string();
        let answers = (0..3).map(|_| FakeAnswer::Now(404, missing.clone()));
        let (cluster, _requests) = serve(answers.collect()).await;
        let mut signals = cluster.watch_slices(CancellationToken::new());
        assert_eq!(signals.recv().await, Some(Signal::Restarted));
        assert_eq!(signals.recv().await, Some(Signal::Listed));
    }
}
