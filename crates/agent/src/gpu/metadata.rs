//! Writes `gpu_metadata.json`: this machine's GPUs and their distance to its NICs, in the
//! format of NVSentinel's metadata collector, for other monitors.
//!
//! The file is replaced as a whole, and only if something has changed. A file of another writer
//! is left alone: NVSentinel's collector writes once, when it starts, and two writers would
//! replace each other's file forever. A key that readers ignore marks gpuwarden's own file. A
//! file that cannot be written costs other monitors names, and is no fault.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::time::Duration;

use diagnosis::decode::{MAX_MACHINE_BYTES, MachineGpus, cut_domain};
use diagnosis::gpu::{Gpu, Inventory};
use host::boot::Boot;
use host::topology;
use jiff::Timestamp;
use runtime::logging::{Trouble, chain};
use runtime::text_file;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Version of the format.
const VERSION: &str = "1.0";
/// Value of the key `written_by` in gpuwarden's file.
const OURS: &str = "gpuwarden";
/// Number of an unknown link or NUMA node.
const UNKNOWN: i64 = -1;
/// Interval of checks of the file and the NICs, in addition to those when the GPUs change: a
/// card may be replaced, or the file deleted.
const EVERY: Duration = Duration::from_secs(60);
/// Permission bits of the file: every monitor may read it.
const MODE: u32 = 0o644;

#[derive(Clone, Debug)]
pub struct MetadataConfig {
    pub path: PathBuf,
    /// Directory of sysfs: [`host::nics::SYSFS`].
    pub sysfs: PathBuf,
    pub node_name: String,
    /// The running boot; `None` if unknown.
    pub boot: Option<Boot>,
    pub clock: fn() -> Timestamp,
}

/// Writer of the file, with the known GPUs.
pub struct MetadataFile {
    config: MetadataConfig,
    /// Description of all GPUs that were seen since the boot.
    known: Option<Description>,
    /// Limits the log lines about the file's problem.
    trouble: Trouble,
}

/// Content of the file, in NVSentinel's format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Description {
    version: String,
    /// Time of writing; empty for comparisons.
    timestamp: String,
    node_name: String,
    driver_version: String,
    chassis_serial: Option<String>,
    gpus: Vec<GpuEntry>,
    nvswitches: BTreeSet<String>,
    /// Distance of each NIC to each of `gpus`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    nic_topology: BTreeMap<String, Vec<String>>,
    /// The only key that NVSentinel's format does not have.
    written_by: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct GpuEntry {
    gpu_id: u32,
    uuid: String,
    pci_address: String,
    serial_number: String,
    device_name: String,
    nvlinks: Vec<LinkEntry>,
    numa_node: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    slowdown_tlimit_c: Option<i32>,
}

/// A link to a switch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct LinkEntry {
    link_id: u32,
    remote_pci_address: String,
    remote_link_id: i64,
}

/// Content of the file's path.
enum Found {
    Nothing,
    Ours(Box<Description>),
    /// Text of a file of another writer.
    Others(String),
}

// === impl MetadataFile ===

impl MetadataFile {
    /// Creates the writer, which does not touch the file before GPUs are seen.
    pub fn new(config: MetadataConfig) -> Self {
        Self {
            config,
            known: None,
            trouble: Trouble::default(),
        }
    }

    /// Updates the file from `inventory` until `cancel`, and sends the known GPUs to `machine`.
    pub async fn run(
        mut self,
        mut inventory: watch::Receiver<Inventory>,
        machine: watch::Sender<Option<MachineGpus>>,
        cancel: CancellationToken,
    ) {
        loop {
            let seen = inventory.borrow_and_update().clone();
            let updated = tokio::task::spawn_blocking(move || {
                let changed = self.update(&seen);
                (self, changed)
            });
            let Ok((file, changed)) = updated.await else {
                return; // The sender was dropped at shutdown.
            };
            self = file;
            if changed.is_some() {
                machine.send_replace(changed);
            }
            tokio::select! {
                () = cancel.cancelled() => return,
                changed = inventory.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(EVERY) => {}
            }
        }
    }

