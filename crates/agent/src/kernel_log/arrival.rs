//! Estimates when a line arrived, by this machine's wall clock: a person's later decision must
//! not be undone by a line that arrived before, however late the line is read or counted.
//!
//! The log's own time is used only for lines that waited to be read: the kernel's clock drifts
//! from the wall clock, and times in files may be anything. A line that is read at once has
//! just arrived.

use jiff::{SignedDuration, Timestamp};

/// Age up to which a line is new: later, its process may have ended and given its number, or its
/// pod its GPU, to another one.
const NEW: SignedDuration = SignedDuration::from_secs(2);

/// Bounds on the arrival time of the next line.
#[derive(Debug, Default)]
pub(super) struct Arrival {
    /// True once the lines that existed when the source was opened have been read.
    caught_up: bool,
    /// True if all lines so far have been read, and the next one is awaited.
    live: bool,
    /// Earliest arrival time of the next line: the previous lines were read, or had arrived, by
    /// then.
    last: Option<Timestamp>,
}

// === impl Arrival ===

impl Arrival {
    /// Records that the source is opened, or reopened after the last line.
    pub(super) fn opened(&mut self) {
        (self.caught_up, self.live) = (false, false);
    }

    /// Records that the backlog has been read.
    pub(super) fn mark_caught_up(&mut self) {
        self.caught_up = true;
    }

    /// Records a pause in reading, during which lines wait.
    pub(super) fn pause(&mut self) {
        self.live = false;
    }

    /// Records that lines were read at `now`; `all` is true if none are left, as far as is
    /// known.
    pub(super) fn read(&mut self, all: bool, now: Timestamp) {
        self.live = self.caught_up && all;
        if self.live {
            self.last = Some(now);
        }
    }

    /// Returns the arrival time of a line that is read at `now` and has the time `at` itself.
    /// The order of the log takes precedence over its times.
    pub(super) fn came_at(&mut self, at: Timestamp, now: Timestamp) -> Timestamp {
        let came = if self.live {
            now
        } else {
            self.last.map_or(at, |last| last.max(at)).min(now)
        };
        self.last = Some(came);
        came
    }

    /// Returns true if a line that arrived at `came` is read soon after it was written. A line
    /// that existed when the source was opened is not: it may have no time of its own.
    pub(super) fn is_new(&self, came: Timestamp, now: Timestamp) -> bool {
        self.caught_up && now.duration_since(came) <= NEW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    #[test]
    fn what_waited_to_be_read_came_when_it_says_and_what_is_read_as_it_comes_came_now() {
        let mut arrival = Arrival::default();
        // Lines that existed at the start.
        assert_eq!(arrival.came_at(at(-500), at(0)), at(-500));
        // The log's clock was set back, or is ahead of the wall clock.
        assert_eq!(arrival.came_at(at(-900), at(0)), at(-500));
        assert_eq!(arrival.came_at(at(900), at(0)), at(0));
        assert_eq!(arrival.came_at(at(-100), at(0)), at(0));
        arrival.mark_caught_up();
        arrival.read(true, at(1));
        // The log's clock is behind, but the line is new.
        assert_eq!(arrival.came_at(at(-900), at(50)), at(50));
        arrival.read(false, at(50));
        // The rest of a burst arrived after the lines that were read.
        assert_eq!(arrival.came_at(at(-900), at(60)), at(50));
        assert_eq!(arrival.came_at(at(55), at(60)), at(55));
        arrival.read(true, at(60));
        arrival.pause();
        assert_eq!(arrival.came_at(at(70), at(100)), at(70));
        // Reopened after the lines that were read.
        arrival.opened();
        arrival.read(true, at(110));
        assert_eq!(arrival.came_at(at(10), at(120)), at(70));
        // The wall clock was set back.
        assert_eq!(arrival.came_at(at(80), at(20)), at(20));
    }

    #[test]
    fn a_line_is_new_if_it_is_read_soon_and_came_after_the_source_was_opened() {
        let mut arrival = Arrival::default();
        assert!(!arrival.is_new(at(0), at(0)));
        arrival.mark_caught_up();
        for (came, is_new) in [(0, true), (-2, true), (-3, false)] {
            assert_eq!(arrival.is_new(at(came), at(0)), is_new, "{came}");
        }
        arrival.opened();
        assert!(!arrival.is_new(at(0), at(0)));
    }
}
