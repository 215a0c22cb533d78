//! Followers: faults that are reported because of another one, the primary.
//!
//! A GPU that falls off the bus takes down its NVLinks, and each of its peers reports that. The
//! peers are sound. The table (`data/sympathy.tsv`) names such pairs; the driver names others
//! itself, in a line that ends with `caused by previous Xid 149`.

use std::fmt;
use std::sync::LazyLock;

use contract::keys;
use jiff::SignedDuration;

use crate::catalog::{RowError, Table, number};

/// Pair of a primary and a follower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sympathy {
    /// Code of the primary.
    pub primary: FaultCode,
    /// Code of the follower.
    pub follower: FaultCode,
    /// Distance from the primary within which followers are explained.
    pub scope: SympathyScope,
    /// Longest time between reports of the primary and of the follower, either way.
    pub within: SignedDuration,
    /// Reason why the follower is reported.
    pub note: &'static str,
    /// Source of the row's facts.
    pub source: &'static str,
}

/// Code of a fault, with its check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultCode {
    /// Name of the check.
    pub check: &'static str,
    /// Number in the code; `None` for any.
    pub number: Option<u32>,
}

/// Distance from a primary within which followers are explained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SympathyScope {
    /// The GPU of the primary.
    Gpu,
    /// The node of the primary.
    Node,
    /// The NVLink domain of the node of the primary.
    NvlinkDomain,
}

const SYMPATHY: Table = Table {
    file: "sympathy.tsv",
    text: include_str!("../data/sympathy.tsv"),
};

static ROWS: LazyLock<Vec<Sympathy>> = LazyLock::new(|| rows().filter_map(Result::ok).collect());

/// Returns the pairs of the table.
pub fn sympathies() -> &'static [Sympathy] {
    &ROWS
}

/// Returns whether faults of this check may be primaries or followers.
pub fn concerns(check: &str) -> bool {
    [keys::CHECK_XID, keys::CHECK_SXID].contains(&check)
}

/// Returns whether a fault of this check and code may be a primary.
pub fn may_be_primary(check: &str, code: &str) -> bool {
    concerns(check) && sympathies().iter().any(|row| row.primary.is(check, code))
}

/// Returns whether a fault of this check and code may be a follower.
pub fn may_follow(check: &str, code: &str) -> bool {
    concerns(check) && sympathies().iter().any(|row| row.follower.is(check, code))
}

fn rows() -> impl Iterator<Item = Result<Sympathy, RowError>> {
    SYMPATHY.rows(
        |[primary, follower, scope, seconds, note, source]: [&str; 6]| {
            Ok(Sympathy {
                primary: FaultCode::parse(primary)?,
                follower: FaultCode::parse(follower)?,
                scope: match scope {
                    "gpu" => SympathyScope::Gpu,
                    "node" => SympathyScope::Node,
                    "nvlink_domain" => SympathyScope::NvlinkDomain,
                    _ => return Err(format!("scope '{scope}' is unknown")),
                },
                within: SignedDuration::from_secs(number(seconds)?.into()),
                note,
                source,
            })
        },
    )
}

// === impl FaultCode ===

impl FaultCode {
    /// Parses `XID 79`, or `SXID *` for any.
    fn parse(text: &str) -> Result<Self, String> {
        let (check, code) = match text.split_once(' ') {
            Some(("XID", code)) => (keys::CHECK_XID, code),
            Some(("SXID", code)) => (keys::CHECK_SXID, code),
            _ => return Err(format!("'{text}' is neither XID nor SXID with a number")),
        };
        let number = (code != "*").then(|| number(code)).transpose()?;
        Ok(Self { check, number })
    }

    /// Returns whether a fault has this check and code. The name of a unit after the number, as
    /// in `149.NETIR_LINK_EVT`, does not count.
    pub fn is(self, check: &str, code: &str) -> bool {
        check == self.check
            && self
                .number
                .is_none_or(|number| leading(code) == Some(number))
    }
}

impl fmt::Display for FaultCode {
    /// Writes `XID 79`, or `SXid` for any.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.check == keys::CHECK_SXID {
            "SXid"
        } else {
            "XID"
        })?;
        self.number.map_or(Ok(()), |number| write!(f, " {number}"))
    }
}

// === impl Sympathy ===

impl fmt::Display for Sympathy {
    /// Writes what the follower follows, why, and the source.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scope = match self.scope {
            SympathyScope::Gpu => "GPU",
            SympathyScope::Node => "node",
            SympathyScope::NvlinkDomain => "NVLink domain",
        };
        let (primary, within) = (self.primary, self.within);
        write!(
            f,
            "a fatal {primary} of the same {scope} within {within:#}: "
        )?;
        write!(f, "{} ({})", self.note, self.source)
    }
}

/// Returns the number of a code such as `149.NETIR_LINK_EVT`.
pub fn leading(code: &str) -> Option<u32> {
    code.split('.').next()?.parse().ok()
}

/// Returns the XID that the driver names as the cause of another one, in
/// `channel 0x00000010 caused by previous Xid 149`.
pub fn named_cause(message: &str) -> Option<u32> {
    let (_, rest) = message.split_once("caused by previous Xid ")?;
    let end = rest
        .find(|digit: char| !digit.is_ascii_digit())
        .unwrap_or(rest.len());
    rest.get(..end)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_read_and_names_a_pair_once() {
        let rows: Vec<Sympathy> = rows().map(Result::unwrap).collect();
        assert!(!rows.is_empty());
        for (index, row) in rows.iter().enumerate() {
            assert!(row.within.is_positive() && !row.note.is_empty() && !row.source.is_empty());
            assert_ne!(row.primary, row.follower, "a fault cannot explain itself");
            let same =
                |other: &Sympathy| (other.primary, other.follower) == (row.primary, row.follower);
            assert!(!rows[..index].iter().any(same), "{row:?} is there twice");
        }
    }

    #[test]
    fn a_unit_after_the_number_does_not_count_and_another_check_does() {
        assert!(may_be_primary("SysLogsXIDError", "149.NETIR_LINK_EVT"));
        assert!(may_follow("SysLogsXIDError", "145.RLW_SRC_TRACK"));
        assert!(may_be_primary("SysLogsSXIDError", "24007"));
        assert!(!may_be_primary("SysLogsXIDError", "14"));
        assert!(!may_be_primary("GpuXidError", "149"));
        assert!(!may_follow("SysLogsXIDError", "79"));
    }

    #[test]
    fn the_cause_that_the_driver_names_is_read() {
        let line = "channel 0x00000010 caused by previous Xid 149";
        assert_eq!(named_cause(line), Some(149));
        assert_eq!(
            named_cause("caused by previous Xid 149, and more"),
            Some(149)
        );
        for none in [
            "caused by previous Xid",
            "caused by previous Xid x",
            "Ch 00000010",
        ] {
            assert_eq!(named_cause(none), None);
        }
    }
}
