//! Thread that reads and writes the outbox's files.
//!
//! The thread writes all queued events ([`GroupThread`]) in one batch, and answers once they
//! are on disk. Other calls in the group are executed first, since they may make room.

use jiff::{SignedDuration, Timestamp};
use store::{Appended, GroupThread, NewEvent};
use tokio::sync::{oneshot, watch};

use super::log::Log;
use super::metrics::OutboxMetrics;
use super::{OutboxError, OutboxStatus};

/// Most events in queued calls, which bounds the memory.
const MAX_WAITING_EVENTS: usize = 2 * model::event::MAX_EVENTS;

/// Handle to the thread.
#[derive(Debug)]
pub(super) struct Thread {
    thread: GroupThread<Request>,
    status: watch::Receiver<OutboxStatus>,
}

type Reply<T> = oneshot::Sender<Result<T, OutboxError>>;
/// Function that sends an answer.
type Answer = Box<dyn FnOnce() + Send>;

/// Queued call to the thread.
enum Request {
    Append {
        events: Vec<NewEvent>,
        reply: Reply<Vec<Appended>>,
    },
    Other(Box<dyn FnOnce(&mut Log) -> Answer + Send>),
}

/// State of the thread.
struct Worker {
    log: Log,
    /// Time that delivered events are kept.
    keep: Option<SignedDuration>,
    status: watch::Sender<OutboxStatus>,
    metrics: OutboxMetrics,
}

// === impl Thread ===

impl Thread {
    /// Starts the thread, which owns `log` and `guard` until it ends.
    pub(super) fn start(
        log: Log,
        keep: Option<SignedDuration>,
        metrics: OutboxMetrics,
        guard: impl Send + 'static,
    ) -> std::io::Result<Self> {
        metrics.set(&log.status());
        let (status_sender, status) = watch::channel(log.status());
        let mut worker = Worker {
            log,
            keep,
            status: status_sender,
            metrics,
        };
        let work = move |group| worker.run(group);
        Ok(Self {
            thread: GroupThread::start("outbox", MAX_WAITING_EVENTS, work, guard)?,
            status,
        })
    }

    pub(super) fn status(&self) -> watch::Receiver<OutboxStatus> {
        self.status.clone()
    }

    pub(super) async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, OutboxError> {
        let size = events.len();
        let request = |reply| Request::Append { events, reply };
        let answer = self.thread.call(size, request).await;
        answer.unwrap_or(Err(OutboxError::Closed))
    }

    /// Runs `work` on the log in the thread, and returns the outcome.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Log) -> Result<T, OutboxError> + Send + 'static,
    ) -> Result<T, OutboxError> {
        let request = |reply: Reply<T>| {
            Request::Other(Box::new(move |log| {
                let outcome = work(log);
                // A receiver that is gone has given up; the work is done all the same.
                Box::new(move || drop(reply.send(outcome)))
            }))
        };
        let answer = self.thread.call(0, request).await;
        answer.unwrap_or(Err(OutboxError::Closed))
    }

    /// Accepts no further call, and waits until those in progress are answered and the thread
    /// has released the files.
    pub(super) async fn close(&self) {
        self.thread.close().await;
    }
}

// === impl Worker ===

impl Worker {
    fn run(&mut self, group: Vec<Request>) {
        if let Some(keep) = self.keep {
            let since = Timestamp::now().checked_sub(keep);
            self.log.keep_since(since.unwrap_or(Timestamp::MIN));
        }
        let (mut appends, mut answers) = (Vec::new(), Vec::new());
        for request in group {
            match request {
                Request::Append { events, reply } => appends.push((reply, events)),
                Request::Other(work) => answers.push(work(&mut self.log)),
            }
        }
        let staged: Vec<_> = appends
            .into_iter()
            .map(|(reply, events)| (reply, self.log.stage(&events)))
            .collect();
        let waiting_before = self.log.staged_from();
        let committed = self.log.commit();
        // Updated before the callers are answered, so that a caller finds its own event
        // announced.
        let status = self.log.status();
        self.metrics.set(&status);
        self.status.send_replace(status);
        for answer in answers {
            answer();
        }
        for (reply, staged) in staged {
            let _ = reply.send(match (&committed, staged) {
                (Err(error), Ok(answers))
                    if answers.iter().any(|one| one.seq >= waiting_before.into()) =>
                {
                    Err(error.clone())
                }
                (_, staged) => staged,
            });
        }
    }
}
