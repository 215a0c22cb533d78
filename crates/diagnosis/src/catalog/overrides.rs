//! An operator's changes to the catalogue, read from a TOML file.
//!
//! ```toml
//! [[xid]]
//! code = 79
//! fatal = false
//! reason = "eGPU bench: the dock is unplugged on purpose"
//! ```
//!
//! `[[sxid]]`, `[[nvlink5]]`, `[[dcgm]]` and `[[nic]]` change the other kinds, and
//! `[gpu-limits]` the thresholds of the checks. The two files of NVSentinel's kernel log
//! monitor are read unchanged: `[nicDriverDetection]` with its list of patterns, and
//! `[[checks]]` with cancellations. `docs/catalog.md` documents the keys.
//!
//! All errors are found when the file is read, and reported together.

mod entries;
mod limits;

use std::collections::BTreeMap;

use contract::findings::FileError;
use contract::{ProcessingStrategy, RecommendedAction};

use super::rows::{Changed, Confidence, Nic, Nvlink5, Sxid, SxidClass, Text, Xid};
use super::{Catalog, nvlink5};
use crate::limits::ThresholdKey;

/// Most entries of a file: far more than there are codes.
pub const MAX_OVERRIDES: usize = 4096;

/// Changes to the catalogue, as read from one file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    xids: Vec<VerdictChange<u32>>,
    sxids: Vec<VerdictChange<u32>>,
    nvlink5: Vec<VerdictChange<Nvlink5Key>>,
    dcgm: Vec<VerdictChange<String>>,
    nics: Vec<NicChange>,
    /// NVSentinel's list of enabled patterns, in order, each with its strategy.
    nic_list: Option<Vec<(String, ProcessingStrategy)>>,
    cancellations: Option<BTreeMap<String, Vec<String>>>,
    limits: Vec<LimitChange>,
}

/// A changed threshold of `[gpu-limits]`.
#[derive(Clone, Debug, PartialEq)]
struct LimitChange {
    key: &'static str,
    value: u32,
    changed: Changed,
}

/// A changed verdict about the rows of one key.
#[derive(Clone, Debug, PartialEq)]
struct VerdictChange<K> {
    key: K,
    /// New verdict: true if fatal, and the recommended action.
    verdict: (bool, RecommendedAction),
    meaning: Option<String>,
    changed: Changed,
}

/// A key of `NVLink` 5 rows, which covers all rows that match the given columns.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Nvlink5Key {
    code: u32,
    unit: Option<String>,
    cause: Option<u32>,
    status: Option<u32>,
}

/// A changed pattern of a NIC's driver.
#[derive(Clone, Debug, PartialEq)]
struct NicChange {
    name: String,
    enabled: Option<bool>,
    strategy: Option<ProcessingStrategy>,
    verdict: Option<(bool, RecommendedAction)>,
    changed: Changed,
}

// === impl Overrides ===

impl Overrides {
    /// Reads a file. `shown` is its name in messages and on events.
    pub fn parse(text: &str, shown: &str) -> Result<Self, FileError> {
        entries::parse(text, shown)
    }
}

// === impl Catalog ===

impl Catalog {
    /// Returns this catalogue with the changes of a file, which override those of earlier
    /// files.
    #[must_use]
    pub fn with(&self, overrides: &Overrides) -> Self {
        let mut catalog = self.clone();
        for change in &overrides.xids {
            let row = catalog.xids.entry(change.key);
            let row = row.or_insert_with(|| Xid {
                code: change.key,
                mnemonic: "".into(),
                meaning: "GPU error that the file names".into(),
                fatal: false,
                action: RecommendedAction::None,
                scope: "gpu".into(),
                note: "".into(),
                confidence: Confidence::High,
                source: change.changed.by.clone().into(),
                changed: None,
            });
            (row.fatal, row.action) = change.verdict;
            change.apply(&mut row.meaning, &mut row.changed);
        }
        for change in &overrides.sxids {
            let row = catalog.sxids.entry(change.key);
            let row = row.or_insert_with(|| Sxid {
                code: change.key,
                name: "".into(),
                meaning: "NVSwitch error that the file names".into(),
                class: SxidClass::PotentiallyFatal,
                fixed: None,
                note: "".into(),
                confidence: Confidence::High,
                source: change.changed.by.clone().into(),
                changed: None,
            });
            // The override applies to every line, whatever severity the line has.
            row.fixed = Some(change.verdict);
            change.apply(&mut row.meaning, &mut row.changed);
        }
        for change in &overrides.nvlink5 {
            let rows = catalog.nvlink5.iter_mut();
            for row in rows.filter(|row| change.key.covers(row)) {
                (row.fatal, row.action) = change.verdict;
                change.apply(&mut row.meaning, &mut row.changed);
            }
        }
        for change in &overrides.dcgm {
            let rows = catalog.dcgm.iter_mut();
            for row in rows.filter(|row| row.has_name(&change.key)) {
                (row.fatal, row.action) = change.verdict;
                change.apply(&mut row.meaning, &mut row.changed);
            }
        }
        if let Some(list) = &overrides.nic_list {
            catalog.list_nics(list);
        }
        for change in &overrides.nics {
            let rows = catalog.nics.iter_mut();
            for row in rows.filter(|row| row.name == change.name) {
                row.enabled = change.enabled.unwrap_or(row.enabled);
                row.strategy = change.strategy.unwrap_or(row.strategy);
                (row.fatal, row.action) = change.verdict.unwrap_or((row.fatal, row.action));
                row.changed = Some(change.changed.clone());
            }
        }
        if let Some(cancellations) = &overrides.cancellations {
            catalog.cancellations.clone_from(cancellations);
        }
        for change in &overrides.limits {
            if let Some(key) = ThresholdKey::named(change.key) {
                key.set(&mut catalog.limits, change.value);
            }
            let changed = change.changed.clone();
            catalog.limits_changed.insert(change.key, changed);
        }
        catalog
    }

    /// Enables the patterns in NVSentinel's list, in the list's order, and disables all others.
    fn list_nics(&mut self, list: &[(String, ProcessingStrategy)]) {
        let place = |row: &Nic| list.iter().position(|(name, _)| row.name == *name);
        for row in &mut self.nics {
            let listed = place(row).and_then(|index| list.get(index));
            row.enabled = listed.is_some();
            if let Some((_, strategy)) = listed {
                row.strategy = *strategy;
            }
        }
        // The sort is stable, so disabled patterns keep their order after the others.
        self.nics
            .sort_by_key(|row| place(row).unwrap_or(usize::MAX));
    }
}

// === impl Nvlink5Key ===

impl Nvlink5Key {
    fn covers(&self, row: &Nvlink5) -> bool {
        self.code == row.code
            && self
                .unit
                .as_ref()
                .is_none_or(|unit| nvlink5::names(row, unit))
            && self
                .cause
                .is_none_or(|cause| row.from_r575.reason() == cause)
            && self
                .status
                .is_none_or(|status| row.status.contains(&status))
    }
}

// === impl VerdictChange ===

impl<K> VerdictChange<K> {
    /// Writes the changed columns other than the verdict to a row.
    fn apply(&self, meaning: &mut Text, changed: &mut Option<Changed>) {
        if let Some(text) = &self.meaning {
            *meaning = text.clone().into();
        }
        *changed = Some(self.changed.clone());
    }
}

#[cfg(test)]
mod tests;
