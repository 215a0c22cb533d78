//! The position of an event in the feed of its store.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A place in the feed of a store.
///
/// It only grows: what is accepted later stands behind what was accepted before. Nothing else
/// follows from it. A feed may begin anywhere and has gaps, so the difference of two positions is
/// no number of events, and the one after a position need not be there.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Position(u64);

// === impl Position ===

impl Position {
    /// The place before every event.
    pub const START: Self = Self(0);
    /// The place behind every event.
    pub const END: Self = Self(u64::MAX);

    /// Returns the place right before this position: whoever reads on from there begins with the
    /// event that stands here.
    #[must_use]
    pub fn before(self) -> Self {
        Self(self.0.saturating_sub(1))
    }

    /// Returns the number that a backend has given this position.
    pub fn number(self) -> u64 {
        self.0
    }
}

impl From<u64> for Position {
    /// Returns the position of an event to which a backend gives this number, from 1 on.
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
