//! What of the lines is worth an event: the decoder with the little memory that this needs.
//!
//! It knows which GPU sits at which PCI address, as [`Machine`] or else the kernel itself
//! said, and which GPUs have just reported an XID: a driver that prints XID 79 also
//! prints "GPU has fallen off the bus", and that is one fault, not two.

use std::collections::{HashMap, VecDeque};

use contract::{Entity, RecommendedAction, action_name, keys};
use jiff::{SignedDuration, Timestamp};

use super::{Line, Machine, decode};
use crate::catalog;
use crate::fault::normalise_pci;

/// How long after an XID of a GPU a "fallen off the bus" line of it adds nothing.
const SAME_FALL: SignedDuration = SignedDuration::from_mins(5);
/// Most GPUs, and most recent XIDs, that are remembered: far above any machine.
const REMEMBERED: usize = 1024;

/// A fault found in a line of kernel log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which check found it.
    pub kind: Kind,
    /// PCI address in the form of [`normalise_pci`].
    pub pci: String,
    /// UUID of the GPU, where [`Machine`] or a line of the log named it.
    pub gpu_uuid: Option<String>,
    /// Process id that the driver blames.
    pub pid: Option<u32>,
    /// Process name that the driver blames.
    pub process: Option<String>,
    /// Whether work on the GPU must stop.
    pub fatal: bool,
    /// What mends it.
    pub action: RecommendedAction,
    /// What happened, for people.
    pub meaning: &'static str,
}

/// Which check a finding belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An XID line, with its code.
    Xid(u32),
    /// A "fallen off the bus" line without XID, with the PCI id where it has one.
    FallenOffBus {
        /// Vendor and device, for example `10de:2330`.
        pci_id: Option<String>,
    },
}

/// Decodes the lines of one kernel log in their order.
#[derive(Debug, Default)]
pub struct KernelLogDecoder {
    machine: Option<Machine>,
    /// UUID by PCI address, as lines of the log said.
    uuids: HashMap<String, String>,
    recent_xids: VecDeque<(String, Timestamp)>,
}

// === impl Finding ===

impl Finding {
    /// Check name on the wire.
    pub fn check(&self) -> &'static str {
        match self.kind {
            Kind::Xid(_) => keys::CHECK_XID,
            Kind::FallenOffBus { .. } => keys::CHECK_GPU_FALLEN_OFF,
        }
    }

    /// Error code on the wire.
    pub fn code(&self) -> String {
        match self.kind {
            Kind::Xid(code) => code.to_string(),
            Kind::FallenOffBus { .. } => keys::CODE_GPU_FALLEN_OFF.to_owned(),
        }
    }

    /// The recommended action by name.
    pub fn action_name(&self) -> String {
        action_name(self.action as i32).into_owned()
    }

    /// Affected resources on the wire.
    pub fn entities(&self) -> Vec<Entity> {
        let entity = |kind: &str, value: &str| Entity {
            entity_type: kind.to_owned(),
            entity_value: value.to_owned(),
        };
        let mut entities = vec![entity(keys::ENTITY_PCI, &self.pci)];
        if let Some(uuid) = &self.gpu_uuid {
            entities.push(entity(keys::ENTITY_GPU_UUID, uuid));
        }
        if let Kind::FallenOffBus { pci_id: Some(id) } = &self.kind {
            entities.push(entity(keys::ENTITY_PCI_ID, id));
        }
        entities
    }
}

// === impl KernelLogDecoder ===

impl KernelLogDecoder {
    /// What is known of the machine from now on; `None`: nothing but what the log says.
    pub fn set_machine(&mut self, machine: Option<Machine>) {
        self.machine = machine;
    }

    /// What is known of the machine.
    pub fn machine(&self) -> Option<&Machine> {
        self.machine.as_ref()
    }

    /// The fault in a line, if it has one. `at` is the line's own time, or the newest
    /// one known where it has none.
    pub fn line(&mut self, line: &[u8], at: Timestamp) -> Option<Finding> {
        match decode(line)? {
            Line::GpuName { pci, uuid } => {
                if self.uuids.len() < REMEMBERED {
                    self.uuids.insert(normalise_pci(pci), uuid.to_owned());
                }
                None
            }
            Line::Xid(xid) => {
                let pci = normalise_pci(xid.pci);
                if self.recent_xids.len() == REMEMBERED {
                    self.recent_xids.pop_front();
                }
                self.recent_xids.push_back((pci.clone(), at));
                let verdict = catalog::judge_xid(xid.code, xid.detail);
                Some(Finding {
                    kind: Kind::Xid(xid.code),
                    gpu_uuid: self.uuid_at(&pci),
                    pci,
                    pid: xid.pid,
                    process: xid.process.map(str::to_owned),
                    fatal: verdict.fatal,
                    action: verdict.action,
                    meaning: verdict.meaning,
                })
            }
            Line::FallenOffBus { pci, pci_id } => {
                let pci = normalise_pci(pci);
                let told = self.recent_xids.iter().any(|(address, time)| {
                    *address == pci && at.duration_since(*time).abs() <= SAME_FALL
                });
                if told {
                    return None;
                }
                Some(Finding {
                    kind: Kind::FallenOffBus {
                        pci_id: pci_id.map(str::to_owned),
                    },
                    gpu_uuid: self.uuid_at(&pci),
                    pci,
                    pid: None,
                    process: None,
                    fatal: true,
                    action: RecommendedAction::RestartBm,
                    meaning: "The GPU no longer answers on the PCIe bus",
                })
            }
        }
    }

    /// UUID of the GPU at a normalised PCI address. The machine's word counts before the
    /// log's: a line of the log may be from before a GPU was replaced.
    fn uuid_at(&self, pci: &str) -> Option<String> {
        let of_machine = self
            .machine
            .as_ref()
            .and_then(|machine| machine.gpu_at(pci)?.uuid.clone());
        of_machine.or_else(|| self.uuids.get(pci).cloned())
    }
}
