//! Limits of a policy on nodes out of service, enforced by the brake (`fleet/brake.rs`).

use std::fmt;

use jiff::SignedDuration;

/// Default limit on GPU nodes out of service at the same time, in percent, rounded up to a
/// whole node.
///
/// Clusters cope with one node in a hundred out of service, or with a rack of them. One in five
/// is not a series of independent faults but a monitor, a driver or a network, and taking out
/// more nodes fixes none of these. Four fifths of the cluster stay in service however wrong the
/// monitors are, and a single bad node of a small cluster can still be taken out.
pub const DEFAULT_PERCENT: u8 = 20;

/// Limits on new quarantines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Brake {
    /// Budgets. Each of them applies.
    pub budgets: Vec<Budget>,
    /// Limit on nodes taken out within a period. Exceeding it trips the circuit breaker.
    pub window: Option<Window>,
}

/// A limit on nodes out of service at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Number of nodes that may be out of service, or that have to stay.
    pub limit: Limit,
    /// Label that divides the nodes into groups, each with a budget of its own. `None` if the
    /// budget covers all nodes. Nodes without the label form one group of a [`Limit::Max`], and
    /// none of a [`Limit::Keep`].
    pub per: Option<String>,
}

/// Limit of a budget on a group of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Most nodes out of service.
    Max(Amount),
    /// Fewest nodes in service. A group without as many nodes lets none go.
    Keep(Amount),
}

/// A number of nodes, absolute or relative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// An absolute number of nodes.
    Nodes(u32),
    /// A percentage of all nodes, rounded up, from 1 to 100.
    Percent(u8),
}

/// A limit on different nodes taken out within a period: NVSentinel's `circuitBreaker`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Share of the GPU nodes that may be taken out, in percent, rounded up, from 1 to 100. One
    /// more node trips the circuit breaker.
    pub percentage: u8,
    /// Length of the period.
    pub duration: SignedDuration,
}

// === impl Brake ===

impl Default for Brake {
    /// Returns the brake of a policy without settings for it: [`DEFAULT_PERCENT`] of the GPU
    /// nodes.
    fn default() -> Self {
        Self {
            budgets: vec![Budget {
                limit: Limit::Max(Amount::Percent(DEFAULT_PERCENT)),
                per: None,
            }],
            window: None,
        }
    }
}

// === impl Limit ===

impl Limit {
    /// Returns how many of `all` nodes may be out of service.
    pub fn allowed(self, all: usize) -> usize {
        match self {
            Self::Max(max) => max.of(all),
            Self::Keep(keep) => all.saturating_sub(keep.of(all)),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Max(max) => write!(f, "{max}"),
            Self::Keep(keep) => write!(f, "keep {keep}"),
        }
    }
}

// === impl Amount ===

impl Amount {
    /// Returns the absolute number for a total of `all` nodes.
    pub fn of(self, all: usize) -> usize {
        match self {
            Self::Nodes(nodes) => usize::try_from(nodes).unwrap_or(usize::MAX),
            Self::Percent(percent) => all.saturating_mul(usize::from(percent)).div_ceil(100),
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nodes(nodes) => write!(f, "{nodes}"),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

// === impl Budget ===

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.per {
            Some(label) => write!(f, "{} per {label}", self.limit),
            None => write!(f, "{}", self.limit),
        }
    }
}

// === impl Window ===

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}% in {:#}", self.percentage, self.duration)
    }
}
