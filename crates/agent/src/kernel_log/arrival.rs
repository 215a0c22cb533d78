//! The time when a line came, by our clock: what a person has decided since is not undone by a line
//! that was there before, however late it is read or counted.
//!
//! The log's own time is asked only of lines that waited to be read: the kernel's clock drifts
//! from ours, and those of files may be anything. What is read as it comes came now.

use jiff::Timestamp;

/// The times between which the next line came, as far as known.
#[derive(Debug, Default)]
pub(super) struct Arrival {
    /// True once all lines that were there when the source was opened have been read.
    caught_up: bool,
    /// True if all lines so far have been read, and the next one is waited for.
    live: bool,
    /// The time after which the next line came: those before it were read then, or had come then.
    last: Option<Timestamp>,
}

// === impl Arrival ===

impl Arrival {
    /// Notes that the source is opened, or opened again behind the last line.
    pub(super) fn note_opened(&mut self) {
        (self.caught_up, self.live) = (false, false);
    }

    /// Notes that what was there has been read.
    pub(super) fn note_caught_up(&mut self) {
        self.caught_up = true;
    }

    /// Notes that nothing is read: lines wait.
    pub(super) fn note_pause(&mut self) {
        self.live = false;
    }

    /// Notes that what has come until `now` was read; `all` of it, as far as one can tell.
    pub(super) fn note_read(&mut self, all: bool, now: Timestamp) {
        self.live = self.caught_up && all;
        if self.live {
            self.last = Some(now);
        }
    }

    /// Returns when a line came that is read `now` and says `at` of itself. The order of the log
    /// counts before its times.
    pub(super) fn came_at(&mut self, at: Timestamp, now: Timestamp) -> Timestamp {
        let came = if self.live {
            now
        } else {
            self.last.map_or(at, |last| last.max(at)).min(now)
        };
        self.last = Some(came);
        came
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
        // What was there at the start.
        assert_eq!(arrival.came_at(at(-500), at(0)), at(-500));
        // Its clock was set back; or is ahead of ours.
        assert_eq!(arrival.came_at(at(-900), at(0)), at(-500));
        assert_eq!(arrival.came_at(at(900), at(0)), at(0));
        assert_eq!(arrival.came_at(at(-100), at(0)), at(0));
        arrival.note_caught_up();
        arrival.note_read(true, at(1));
        // The clock of the log is behind: what comes now is new all the same.
        assert_eq!(arrival.came_at(at(-900), at(50)), at(50));
        arrival.note_read(false, at(50));
        // A burst: the rest of it came behind what was read.
        assert_eq!(arrival.came_at(at(-900), at(60)), at(50));
        assert_eq!(arrival.came_at(at(55), at(60)), at(55));
        arrival.note_read(true, at(60));
        arrival.note_pause();
        assert_eq!(arrival.came_at(at(70), at(100)), at(70));
        // Opened again, behind what was read.
        arrival.note_opened();
        arrival.note_read(true, at(110));
        assert_eq!(arrival.came_at(at(10), at(120)), at(70));
        // Our own clock was set back.
        assert_eq!(arrival.came_at(at(80), at(20)), at(20));
    }
}
