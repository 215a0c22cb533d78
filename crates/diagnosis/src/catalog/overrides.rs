//! An operator's changes to the catalogue, read from a TOML file.
//!
//! ```toml
//! [[xid]]
//! code = 79
//! fatal = false
//! reason = "eGPU bench: the dock is unplugged on purpose"
//! ```
//!
//! `[[sxid]]`, `[[nvlink5]]` and `[[nic]]` change the other kinds. The two files of
//! NVSentinel's kernel log monitor are read as they are: `[nicDriverDetection]` with its
//! list of patterns, and `[[checks]]` with cancellations. `docs/catalog.md` has the keys.
//!
//! Everything that can be wrong is found when the file is read, and all of it at once.

mod entries;

use std::collections::BTreeMap;

use contract::findings::FileError;
use contract::{ProcessingStrategy, RecommendedAction};

use super::rows::{Changed, Confidence, Nic, Xid};
use super::{Catalog, Text, nvlink5};

/// Longest file (bytes): a row for every code there is takes a tenth of it.
pub const MAX_OVERRIDES_BYTES: usize = 1024 * 1024;
/// Most entries of a file: far more than there are codes.
pub const MAX_OVERRIDES: usize = 4096;

/// What a file changes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    xids: Vec<Entry<u32>>,
    sxids: Vec<Entry<u32>>,
    nvlink5: Vec<Entry<Nvlink5Key>>,
    nics: Vec<NicEntry>,
    /// NVSentinel's list: the patterns that are on, in order, and what they are for.
    nic_list: Option<Vec<(String, ProcessingStrategy)>>,
    cancellations: Option<BTreeMap<String, Vec<String>>>,
}

/// A changed verdict.
#[derive(Clone, Debug, PartialEq)]
struct Entry<K> {
    key: K,
    /// Whether it is fatal, and what mends it.
    verdict: (bool, RecommendedAction),
    meaning: Option<String>,
    changed: Changed,
}

/// Which rows about `NVLink` 5 words are meant: all that have what is given.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Nvlink5Key {
    code: u32,
    unit: Option<String>,
    cause: Option<u32>,
    status: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
struct NicEntry {
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
    /// Returns this catalogue with the changes of a file; a later file has the last word.
    #[must_use]
    pub fn with(&self, overrides: &Overrides) -> Self {
        let mut catalog = self.clone();
        for entry in &overrides.xids {
            catalog.change_xid(entry);
        }
        for entry in &overrides.sxids {
            // The line's own word would have decided; now the file does, for any of them.
            if let Some(row) = catalog.sxids.get_mut(&entry.key) {
                row.fixed = Some(entry.verdict);
                row.changed = Some(entry.changed.clone());
                if let Some(meaning) = &entry.meaning {
                    row.meaning = meaning.clone().into();
                }
            } else {
                let row = super::Sxid {
                    code: entry.key,
                    name: "".into(),
                    meaning: meaning_or(entry, "NVSwitch error that the file names"),
                    class: super::SxidClass::PotentiallyFatal,
                    fixed: Some(entry.verdict),
                    note: "".into(),
                    confidence: Confidence::High,
                    source: entry.changed.by.clone().into(),
                    changed: Some(entry.changed.clone()),
                };
                catalog.sxids.insert(entry.key, row);
            }
        }
        for entry in &overrides.nvlink5 {
            for row in &mut catalog.nvlink5 {
                if entry.key.covers(row) {
                    (row.fatal, row.action) = entry.verdict;
                    row.changed = Some(entry.changed.clone());
                    if let Some(meaning) = &entry.meaning {
                        row.meaning = meaning.clone().into();
                    }
                }
            }
        }
        if let Some(list) = &overrides.nic_list {
            catalog.list_nics(list);
        }
        for entry in &overrides.nics {
            for row in &mut catalog.nics {
                if row.name == entry.name {
                    entry.apply(row);
                }
            }
        }
        if let Some(cancellations) = &overrides.cancellations {
            catalog.cancellations.clone_from(cancellations);
        }
        catalog
    }

    fn change_xid(&mut self, entry: &Entry<u32>) {
        let (fatal, action) = entry.verdict;
        if let Some(row) = self.xids.get_mut(&entry.key) {
            (row.fatal, row.action) = (fatal, action);
            row.changed = Some(entry.changed.clone());
            if let Some(meaning) = &entry.meaning {
                row.meaning = meaning.clone().into();
            }
            return;
        }
        let row = Xid {
            code: entry.key,
            mnemonic: "".into(),
            meaning: meaning_or(entry, "GPU error that the file names"),
            fatal,
            action,
            scope: "gpu".into(),
            note: "".into(),
            confidence: Confidence::High,
            source: entry.changed.by.clone().into(),
            changed: Some(entry.changed.clone()),
        };
        self.xids.insert(entry.key, row);
    }

    /// The patterns that a list of NVSentinel turns on, in its order; all others are off.
    fn list_nics(&mut self, list: &[(String, ProcessingStrategy)]) {
        let place = |row: &Nic| list.iter().position(|(name, _)| row.name == *name);
        for row in &mut self.nics {
            let listed = place(row).and_then(|index| list.get(index));
            row.enabled = listed.is_some();
            if let Some((_, strategy)) = listed {
                row.strategy = *strategy;
            }
        }
        // Stable: those that are off keep their order behind the others.
        self.nics
            .sort_by_key(|row| place(row).unwrap_or(usize::MAX));
    }
}

// === impl Nvlink5Key ===

impl Nvlink5Key {
    fn covers(&self, row: &super::Nvlink5) -> bool {
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

// === impl NicEntry ===

impl NicEntry {
    fn apply(&self, row: &mut Nic) {
        row.enabled = self.enabled.unwrap_or(row.enabled);
        row.strategy = self.strategy.unwrap_or(row.strategy);
        if let Some(verdict) = self.verdict {
            (row.fatal, row.action) = verdict;
        }
        row.changed = Some(self.changed.clone());
    }
}

fn meaning_or<K>(entry: &Entry<K>, otherwise: &'static str) -> Text {
    entry
        .meaning
        .clone()
        .map_or(Text::Borrowed(otherwise), Text::Owned)
}

#[cfg(test)]
mod tests;
