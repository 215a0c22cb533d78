//! The tasks of a role: how they end, and what follows where one ends by itself.
//!
//! None does but by a fault of ours, a panic mostly, and no part can do without another: a
//! controller that takes events and keeps its Lease, but decides nothing any more, is worse
//! than none. So the process ends, in order, and whoever supervises it starts it anew.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::anyhow;
use cli::{Endpoint, ProcessSettings};
use runtime::logging;
use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

/// The work that is still under way this long after SIGTERM is left behind.
const GRACE: Duration = Duration::from_millis(800);
/// But writes into the cluster have so long: who cuts one off does not know whether it was
/// made, or still is. A slow API server takes seconds, and a pod has 30 s to end.
const WRITES_GRACE: Duration = Duration::from_secs(5);

/// `Tasks` are those of a role.
#[derive(Default)]
pub(crate) struct Tasks {
    /// The tasks that let something in. They end first.
    inputs: JoinSet<()>,
    no_more: CancellationToken,
    /// The tasks that work it off and write into the cluster.
    writers: JoinSet<()>,
    /// One of these has not come to its end.
    cut: bool,
    /// The other tasks that work it off.
    workers: JoinSet<()>,
    done: CancellationToken,
    /// The name of each, for people.
    names: HashMap<Id, &'static str>,
}

/// A task that serves, and says why where it ends by itself.
pub(crate) async fn said<E: std::error::Error>(
    what: &'static str,
    serving: impl Future<Output = Result<(), E>>,
) {
    if let Err(error) = serving.await {
        tracing::error!(err = %logging::chain(&error), "{what} has failed");
    }
}

// === impl Tasks ===

impl Tasks {
    /// Returns the token that is cancelled when nothing more is to come in.
    pub(crate) fn no_more(&self) -> CancellationToken {
        self.no_more.clone()
    }

    /// Returns the token that is cancelled when what came in is to be worked off.
    pub(crate) fn done(&self) -> CancellationToken {
        self.done.clone()
    }

    /// Starts a task that lets something in, and ends with [`no_more`](Self::no_more) only.
    pub(crate) fn input(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.names.insert(self.inputs.spawn(task).id(), name);
    }

    /// Starts a monitor. It may end by itself: a log on standard input has an end.
    pub(crate) fn monitor<R: Future<Output = ()> + Send + 'static>(
        &mut self,
        name: &'static str,
        run: impl FnOnce(CancellationToken) -> R,
    ) {
        let no_more = self.no_more();
        let running = run(no_more.clone());
        self.input(name, async move {
            running.await;
            no_more.cancelled().await;
        });
    }

    /// Starts a task that works off what came in, and ends with [`done`](Self::done) only.
    pub(crate) fn worker(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.names.insert(self.workers.spawn(task).id(), name);
    }

    /// Does the same for a task that writes into the cluster: it is waited for longer.
    pub(crate) fn writer(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.names.insert(self.writers.spawn(task).id(), name);
    }

    /// Waits until `told` to end, or until a task has ended by itself, which is an error.
    pub(crate) async fn until_told_or_failed(
        &mut self,
        told: impl Future<Output = anyhow::Result<()>>,
    ) -> anyhow::Result<()> {
        tokio::select! {
            told = told => told,
            error = self.failed() => Err(error),
        }
    }

    /// Waits until a task has ended by itself; says which, and why.
    pub(crate) async fn failed(&mut self) -> anyhow::Error {
        let ended = tokio::select! {
            Some(ended) = self.inputs.join_next_with_id() => ended,
            Some(ended) = self.writers.join_next_with_id() => {
                self.cut |= ended.is_err();
                ended
            }
            Some(ended) = self.workers.join_next_with_id() => ended,
            else => std::future::pending().await,
        };
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, ())| *id);
        let name = self.names.get(&id).copied().unwrap_or("a part");
        let error = match ended {
            Ok(_) => anyhow!("it has ended by itself; the log says why"),
            Err(error) => anyhow::Error::new(error),
        };
        error.context(format!(
            "{name} has failed: this process cannot go on without, and ends"
        ))
    }

    /// Ends the tasks: first nothing more comes in, then what came in is worked off, then
    /// `close` lets go of what is on disk. Removes the note of where the process is.
    ///
    /// Returns whether all writes into the cluster were brought to their end.
    pub(crate) async fn end(
        self,
        close: impl Future<Output = ()>,
        settings: &ProcessSettings,
    ) -> bool {
        // A peer that does not let go of its connection must not cost the others their end.
        let written = self.end_within(GRACE / 2, close).await;
        Endpoint::remove(&settings.data_dir);
        written
    }

    /// Ends the tasks likewise; those that let something in get so much time.
    pub(crate) async fn end_within(
        mut self,
        for_inputs: Duration,
        close: impl Future<Output = ()>,
    ) -> bool {
        self.no_more.cancel();
        let inputs = async { while self.inputs.join_next().await.is_some() {} };
        let no_more = tokio::time::timeout(for_inputs, inputs).await;
        self.done.cancel();
        let written = self.written().await;
        let workers = async {
            while self.workers.join_next().await.is_some() {}
            close.await;
        };
        let worked_off = tokio::time::timeout(GRACE / 2, workers).await;
        if no_more.is_err() || worked_off.is_err() || !written {
            tracing::warn!("some work was still under way; nothing that was acknowledged is lost");
        }
        written
    }

    /// Waits for those who write into the cluster. Returns whether all came to their end.
    async fn written(&mut self) -> bool {
        let writers = async {
            while let Some(ended) = self.writers.join_next().await {
                self.cut |= ended.is_err();
            }
        };
        let in_time = tokio::time::timeout(WRITES_GRACE, writers).await.is_ok();
        // The journal is written until the last of them is gone.
        self.writers.abort_all();
        in_time && !self.cut
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_ends_by_itself_is_named_and_who_is_told_to_is_not() {
        let mut tasks = Tasks::default();
        let (no_more, done) = (tasks.no_more(), tasks.done());
        tasks.input("the socket", async move { no_more.cancelled().await });
        tasks.worker("the page", async move { done.cancelled().await });
        let quiet = Duration::from_millis(20);
        assert!(tokio::time::timeout(quiet, tasks.failed()).await.is_err());

        tasks.worker("the quarantine", async {});
        let said = format!("{:#}", tasks.failed().await);
        assert!(said.starts_with("the quarantine has failed"), "{said}");
        assert!(said.contains("ended by itself"), "{said}");

        tasks.input("the kernel log", async { panic!("no such index") });
        let said = format!("{:#}", tasks.failed().await);
        assert!(said.starts_with("the kernel log has failed"), "{said}");
        assert!(said.contains("no such index"), "{said}");

        // The others still end when they are told to.
        tasks.no_more.cancel();
        tasks.done.cancel();
        tasks.inputs.join_all().await;
        tasks.workers.join_all().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_has_seconds_to_end_and_one_that_is_cut_is_told() {
        for (takes, ends) in [(4_900, true), (5_100, false)] {
            let mut tasks = Tasks::default();
            let done = tasks.done();
            tasks.writer("the quarantine", async move {
                done.cancelled().await;
                tokio::time::sleep(Duration::from_millis(takes)).await;
            });
            tasks.done.cancel();
            assert_eq!(tasks.written().await, ends, "{takes}");
        }
        // What it had under way when it failed is cut off as well.
        let mut tasks = Tasks::default();
        tasks.writer("the quarantine", async { panic!("no such index") });
        tasks.failed().await;
        assert!(!tasks.written().await);
    }
}
