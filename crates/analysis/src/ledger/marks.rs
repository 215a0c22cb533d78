//! Marks of all GPUs, to be kept beside the ledger: one that starts empty takes them over.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::names::{NamedGpu, real};
use super::{Ledger, Mark, shortened};

/// Most marks that are kept: the latest. With the longest names and reasons they fit into a
/// `ConfigMap`.
pub const MAX_KEPT_MARKS: usize = 256;

/// Mark with the names of its GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuMark {
    /// Serial number of the board; `None` if no event named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// UUIDs.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub uuids: BTreeSet<String>,
    /// Mark.
    pub mark: Mark,
}

// === impl Ledger ===

impl Ledger {
    /// Returns the latest marks, oldest first.
    pub fn marks(&self) -> Vec<GpuMark> {
        let rows = self.watched.iter().filter_map(|key| self.gpus.get(key));
        let marked = rows.filter_map(|row| {
            Some(GpuMark {
                serial: row.serial.clone(),
                uuids: row.uuids.clone(),
                mark: row.mark.clone()?,
            })
        });
        let mut marks: Vec<GpuMark> = marked.collect();
        marks.sort_by(|one, other| one.mark.cmp(&other.mark));
        let excess = marks.len().saturating_sub(MAX_KEPT_MARKS);
        marks.split_off(excess)
    }

    /// Takes marks over from another ledger. Of two marks of a GPU, the later one counts. Returns true if
    /// that changes anything.
    pub fn take_marks(&mut self, marks: Vec<GpuMark>) -> bool {
        let mut has_changed = false;
        for one in marks {
            let mark = Mark {
                reason: shortened(&one.mark.reason),
                by: shortened(&one.mark.by),
                ..one.mark
            };
            let serial = one.serial.as_deref().and_then(real);
            let named = |uuid: Option<String>| NamedGpu {
                serial: serial.clone(),
                uuid,
                slot: String::new(),
            };
            let mut gpus: Vec<NamedGpu> = (one.uuids.iter())
                .filter_map(|uuid| real(uuid))
                .map(|uuid| named(Some(uuid)))
                .collect();
            if gpus.is_empty() && serial.is_some() {
                gpus.push(named(None));
            }
            for gpu in gpus {
                let name = gpu.serial.as_ref().or(gpu.uuid.as_ref());
                let row = name.and_then(|name| self.gpu(name));
                if row.is_none_or(|(_, row)| row.mark.as_ref() < Some(&mark)) {
                    self.change(&gpu, |row| row.mark(mark.clone()));
                    has_changed = true;
                }
            }
        }
        has_changed
    }
}