    /// Writes the file if something has changed. Returns the known GPUs if they have changed.
    fn update(&mut self, inventory: &Inventory) -> Option<MachineGpus> {
        // A driver that is away does not mean that GPUs are gone.
        if inventory.gpus.is_empty() {
            return None;
        }
        let found = self.find();
        let before = match (&self.known, &found) {
            (Some(known), _) => Some(known),
            (None, Ok(Found::Ours(file))) if self.is_of_this_boot(file) => Some(&**file),
            _ => None,
        };
        let now = self.describe(inventory, before);
        let result = match found {
            Ok(Found::Ours(file)) if file.without_time() == now => Ok(()),
            Ok(Found::Nothing | Found::Ours(_)) => self.write(&now).map_err(|error| {
                format!(
                    "cannot be written: {}. Other monitors that read it learn no names; \
                     --gpu-metadata names another place",
                    chain(&error)
                )
            }),
            Ok(Found::Others(text)) => check(&text, &now),
            Err(error) => Err(format!("cannot be read: {}", chain(&error))),
        };
        let path = self.config.path.display();
        self.trouble
            .note(result.map_err(|why| format!("{path} {why}")));
        let changed = self.known.as_ref() != Some(&now);
        let machine = changed.then(|| MachineGpus::parse(&text(&now)).ok());
        self.known = Some(now);
        machine.flatten()
    }

    /// Reads what is at the path.
    fn find(&self) -> io::Result<Found> {
        let there = match fs::metadata(&self.config.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            there => there?,
        };
        // Anything other than a file may be endless.
        if !there.is_file() {
            return Err(io::Error::other("it is not a file"));
        }
        let text = text_file::read(&self.config.path, MAX_MACHINE_BYTES)?;
        let ours = serde_json::from_str::<Description>(&text).ok();
        let ours = ours.filter(|file| file.written_by == OURS);
        Ok(ours.map_or(Found::Others(text), |file| Found::Ours(Box::new(file))))
    }

    fn is_of_this_boot(&self, file: &Description) -> bool {
        let written = file.timestamp.parse::<Timestamp>().ok();
        let boot = self.config.boot.as_ref();
        written.zip(boot).is_some_and(|(at, boot)| at >= boot.at)
    }

    /// Describes the GPUs. A GPU that was seen since the boot and is missing now stays: log
    /// lines about a GPU that fell off the bus are the ones that need its names.
    fn describe(&self, inventory: &Inventory, before: Option<&Description>) -> Description {
        let place = |pci: &str| topology::of_device(&self.config.sysfs, pci);
        let mut gpus = Vec::new();
        for gpu in &inventory.gpus {
            let place = place(&gpu.pci);
            gpus.push((entry(gpu, place.as_ref()), place));
        }
        for old in before.into_iter().flat_map(|before| &before.gpus) {
            let replaces = |new: &GpuEntry| {
                new.uuid == old.uuid
                    || new.pci_address == old.pci_address
                    || new.gpu_id == old.gpu_id
            };
            if !gpus.iter().any(|(new, _)| replaces(new)) {
                gpus.push((old.clone(), place(&old.pci_address)));
            }
        }
        gpus.sort_by_key(|(gpu, _)| gpu.gpu_id);
        let (gpus, places): (Vec<GpuEntry>, Vec<_>) = gpus.into_iter().unzip();
        let links = gpus.iter().flat_map(|gpu| &gpu.nvlinks);
        let switches = links.map(|link| link.remote_pci_address.clone()).collect();
        let same = |before: &&Description| {
            let uuids = |gpus: &[GpuEntry]| gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
            let (before, now): (Vec<_>, Vec<_>) = (uuids(&before.gpus), uuids(&gpus));
            before == now
        };
        let nic_topology = match places.into_iter().collect::<Option<Vec<_>>>() {
            Some(places) => topology::of_nics(&self.config.sysfs)
                .into_iter()
                .map(|(nic, at)| {
                    let levels = places.iter().map(|gpu| at.level(gpu).to_owned());
                    (nic, levels.collect())
                })
                .collect(),
            // A column for each GPU, or none.
            None => before
                .filter(same)
                .map(|before| before.nic_topology.clone())
                .unwrap_or_default(),
        };
        Description {
            version: VERSION.to_owned(),
            timestamp: String::new(),
            node_name: self.config.node_name.clone(),
            driver_version: inventory.driver_version.clone().unwrap_or_default(),
            chassis_serial: inventory
                .gpus
                .iter()
                .find_map(|gpu| gpu.chassis_serial.clone()),
            gpus,
            nvswitches: switches,
            nic_topology,
            written_by: OURS.to_owned(),
        }
    }

