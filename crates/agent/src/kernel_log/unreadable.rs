//! Logs XID and `SXid` lines that cannot be parsed: all are counted, and some are logged. Their
//! fault is unknown, so they open none.

use std::time::Duration;

use diagnosis::decode::Garbled;
use tokio::time::Instant;

/// Shortest time between two log lines: a broken console may produce thousands.
const EVERY: Duration = Duration::from_secs(60);

/// Number of lines that were not logged yet.
#[derive(Default)]
pub(super) struct Unreadable {
    said: Option<Instant>,
    unsaid: u64,
}

// === impl Unreadable ===

impl Unreadable {
    /// Logs the lines, unless the last log line is less than [`EVERY`] ago.
    pub(super) fn log(&mut self, garbled: &Garbled, now: Instant) {
        if let Some(lines) = self.due(garbled.lines, now) {
            tracing::warn!(
                lines,
                line = garbled.quoted,
                "an XID or SXid line of the kernel log cannot be read, and opens no fault"
            );
        }
    }

    /// Returns the number of lines to log now.
    fn due(&mut self, lines: u64, now: Instant) -> Option<u64> {
        self.unsaid = self.unsaid.saturating_add(lines);
        let waits = self
            .said
            .is_some_and(|said| now.saturating_duration_since(said) < EVERY);
        if waits {
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_said_and_the_others_together_once_a_minute() {
        let mut unreadable = Unreadable::default();
        let begun = Instant::now();
        for (second, lines, expected) in [
            (0, 1, Some(1)),
            (1, 2, None),
            (59, 1, None),
            (60, 1, Some(4)),
            (61, 1, None),
            (500, 7, Some(8)),
        ] {
            let now = begun + Duration::from_secs(second);
            assert_eq!(unreadable.due(lines, now), expected, "{second}");
        }
    }
}
