//! The fault catalogue: what each code means, and the recommended actions.
//!
//! The rows are data (`data/*.tsv`), compiled in; `data/README.md` documents the source of each
//! fact. An operator's file changes verdicts ([`Overrides`]), and [`Catalog::changes_to`] shows
//! the difference. A code without a row is still an event: its action is unknown.

mod changes;
mod dcgm;
mod nic;
mod nvlink5;
mod overrides;
mod recovery;
mod rows;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use contract::RecommendedAction;

use crate::limits::CheckLimits;

pub use changes::{CatalogChange, GPU_LIMITS};
pub use dcgm::DcgmCode;
pub use nic::{Filter, NicDriver, Pattern};
pub use nvlink5::{NvlinkReport, Severity};
pub use overrides::{MAX_OVERRIDES, Overrides};
pub use recovery::{recovery_code, recovery_codes};
pub use rows::{Bits, Changed, Confidence, Nic, Nvlink5, RowError, Sxid, SxidClass, Text, Xid};
pub(crate) use rows::{Table, hex, number};

/// Built-in cancellation, the same as NVSentinel's: an XID 162 reports that power smoothing
/// works again, which ends an XID 163, that it is disengaged.
const CANCELLATIONS: [(&str, &str); 1] = [("162", "163")];

/// Rows of the catalogue, with the changes of override files applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Catalog {
    xids: BTreeMap<u32, Xid>,
    sxids: BTreeMap<u32, Sxid>,
    nvlink5: Vec<Nvlink5>,
    dcgm: Vec<DcgmCode>,
    /// NIC patterns in matching order; the first one that covers a line counts.
    nics: Vec<Nic>,
    /// Codes of the XIDs that an XID ends, by its own code.
    cancellations: BTreeMap<String, Vec<String>>,
    limits: CheckLimits,
    /// Thresholds that a file has set, by key.
    limits_changed: BTreeMap<&'static str, Changed>,
}

/// The catalogue's verdict about a log line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineVerdict {
    /// True if the line ends a fault instead of reporting one.
    pub healthy: bool,
    /// True if work on the device must stop.
    pub fatal: bool,
    /// Recommended action to remediate the fault.
    pub action: RecommendedAction,
    /// Explanation of the fault, for operators.
    pub meaning: Text,
    /// Basis of the verdict, if other than the row of the code.
    pub basis: Option<Text>,
}

static BUILTIN: LazyLock<Catalog> = LazyLock::new(|| Catalog {
    xids: by_code(rows::XID.rows(rows::xid), |row| row.code),
    sxids: by_code(rows::SXID.rows(rows::sxid), |row| row.code),
    nvlink5: rows::NVLINK5
        .rows(rows::nvlink5)
        .filter_map(Result::ok)
        .collect(),
    dcgm: dcgm::DCGM.rows(dcgm::read).filter_map(Result::ok).collect(),
    nics: rows::NIC.rows(rows::nic).filter_map(Result::ok).collect(),
    cancellations: CANCELLATIONS
        .map(|(source, target)| (source.to_owned(), vec![target.to_owned()]))
        .into(),
    limits: CheckLimits::default(),
    limits_changed: BTreeMap::new(),
});

// === impl Catalog ===

