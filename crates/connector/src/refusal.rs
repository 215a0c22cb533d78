//! Events that are not taken: what the sender is told, and what the log says.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use domain::event::Problem;
use tokio::time::Instant;

use crate::Caller;

/// Most refused events that an error names one by one.
const NAMED: usize = 20;
/// Refusals are logged at most this often: who may write to the socket must not thereby
/// fill the log.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// An event of a batch that was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Its index in the batch.
    pub index: usize,
    /// What is wrong with it, and what to do.
    pub problem: Problem,
    /// Whether the event would be good from another sender.
    pub reason: Reason,
}

/// The kind of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The event is not valid.
    Invalid,
    /// The sender may not speak for the event's node.
    ForeignNode,
}

/// Refusals as text.
pub(super) struct List<'a>(pub(super) &'a [Refused]);

/// Logs refusals, and counts those that it does not log.
#[derive(Clone, Debug, Default)]
pub(super) struct RefusalLog(Arc<Mutex<Said>>);

#[derive(Debug, Default)]
struct Said {
    last: Option<Instant>,
    unsaid: usize,
}

// === impl RefusalLog ===

impl RefusalLog {
    /// Takes note of events that were refused; there is at least one.
    pub(super) fn note(&self, caller: &Caller, refused: &[Refused]) {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if said.last.is_some_and(|last| now - last < LOG_EVERY) {
            said.unsaid += refused.len();
            return;
        }
        let unsaid = std::mem::take(&mut said.unsaid);
        said.last = Some(now);
        drop(said);
        tracing::warn!(
            sender = %caller,
            count = refused.len(),
            not_logged_before = unsaid,
            "events refused: {}",
            List(refused)
        );
    }
}

// === impl List ===

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, Refused { index, problem, .. }) in self.0.iter().take(NAMED).enumerate() {
            let separator = if place == 0 { "" } else { "; " };
            write!(f, "{separator}events[{index}].{problem}")?;
        }
        match self.0.len().checked_sub(NAMED) {
            None | Some(0) => Ok(()),
            Some(more) => write!(f, "; and {more} more"),
        }
    }
}
