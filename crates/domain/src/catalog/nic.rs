//! Lines of NIC drivers: which of them a pattern covers.

use memchr::memmem;

use super::rows::Text;

/// A driver of NICs whose lines are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicDriver {
    /// `mlx5_core`: NVIDIA `ConnectX` and `BlueField`.
    Mlx5,
    /// `efa`: the Elastic Fabric Adapter of AWS.
    Efa,
}

/// A pattern: parts that a line has in this order, or one of several such lists.
///
/// As text the parts stand with ` ... ` between them and the lists with ` || `.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    alternatives: Vec<Vec<&'static str>>,
}

// === impl NicDriver ===

impl NicDriver {
    /// Its name in the kernel.
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
            .map(|parts| parts.split(" ... ").collect())
            .collect();
        Self { alternatives }
    }

    /// Whether a line has all parts of one of the lists, in order.
    pub fn covers(&self, line: &[u8]) -> bool {
        self.alternatives.iter().any(|parts| {
            let mut rest = line;
            parts.iter().all(|part| {
                let found =
                    memmem::find(rest, part.as_bytes()).and_then(|at| rest.get(at + part.len()..));
                rest = found.unwrap_or_default();
                found.is_some()
            })
        })
    }
}

impl std::fmt::Display for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lists: Vec<Text> = self
            .alternatives
            .iter()
            .map(|parts| parts.join(" ... ").into())
            .collect();
        f.write_str(&lists.join(" || "))
    }
}
