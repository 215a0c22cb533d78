//! Description of this machine's GPUs: their names, and the devices that their `NVLink`s
//! connect.
//!
//! Parsed from `gpu_metadata.json`, which NVSentinel's metadata collector writes on a node for
//! its monitors; the caller reads the file. The description only adds to findings: without it,
//! or if it lacks something, a finding names less and is otherwise the same.

use std::collections::HashMap;

use serde::Deserialize;

use crate::subject::normalise_pci;

/// Longest text, in bytes. A machine with eight GPUs has about 30 KiB.
pub const MAX_MACHINE_BYTES: usize = 4 * 1024 * 1024;
/// Most GPUs in a description: far above any machine.
pub const MAX_GPUS: usize = 1024;
/// Most `NVLink`s of a GPU; today's have 18.
pub const MAX_LINKS: usize = 256;
/// Longest name in bytes: UUID, address, serial number or driver version. All of them become
/// part of events, which have limits of their own.
pub const MAX_MACHINE_NAME_BYTES: usize = 128;

/// GPUs of a machine, and their links.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineGpus {
    driver_version: Option<String>,
    chassis_serial: Option<String>,
    gpus: Vec<Gpu>,
    /// Index into `gpus` by PCI address, [`normalise_pci`].
    by_pci: HashMap<String, usize>,
    /// Index into `gpus` by UUID in lower case.
    by_uuid: HashMap<String, usize>,
    /// Index into `gpus` by PCI address and link of the device at the other end.
    by_remote_link: HashMap<(String, u32), usize>,
}

/// A GPU with its known names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    /// Index in the driver's tools.
    pub index: Option<u32>,
    /// UUID of the form `GPU-...`.
    pub uuid: Option<String>,
    /// PCI address in the form of [`normalise_pci`].
    pub pci: Option<String>,
    /// Serial number of the board.
    pub serial: Option<String>,
}

/// Error in the description of a machine.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The text is too long.
    #[error("it has {found} bytes; the limit is {MAX_MACHINE_BYTES}")]
    TooLong {
        /// Length of the text in bytes.
        found: usize,
    },
    /// The text is not JSON, or has another structure.
    #[error("it does not have the format of gpu_metadata.json")]
    Shape(#[source] serde_json::Error),
    /// A list has too many entries.
    #[error("{field} has {found} entries; the limit is {most}")]
    TooMany {
        /// Name of the list, such as `gpus`.
        field: String,
        /// Number of entries of the list.
        found: usize,
        /// Limit on the number of entries.
        most: usize,
    },
    /// A name is not printable ASCII, or is too long.
    #[error(
        "{field} is {value:?}: expected printable ASCII of at most {MAX_MACHINE_NAME_BYTES} bytes"
    )]
    Name {
        /// Name of the field, such as `gpus[0].uuid`.
        field: String,
        /// Start of the field's value.
        value: String,
    },
}

/// Parts of the file that are used. Any key may be missing or null; others (`nic_topology`,
/// `nvswitches`, `numa_node`, ...) are ignored.
#[derive(Deserialize)]
struct MetadataFile {
    driver_version: Option<String>,
    chassis_serial: Option<String>,
    gpus: Option<Vec<GpuEntry>>,
}

#[derive(Deserialize)]
struct GpuEntry {
    gpu_id: Option<u32>,
    uuid: Option<String>,
    pci_address: Option<String>,
    serial_number: Option<String>,
    nvlinks: Option<Vec<LinkEntry>>,
}

#[derive(Deserialize)]
struct LinkEntry {
    remote_pci_address: Option<String>,
    /// Number of the link there; -1 if unknown.
    remote_link_id: Option<i64>,
}

// === impl MachineGpus ===

