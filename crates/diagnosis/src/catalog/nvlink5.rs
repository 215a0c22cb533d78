//! `NVLink` 5: the meaning of the register words in an XID 144 to 150 line.
//!
//! The line names a unit, gives a severity, and has register words. `IntrInfo` identifies the
//! unit, and for a link that went down the cause; the error status identifies the unit's error.
//! Drivers before R575 number the units differently from those since R575.

use super::rows::{Bits, Nvlink5, Text};

/// First driver branch with the second layout of `IntrInfo`.
const SECOND_LAYOUT: u32 = 575;

/// Content of an XID 144 to 150 line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvlinkReport<'a> {
    /// Name of the unit as printed, for example `NETIR_LINK_EVT`.
    pub unit: &'a str,
    /// Severity in the line; `None` if the line has none.
    pub severity: Option<Severity>,
    /// First register word, `IntrInfo`.
    pub intr_info: u32,
    /// Second register word, the error status.
    pub error_status: u32,
}

/// Driver's severity of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Printed as `Fatal` by the driver.
    Fatal,
    /// Printed as `Nonfatal` or `Correctable`.
    NonFatal,
}

/// A known layout of `IntrInfo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    BeforeR575,
    FromR575,
}

/// A row that covers a report.
pub(super) struct Match<'a> {
    pub(super) row: &'a Nvlink5,
    /// Assumed layout, as the basis of the verdict, if the driver version is unknown.
    pub(super) basis: Option<Text>,
}

// === impl Layout ===

impl Layout {
    fn name(self) -> &'static str {
        match self {
            Self::BeforeR575 => "drivers before R575",
            Self::FromR575 => "drivers from R575 on",
        }
    }

    fn of_branch(branch: u32) -> Self {
        if branch < SECOND_LAYOUT {
            Self::BeforeR575
        } else {
            Self::FromR575
        }
    }

    fn of(row: &Nvlink5, layout: Self) -> Bits {
        match layout {
            Self::BeforeR575 => row.before_r575,
            Self::FromR575 => row.from_r575,
        }
    }
}

/// Returns the row of `rows` for `report` of XID `code`.
///
/// `branch` is the driver's, such as 570 for 570.86.15, and only its layout counts: the words
/// of one layout may be those of a more severe unit in the other. Without a branch, the words
/// themselves reveal the layout: none fit both layouts except those of XID 150, which mean the
/// same in both.
pub(super) fn find<'a>(
    rows: &'a [Nvlink5],
    code: u32,
    report: &NvlinkReport<'_>,
    branch: Option<u32>,
) -> Option<Match<'a>> {
    let read_as = |layout| read(rows, code, report, layout);
    if let Some(branch) = branch {
        let row = read_as(Layout::of_branch(branch))?;
        return Some(Match { row, basis: None });
    }
    let (layout, row) = [Layout::FromR575, Layout::BeforeR575]
        .into_iter()
        .find_map(|layout| Some((layout, read_as(layout)?)))?;
    let basis = format!(
        "driver version not known: the line was read as one of {}",
        layout.name()
    );
    Some(Match {
        row,
        basis: Some(basis.into()),
    })
}

/// Returns the row for a report, with `IntrInfo` in the given layout.
fn read<'a>(
    rows: &'a [Nvlink5],
    code: u32,
    report: &NvlinkReport<'_>,
    layout: Layout,
) -> Option<&'a Nvlink5> {
    let of_unit: Vec<&Nvlink5> = rows
        .iter()
        .filter(|row| row.code == code && Layout::of(row, layout).covers(report.intr_info))
        .collect();
    let with_status = |status: u32| {
        let fitting = || {
            of_unit
                .iter()
                .copied()
                .filter(move |row| row.status.is_empty() || row.status.contains(&status))
        };
        fitting()
            .find(|row| names(row, report.unit))
            .or_else(|| fitting().next())
    };
    if let Some(row) = with_status(report.error_status) {
        return Some(row);
    }
    // From here on several bits are set. For 149 and 150 the status is a number, not a bit
    // mask.
    if code >= 149 {
        return None;
    }
    let bits = (0..32).map(|bit| report.error_status & 1 << bit);
    let found: Vec<Option<&Nvlink5>> = bits
        .filter(|status| *status != 0)
        .map(with_status)
        .collect();
    let fatal = found.iter().flatten().find(|row| row.fatal);
    // A bit without a row leaves the verdict undetermined, unless another bit is fatal anyway.
    let all_known = found.iter().all(Option::is_some);
    let any = found.iter().flatten().next().filter(|_| all_known);
    fatal.or(any).copied()
}

/// Returns true if `unit` is one of the row's unit names.
pub(super) fn names(row: &Nvlink5, unit: &str) -> bool {
    row.unit
        .split('/')
        .any(|name| name.eq_ignore_ascii_case(unit))
}

#[cfg(test)]
mod tests {
    use super::super::Catalog;

    /// Without this property, a line would not reveal its layout.
    #[test]
    fn no_word_means_one_thing_in_one_layout_and_another_in_the_other() {
        let rows = Catalog::builtin().nvlink5();
        let pairs = rows
            .iter()
            .flat_map(|a| rows.iter().map(move |b| (a, b)))
            .filter(|(a, b)| a.code == b.code);
        let mut same = 0;
        for (a, b) in pairs {
            let (before, from) = (a.before_r575, b.from_r575);
            if (before.value ^ from.value) & before.mask & from.mask == 0 {
                same += 1;
                assert_eq!((a.fatal, a.action), (b.fatal, b.action), "{a:?}\n{b:?}");
            }
        }
        assert_eq!(same, 4, "the two rows of 150, each with each");
    }
}
