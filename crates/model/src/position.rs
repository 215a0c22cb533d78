//! Position of an event in the feed of its store.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A position in the feed of a store.
///
/// Positions grow in the order of acceptance, and have no other meaning. A feed may start
/// anywhere and has gaps, so the difference of two positions is not a number of events, and the
/// next number need not exist.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Position(u64);

// === impl Position ===

impl Position {
    /// Position before every event.
    pub const START: Self = Self(0);
    /// Position after every event.
    pub const END: Self = Self(u64::MAX);

    /// Returns the position right before this one. A reader that continues from there starts
    /// with the event at this position.
    #[must_use]
    pub fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }

    /// Returns the number that the backend assigned to this position.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl From<u64> for Position {
    /// Creates the position from the number that a backend assigned. Numbers start at 1.
    fn from(number: u64) -> Self {
        Self(number)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Position {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}
