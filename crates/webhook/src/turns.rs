//! Turns: limits how many reviews are answered at a time, by the memory that they need, and
//! chooses the thread.
//!
//! A review of an ordinary pod is answered on the thread that received it, beside many others.
//! Large reviews, which anybody with permission to create pods can cause, are answered one by
//! one on a thread of their own, so that they delay each other but no ordinary review. Each
//! client address queues its own large reviews, and only the first of them competes for the
//! turn.
//!
//! A review holds a turn only while it is worked on. While it waits for the cluster, only its
//! text is kept.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use futures::FutureExt as _;
use runtime::http_server::{Peer, ReadBody};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::review::{Review, Unanswered};

/// Memory of a JSON object beside its text, in bytes: a B-tree node with room for eleven
/// fields.
const OBJECT_BYTES: usize = 640;
/// Memory of each further element or field, in bytes: a value and possibly its own text.
const ELEMENT_BYTES: usize = 100;
/// Largest memory of an ordinary review in bytes: two hundred times the text of a usual pod,
/// and a few milliseconds of work.
const MAX_ORDINARY: usize = 1024 * 1024;
/// Most memory of all ordinary reviews in bytes.
const ORDINARY: usize = 32 * 1024 * 1024;
/// Largest memory of a large review in bytes: above that of a 1 MB pod that consists of the
/// smallest possible volumes and mounts.
const MAX_LARGE: usize = 96 * 1024 * 1024;
/// Unit of the semaphore for ordinary reviews, in bytes.
const UNIT: usize = 1024;

/// Turns of all reviews. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Turns {
    ordinary: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// Queues of the clients with large reviews.
    lines: Arc<Mutex<HashMap<Peer, Weak<Semaphore>>>>,
}

/// Turn of a review. It ends when all clones are dropped and no work is running in it.
#[derive(Clone)]
pub(crate) struct Turn {
    /// Permit of the turn, and of the client's queue.
    permits: Arc<(OwnedSemaphorePermit, Option<OwnedSemaphorePermit>)>,
    is_large: bool,
}

/// Work on a review, in one or more turns.
pub(crate) struct Work {
    turns: Turns,
    text: Arc<ReadBody>,
    /// Turn and parsed review; `None` while the review has no turn.
    held: Option<(Turn, Review)>,
}

// === impl Turns ===

impl Default for Turns {
    fn default() -> Self {
        Self {
            ordinary: Arc::new(Semaphore::new(ORDINARY / UNIT)),
            large: Arc::new(Semaphore::new(1)),
            lines: Arc::default(),
        }
    }
}

impl Turns {
    /// Waits for the turn of a review. Turns are fair; large reviews alternate between clients,
    /// and ordinary ones wait only for ordinary ones.
    pub(crate) async fn take(&self, peer: Peer, text: &[u8]) -> Result<Turn, Unanswered> {
        let memory = memory(text);
        let is_large = memory > MAX_ORDINARY;
        let (turns, units) = if is_large {
            (&self.large, 1)
        } else {
            (&self.ordinary, memory / UNIT + 1)
        };
        if memory > MAX_LARGE {
            return Err(Unanswered::TooLarge);
        }
        let units = u32::try_from(units).map_err(|_| Unanswered::TooLarge)?;
        let mut first = None;
        if is_large {
            let in_line = self.line(peer).acquire_owned().await;
            first = Some(in_line.map_err(|_| Unanswered::Failed)?);
        }
        let permit = Arc::clone(turns).acquire_many_owned(units).await;
        let permit = permit.map_err(|_| Unanswered::Failed)?;
        Ok(Turn {
            permits: Arc::new((permit, first)),
            is_large,
        })
    }

    /// Returns the queue for large reviews of a client.
    fn line(&self, peer: Peer) -> Arc<Semaphore> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = lines.get(&peer).and_then(Weak::upgrade) {
            return line;
        }
        lines.retain(|_, line| line.strong_count() > 0);
        let line = Arc::new(Semaphore::new(1));
        lines.insert(peer, Arc::downgrade(&line));
        line
    }
}

// === impl Turn ===

impl Turn {
    /// Runs a part of the work. The turn lasts until it is done, even if the caller stops
    /// waiting.
    pub(crate) async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        if !self.is_large {
            return Ok(work());
        }
        let permits = Arc::clone(&self.permits);
        let working = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(permits);
            done
        });
        working.await.map_err(|error| {
            tracing::error!(%error, "processing a review failed");
            Unanswered::Failed
        })
    }
}

// === impl Work ===

impl Work {
    /// Creates the work on a review that has had no turn yet.
    pub(crate) fn new(turns: &Turns, text: ReadBody) -> Self {
        Self {
            turns: turns.clone(),
            text: Arc::new(text),
            held: None,
        }
    }

