//! The codes by which DCGM, NVIDIA's management service for GPUs, names what it finds. The checks of
//! gpuwarden's own use them too, so that a fault has one name whoever has found it.

use contract::RecommendedAction;

use super::rows::{self, Changed, Confidence, Table, Text};
use super::{Catalog, Verdict};

/// The row of a code of DCGM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dcgm {
    /// The number; `None` for a code that is NVSentinel's or ours.
    pub code: Option<u32>,
    /// The name: the error code of its events.
    pub name: Text,
    /// Another name of it, in older versions.
    pub alias: Option<Text>,
    /// The publisher's word for its gravity, such as `ISOLATE`; empty where there is none. In the
    /// verdict it decides nothing: the action does.
    pub severity: Text,
    /// True if work on the GPU must stop: it must where there is an action, unless a file says
    /// otherwise.
    pub fatal: bool,
    /// The action that mends it.
    pub action: RecommendedAction,
    /// The explanation for people.
    pub meaning: Text,
    /// A note for people; may be empty.
    pub note: Text,
    /// The confidence in the verdict.
    pub confidence: Confidence,
    /// The source of the facts.
    pub source: Text,
    /// The change of a file, where one decided the verdict.
    pub changed: Option<Changed>,
}

pub(super) const DCGM: Table = Table {
    file: "dcgm.tsv",
    text: include_str!("../../data/dcgm.tsv"),
};

// === impl Dcgm ===

impl Dcgm {
    /// Returns whether this is one of its names.
    pub(super) fn has_name(&self, name: &str) -> bool {
        self.name == name || self.alias.as_deref() == Some(name)
    }
}

// === impl Catalog ===

impl Catalog {
    /// Returns the row of a code of DCGM.
    pub fn dcgm(&self, code: u32) -> Option<&Dcgm> {
        self.dcgm.iter().find(|row| row.code == Some(code))
    }

    /// Returns the row of a code of DCGM by one of its names.
    pub fn dcgm_named(&self, name: &str) -> Option<&Dcgm> {
        self.dcgm.iter().find(|row| row.has_name(name))
    }

    /// Returns all rows of DCGM's codes, by code.
    pub fn dcgms(&self) -> &[Dcgm] {
        &self.dcgm
    }

    /// Returns the verdict about a code of DCGM by one of its names. As with XIDs, a code without a
    /// row is shown and kept, with action unknown, and stops nothing.
    pub fn judge_dcgm(&self, name: &str) -> Verdict {
        let Some(row) = self.dcgm_named(name) else {
            let meaning = "Code of DCGM without a row in the catalogue".into();
            return Verdict::of((false, RecommendedAction::Unknown), &meaning, None);
        };
        let verdict = (row.fatal, row.action);
        Verdict::of(verdict, &row.meaning, row.changed.as_ref())
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
) -> Result<Dcgm, String> {
    let action = rows::action_of(action)?;
    let code = (!code.is_empty()).then(|| rows::number(code)).transpose()?;
    Ok(Dcgm {
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