impl MachineGpus {
    /// Parses `gpu_metadata.json`. Unknown keys are ignored, and any key may be missing; a key
    /// of the wrong type, or a value that no event may contain, is an error that names it.
    pub fn parse(text: &str) -> Result<Self, MachineError> {
        if text.len() > MAX_MACHINE_BYTES {
            return Err(MachineError::TooLong { found: text.len() });
        }
        let file: MetadataFile = serde_json::from_str(text).map_err(MachineError::Shape)?;
        let entries = file.gpus.unwrap_or_default();
        limit("gpus", entries.len(), MAX_GPUS)?;
        let mut machine = Self {
            driver_version: name("driver_version", file.driver_version)?,
            chassis_serial: name("chassis_serial", file.chassis_serial)?,
            ..Self::default()
        };
        for (index, entry) in entries.into_iter().enumerate() {
            let field = |key: &str| format!("gpus[{index}].{key}");
            let gpu = Gpu {
                index: entry.gpu_id,
                uuid: name(&field("uuid"), entry.uuid)?,
                pci: name(&field("pci_address"), entry.pci_address)?.map(|pci| normalise_pci(&pci)),
                serial: name(&field("serial_number"), entry.serial_number)?,
            };
            // If a name occurs twice, it belongs to the first GPU.
            if let Some(pci) = &gpu.pci {
                machine.by_pci.entry(pci.clone()).or_insert(index);
            }
            if let Some(uuid) = &gpu.uuid {
                let uuid = uuid.to_ascii_lowercase();
                machine.by_uuid.entry(uuid).or_insert(index);
            }
            let links = entry.nvlinks.unwrap_or_default();
            limit(&field("nvlinks"), links.len(), MAX_LINKS)?;
            for (number, link) in links.into_iter().enumerate() {
                let field = field(&format!("nvlinks[{number}].remote_pci_address"));
                let remote = name(&field, link.remote_pci_address)?;
                let link = link
                    .remote_link_id
                    .and_then(|link| u32::try_from(link).ok());
                if let (Some(remote), Some(link)) = (remote, link) {
                    machine
                        .by_remote_link
                        .entry((normalise_pci(&remote), link))
                        .or_insert(index);
                }
            }
            machine.gpus.push(gpu);
        }
        Ok(machine)
    }

    /// Returns the version of the driver, such as `570.86.15`.
    pub fn driver_version(&self) -> Option<&str> {
        self.driver_version.as_deref()
    }

    /// Returns the branch of the driver, 570 for `570.86.15`.
    pub fn driver_branch(&self) -> Option<u32> {
        self.driver_version()?.split('.').next()?.parse().ok()
    }

    /// Returns the serial number of the chassis.
    pub fn chassis_serial(&self) -> Option<&str> {
        self.chassis_serial.as_deref()
    }

    /// Returns the GPU at a PCI address in any form.
    ///
    /// The file has only the last four digits of a domain. A GPU with a longer one, as behind a
    /// volume management device (`10000:01:00`), is found if they match one GPU only.
    pub fn gpu_at(&self, pci: &str) -> Option<&Gpu> {
        let pci = normalise_pci(pci);
        if let Some(index) = self.by_pci.get(&pci) {
            return self.gpus.get(*index);
        }
        let cut = cut_domain(&pci)?;
        let mut there = self
            .gpus
            .iter()
            .filter(|gpu| gpu.pci.as_deref() == Some(&*cut));
        there.next().filter(|_| there.next().is_none())
    }

    /// Returns the GPU with a UUID.
    pub fn gpu_with_uuid(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus
            .get(*self.by_uuid.get(&uuid.to_ascii_lowercase())?)
    }

    /// Returns the GPU whose `NVLink` ends in link `link` of the device at `pci`, a switch or
    /// another GPU.
    pub fn gpu_linked_to(&self, pci: &str, link: u32) -> Option<&Gpu> {
        self.gpus
            .get(*self.by_remote_link.get(&(normalise_pci(pci), link))?)
    }
}

/// Shortens the domain of a normalised address to its last four digits; `None` if it is no
/// longer.
pub fn cut_domain(pci: &str) -> Option<String> {
    let (domain, rest) = pci.split_once(':')?;
    let cut = domain.len().checked_sub(4).filter(|cut| *cut > 0)?;
    Some(format!("{}:{rest}", domain.get(cut..)?))
}

fn limit(field: &str, found: usize, most: usize) -> Result<(), MachineError> {
    if found <= most {
        return Ok(());
    }
    Err(MachineError::TooMany {
        field: field.to_owned(),
        found,
        most,
    })
}

/// Returns a name without surrounding blanks; `None` if it is empty.
fn name(field: &str, value: Option<String>) -> Result<Option<String>, MachineError> {
    let Some(value) = value else {
        return Ok(None);
    };
    let value = value.trim();
    if value.len() > MAX_MACHINE_NAME_BYTES
        || !value.bytes().all(|b| b == b' ' || b.is_ascii_graphic())
    {
        return Err(MachineError::Name {
            field: field.to_owned(),
            value: value.chars().take(40).collect(),
        });
    }
    Ok((!value.is_empty()).then(|| value.to_owned()))
}

#[cfg(test)]
mod tests;
