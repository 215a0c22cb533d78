//! The boot of the machine: its id, and the wall-clock time when its clock started.
//!
//! The kernel log counts records and microseconds from the start of the boot. A sequence number
//! is meaningful only together with the [`BootId`], a time stamp only together with the
//! [`BootClock`].

use std::{fmt, io, path::Path, str::FromStr};

use jiff::{SignedDuration, Timestamp};
use rustix::time::{ClockId, clock_gettime};

const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// The random identity that the kernel gives each boot: a UUID, as text in lower case.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BootId(u128);

/// A boot of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boot {
    /// Identity of the boot.
    pub id: BootId,
    /// Wall-clock time of the clock's zero, computed from the current wall clock.
    pub at: Timestamp,
}

/// Turns the kernel's time stamps into wall-clock time.
///
/// The offset is read once, so that a stamp maps to the same time for as long as the process
/// lives, whatever is done to the wall clock. The price: the kernel's log clock stands still
/// while the machine is suspended, and the offset is the *current* one, so a record from before
/// a suspend appears later than it was by the time of the suspend. Servers do not sleep; a
/// virtual machine that was paused shows the same effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BootClock {
    /// Wall-clock time of the monotonic clock's zero.
    zero: Timestamp,
}

/// Error for a text that is not a boot id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a boot id has 36 characters, hexadecimal digits in groups of 8-4-4-4-12")]
pub struct InvalidBootId;

// === impl BootId ===

impl BootId {
    /// Reads the identity of the running boot from `/proc`.
    ///
    /// Fails if `/proc` is not mounted, or the file holds something else.
    pub fn current() -> io::Result<Self> {
        Self::read(Path::new(BOOT_ID_FILE))
    }

    fn read(path: &Path) -> io::Result<Self> {
        std::fs::read_to_string(path)?
            .trim_end()
            .parse()
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Returns the id with these 16 bytes, the form in journal files.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }
}

impl FromStr for BootId {
    type Err = InvalidBootId;

    fn from_str(text: &str) -> Result<Self, InvalidBootId> {
        let well_formed = text.len() == 36
            && text.bytes().enumerate().all(|(index, byte)| match index {
                8 | 13 | 18 | 23 => byte == b'-',
                _ => byte.is_ascii_hexdigit(),
            });
        if !well_formed {
            return Err(InvalidBootId);
        }
        let digits: String = text.split('-').collect();
        u128::from_str_radix(&digits, 16)
            .map(Self)
            .map_err(|_| InvalidBootId)
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = |shift: u32| self.0 >> shift & 0xffff;
        write!(f, "{:08x}-{:04x}-{:04x}", self.0 >> 96, part(80), part(64))?;
        write!(f, "-{:04x}-{:012x}", part(48), self.0 & 0xffff_ffff_ffff)
    }
}

impl fmt::Debug for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

// === impl Boot ===

impl Boot {
    /// Returns the running boot. Fails if [`BootId::current`] does.
    pub fn current() -> io::Result<Self> {
        Ok(Self {
            id: BootId::current()?,
            at: BootClock::now().wall_clock(0),
        })
    }
}

// === impl BootClock ===

impl BootClock {
    /// Computes the offset between the wall clock and the monotonic clock.
    ///
    /// The kernel stamps its log with `local_clock`, which runs with `CLOCK_MONOTONIC` but is
    /// not steered by time synchronisation; the two drift apart by some parts in a million.
    pub fn now() -> Self {
        let monotonic = clock_gettime(ClockId::Monotonic);
        let uptime = SignedDuration::new(monotonic.tv_sec, nanoseconds(monotonic.tv_nsec));
        Self::started_at(
            Timestamp::now()
                .checked_sub(uptime)
                .unwrap_or(Timestamp::MIN),
        )
    }

    /// Returns a clock with the given zero, for logs of other boots and for tests.
    pub fn started_at(zero: Timestamp) -> Self {
        Self { zero }
    }

    /// Returns the wall-clock time `boot_time_us` microseconds after the clock's zero, clamped
    /// to [`Timestamp::MAX`].
    pub fn wall_clock(&self, boot_time_us: u64) -> Timestamp {
        i64::try_from(boot_time_us)
            .ok()
            .and_then(|us| self.zero.checked_add(SignedDuration::from_micros(us)).ok())
            .unwrap_or(Timestamp::MAX)
    }
}

/// Converts nanoseconds below a second. The kernel guarantees that range, so nothing is lost.
fn nanoseconds(value: i64) -> i32 {
    i32::try_from(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_id_forms() {
        let id = "f6ee57d5-7e3f-47b5-b8b4-39ade2595d41";
        let cases = [
            (id, Some(id)),
            ("F6EE57D5-7E3F-47B5-B8B4-39ADE2595D41", Some(id)),
            ("", None),
            ("f6ee57d57e3f47b5b8b439ade2595d41", None),
            ("f6ee57d5-7e3f-47b5-b8b4-39ade2595d4g", None),
            ("f6ee57d5-7e3f-47b5-b8b4-39ade2595d41\n", None),
            ("f6ee57d5-7e3f-47b5-b8b4-39ade2595d4\u{e9}", None),
        ];
        for (text, expected) in cases {
            let parsed = text.parse::<BootId>().ok();
            let shown = parsed.map(|id| id.to_string());
            assert_eq!(shown.as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn current_boot_id_is_stable() {
        assert_eq!(BootId::current().unwrap(), BootId::current().unwrap());
    }

    #[test]
    fn boot_id_file_with_other_content_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "no uuid\n").unwrap();
        let error = BootId::read(file.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn stamps_count_from_the_clock_zero() {
        let clock = BootClock::started_at("2026-11-21T11:40:00Z".parse().unwrap());
        let cases = [
            (0, "2026-11-21T11:40:00Z"),
            (1_500_000, "2026-11-21T11:40:01.5Z"),
            (86_400_000_001, "2026-11-22T11:40:00.000001Z"),
        ];
        for (us, expected) in cases {
            assert_eq!(clock.wall_clock(us), expected.parse().unwrap(), "{us}");
        }
        assert_eq!(clock.wall_clock(u64::MAX), Timestamp::MAX);
        assert_eq!(clock.wall_clock(u64::MAX / 2), Timestamp::MAX);
    }

    #[test]
    fn the_monotonic_time_of_now_is_now() {
        let clock = BootClock::now();
        let monotonic = clock_gettime(ClockId::Monotonic);
        let us = u64::try_from(monotonic.tv_sec * 1_000_000 + monotonic.tv_nsec / 1_000).unwrap();
        let error = clock.wall_clock(us).duration_since(Timestamp::now()).abs();
        assert!(error < SignedDuration::from_secs(5), "{error:?}");
    }
}
