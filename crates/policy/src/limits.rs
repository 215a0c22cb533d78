//! The limits of a policy on nodes out of service, to which [`crate::brake`] holds.

use std::fmt;

use jiff::SignedDuration;

/// Largest part of the GPU nodes that may be out of service at the same time where the
/// policy does not say otherwise, in percent, rounded up to a whole node.
///
/// Clusters live with one node in a hundred out of service, and with a rack of them. One
/// in five is no longer a fault here and there: it is a monitor, a driver or a network,
/// and none of these gets better by taking out the rest. Four fifths of the cluster stay,
/// however wrong the monitors are, and a single bad node of a small cluster still goes.
pub const DEFAULT_PERCENT: u8 = 20;

/// The limits on new quarantines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Brake {
    /// The budgets, all of which hold.
    pub budgets: Vec<Budget>,
    /// The limit on nodes taken out within a while; more trip the circuit breaker.
    pub window: Option<Window>,
}

/// A limit on nodes out of service at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The number of nodes.
    pub max: Amount,
    /// The label by whose values the nodes are counted apart; `None`: all together. Nodes without
    /// the label are counted together.
    pub per: Option<String>,
}

/// A number of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// A fixed number.
    Nodes(u32),
    /// A share of all in percent, rounded up; 1 to 100.
    Percent(u8),
}

/// A limit on different nodes that are taken out within a while: NVSentinel's `circuitBreaker`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The share of the GPU nodes in percent, rounded up; 1 to 100. As many may be taken out; the
    /// next trips.
    pub percentage: u8,
    /// The while.
    pub duration: SignedDuration,
}

// === impl Brake ===

impl Default for Brake {
    /// Returns the brake of a policy that says nothing of it: [`DEFAULT_PERCENT`] of the GPU nodes.
    fn default() -> Self {
        Self {
            budgets: vec![Budget {
                max: Amount::Percent(DEFAULT_PERCENT),
                per: None,
            }],
            window: None,
        }
    }
}

// === impl Amount ===

impl Amount {
    /// Returns the number of nodes that it is of `all`.
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
            Some(label) => write!(f, "{} per {label}", self.max),
            None => write!(f, "{}", self.max),
        }
    }
}

// === impl Window ===

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}% in {:#}", self.percentage, self.duration)
    }
}
