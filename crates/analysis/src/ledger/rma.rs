//! GPUs that repairs do not help, by the analysis's conclusions: candidates for a return to their
//! vendor. Shown only; nothing acts on it.

use std::collections::BTreeMap;

use contract::{HealthEvent, keys};
use diagnosis::subject::Subject;
use jiff::Timestamp;
use model::event::{EventRecord, counts};
use serde::{Deserialize, Serialize};

use super::names::{self, NamedGpu};
use super::{GPU_PART, Ledger, shortened};

/// Most conclusions about a GPU that are kept: the latest.
const MAX_CANDIDACIES: usize = 16;

/// Open conclusion that repairs do not help a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RmaCandidacy {
    /// Time of acceptance.
    pub since: Timestamp,
    /// Name of the node.
    pub node: String,
    /// Check and code of the fault that came back.
    pub fault: String,
    /// Id of the event of the conclusion.
    pub event: String,
    /// Names of the GPU in that event.
    pub device: Subject,
}

// === impl Ledger ===

impl Ledger {
    /// Records a conclusion that repairs do not help, or its end.
    pub(super) fn record_unrepaired(&mut self, record: &EventRecord) {
        let event = &record.event;
        let conclusion = event.metadata.get(keys::META_CONCLUSION);
        if event.is_healthy {
            let ends = |id: &String, one: &RmaCandidacy| {
                one.node == event.node_name
                    && conclusion.is_none_or(|ended| ended == id)
                    && one.device.healed_by(&event.entities_impacted)
            };
            for (key, row) in &mut self.gpus {
                let before = row.rma.len();
                row.rma.retain(|id, one| !ends(id, one));
                if row.rma.len() < before {
                    self.unsaved.insert(format!("{GPU_PART}{key}"));
                }
            }
            return;
        }
        let Some(conclusion) = conclusion.filter(|_| counts(event)) else {
            return;
        };
        let check = event.metadata.get(keys::META_ANALYSED_CHECK);
        let check = check
            .and_then(|name| name.rsplit('/').next())
            .unwrap_or_default();
        let fault = format!("{check} {}", event.error_code.join(","));
        let device = Subject::of_entities(&event.entities_impacted)
            .into_iter()
            .next();
        let Some(device) = device else {
            return;
        };
        for gpu in self.gpus_of(event) {
            let candidacy = RmaCandidacy {
                since: record.created_at,
                node: event.node_name.clone(),
                fault: shortened(fault.trim()),
                event: record.id.clone(),
                device: device.clone(),
            };
            self.change(&gpu, |row| {
                row.rma.insert(conclusion.clone(), candidacy);
                cut(&mut row.rma);
            });
        }
    }

    /// Returns the GPUs that an event names; one that is named by its slot only is the one that was
    /// seen there last.
    fn gpus_of(&self, event: &HealthEvent) -> Vec<NamedGpu> {
        let named = names::of(event);
        if !named.is_empty() {
            return named;
        }
        let slot = names::slot(event).unwrap_or_default();
        let occupant = self.occupants.get(&(event.node_name.clone(), slot));
        let row = occupant.and_then(|(_, key)| self.gpus.get(key));
        let gpu = row.map(|row| NamedGpu {
            serial: row.serial.clone(),
            uuid: row.uuids.iter().next().cloned(),
            slot: String::new(),
        });
        gpu.into_iter().collect()
    }
}

/// Removes the oldest conclusions if there are too many.
pub(super) fn cut(rma: &mut BTreeMap<String, RmaCandidacy>) {
    while rma.len() > MAX_CANDIDACIES
        && let Some(oldest) = rma.iter().min_by_key(|(id, one)| (one.since, *id))
    {
        let oldest = oldest.0.clone();
        rma.remove(&oldest);
    }
}
