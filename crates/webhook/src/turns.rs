//! Turns of questions: how many are answered at a time, by the memory that they take, and on which threads.
//!
//! A question about an ordinary pod is answered where it came in, beside many others. Large ones, which anybody may
//! ask who may create a pod, are answered one after the other on a thread of their own, so that they wait for each
//! other and no ordinary one for them.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::review::Unanswered;

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
}

/// The turn of a question, until it is dropped and nothing is worked on in it.
#[derive(Clone)]
pub(crate) struct Turn {
    permit: Arc<OwnedSemaphorePermit>,
    is_large: bool,
}

// === impl Turns ===

impl Default for Turns {
    fn default() -> Self {
        Self {
            ordinary: Arc::new(Semaphore::new(ORDINARY / UNIT)),
            large: Arc::new(Semaphore::new(1)),
        }
    }
}

impl Turns {
    /// Returns the turn of a question when it has come. It is in order, and an ordinary question waits only for
    /// ordinary ones.
    pub(crate) async fn take(&self, text: &[u8]) -> Result<Turn, Unanswered> {
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
        let permit = Arc::clone(turns).acquire_many_owned(units).await;
        Ok(Turn {
            permit: Arc::new(permit.map_err(|_| Unanswered::Failed)?),
            is_large,
        })
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
        let permit = Arc::clone(&self.permit);
        let working = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(permit);
            done
        });
        working.await.map_err(|error| {
            tracing::error!(%error, "the work for a question ended");
            Unanswered::Failed
        })
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

    #[tokio::test]
    async fn an_ordinary_question_waits_for_no_large_one() {
        let turns = Turns::default();
        let large = objects(10_000);
        let first = turns.take(&large).await.expect("a turn");
        assert!(turns.take(&large).now_or_never().is_none(), "one at a time");
        let ordinary = turns.take(&objects(100)).now_or_never();
        let ordinary = ordinary.expect("no wait").expect("a turn");
        assert!(first.is_large && !ordinary.is_large);
        drop(first);
        assert!(turns.take(&large).now_or_never().is_some());
        let huge = turns.take(&objects(200_000)).await;
        assert!(matches!(huge, Err(Unanswered::TooLarge)));
    }

    #[tokio::test]
    async fn the_work_for_a_large_question_holds_up_nobody_and_keeps_its_turn() {
        let turns = Turns::default();
        let large = objects(10_000);
        let turn = turns.take(&large).await.expect("a turn");
        let (go_on, waits) = std::sync::mpsc::channel::<()>();
        // This test has one thread: it would wait for itself.
        let working = turn.work(move || waits.recv());
        let mut working = Box::pin(working);
        assert!(working.as_mut().now_or_never().is_none());
        // Whoever asked is gone, and the work is not.
        drop(working);
        drop(turn);
        assert!(turns.take(&large).now_or_never().is_none());
        drop(go_on);
        turns.take(&large).await.expect("a turn, once it is done");
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
