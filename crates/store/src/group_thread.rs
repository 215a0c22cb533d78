//! Group commit: one thread owns the file and executes, in one batch, all calls that queued up
//! while the previous batch was synced to disk. Throughput is therefore not bound by the number
//! of syncs per second.
//!
//! Used by the embedded event store (`sqlite/writer.rs`) and by the connector's outbox.

use std::sync::{Arc, PoisonError, RwLock};
use std::{fmt, io, thread};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

/// Most queued calls; further callers wait in their own tasks.
const MAX_WAITING: usize = 1024;
/// Most calls in a group.
const MAX_GROUP: usize = 256;
/// Total size of the calls in a group that closes the group to further calls.
const MAX_GROUP_SIZE: usize = 4096;

/// Handle to a thread that executes calls in groups.
pub struct GroupThread<R> {
    sender: RwLock<Option<mpsc::Sender<WaitingCall<R>>>>,
    room: Arc<Semaphore>,
    max_size: usize,
    /// Closed when the thread has released everything it owned.
    ended: watch::Receiver<()>,
}

/// Queued call, with its share of the size limit.
struct WaitingCall<R> {
    request: R,
    size: usize,
    room: OwnedSemaphorePermit,
}

// === impl GroupThread ===

impl<R: Send + 'static> GroupThread<R> {
    /// Starts the thread. Each group is passed to `work`, in the order of the calls. When the
    /// thread ends, it drops `work` first and `guard` last.
    ///
    /// `max_size` bounds the total size of the calls that are queued or executing, and so the
    /// memory.
    pub fn start(
        name: &str,
        max_size: usize,
        mut work: impl FnMut(Vec<R>) + Send + 'static,
        guard: impl Send + 'static,
    ) -> io::Result<Self> {
        let (sender, mut receiver) = mpsc::channel::<WaitingCall<R>>(MAX_WAITING);
        let (end, ended) = watch::channel(());
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                while let Some(first) = receiver.blocking_recv() {
                    let mut size = first.size;
                    let mut group = vec![first.request];
                    let mut room = vec![first.room];
                    while group.len() < MAX_GROUP
                        && size < MAX_GROUP_SIZE
                        && let Ok(next) = receiver.try_recv()
                    {
                        size += next.size;
                        group.push(next.request);
                        room.push(next.room);
                    }
                    work(group);
                }
                // The order matters: a caller that observes the end may open the files again.
                drop(work);
                drop(guard);
                drop(end);
            })?;
        Ok(Self {
            sender: RwLock::new(Some(sender)),
            room: Arc::new(Semaphore::new(max_size)),
            max_size,
            ended,
        })
    }

    /// Sends a request, which gets the channel for its answer, and waits for the answer.
    /// Returns `None` if the thread has ended or is closing.
    ///
    /// `size` is the size of the request, such as its number of rows. Size 0 waits for no room.
    pub async fn call<T>(
        &self,
        size: usize,
        request: impl FnOnce(oneshot::Sender<T>) -> R,
    ) -> Option<T> {
        let sender = self
            .sender
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()?;
        let permits = u32::try_from(size.min(self.max_size)).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.room).acquire_many_owned(permits);
        let room = room.await.ok()?;
        let (reply, answer) = oneshot::channel();
        let request = request(reply);
        let waiting = WaitingCall {
            request,
            size,
            room,
        };
        sender.send(waiting).await.ok()?;
        answer.await.ok()
    }

    /// Accepts no further call, and waits until all calls in progress are answered and the
    /// thread has released everything it owned.
    pub async fn close(&self) {
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

impl<R> fmt::Debug for GroupThread<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupThread")
            .field("room", &self.room.available_permits())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc as blocking;

    use tokio::task::{JoinHandle, yield_now};

    use super::*;

    type Reply = oneshot::Sender<()>;

    /// Thread that reports the size of each group, and answers a group's calls on demand.
    struct Bench {
        thread: Arc<GroupThread<Reply>>,
        groups: blocking::Receiver<usize>,
        go: blocking::Sender<()>,
    }

    impl Bench {
        fn new(max_size: usize) -> Self {
            let (sizes, groups) = blocking::channel();
            let (go, gate) = blocking::channel();
            let work = move |group: Vec<Reply>| {
                sizes.send(group.len()).unwrap();
                gate.recv().unwrap();
                for reply in group {
                    reply.send(()).unwrap();
                }
            };
            let thread = GroupThread::start("test", max_size, work, ()).unwrap();
            Self {
                thread: Arc::new(thread),
                groups,
                go,
            }
        }

        /// Makes calls; all of them are sent, or wait for room, when this returns.
        async fn call(&self, calls: usize, size: usize) -> Vec<JoinHandle<Option<()>>> {
            let begun = Arc::new(AtomicUsize::new(0));
            let call = |_| {
                let (thread, begun) = (Arc::clone(&self.thread), Arc::clone(&begun));
                tokio::spawn(async move {
                    begun.fetch_add(1, Ordering::Relaxed);
                    thread.call(size, |reply| reply).await
                })
            };
            let handles = (0..calls).map(call).collect();
            while begun.load(Ordering::Relaxed) < calls {
                yield_now().await;
            }
            handles
        }

        fn group(&self) -> usize {
            self.groups.recv().unwrap()
        }
    }

    async fn answered(calls: Vec<JoinHandle<Option<()>>>) {
        for call in calls {
            assert_eq!(call.await.unwrap(), Some(()));
        }
    }

    #[tokio::test]
    async fn what_gathers_makes_one_group_up_to_the_limits() {
        let bench = Bench::new(100_000);
        let mut calls = bench.call(1, 1).await;
        assert_eq!(bench.group(), 1);
        calls.extend(bench.call(MAX_GROUP + 3, 1).await);
        calls.extend(bench.call(3, MAX_GROUP_SIZE - 2).await);
        // 256 of the small ones; the other 3 and one large one; the remaining two large ones.
        for group in [MAX_GROUP, 4, 2] {
            bench.go.send(()).unwrap();
            assert_eq!(bench.group(), group);
        }
        bench.go.send(()).unwrap();
        answered(calls).await;
    }

    #[tokio::test]
    async fn what_has_no_room_waits_until_a_group_is_done() {
        let bench = Bench::new(10);
        let first = bench.call(1, 8).await;
        assert_eq!(bench.group(), 1);
        let large = bench.call(1, 1_000).await;
        let none = bench.call(2, 0).await;
        for group in [2, 1] {
            bench.go.send(()).unwrap();
            assert_eq!(bench.group(), group);
            yield_now().await;
        }
        bench.go.send(()).unwrap();
        for calls in [first, large, none] {
            answered(calls).await;
        }
        bench.thread.close().await;
        assert_eq!(bench.thread.room.available_permits(), 10);
    }

    /// Reports its name when dropped.
    struct Drops(&'static str, blocking::Sender<&'static str>);

    impl Drop for Drops {
        fn drop(&mut self) {
            self.1.send(self.0).unwrap();
        }
    }

    #[tokio::test]
    async fn closing_answers_what_is_under_way_and_lets_go_in_order() {
        let (steps, received) = blocking::channel();
        let owned = Drops("work", steps.clone());
        let work = move |group: Vec<Reply>| {
            owned.1.send("answer").unwrap();
            for reply in group {
                reply.send(()).unwrap();
            }
        };
        let guard = Drops("guard", steps);
        let thread = Arc::new(GroupThread::start("test", 10, work, guard).unwrap());
        let call = tokio::spawn({
            let thread = Arc::clone(&thread);
            async move { thread.call(1, |reply| reply).await }
        });
        yield_now().await;
        thread.close().await;
        assert!(received.try_iter().eq(["answer", "work", "guard"]));
        assert_eq!(call.await.unwrap(), Some(()));
        assert_eq!(thread.call(1, |reply: Reply| reply).await, None);
        thread.close().await;
    }

    #[tokio::test]
    async fn a_thread_that_fails_answers_nobody_and_ends() {
        let work = |_: Vec<Reply>| panic!("no such index");
        let thread = GroupThread::start("test", 10, work, ()).unwrap();
        assert_eq!(thread.call(1, |reply| reply).await, None);
        thread.close().await;
        assert_eq!(thread.call(1, |reply| reply).await, None);
    }
}