    /// Replaces the file with a description.
    fn write(&self, description: &Description) -> io::Result<()> {
        let path = &self.config.path;
        if let Some(directory) = path.parent().filter(|directory| !directory.exists()) {
            fs::create_dir(directory)?;
        }
        let now = Description {
            timestamp: format!("{:.0}", (self.config.clock)()),
            ..description.clone()
        };
        let new = path.with_extension("gpuwarden");
        drop(fs::remove_file(&new));
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(MODE)
            .open(&new)?;
        // Independent of the umask.
        file.set_permissions(Permissions::from_mode(MODE))?;
        file.write_all(text(&now).as_bytes())?;
        file.sync_data()?;
        fs::rename(&new, path)?;
        tracing::info!("{} describes {} GPUs", path.display(), now.gpus.len());
        Ok(())
    }
}

// === impl Description ===

impl Description {
    fn without_time(&self) -> Self {
        Self {
            timestamp: String::new(),
            ..self.clone()
        }
    }
}

fn text(description: &Description) -> String {
    serde_json::to_string_pretty(description).unwrap_or_default()
}

/// Returns an error if another writer's file, which is left alone, is incomplete.
fn check(text: &str, seen: &Description) -> Result<(), String> {
    let left = "gpuwarden did not write it, and leaves it alone";
    let machine = MachineGpus::parse(text).map_err(|error| format!("{}; {left}", chain(&error)))?;
    let mut gpus = seen.gpus.iter();
    let Some(gpu) = gpus.find(|gpu| machine.gpu_with_uuid(&gpu.uuid).is_none()) else {
        return Ok(());
    };
    Err(format!(
        "does not name {}, which the driver lists; {left}. Delete it where nobody else keeps it up \
         to date: it is then written anew",
        gpu.uuid
    ))
}

fn entry(gpu: &Gpu, place: Option<&topology::PciPosition>) -> GpuEntry {
    let links = gpu
        .nvlinks
        .iter()
        .filter(|link| link.remote_is_switch == Some(true));
    let links = links.filter_map(|link| {
        Some(LinkEntry {
            link_id: link.link,
            remote_pci_address: short(link.remote_pci.as_deref()?),
            remote_link_id: link.remote_link.map_or(UNKNOWN, i64::from),
        })
    });
    GpuEntry {
        gpu_id: gpu.index,
        uuid: gpu.uuid.clone(),
        pci_address: short(&gpu.pci),
        serial_number: gpu.serial.clone().unwrap_or_default(),
        device_name: gpu.product.clone(),
        nvlinks: links.collect(),
        numa_node: place.map_or(UNKNOWN, |place| place.numa_node.into()),
        slowdown_tlimit_c: gpu.slowdown_margin_c,
    }
}

/// Returns an address in the format's form, with the last four digits of its domain.
fn short(pci: &str) -> String {
    cut_domain(pci).unwrap_or_else(|| pci.to_owned())
}

#[cfg(test)]
mod tests;
