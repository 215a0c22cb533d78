//! `NVLink` 5: the meaning of the words in an XID 144 to 150 line.
//!
//! The line names a unit, whether it is fatal to it, and carries register words. Of these
//! `IntrInfo` says which unit, and for a link that went down why, and the error status
//! says what the unit met. Drivers number the units differently before and from R575 on.

use super::rows::{Bits, Nvlink5, Text};

/// Driver branch from which on `IntrInfo` has its second layout.
const SECOND_LAYOUT: u32 = 575;

/// The content of an XID 144 to 150 line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report<'a> {
    /// Name of the unit as printed, for example `NETIR_LINK_EVT`.
    pub unit: &'a str,
    /// The driver's own word for how grave it is.
    pub severity: Option<Severity>,
    /// The first register word.
    pub intr_info: u32,
    /// The second register word.
    pub error_status: u32,
}

/// The driver's own word for how grave a report is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// `Fatal`.
    Fatal,
    /// `Nonfatal`, or `Correctable`.
    NonFatal,
}

/// A layout of `IntrInfo` words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    BeforeR575,
    FromR575,
}

/// A row that covers a report.
pub(super) struct Match<'a> {
    pub(super) row: &'a Nvlink5,
    /// The layout that was taken, in words, where the driver is not known.
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

/// Returns the row of `rows` that says what `report` of XID `code` means.
///
/// `branch` is the driver's, 570 of 570.86.15, and its layout alone counts: the words of one
/// layout may be those of a graver unit in the other. Without it the line itself tells: no
/// word fits both layouts but those of XID 150, which mean the same in both.
pub(super) fn find<'a>(
    rows: &'a [Nvlink5],
    code: u32,
    report: &Report<'_>,
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

/// Returns the row for a report whose `IntrInfo` has one layout.
fn read<'a>(
    rows: &'a [Nvlink5],
    code: u32,
    report: &Report<'_>,
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
    // From here on several bits are set. Units of 149 and 150 put a number there, not bits.
    if code >= 149 {
        return None;
    }
    let bits = (0..32).map(|bit| report.error_status & 1 << bit);
    let found: Vec<Option<&Nvlink5>> = bits
        .filter(|status| *status != 0)
        .map(with_status)
        .collect();
    let fatal = found.iter().flatten().find(|row| row.fatal);
    // A bit that nobody has described leaves open what is to be done, unless another one
    // already asks for the most.
    let all_known = found.iter().all(Option::is_some);
    let any = found.iter().flatten().next().filter(|_| all_known);
    fatal.or(any).copied()
}

/// Returns whether a row is of the unit that a line names.
pub(super) fn names(row: &Nvlink5, unit: &str) -> bool {
    row.unit
        .split('/')
        .any(|name| name.eq_ignore_ascii_case(unit))
}

#[cfg(test)]
mod tests {
    use super::super::Catalog;

    /// A line tells its layout by itself only because of this.
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
