//! The one thread that reads and writes the outbox's files.
//!
//! It writes all that waits ([`GroupThread`]) in one go and answers when it is on disk. What
//! is delivered is noted first, for it makes room.

use jiff::{SignedDuration, Timestamp};
use runtime::logging::chain;
use store::{Appended, GroupThread, NewEvent};
use tokio::sync::{oneshot, watch};

use super::log::Log;
use super::metrics::OutboxMetrics;
use super::{OutboxError, Status, Waiting};

/// Events that wait with their calls: what bounds the memory.
const MAX_WAITING_EVENTS: usize = 2 * domain::event::MAX_EVENTS;

/// The way to the thread.
#[derive(Debug)]
pub(super) struct Thread {
    thread: GroupThread<Request>,
    status: watch::Receiver<Status>,
}

type Reply<T> = oneshot::Sender<Result<T, OutboxError>>;

enum Request {
    Append {
        events: Vec<NewEvent>,
        reply: Reply<Vec<Appended>>,
    },
    Read {
        after: u64,
        events: usize,
        bytes: u64,
        reply: Reply<Vec<Waiting>>,
    },
    Delivered {
        position: u64,
        reply: Reply<()>,
    },
    PutAside {
        events: Vec<(NewEvent, String)>,
        reply: Reply<()>,
    },
    TurnTo {
        store: String,
        reply: Reply<usize>,
    },
}

/// What runs in the thread.
struct Worker {
    log: Log,
    /// How long what is delivered is kept.
    keep: Option<SignedDuration>,
    status: watch::Sender<Status>,
    metrics: OutboxMetrics,
}

// === impl Thread ===

impl Thread {
    /// Starts the thread. It owns `log` and `guard` until it ends.
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

    pub(super) fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    pub(super) async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, OutboxError> {
        let size = events.len();
        self.call(size, |reply| Request::Append { events, reply })
            .await
    }

    pub(super) async fn read(
        &self,
        after: u64,
        events: usize,
        bytes: u64,
    ) -> Result<Vec<Waiting>, OutboxError> {
        self.call(0, |reply| Request::Read {
            after,
            events,
            bytes,
            reply,
        })
        .await
    }

    pub(super) async fn delivered(&self, position: u64) -> Result<(), OutboxError> {
        self.call(0, |reply| Request::Delivered { position, reply })
            .await
    }

    pub(super) async fn put_aside(
        &self,
        events: Vec<(NewEvent, String)>,
    ) -> Result<(), OutboxError> {
        self.call(0, |reply| Request::PutAside { events, reply })
            .await
    }

    pub(super) async fn turn_to(&self, store: String) -> Result<usize, OutboxError> {
        self.call(0, |reply| Request::TurnTo { store, reply }).await
    }

    /// Asks the thread and waits for its answer. `events` is how many the request brings.
    async fn call<T>(
        &self,
        events: usize,
        request: impl FnOnce(Reply<T>) -> Request,
    ) -> Result<T, OutboxError> {
        let answer = self.thread.call(events, request).await;
        answer.unwrap_or(Err(OutboxError::Closed))
    }

    /// Takes no further call, and waits until those under way are answered and the
    /// thread has let go of the files.
    pub(super) async fn close(&self) {
        self.thread.close().await;
    }
}

// === impl Worker ===

impl Worker {
    fn run(&mut self, group: Vec<Request>) {
        let (mut appends, mut reads, mut notes) = (Vec::new(), Vec::new(), Vec::new());
        let (mut asides, mut turns) = (Vec::new(), Vec::new());
        let mut delivered = 0;
        for request in group {
            match request {
                Request::Append { events, reply } => appends.push((reply, events)),
                Request::Delivered { position, reply } => {
                    delivered = delivered.max(position);
                    notes.push(reply);
                }
                Request::PutAside { events, reply } => {
                    asides.push((reply, self.log.put_aside(&events)));
                }
                Request::TurnTo { store, reply } => turns.push((reply, store)),
                read @ Request::Read { .. } => reads.push(read),
            }
        }
        if !notes.is_empty() {
            self.log.delivered(delivered);
        }
        if let Some(keep) = self.keep {
            let since = Timestamp::now().checked_sub(keep);
            self.log.keep_since(since.unwrap_or(Timestamp::MIN));
        }
        // Behind what was delivered to the store before.
        let turns: Vec<_> = turns
            .into_iter()
            .map(|(reply, store)| (reply, self.log.turn_to(store)))
            .collect();
        let staged: Vec<_> = appends
            .into_iter()
            .map(|(reply, events)| (reply, self.log.stage(&events)))
            .collect();
        let waiting_before = self.log.staged_from();
        let committed = self.log.commit();
        if let Err(error) = &committed {
            tracing::error!(err = %chain(error), "the outbox took no events");
        }
        // Before the callers are answered: who has appended an event finds it announced.
        let status = self.log.status();
        self.metrics.set(&status);
        self.status.send_replace(status);

        for (reply, kept) in asides {
            // A caller that no longer listens has given up; it is done.
            let _ = reply.send(kept);
        }
        for (reply, again) in turns {
            let _ = reply.send(Ok(again));
        }
        for reply in notes {
            let _ = reply.send(Ok(()));
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
        for read in reads {
            if let Request::Read {
                after,
                events,
                bytes,
                reply,
            } = read
            {
                let _ = reply.send(self.log.read(after, events, bytes));
            }
        }
    }
}
