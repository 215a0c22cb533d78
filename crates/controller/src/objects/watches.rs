//! The watches of the objects, one for each kind and namespace. Objects are reduced as they arrive,
//! so that few whole ones are in memory.

use std::sync::Arc;
use std::time::Duration;

use cluster::{Cluster, ObjectKind, Selection, Signal};
use objects::{Input, ObjectMonitor, Reducer, Watched};
use runtime::logging::chain;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Reduced objects that wait for the monitor; when it is slower, the watches wait.
const QUEUE: usize = 1024;
/// Pause between two looks for a kind that the API server does not serve.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Input of the monitor, with the reason of a failure.
pub(super) struct Seen {
    pub(super) input: Input,
    pub(super) why: String,
}

/// A watch.
struct Following {
    cluster: Arc<Cluster>,
    sight: usize,
    watched: Watched,
    reducer: Reducer,
    seen: mpsc::Sender<Seen>,
    stop: CancellationToken,
}

/// Starts all watches of a monitor, until `stop`.
pub(super) fn start(
    cluster: &Arc<Cluster>,
    monitor: &ObjectMonitor,
    stop: &CancellationToken,
) -> mpsc::Receiver<Seen> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    for (sight, (watched, reducer)) in monitor.watched().enumerate() {
        let following = Following {
            cluster: Arc::clone(cluster),
            sight,
            watched: watched.clone(),
            reducer: reducer.clone(),
            seen: sender.clone(),
            stop: stop.clone(),
        };
        tokio::spawn(stop.clone().run_until_cancelled_owned(following.run()));
    }
    receiver
}

// === impl Following ===

impl Following {
    async fn run(self) {
        let kind = self.find().await;
        let mut selection = Selection::of_kind(&kind, self.watched.namespace.as_deref());
        if self.reducer.reads_only_metadata() {
            selection = selection.metadata_only();
        }
        let mut signals = (self.cluster).watch::<Box<RawValue>>(selection, self.stop.clone());
        while let Some(signal) = signals.recv().await {
            let mut why = String::new();
            let input = match signal {
                Signal::Restarted => Input::Restarted(self.sight),
                Signal::Listed => Input::Listed(self.sight),
                Signal::Applied(object) => match self.reducer.reduce(object.get()) {
                    Some(kept) => Input::Applied(self.sight, kept),
                    None => continue,
                },
                Signal::Deleted(key) => Input::Deleted(self.sight, key),
                Signal::Failing { error, refused } => {
                    why = error;
                    if refused {
                        why.push_str(" (this takes the permissions list and watch)");
                    }
                    Input::Failing(self.sight)
                }
                Signal::Recovered => Input::Recovered(self.sight),
            };
            self.send(input, why).await;
        }
    }

    /// Returns the kind once the API server serves it.
    async fn find(&self) -> ObjectKind {
        let kind = &self.watched.kind;
        loop {
            let found = (self.cluster).resource_of(&kind.group, &kind.version, &kind.kind);
            let why = match found.await {
                Ok(Some(resource)) => {
                    return ObjectKind::new(&kind.group, &kind.version, &resource);
                }
                Ok(None) => "the API server does not serve this kind".to_owned(),
                Err(error) => chain(&error),
            };
            self.send(Input::Failing(self.sight), why).await;
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Fails only once nobody receives, and then `stop` ends the watch.
    async fn send(&self, input: Input, why: String) {
        drop(self.seen.send(Seen { input, why }).await);
    }
}
