//! Findings in the kernel log, and the fields of their events on the wire.

use contract::{Entity, ProcessingStrategy, RecommendedAction, action_name, keys};

use super::Mig;
use crate::catalog::Text;

/// A fault found in the kernel log, or the end of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Check of the finding, with the check's own details.
    pub kind: FindingKind,
    /// True if the line ends faults instead of reporting one.
    pub healthy: bool,
    /// PCI address. For a GPU in the form of [`normalise_pci`](crate::subject::normalise_pci),
    /// for a switch with the function if the line has it, for a NIC as printed.
    pub pci: Option<String>,
    /// UUID of the GPU, if the machine's description or the log has it.
    pub gpu_uuid: Option<String>,
    /// Index of the GPU at the other end of a switch's link.
    pub gpu_index: Option<u32>,
    /// Affected part of a GPU under MIG.
    pub mig: Option<Mig>,
    /// Parts that describe the fault further, as entity type and value: link, registers, units.
    pub parts: Vec<(&'static str, String)>,
    /// Process id that the driver blames.
    pub pid: Option<u32>,
    /// Process name that the driver blames.
    pub process: Option<String>,
    /// True if work on the device must stop.
    pub fatal: bool,
    /// Recommended action to remediate the fault.
    pub action: RecommendedAction,
    /// Explanation of the fault, for operators.
    pub meaning: Text,
    /// Basis of the verdict, if other than the catalogue's row of the code.
    pub basis: Option<Text>,
    /// Strategy of the event.
    pub strategy: ProcessingStrategy,
    /// Faults on this device that the finding ends.
    pub cancels: Vec<Cancelled>,
    /// Serial number of the chassis, if the machine is described.
    pub chassis_serial: Option<String>,
    /// XID that the driver names as the cause of this one.
    pub caused_by: Option<u32>,
    /// Dump of requests to the GPU that the driver has printed since the previous XID.
    pub dump: Option<String>,
    /// Lines of the finding, if other than the record: some of its lines, or also lines of
    /// earlier records.
    pub lines: Option<String>,
}

/// A fault that another finding ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cancelled {
    /// Check of the fault.
    pub check: &'static str,
    /// Error code of the fault.
    pub code: String,
}

/// Check of a finding, with the check's own details.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// An XID line, from the driver of a GPU.
    Xid {
        /// XID code, the number in the line.
        code: u32,
        /// Name of the `NVLink` unit, if the line has one.
        unit: Option<String>,
    },
    /// An `SXid` line, with the code and the number of the switch.
    Sxid {
        /// `SXid` code, the number in the line.
        code: u32,
        /// Number of the switch, 3 for `nvidia-nvswitch3`.
        switch: Option<u32>,
    },
    /// A "fallen off the bus" line without an XID, with the PCI id if the line has one.
    FallenOffBus {
        /// Vendor and device id, for example `10de:2330`.
        pci_id: Option<String>,
    },
    /// Lines about repeated failed starts of a GPU.
    InitFailed,
    /// A line about a reset of a GPU. A successful reset ends all XIDs of the GPU.
    Reset,
    /// A line of a NIC driver.
    Nic {
        /// Name of the matching pattern.
        pattern: String,
        /// Device name: the RDMA device if known, else the PCI address or network interface;
        /// `None` if the line names none.
        device: Option<String>,
    },
}

// === impl Finding ===

