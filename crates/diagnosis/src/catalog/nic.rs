//! Patterns for log lines of NIC drivers.

use aho_corasick::packed::Searcher;
use memchr::memmem::Finder;

/// A NIC driver whose log lines are matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicDriver {
    /// `mlx5_core`: NVIDIA `ConnectX` and `BlueField`.
    Mlx5,
    /// `efa`: the Elastic Fabric Adapter of AWS.
    Efa,
}

/// A pattern: substrings that a line contains in this order, or one of several such lists.
///
/// As text, ` ... ` separates the substrings and ` || ` the lists.
#[derive(Clone, Debug)]
pub struct Pattern {
    /// Searchers, kept because building one costs many times a search.
    alternatives: Vec<Vec<Finder<'static>>>,
}

/// A filter that drops nearly all lines that no pattern covers, in one pass: NICs log many
/// ordinary lines.
#[derive(Clone, Debug)]
pub struct Filter {
    /// `None` if this machine supports no such searcher; then every line passes.
    endings: Option<Searcher>,
}

// === impl Filter ===

impl Filter {
    /// Returns the filter for lines that one of these patterns covers.
    pub(super) fn of<'a>(patterns: impl Iterator<Item = &'a Pattern>) -> Self {
        let endings = patterns
            .flat_map(|pattern| &pattern.alternatives)
            .filter_map(|parts| Some(parts.last()?.needle()));
        Self {
            endings: Searcher::new(endings),
        }
    }

    /// Returns true if a pattern may cover a line.
    pub fn passes(&self, line: &[u8]) -> bool {
        self.endings
            .as_ref()
            .is_none_or(|endings| endings.find(line).is_some())
    }
}

// === impl NicDriver ===

impl NicDriver {
    /// Returns the driver's name in the kernel log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mlx5 => "mlx5_core",
            Self::Efa => "efa",
        }
    }
}

// === impl Pattern ===

impl Pattern {
    pub(super) fn parse(text: &'static str) -> Self {
        let alternatives = text
            .split(" || ")
            .map(|parts| parts.split(" ... ").map(Finder::new).collect())
            .collect();
        Self { alternatives }
    }

    /// Returns true if a line contains all substrings of one of the lists, in order.
    pub fn covers(&self, line: &[u8]) -> bool {
        self.alternatives.iter().any(|parts| {
            let mut rest = line;
            parts.iter().all(|part| {
                let found = part
                    .find(rest)
                    .and_then(|at| rest.get(at + part.needle().len()..));
                rest = found.unwrap_or_default();
                found.is_some()
            })
        })
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for Pattern {}

impl std::fmt::Display for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lists: Vec<String> = self
            .alternatives
            .iter()
            .map(|parts| {
                let parts: Vec<_> = parts
                    .iter()
                    .map(|part| String::from_utf8_lossy(part.needle()))
                    .collect();
                parts.join(" ... ")
            })
            .collect();
        f.write_str(&lists.join(" || "))
    }
}
