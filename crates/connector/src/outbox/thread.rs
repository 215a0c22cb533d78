//! The one thread that reads and writes the outbox's files.
//!
//! It takes all that waits, writes it in one go and answers when it is on disk: while one
//! group is being synchronised the next one gathers. What is delivered is noted first, for
//! it makes room.

use std::sync::{Arc, PoisonError, RwLock};
use std::thread;

use jiff::{SignedDuration, Timestamp};
use runtime::logging::chain;
use store::{Appended, NewEvent};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::log::Log;
use super::metrics::OutboxMetrics;
use super::{OutboxError, Status, Waiting};

/// Calls that wait; more wait in their own tasks.
const MAX_WAITING: usize = 1024;
/// Events that wait with them: what bounds the memory.
const MAX_WAITING_EVENTS: usize = 2 * domain::event::MAX_EVENTS;
/// Most calls in a group.
const MAX_GROUP: usize = 256;
/// A group that has as many events takes no further call.
const MAX_GROUP_EVENTS: usize = 4096;

/// The way to the thread.
#[derive(Debug)]
pub(super) struct Thread {
    sender: RwLock<Option<mpsc::Sender<Request>>>,
    room: Arc<Semaphore>,
    status: watch::Receiver<Status>,
    /// Closed when the thread has let go of everything.
    ended: watch::Receiver<()>,
}

type Reply<T> = oneshot::Sender<Result<T, OutboxError>>;

enum Request {
    Append(Append),
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

struct Append {
    events: Vec<NewEvent>,
    reply: Reply<Vec<Appended>>,
    room: OwnedSemaphorePermit,
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
        let (sender, mut receiver) = mpsc::channel::<Request>(MAX_WAITING);
        metrics.set(&log.status());
        let (status_sender, status) = watch::channel(log.status());
        let (end, ended) = watch::channel(());
        let mut worker = Worker {
            log,
            keep,
            status: status_sender,
            metrics,
        };
        thread::Builder::new()
            .name("outbox".to_owned())
            .spawn(move || {
                while let Some(first) = receiver.blocking_recv() {
                    let mut size = first.size();
                    let mut group = vec![first];
                    while group.len() < MAX_GROUP
                        && size < MAX_GROUP_EVENTS
                        && let Ok(next) = receiver.try_recv()
                    {
                        size += next.size();
                        group.push(next);
                    }
                    worker.run(group);
                }
                // In this order: whoever sees the end can open the outbox again.
                drop(worker);
                drop(guard);
                drop(end);
            })?;
        Ok(Self {
            sender: RwLock::new(Some(sender)),
            room: Arc::new(Semaphore::new(MAX_WAITING_EVENTS)),
            status,
            ended,
        })
    }

    pub(super) fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    pub(super) async fn append(&self, events: Vec<NewEvent>) -> Result<Vec<Appended>, OutboxError> {
        let permits = events.len().clamp(1, MAX_WAITING_EVENTS);
        let permits = u32::try_from(permits).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.room).acquire_many_owned(permits).await;
        let room = room.map_err(|_| OutboxError::Closed)?;
        self.call(|reply| {
            Request::Append(Append {
                events,
                reply,
                room,
            })
        })
        .await
    }

    pub(super) async fn read(
        &self,
        after: u64,
        events: usize,
        bytes: u64,
    ) -> Result<Vec<Waiting>, OutboxError> {
        self.call(|reply| Request::Read {
            after,
            events,
            bytes,
            reply,
        })
        .await
    }

    pub(super) async fn delivered(&self, position: u64) -> Result<(), OutboxError> {
        self.call(|reply| Request::Delivered { position, reply })
            .await
    }

    pub(super) async fn put_aside(
        &self,
        events: Vec<(NewEvent, String)>,
    ) -> Result<(), OutboxError> {
        self.call(|reply| Request::PutAside { events, reply }).await
    }

    pub(super) async fn turn_to(&self, store: String) -> Result<usize, OutboxError> {
        self.call(|reply| Request::TurnTo { store, reply }).await
    }

    async fn call<T>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Result<T, OutboxError> {
        let sender = self
            .sender
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let sender = sender.ok_or(OutboxError::Closed)?;
        let (reply, answer) = oneshot::channel();
        let sent = sender.send(request(reply)).await;
        sent.map_err(|_| OutboxError::Closed)?;
        answer.await.unwrap_or(Err(OutboxError::Closed))
    }

    /// Takes no further call, and waits until those under way are answered and the
    /// thread has let go of the files.
    pub(super) async fn close(&self) {
        drop(
            self.sender
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        let mut ended = self.ended.clone();
        while ended.changed().await.is_ok() {}
    }
}

// === impl Request ===

impl Request {
    /// How many events it brings.
    fn size(&self) -> usize {
        match self {
            Self::Append(append) => append.events.len(),
            Self::Read { .. }
            | Self::Delivered { .. }
            | Self::PutAside { .. }
            | Self::TurnTo { .. } => 0,
        }
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
                Request::Append(append) => appends.push(append),
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
            .map(|append| (append.reply, self.log.stage(&append.events), append.room))
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
        for (reply, staged, _room) in staged {
            let _ = reply.send(match (&committed, staged) {
                (Err(error), Ok(answers))
                    if answers.iter().any(|one| one.seq >= waiting_before) =>
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
