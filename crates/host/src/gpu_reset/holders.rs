//! Finds the processes that use a GPU, from the driver's list and from open device files.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fmt, fs, process};

use super::{ResetError, ResetSettings};

/// Name of the daemon that holds GPUs open for persistence mode, truncated as the kernel does.
const PERSISTENCE_DAEMON: &str = "nvidia-persiste";
/// Name of the daemon that sets up the NVSwitches, truncated as the kernel does.
const FABRIC_MANAGER: &str = "nv-fabricmanage";
/// Device file of the first NVSwitch. The common device file of all switches exists even
/// without any.
const FIRST_SWITCH: &str = "nvidia-nvswitch0";
/// Most processes that are listed.
const MAX_NAMED: usize = 20;

/// A process that holds a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    pid: u32,
    name: String,
}

// === impl Holder ===

impl Holder {
    pub(super) fn is_persistence_daemon(&self) -> bool {
        self.name.starts_with(PERSISTENCE_DAEMON)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.name, self.pid)
    }
}

/// Returns the processes that hold a GPU: those in `listed`, the driver's list, and those that
/// have the device file open. Leaves this process out.
pub(super) fn of(
    settings: &ResetSettings,
    minor: Option<u32>,
    listed: &[u32],
) -> Result<Vec<Holder>, ResetError> {
    let file = minor.map(|minor| settings.devices.join(format!("nvidia{minor}")));
    let mut found = BTreeMap::new();
    for pid in listed {
        found.insert(*pid, name(&settings.processes, *pid));
    }
    for pid in all(&settings.processes)? {
        let opened = settings.processes.join(pid.to_string()).join("fd");
        // A process that ends meanwhile holds nothing.
        let opened = fs::read_dir(opened).into_iter().flatten().flatten();
        let mut opened = opened.filter_map(|entry| fs::read_link(entry.path()).ok());
        if file.is_some() && opened.any(|to| Some(&to) == file.as_ref()) {
            found.insert(pid, name(&settings.processes, pid));
        }
    }
    found.remove(&process::id());
    let found = found.into_iter().take(MAX_NAMED);
    Ok(found.map(|(pid, name)| Holder { pid, name }).collect())
}

/// Returns the reason why GPUs could not be used with their NVSwitches after a reset; `None` if
/// they could, or if there are no switches.
pub(super) fn fabric_manager(settings: &ResetSettings) -> Option<String> {
    if !settings.devices.join(FIRST_SWITCH).exists() {
        return None;
    }
    let mut pids = all(&settings.processes).ok()?;
    let runs = pids.any(|pid| name(&settings.processes, pid).starts_with(FABRIC_MANAGER));
    (!runs).then(|| {
        "the Fabric Manager does not run: after a reset the GPU would not find its switches"
            .to_owned()
    })
}

fn all(processes: &Path) -> Result<impl Iterator<Item = u32> + use<>, ResetError> {
    let entries = fs::read_dir(processes).map_err(|source| ResetError::Processes {
        at: processes.to_owned(),
        source,
    })?;
    Ok(entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// Returns the process name in the kernel's form, its first 15 bytes.
fn name(processes: &Path, pid: u32) -> String {
    let file = processes.join(pid.to_string()).join("comm");
    let name = fs::read_to_string(file).unwrap_or_default();
    match name.trim() {
        "" => "a process that is not visible from here".to_owned(),
        name => name.to_owned(),
    }
}