    /// Runs a part of the work in a turn.
    pub(crate) async fn part<T: Send + 'static>(
        &mut self,
        part: impl FnOnce(&Review) -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        let (turn, review) = self.in_turn().await?;
        let working = turn.work(move || {
            let done = part(&review);
            (done, review)
        });
        let (done, review) = working.await?;
        self.held = Some((turn, review));
        Ok(done)
    }

    /// Runs the last part. The memory of the review is freed on the thread of its turn.
    pub(crate) async fn last<T: Send + 'static>(
        mut self,
        part: impl FnOnce(&Review) -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        let (turn, review) = self.in_turn().await?;
        turn.work(move || part(&review)).await
    }

    /// Waits for facts from the cluster. Unless they are available at once, the turn and the
    /// parsed review are released meanwhile, so that other reviews do not wait.
    pub(crate) async fn meanwhile<T>(
        &mut self,
        facts: impl Future<Output = T>,
    ) -> Result<T, Unanswered> {
        let mut facts = pin!(facts);
        if let Some(facts) = facts.as_mut().now_or_never() {
            return Ok(facts);
        }
        if let Some((turn, review)) = self.held.take() {
            turn.work(move || drop(review)).await?;
        }
        Ok(facts.await)
    }

    /// Returns the turn, waiting for it if needed, and the parsed review.
    async fn in_turn(&mut self) -> Result<(Turn, Review), Unanswered> {
        if let Some(held) = self.held.take() {
            return Ok(held);
        }
        let turn = self.turns.take(self.text.peer(), &self.text).await?;
        let text = Arc::clone(&self.text);
        let review = turn.work(move || Review::parse(&text)).await??;
        Ok((turn, review))
    }
}

/// Returns an upper bound for the memory needed to answer a review, estimated from its text.
pub(crate) fn memory(text: &[u8]) -> usize {
    let (mut objects, mut elements) = (0, 0);
    let next = text.iter().skip(1).chain([&0]);
    for (byte, next) in text.iter().zip(next) {
        // An empty object allocates nothing.
        objects += usize::from(*byte == b'{' && *next != b'}');
        elements += usize::from(*byte == b',');
    }
    text.len() + objects * OBJECT_BYTES + elements * ELEMENT_BYTES
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn objects(count: usize) -> Vec<u8> {
        format!("[{}]", vec![r#"{"name":"v"}"#; count].join(",")).into_bytes()
    }

    fn peer(number: u8) -> Peer {
        Peer::of([10, 0, 0, number].into())
    }

    #[tokio::test]
    async fn who_asks_many_large_questions_waits_for_itself() {
        let turns = Turns::default();
        let large = objects(10_000);
        let first = turns.take(peer(1), &large).await.expect("a turn");
        let mut second = Box::pin(turns.take(peer(1), &large));
        let mut third = Box::pin(turns.take(peer(1), &large));
        let mut other = Box::pin(turns.take(peer(2), &large));
        for waiting in [&mut second, &mut third, &mut other] {
            assert!(waiting.as_mut().now_or_never().is_none(), "one at a time");
        }
        drop(first);
        assert!(second.as_mut().now_or_never().is_none());
        let other = other.now_or_never().expect("its turn, though it came last");
        assert!(third.as_mut().now_or_never().is_none());
        drop(other);
        let second = second.now_or_never().expect("its turn");
        drop(second);
        assert!(third.now_or_never().is_some());
        // Queues of clients without reviews are removed.
        drop(turns.take(peer(3), &large).await);
        assert_eq!(turns.lines.lock().expect("no panic elsewhere").len(), 1);
    }

    #[tokio::test]
    async fn an_ordinary_question_waits_for_no_large_one() {
        let turns = Turns::default();
        let large = objects(10_000);
        let first = turns.take(peer(1), &large).await.expect("a turn");
        assert!(
            turns.take(peer(1), &large).now_or_never().is_none(),
            "one at a time"
        );
        let ordinary = turns.take(peer(1), &objects(100)).now_or_never();
        let ordinary = ordinary.expect("no wait").expect("a turn");
        assert!(first.is_large && !ordinary.is_large);
        drop(first);
        assert!(turns.take(peer(1), &large).now_or_never().is_some());
        let huge = turns.take(peer(1), &objects(200_000)).await;
        assert!(matches!(huge, Err(Unanswered::TooLarge)));
    }

    #[tokio::test]
    async fn the_work_for_a_large_question_holds_up_nobody_and_keeps_its_turn() {
        let turns = Turns::default();
        let large = objects(10_000);
        let turn = turns.take(peer(1), &large).await.expect("a turn");
        let (go_on, waits) = std::sync::mpsc::channel::<()>();
        // The test has a single thread and would block itself.
        let working = turn.work(move || waits.recv());
        let mut working = Box::pin(working);
        assert!(working.as_mut().now_or_never().is_none());
        // The client is gone, but the work continues.
        drop(working);
        drop(turn);
        assert!(turns.take(peer(1), &large).now_or_never().is_none());
        drop(go_on);
        turns
            .take(peer(1), &large)
            .await
            .expect("a turn, once it is done");
    }

    #[test]
    fn memory_is_not_less_than_what_values_take() {
        // Smallest texts of the constructs that need most memory: a map of one field, and
        // elements of two bytes.
        for (text, at_least) in [
            (objects(1_000), 1_000 * (24 * 11 + 32 * 11)),
            (
                format!("[{}1]", "1,".repeat(1_000)).into_bytes(),
                1_000 * 32,
            ),
        ] {
            assert!(memory(&text) >= at_least);
        }
        assert_eq!(memory(br#"{"a":{},"b":[{}]}"#), 17 + 640 + 100);
    }
}