impl Catalog {
    /// Returns the compiled-in rows.
    pub fn builtin() -> &'static Self {
        &BUILTIN
    }

    /// Returns the row of an XID code.
    pub fn xid(&self, code: u32) -> Option<&Xid> {
        self.xids.get(&code)
    }

    /// Returns all XID rows, by code.
    pub fn xids(&self) -> impl Iterator<Item = &Xid> {
        self.xids.values()
    }

    /// Returns the row of an `SXid` code.
    pub fn sxid(&self, code: u32) -> Option<&Sxid> {
        self.sxids.get(&code)
    }

    /// Returns all `SXid` rows, by code.
    pub fn sxids(&self) -> impl Iterator<Item = &Sxid> {
        self.sxids.values()
    }

    /// Returns the rows about the register words in XID 144 to 150 lines.
    pub fn nvlink5(&self) -> &[Nvlink5] {
        &self.nvlink5
    }

    /// Returns the NIC patterns, in matching order.
    pub fn nics(&self) -> &[Nic] {
        &self.nics
    }

    /// Returns the thresholds for readings of GPUs.
    pub fn limits(&self) -> &CheckLimits {
        &self.limits
    }

    /// Returns the error codes of the XIDs that XID `code` ends.
    pub fn cancelled_by(&self, code: &str) -> &[String] {
        self.cancellations.get(code).map_or(&[], Vec::as_slice)
    }

    /// Returns the verdict about an XID line. `text` is the part after code and process.
    ///
    /// The verdict is the row's, except that the text of an XID 154 names the action. A code
    /// without a row is shown and stored, with action unknown, and stops nothing: an unknown
    /// code is not evidence of a fault.
    pub fn judge_xid(&self, code: u32, text: &str) -> LineVerdict {
        let Some(row) = self.xid(code) else {
            let meaning = "Code without a row in the catalogue".into();
            return LineVerdict::of((false, RecommendedAction::Unknown), &meaning, None);
        };
        let verdict = LineVerdict::of((row.fatal, row.action), &row.meaning, row.changed.as_ref());
        if code != 154 || row.changed.is_some() {
            return verdict;
        }
        self.judge_advice(text, &verdict)
    }

    /// Returns the verdict about an XID 144 to 150 line that has a unit and register words.
    ///
    /// `branch` is the driver's, such as 570 for 570.86.15. If no row covers the words, the
    /// verdict is [undetermined](Self::undetermined).
    pub fn judge_nvlink5(
        &self,
        code: u32,
        report: &NvlinkReport<'_>,
        branch: Option<u32>,
    ) -> LineVerdict {
        let found = nvlink5::find(&self.nvlink5, code, report, branch);
        // A file that changes the code as a whole covers all its lines, unless it also changes
        // this row.
        if self.xid(code).is_some_and(|row| row.changed.is_some())
            && found
                .as_ref()
                .is_none_or(|found| found.row.changed.is_none())
        {
            return self.judge_xid(code, "");
        }
        if let Some(found) = found {
            let row = found.row;
            let verdict =
                LineVerdict::of((row.fatal, row.action), &row.meaning, row.changed.as_ref());
            let basis = verdict.basis.or(found.basis);
            return LineVerdict { basis, ..verdict };
        }
        self.undetermined(code, "no row covers these words", report.severity)
    }

    /// Returns the verdict about an XID 144 to 150 line whose unit and register words cannot be
    /// parsed.
    pub fn judge_unread_nvlink5(&self, code: u32, severity: Option<Severity>) -> LineVerdict {
        if self.xid(code).is_some_and(|row| row.changed.is_some()) {
            return self.judge_xid(code, "");
        }
        self.undetermined(code, "the line has no words that can be read", severity)
    }

    /// Returns the verdict if no row decides. The driver's own severity does then: a fatal
    /// report needs a person, a non-fatal one is shown and stored with action unknown. Without
    /// a severity, the row of the code decides. The report is never dropped as harmless, and
    /// the basis of the verdict is always given.
    fn undetermined(&self, code: u32, why: &str, severity: Option<Severity>) -> LineVerdict {
        let of_code = self.judge_xid(code, "");
        let (fatal, action, word) = match severity {
            Some(Severity::Fatal) => (true, RecommendedAction::ContactSupport, "calls it fatal"),
            Some(Severity::NonFatal) => (false, RecommendedAction::Unknown, "calls it not fatal"),
            None => (of_code.fatal, of_code.action, "does not give its severity"),
        };
        LineVerdict {
            healthy: false,
            fatal,
            action,
            meaning: "NVLink report that is not in the catalogue".into(),
            basis: Some(format!("undetermined: {why}, and the driver {word}").into()),
        }
    }

    /// Returns the verdict about an `SXid` line. `fatal` is the severity in the line, which
    /// decides; without it the class of the code does.
    pub fn judge_sxid(&self, code: u32, fatal: Option<bool>) -> LineVerdict {
        let row = self.sxid(code);
        let always = row.is_some_and(|row| row.class == SxidClass::AlwaysFatal);
        let verdict = match row.and_then(|row| row.fixed) {
            Some(fixed) => fixed,
            None if fatal.unwrap_or(always) => (true, RecommendedAction::ContactSupport),
            None => (false, RecommendedAction::None),
        };
        let unknown = "NVSwitch error without a row in the catalogue".into();
        let meaning = row.map_or(&unknown, |row| &row.meaning);
        LineVerdict::of(verdict, meaning, row.and_then(|row| row.changed.as_ref()))
    }

    /// Returns the filter for lines of NICs that an enabled pattern may cover.
    pub fn nic_filter(&self) -> Filter {
        let enabled = self.nics.iter().filter(|row| row.enabled);
        Filter::of(enabled.map(|row| &row.pattern))
    }

    /// Returns the first enabled pattern that covers a line of a NIC's driver.
    pub fn nic_pattern(&self, driver: NicDriver, line: &[u8]) -> Option<&Nic> {
        self.nics
            .iter()
            .filter(|row| row.enabled && row.driver == driver)
            .find(|row| row.pattern.covers(line))
    }
}

// === impl Nic ===

impl Nic {
    /// Returns the verdict about a line that the pattern covers.
    pub fn verdict(&self) -> LineVerdict {
        let verdict = (self.fatal, self.action);
        LineVerdict::of(verdict, &self.meaning, self.changed.as_ref())
    }
}

// === impl LineVerdict ===

impl LineVerdict {
    /// Returns the verdict for a fatality and an action. If a file has changed them, the file
    /// is the basis.
    pub(crate) fn of(
        (fatal, action): (bool, RecommendedAction),
        meaning: &Text,
        changed: Option<&Changed>,
    ) -> Self {
        Self {
            healthy: false,
            fatal,
            action,
            meaning: meaning.clone(),
            basis: changed.map(|changed| changed.to_string().into()),
        }
    }
}

fn by_code<T>(
    rows: impl Iterator<Item = Result<T, RowError>>,
    code: impl Fn(&T) -> u32,
) -> BTreeMap<u32, T> {
    rows.filter_map(Result::ok)
        .map(|row| (code(&row), row))
        .collect()
}

#[cfg(test)]
mod tests;