impl Finding {
    /// Returns the check name on the wire.
    pub fn check(&self) -> &'static str {
        match self.kind {
            FindingKind::Xid { .. } | FindingKind::Reset => keys::CHECK_XID,
            FindingKind::Sxid { .. } => keys::CHECK_SXID,
            FindingKind::FallenOffBus { .. } => keys::CHECK_GPU_FALLEN_OFF,
            FindingKind::InitFailed => keys::CHECK_GPU_INIT,
            FindingKind::Nic { .. } => keys::CHECK_NIC_DRIVER,
        }
    }

    /// Returns the component class on the wire.
    pub fn component(&self) -> &'static str {
        match self.kind {
            FindingKind::Nic { .. } => keys::COMPONENT_NIC,
            _ => keys::COMPONENT_GPU,
        }
    }

    /// Returns the error code on the wire. `None` means all codes of the device, which a
    /// successful reset ends.
    pub fn code(&self) -> Option<String> {
        match &self.kind {
            FindingKind::Xid { code, unit: None } | FindingKind::Sxid { code, .. } => {
                Some(code.to_string())
            }
            // NVSentinel's form; a blank would end the code in its node conditions.
            FindingKind::Xid {
                code,
                unit: Some(unit),
            } => Some(format!("{code}.{}", unit.replace(' ', "_"))),
            FindingKind::FallenOffBus { .. } => Some(keys::CODE_GPU_FALLEN_OFF.to_owned()),
            FindingKind::InitFailed => Some(keys::CODE_GPU_INIT_FAILED.to_owned()),
            FindingKind::Reset if self.healthy => None,
            FindingKind::Reset => Some(keys::CODE_GPU_RESET_FAILURE.to_owned()),
            FindingKind::Nic { pattern, .. } => Some(pattern.clone()),
        }
    }

    /// Returns the name of the recommended action.
    pub fn action_name(&self) -> String {
        action_name(self.action as i32).into_owned()
    }

    /// Returns the affected resources on the wire. Unknown ones are left out.
    pub fn entities(&self) -> Vec<Entity> {
        let mut entities = Vec::new();
        let mut add = |kind: &str, value: Option<String>| {
            entities.extend(value.map(|value| Entity {
                entity_type: kind.to_owned(),
                entity_value: value,
            }));
        };
        if let FindingKind::Nic { device, .. } = &self.kind {
            add(keys::ENTITY_NIC, device.clone());
            return entities;
        }
        if let FindingKind::Sxid { switch, .. } = self.kind {
            add(
                keys::ENTITY_NVSWITCH,
                switch.map(|switch| switch.to_string()),
            );
        }
        add(keys::ENTITY_PCI, self.pci.clone());
        if let FindingKind::Sxid { .. } = self.kind {
            for (kind, value) in &self.parts {
                add(kind, Some(value.clone()));
            }
            add(
                keys::ENTITY_GPU,
                self.gpu_index.map(|index| index.to_string()),
            );
            add(keys::ENTITY_GPU_UUID, self.gpu_uuid.clone());
            return entities;
        }
        add(keys::ENTITY_GPU_UUID, self.gpu_uuid.clone());
        if let FindingKind::FallenOffBus { pci_id } = &self.kind {
            add(keys::ENTITY_PCI_ID, pci_id.clone());
        }
        for (kind, value) in &self.parts {
            add(kind, Some(value.clone()));
        }
        entities
    }

    /// Returns the metadata on the wire, as key and value.
    pub fn metadata(&self) -> Vec<(&'static str, String)> {
        let mut metadata = Vec::new();
        let mut add = |key, value: Option<String>| {
            metadata.extend(value.map(|value| (key, value)));
        };
        add(keys::META_CHASSIS_SERIAL, self.chassis_serial.clone());
        add(keys::META_MEANING, Some(self.meaning.to_string()));
        add(
            keys::META_VERDICT,
            self.basis.as_ref().map(ToString::to_string),
        );
        add(keys::META_RPC_HISTORY, self.dump.clone());
        add(
            keys::META_CAUSED_BY_XID,
            self.caused_by.map(|code| code.to_string()),
        );
        if let Some(mig) = self.mig {
            add(keys::META_GPU_INSTANCE, Some(mig.gpu_instance.to_string()));
            add(
                keys::META_COMPUTE_INSTANCE,
                mig.compute_instance.map(|number| number.to_string()),
            );
        }
        metadata
    }
}
