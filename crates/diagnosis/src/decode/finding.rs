//! A finding in the kernel log, and the fields of its event on the wire.

use contract::{Entity, ProcessingStrategy, RecommendedAction, action_name, keys};

use super::Mig;
use crate::catalog::Text;

/// A fault found in the kernel log, or the end of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The check that found it, and its name there.
    pub kind: Kind,
    /// True if the line takes faults back instead of reporting one.
    pub healthy: bool,
    /// PCI address of the GPU in the form of [`normalise_pci`](crate::subject::normalise_pci);
    /// of a switch with the function where the line has it, of a NIC as printed.
    pub pci: Option<String>,
    /// UUID of the GPU, where the machine or a line of the log named it.
    pub gpu_uuid: Option<String>,
    /// Index of the GPU at the other end of a switch's link.
    pub gpu_index: Option<u32>,
    /// The part of a GPU under MIG that is meant.
    pub mig: Option<Mig>,
    /// The parts that describe the fault further, as entity type and value: link, registers, units.
    pub parts: Vec<(&'static str, String)>,
    /// Process id that the driver blames.
    pub pid: Option<u32>,
    /// Process name that the driver blames.
    pub process: Option<String>,
    /// True if work on the device must stop.
    pub fatal: bool,
    /// The action that mends it.
    pub action: RecommendedAction,
    /// The explanation for people.
    pub meaning: Text,
    /// The basis of the verdict, where it is not simply the catalogue's row of the code.
    pub basis: Option<Text>,
    /// The strategy of its event.
    pub strategy: ProcessingStrategy,
    /// The faults on this device that it ends.
    pub cancels: Vec<Cancelled>,
    /// Serial number of the chassis, where the machine is known.
    pub chassis_serial: Option<String>,
    /// The dump of requests to the GPU that the driver has printed since the XID before this one.
    pub dump: Option<String>,
    /// The lines that it was read from, where they are not simply the record: some of the
    /// lines of a record, or also lines of records before it.
    pub lines: Option<String>,
}

/// A fault that another finding ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cancelled {
    /// Its check.
    pub check: &'static str,
    /// Its error code.
    pub code: String,
}

/// The check of a finding, and its name there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An XID line.
    Xid {
        /// The code.
        code: u32,
        /// Name of the `NVLink` unit, where the line has one.
        unit: Option<String>,
    },
    /// An `SXid` line, with the code and the number of the switch.
    Sxid {
        /// The code.
        code: u32,
        /// Number of the switch.
        switch: Option<u32>,
    },
    /// A "fallen off the bus" line without XID, with the PCI id where it has one.
    FallenOffBus {
        /// Vendor and device, for example `10de:2330`.
        pci_id: Option<String>,
    },
    /// Lines about starts of a GPU that failed, one after the other.
    InitFailed,
    /// A line about a reset of a GPU. A successful one is the end of all its XIDs.
    Reset,
    /// A line of a NIC's driver.
    Nic {
        /// Name of the pattern that covers it.
        pattern: String,
        /// The device: its RDMA name where that is known, else its PCI address or network
        /// interface; `None` where the line names none.
        device: Option<String>,
    },
}

// === impl Finding ===

impl Finding {
    /// Returns the check name on the wire.
    pub fn check(&self) -> &'static str {
        match self.kind {
            Kind::Xid { .. } | Kind::Reset => keys::CHECK_XID,
            Kind::Sxid { .. } => keys::CHECK_SXID,
            Kind::FallenOffBus { .. } => keys::CHECK_GPU_FALLEN_OFF,
            Kind::InitFailed => keys::CHECK_GPU_INIT,
            Kind::Nic { .. } => keys::CHECK_NIC_DRIVER,
        }
    }

    /// Returns the component class on the wire.
    pub fn component(&self) -> &'static str {
        match self.kind {
            Kind::Nic { .. } => keys::COMPONENT_NIC,
            _ => keys::COMPONENT_GPU,
        }
    }

    /// Returns the error code on the wire; `None`: all codes of the device, as a successful reset
    /// ends them.
    pub fn code(&self) -> Option<String> {
        match &self.kind {
            Kind::Xid { code, unit: None } | Kind::Sxid { code, .. } => Some(code.to_string()),
            // NVSentinel's form; a blank would end the code in its node conditions.
            Kind::Xid {
                code,
                unit: Some(unit),
            } => Some(format!("{code}.{}", unit.replace(' ', "_"))),
            Kind::FallenOffBus { .. } => Some(keys::CODE_GPU_FALLEN_OFF.to_owned()),
            Kind::InitFailed => Some(keys::CODE_GPU_INIT_FAILED.to_owned()),
            Kind::Reset if self.healthy => None,
            Kind::Reset => Some(keys::CODE_GPU_RESET_FAILURE.to_owned()),
            Kind::Nic { pattern, .. } => Some(pattern.clone()),
        }
    }

    /// Returns the recommended action by name.
    pub fn action_name(&self) -> String {
        action_name(self.action as i32).into_owned()
    }

    /// Returns the affected resources on the wire. What is not known is left out.
    pub fn entities(&self) -> Vec<Entity> {
        let mut entities = Vec::new();
        let mut add = |kind: &str, value: Option<String>| {
            entities.extend(value.map(|value| Entity {
                entity_type: kind.to_owned(),
                entity_value: value,
            }));
        };
        if let Kind::Nic { device, .. } = &self.kind {
            add(keys::ENTITY_NIC, device.clone());
            return entities;
        }
        if let Kind::Sxid { switch, .. } = self.kind {
            add(
                keys::ENTITY_NVSWITCH,
                switch.map(|switch| switch.to_string()),
            );
        }
        add(keys::ENTITY_PCI, self.pci.clone());
        if let Kind::Sxid { .. } = self.kind {
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
        if let Kind::FallenOffBus { pci_id } = &self.kind {
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
