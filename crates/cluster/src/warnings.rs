//! The warnings of the API server: a field that it does not know, a version that goes, what admission says.
//!
//! A field that it does not know is left out, and the request succeeds all the same. Every request of ours is
//! checked so without being asked for (`fieldValidation=Warn` is the API server's default): `Strict` would
//! find the same, and refuse a quarantine because an older API server lacks a field.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http::HeaderMap;
use http::header::WARNING;
use tokio::time::Instant;

use crate::layer::MESSAGE_CHARS;

/// The time for which a warning that was logged is not logged again: it comes with each request of its kind.
const AGAIN: Duration = Duration::from_secs(60 * 60);
/// Most warnings that are logged within that time: a policy of admission can word each one differently.
const MOST: usize = 20;

/// The warnings so far.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    count: AtomicU64,
    /// Those that were logged last, oldest first.
    logged: Mutex<VecDeque<(String, Instant)>>,
}

// === impl Warnings ===

impl Warnings {
    /// Returns how many there were.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Counts and logs the warnings in the head of an answer.
    pub(crate) fn read(&self, method: &http::Method, path: &str, headers: &HeaderMap) {
        for value in headers.get_all(WARNING) {
            self.count.fetch_add(1, Ordering::Relaxed);
            let warning = text(&String::from_utf8_lossy(value.as_bytes()));
            if self.is_news(&warning) {
                // The tests of the product fail where it logs this (testkit).
                tracing::warn!(%method, path, warning, "the API server warns of a request");
            }
        }
    }

    /// Returns whether this one is to be logged, and notes that it is.
    fn is_news(&self, warning: &str) -> bool {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        while logged.front().is_some_and(|(_, at)| at.elapsed() >= AGAIN) {
            logged.pop_front();
        }
        if logged.len() >= MOST || logged.iter().any(|(known, _)| known == warning) {
            return false;
        }
        logged.push_back((warning.to_owned(), Instant::now()));
        true
    }
}

/// Returns the text of a warning without its code and agent, which are `299 -`.
fn text(warning: &str) -> String {
    let quoted = warning.split_once('"').map_or(warning, |(_, rest)| rest);
    let quoted = quoted.strip_suffix('"').unwrap_or(quoted);
    quoted
        .replace("\\\"", "\"")
        .chars()
        .take(MESSAGE_CHARS)
        .collect()
}

#[cfg(test)]
mod tests {
    use model::node::{NodeChange, NodeView};

    use super::*;
    use crate::fake::{self, Answer};

    #[tokio::test]
    async fn a_warning_is_counted_with_every_answer() {
        let answers = vec![
            Answer::Warned(200, r#"299 - "unknown field \"spec.x\"""#),
            Answer::Warned(409, r#"299 - "unknown field \"spec.x\"""#),
            Answer::Now(200, fake::node("n", 2).to_string()),
        ];
        let (cluster, _requests) = fake::serve(answers).await;
        let (view, change) = (
            NodeView::unknown("n"),
            NodeChange {
                unschedulable: Some(true),
                ..NodeChange::default()
            },
        );
        for warned in [1, 2, 2] {
            // What the answer says beside that is another matter.
            drop(cluster.apply(&view, &change).await);
            assert_eq!(cluster.requests().warned, warned);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_warning_is_logged_once_an_hour_and_not_many() {
        let warnings = Warnings::default();
        assert!(warnings.is_news("a"));
        assert!(!warnings.is_news("a"));
        assert_eq!(
            (0..100)
                .filter(|one| warnings.is_news(&one.to_string()))
                .count(),
            MOST - 1
        );
        tokio::time::advance(AGAIN).await;
        assert!(warnings.is_news("a"));
    }

    #[test]
    fn the_text_of_a_warning_is_what_is_quoted() {
        assert_eq!(
            text(r#"299 - "unknown field \"spec.x\"""#),
            r#"unknown field "spec.x""#
        );
        assert_eq!(text("oh"), "oh");
        assert_eq!(text(&"x".repeat(10_000)).len(), MESSAGE_CHARS);
    }
}
