//! Warnings in the answers of the API server: unknown fields, deprecated versions, admission
//! policies.
//!
//! The API server drops a field that it does not know, and the request succeeds. It checks every
//! request for such fields by default (`fieldValidation=Warn`). `Strict` would find the same
//! ones, but fail a quarantine because an older API server lacks a field.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http::HeaderMap;
use http::header::WARNING;
use tokio::time::Instant;

use crate::layer::MESSAGE_CHARS;

/// Pause before the same warning is logged again, as every request of its kind repeats it.
const AGAIN: Duration = Duration::from_secs(60 * 60);
/// Most warnings logged within [`AGAIN`], as an admission policy can word each one differently.
const MOST: usize = 20;

/// Counter of warnings, and those that were logged.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    count: AtomicU64,
    /// Warnings logged within [`AGAIN`], oldest first.
    logged: Mutex<VecDeque<(String, Instant)>>,
}

// === impl Warnings ===

impl Warnings {
    /// Returns the number of warnings since the start.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Counts and logs the warnings in the headers of an answer.
    pub(crate) fn read(&self, method: &http::Method, path: &str, headers: &HeaderMap) {
        for value in headers.get_all(WARNING) {
            self.count.fetch_add(1, Ordering::Relaxed);
            let warning = text(&String::from_utf8_lossy(value.as_bytes()));
            if self.is_new(&warning) {
                // Tests of the product fail if this line is logged (testkit).
                tracing::warn!(%method, path, warning, "the API server warns of a request");
            }
        }
    }

    /// Returns true if a warning is to be logged, and records it as logged.
    fn is_new(&self, warning: &str) -> bool {
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

/// Returns the text of a warning without its code and agent (`299 -`).
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
    use crate::fake::{self, FakeAnswer};

    #[tokio::test]
    async fn a_warning_is_counted_with_every_answer() {
        let answers = vec![
            FakeAnswer::Warned(200, r#"299 - "unknown field \"spec.x\"""#),
            FakeAnswer::Warned(409, r#"299 - "unknown field \"spec.x\"""#),
            FakeAnswer::Now(200, fake::node("n", 2).to_string()),
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
            // The result of the request does not matter here.
            drop(cluster.apply(&view, &change).await);
            assert_eq!(cluster.requests().warned, warned);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_warning_is_logged_once_an_hour_and_not_many() {
        let warnings = Warnings::default();
        assert!(warnings.is_new("a"));
        assert!(!warnings.is_new("a"));
        assert_eq!(
            (0..100)
                .filter(|one| warnings.is_new(&one.to_string()))
                .count(),
            MOST - 1
        );
        tokio::time::advance(AGAIN).await;
        assert!(warnings.is_new("a"));
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
