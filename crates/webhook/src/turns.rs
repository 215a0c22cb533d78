//! Turns of questions: how many are answered at a time, by the memory that they take, and on which threads.
//!
//! A question about an ordinary pod is answered where it came in, beside many others. Large ones, which anybody may
//! ask who may create a pod, are answered one after the other on a thread of their own, so that they wait for each
//! other and no ordinary one for them. Who asks many large ones waits for itself: of each address the first in line
//! waits for the turn.
//!
//! A turn is for work. While a question waits for the cluster it has none, and only its text is kept.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use futures::FutureExt as _;
use runtime::http_server::{Peer, ReadBody};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::review::{Question, Unanswered};

/// Memory that an object of JSON takes beside its text (bytes): the node of a tree, with room for eleven fields.
const OBJECT_BYTES: usize = 640;
/// Memory that each further element or field takes: a value, and the text of its own that it may have.
const ELEMENT_BYTES: usize = 100;
/// Most memory of an ordinary question (bytes): two hundred times the text of a usual pod, and some milliseconds of
/// work at most.
const MAX_ORDINARY: usize = 1024 * 1024;
/// Most memory of all ordinary questions.
const ORDINARY: usize = 32 * 1024 * 1024;
/// Most memory of a large question: more than a pod of 1 MB takes whose volumes and mounts are as small as they can be.
const MAX_LARGE: usize = 96 * 1024 * 1024;
/// The unit in which ordinary questions share their memory (bytes).
const UNIT: usize = 1024;

/// The turns. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Turns {
    ordinary: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// The lines of those who ask large questions now.
    lines: Arc<Mutex<HashMap<Peer, Weak<Semaphore>>>>,
}

/// The turn of a question, until it is dropped and nothing is worked on in it.
#[derive(Clone)]
pub(crate) struct Turn {
    /// The turn itself, and the first place in a line.
    permits: Arc<(OwnedSemaphorePermit, Option<OwnedSemaphorePermit>)>,
    is_large: bool,
}

/// The work on a question, in one turn or several.
pub(crate) struct Work {
    turns: Turns,
    text: Arc<ReadBody>,
    /// The turn, and the question as it was read. `None`: it has no turn now.
    held: Option<(Turn, Question)>,
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
    /// Returns the turn of a question when it has come. It is in order, large ones by those who ask them, and an ordinary
    /// question waits only for ordinary ones.
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

    /// Returns the line in which the large questions of one address wait for each other.
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
    /// Does a part of the work for a question. The turn lasts until that is done, also where nobody waits for it.
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
            tracing::error!(%error, "the work for a question ended");
            Unanswered::Failed
        })
    }
}

// === impl Work ===

impl Work {
    /// Returns the work on a question that has had no turn yet.
    pub(crate) fn new(turns: &Turns, text: ReadBody) -> Self {
        Self {
            turns: turns.clone(),
            text: Arc::new(text),
            held: None,
        }
    }

    /// Does a part of the work in a turn.
    pub(crate) async fn part<T: Send + 'static>(
        &mut self,
        part: impl FnOnce(&Question) -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        let (turn, question) = self.in_turn().await?;
        let working = turn.work(move || {
            let done = part(&question);
            (done, question)
        });
        let (done, question) = working.await?;
        self.held = Some((turn, question));
        Ok(done)
    }

    /// Does the last part. What the question takes is let go of where that is done.
    pub(crate) async fn last<T: Send + 'static>(
        mut self,
        part: impl FnOnce(&Question) -> T + Send + 'static,
    ) -> Result<T, Unanswered> {
        let (turn, question) = self.in_turn().await?;
        turn.work(move || part(&question)).await
    }

    /// Waits for what the cluster says. Where it is not known yet, the turn is let go meanwhile, with all that it stands
    /// for: others do not wait for it.
    pub(crate) async fn meanwhile<T>(
        &mut self,
        said: impl Future<Output = T>,
    ) -> Result<T, Unanswered> {
        let mut said = pin!(said);
        if let Some(said) = said.as_mut().now_or_never() {
            return Ok(said);
        }
        if let Some((turn, question)) = self.held.take() {
            turn.work(move || drop(question)).await?;
        }
        Ok(said.await)
    }

    /// Returns the turn, when it has come, and the question.
    async fn in_turn(&mut self) -> Result<(Turn, Question), Unanswered> {
        if let Some(held) = self.held.take() {
            return Ok(held);
        }
        let turn = self.turns.take(self.text.peer(), &self.text).await?;
        let text = Arc::clone(&self.text);
        let question = turn.work(move || Question::parse(&text)).await??;
        Ok((turn, question))
    }
}

/// Returns how much memory a question takes at most while it is answered, by its text.
pub(crate) fn memory(text: &[u8]) -> usize {
    let (mut objects, mut elements) = (0, 0);
    let next = text.iter().skip(1).chain([&0]);
    for (byte, next) in text.iter().zip(next) {
        // An empty object takes none.
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
        // Of those who ask nothing any more, nothing is kept.
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
        // This test has one thread: it would wait for itself.
        let working = turn.work(move || waits.recv());
        let mut working = Box::pin(working);
        assert!(working.as_mut().now_or_never().is_none());
        // Whoever asked is gone, and the work is not.
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
        // The smallest texts of what takes most: a map of one field, and elements of two bytes.
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
