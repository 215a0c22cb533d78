//! Tasks of a role, and their shutdown.
//!
//! A task that ends by itself is a bug, mostly a panic, and no other task can do without it: a
//! controller that receives events and renews its Lease, but decides nothing, is worse than
//! none. So the process shuts down in order, and its supervisor restarts it.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::anyhow;
use cli::{Endpoint, ProcessSettings};
use runtime::logging;
use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

/// Time after SIGTERM for work in progress. Unfinished work is abandoned.
const GRACE: Duration = Duration::from_millis(800);
/// Time after SIGTERM for writes to the cluster. It is longer, because the outcome of an
/// interrupted write is unknown: a slow API server takes seconds, and a pod has 30 s to end.
const WRITES_GRACE: Duration = Duration::from_secs(5);

/// Tasks of a role.
#[derive(Default)]
pub(crate) struct Tasks {
    /// Tasks that receive input. They end first.
    inputs: JoinSet<()>,
    no_more: CancellationToken,
    /// Tasks that process the input and write to the cluster.
    writers: JoinSet<()>,
    /// True if a writer was interrupted.
    cut: bool,
    /// Other tasks that process the input.
    workers: JoinSet<()>,
    done: CancellationToken,
    /// Names of the tasks, for messages.
    names: HashMap<Id, &'static str>,
}

/// Runs a server, and logs the reason if it fails.
pub(crate) async fn log_failure<E: std::error::Error>(
    what: &'static str,
    serving: impl Future<Output = Result<(), E>>,
) {
    if let Err(error) = serving.await {
        tracing::error!(err = %logging::chain(&error), "{what} has failed");
    }
}

// === impl Tasks ===

impl Tasks {
    /// Returns the token that is cancelled when input is to be received no longer.
    pub(crate) fn no_more(&self) -> CancellationToken {
        self.no_more.clone()
    }

    /// Returns the token that is cancelled when the received input is to be completed.
    pub(crate) fn done(&self) -> CancellationToken {
        self.done.clone()
    }

    /// Starts a task that receives input. It must not end before [`no_more`](Self::no_more).
    pub(crate) fn input(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.names.insert(self.inputs.spawn(task).id(), name);
    }

    /// Starts a monitor. Unlike other inputs it may end by itself: a log on standard input has
    /// an end.
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

    /// Starts a task that processes input. It must not end before [`done`](Self::done).
    pub(crate) fn worker(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.names.insert(self.workers.spawn(task).id(), name);
    }

    /// Starts a task that writes to the cluster. Shutdown waits longer for it than for a worker.
    pub(crate) fn writer(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.names.insert(self.writers.spawn(task).id(), name);
    }

    /// Waits until `shutdown` completes or a task ends by itself, which is an error.
    pub(crate) async fn until_shutdown_or_failure(
        &mut self,
        shutdown: impl Future<Output = anyhow::Result<()>>,
    ) -> anyhow::Result<()> {
        tokio::select! {
            result = shutdown => result,
            error = self.failed() => Err(error),
        }
    }

    /// Waits until a task ends by itself. Returns an error with its name and the reason.
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
            "{name} has failed: this process cannot run without it, and ends"
        ))
    }

    /// Shuts down in order: inputs stop, received input is processed, and `close` closes files.
    /// Removes the endpoint file.
    ///
    /// Returns whether all writes to the cluster were completed.
    pub(crate) async fn end(
        self,
        close: impl Future<Output = ()>,
        settings: &ProcessSettings,
    ) -> bool {
        // A peer that keeps its connection open must not use up the time of the other tasks.
        let written = self.end_within(GRACE / 2, close).await;
        Endpoint::remove(&settings.data_dir);
        written
    }

    /// Shuts down as [`end`](Self::end) does, with `for_inputs` as the time for inputs, and
    /// keeps the endpoint file.
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

    /// Waits for the writers. Returns whether all were completed.
    async fn written(&mut self) -> bool {
        let writers = async {
            while let Some(ended) = self.writers.join_next().await {
                self.cut |= ended.is_err();
            }
        };
        let in_time = tokio::time::timeout(WRITES_GRACE, writers).await.is_ok();
        // An aborted writer drops its sender, which lets the journal end.
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

        // The other tasks still end on shutdown.
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
        // A panic interrupts the task's writes as well.
        let mut tasks = Tasks::default();
        tasks.writer("the quarantine", async { panic!("no such index") });
        tasks.failed().await;
        assert!(!tasks.written().await);
    }
}
