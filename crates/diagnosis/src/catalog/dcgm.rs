//! Error codes of DCGM, NVIDIA's management service for GPUs. gpuwarden's own checks use the
//! codes too, so that a fault has one name whichever component found it.

use contract::RecommendedAction;

use super::rows::{self, Changed, Confidence, Table, Text};
use super::{Catalog, LineVerdict};

/// Row of a DCGM error code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DcgmCode {
    /// Number of the code; `None` for one of NVSentinel's or of gpuwarden's own.
    pub code: Option<u32>,
    /// Name of the code, which is the error code of its events.
    pub name: Text,
    /// Name of the code in older versions of DCGM.
    pub alias: Option<Text>,
    /// Publisher's severity, such as `ISOLATE`; empty if there is none. Does not affect the
    /// verdict, which follows the action.
    pub severity: Text,
    /// True if work on the GPU must stop: it must if there is an action, unless a file
    /// overrides it.
    pub fatal: bool,
    /// Recommended action to remediate the fault.
    pub action: RecommendedAction,
    /// Explanation of the fault, for operators.
    pub meaning: Text,
    /// Note for operators; may be empty.
    pub note: Text,
    /// Confidence in the verdict.
    pub confidence: Confidence,
    /// Source of the row's facts.
    pub source: Text,
    /// Change by an override file, if one decided the verdict.
    pub changed: Option<Changed>,
}

pub(super) const DCGM: Table = Table {
    file: "dcgm.tsv",
    text: include_str!("../../data/dcgm.tsv"),
};

// === impl DcgmCode ===

impl DcgmCode {
    /// Returns true if `name` is the code's name or its alias.
    pub(super) fn has_name(&self, name: &str) -> bool {
        self.name == name || self.alias.as_deref() == Some(name)
    }
}

// === impl Catalog ===

impl Catalog {
    /// Returns the row of a DCGM code by number.
    pub fn dcgm(&self, code: u32) -> Option<&DcgmCode> {
        self.dcgm.iter().find(|row| row.code == Some(code))
    }

    /// Returns the row of a DCGM code by name or alias.
    pub fn dcgm_named(&self, name: &str) -> Option<&DcgmCode> {
        self.dcgm.iter().find(|row| row.has_name(name))
    }

    /// Returns all DCGM rows, by code.
    pub fn dcgms(&self) -> &[DcgmCode] {
        &self.dcgm
    }

    /// Returns the verdict about a DCGM code by name or alias. As with XIDs, a code without a
    /// row is shown and stored, with action unknown, and stops nothing.
    pub fn judge_dcgm(&self, name: &str) -> LineVerdict {
        let Some(row) = self.dcgm_named(name) else {
            let meaning = "Code of DCGM without a row in the catalogue".into();
            return LineVerdict::of((false, RecommendedAction::Unknown), &meaning, None);
        };
        let verdict = (row.fatal, row.action);
        LineVerdict::of(verdict, &row.meaning, row.changed.as_ref())
    }
}

pub(super) fn read(
    [
        code,
        name,
        alias,
        severity,
        action,
        meaning,
        note,
        confidence,
        source,
    ]: [&'static str; 9],
) -> Result<DcgmCode, String> {
    let action = rows::action_of(action)?;
    let code = (!code.is_empty()).then(|| rows::number(code)).transpose()?;
    Ok(DcgmCode {
        code,
        name: name.into(),
        alias: (!alias.is_empty()).then(|| alias.into()),
        severity: severity.into(),
        fatal: action != RecommendedAction::None,
        action,
        meaning: meaning.into(),
        note: note.into(),
        confidence: Confidence::parse(confidence)?,
        source: source.into(),
        changed: None,
    })
}
