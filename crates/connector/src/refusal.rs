//! Refused events: the answer to the sender, and the log line.

use std::fmt;

use model::event::FieldProblem;
use runtime::logging::Seldom;
use tonic::metadata::MetadataMap;

use crate::Caller;

/// Most refused events that an error lists.
const NAMED: usize = 20;
/// Header of an answer that lists the refused events by index; all others of the batch are
/// stored. Without the header, a sender finds refused events by sending smaller batches.
const HEADER: &str = "gpuwarden-refused-events";
/// Longest value of the header (bytes): receivers accept 8 KiB of headers.
const HEADER_BYTES: usize = 4 * 1024;

/// Event of a batch that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Index of the event in the batch.
    pub index: usize,
    /// Problem with the event, and what to do.
    pub problem: FieldProblem,
    /// Kind of the refusal.
    pub reason: Reason,
}

/// Kind of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The event is not valid.
    Invalid,
    /// The sender may not report on the event's node.
    ForeignNode,
}

/// Refused events, as text.
pub(super) struct RefusedList<'a>(pub(super) &'a [Refused]);

/// Number of the other events of a request, as text after [`RefusedList`].
pub(super) struct Others(pub(super) usize);

/// Logs refused events at a limited rate; there is at least one.
pub(super) fn log(seldom: &Seldom, caller: &Caller, refused: &[Refused]) {
    let count = refused.len();
    if let Some(not_logged_before) = seldom.counting(count as u64) {
        tracing::warn!(sender = %caller, count, not_logged_before, "events refused: {}", RefusedList(refused));
    }
}

/// Returns the header that lists the refused events; empty if it would be too long.
pub(super) fn header(refused: &[Refused]) -> MetadataMap {
    let mut map = MetadataMap::new();
    let indices: Vec<String> = refused.iter().map(|one| one.index.to_string()).collect();
    let text = indices.join(",");
    if text.len() <= HEADER_BYTES
        && let Ok(value) = text.parse()
    {
        map.insert(HEADER, value);
    }
    map
}

/// Returns the indices in [`header`] for a batch of `events`; `None` if the header is missing
/// or invalid.
pub(super) fn read_header(map: &MetadataMap, events: usize) -> Option<Vec<usize>> {
    let text = map.get(HEADER)?.to_str().ok()?;
    let indices: Option<Vec<usize>> = text
        .split(',')
        .map(|index| index.parse().ok().filter(|index| *index < events))
        .collect();
    indices.filter(|indices| !indices.is_empty())
}

// === impl RefusedList ===

impl fmt::Display for RefusedList<'_> {
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

// === impl Others ===

impl fmt::Display for Others {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            1 => f.write_str("; the other event of the request is stored"),
            stored => write!(f, "; the other {stored} events of the request are stored"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_events_are_spoken_of_only_where_there_are_any() {
        for (stored, expected) in [
            (0, ""),
            (1, "; the other event of the request is stored"),
            (7, "; the other 7 events of the request are stored"),
        ] {
            assert_eq!(Others(stored).to_string(), expected);
        }
    }
}
