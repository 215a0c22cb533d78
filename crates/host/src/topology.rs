//! Positions of GPUs and NICs in the machine's PCI tree, read from sysfs, and their distance in
//! the terms of `nvidia-smi topo -m`.
//!
//! ```text
//! /sys/bus/pci/devices/0000:83:00.0        -> ../../../devices/pci0000:80/0000:80:01.0/0000:81:00.0/...
//! /sys/class/infiniband/mlx5_0/device      -> ../../../0000:84:00.0
//! ```
//!
//! A device's directory is below that of its bridge, up to a host bridge (`pci0000:80`).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::nics::entries;

/// Most path elements after the common bridges for two devices on one switch: the switch port
/// and the device itself.
const ON_ONE_SWITCH: usize = 2;

/// Position of one device in the PCI tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciPosition {
    /// Directory of the host bridge.
    host_bridge: PathBuf,
    /// Bridges on the way, and the device at its end.
    way: Vec<String>,
    /// NUMA node, -1 if unknown.
    pub numa_node: i32,
}

/// Returns the position of the device at a PCI address (`0000:83:00.0`, lower case); `None` if
/// sysfs has no such device.
pub fn of_device(sysfs: &Path, address: &str) -> Option<PciPosition> {
    // An address must be a single name, not a path.
    let plausible = |byte: u8| byte.is_ascii_hexdigit() || byte == b':' || byte == b'.';
    if !address.contains(':') || !address.bytes().all(plausible) {
        return None;
    }
    place(&sysfs.join("bus/pci/devices").join(address))
}

/// Returns the position of each RDMA device (`mlx5_0`) that is a PCI device.
pub fn of_nics(sysfs: &Path) -> BTreeMap<String, PciPosition> {
    let all = entries(&sysfs.join("class/infiniband")).into_iter();
    all.filter_map(|(name, entry)| Some((name, place(&entry.join("device"))?)))
        .collect()
}

fn place(link: &Path) -> Option<PciPosition> {
    let directory = fs::canonicalize(link).ok()?;
    let bridge = directory.ancestors().find(|one| is_host_bridge(one))?;
    let way = directory.strip_prefix(bridge).ok()?.iter();
    let way: Vec<String> = way
        .filter_map(|name| name.to_str().map(str::to_owned))
        .collect();
    if way.is_empty() {
        return None;
    }
    let numa_node = fs::read_to_string(directory.join("numa_node"));
    Some(PciPosition {
        host_bridge: bridge.to_owned(),
        way,
        numa_node: numa_node
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(-1),
    })
}

/// Returns true if a directory is that of a host bridge, such as `pci0000:80`.
fn is_host_bridge(directory: &Path) -> bool {
    let name = directory.file_name().and_then(OsStr::to_str);
    name.is_some_and(|name| name.starts_with("pci") && name.contains(':'))
}

// === impl PciPosition ===

impl PciPosition {
    /// Returns the distance to another device: `PIX` (on one switch), `PXB` (across several
    /// switches), `PHB` (across their host bridge), `NODE` (across host bridges of one NUMA
    /// node) or `SYS`.
    pub fn level(&self, other: &Self) -> &'static str {
        if self.host_bridge != other.host_bridge {
            let same = self.numa_node == other.numa_node;
            return if same { "NODE" } else { "SYS" };
        }
        let both = self.way.iter().zip(&other.way);
        let shared = both.take_while(|(one, other)| one == other).count();
        if shared == 0 {
            return "PHB";
        }
        let apart = self.way.len().max(other.way.len()) - shared;
        if apart <= ON_ONE_SWITCH { "PIX" } else { "PXB" }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A machine with two sockets, and devices that the tests add.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        /// Creates a device with the bridges before it.
        fn device(&self, way: &str, numa_node: &str) -> PathBuf {
            let directory = self.0.path().join("devices").join(way);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("numa_node"), numa_node).unwrap();
            let all = self.0.path().join("bus/pci/devices");
            fs::create_dir_all(&all).unwrap();
            symlink(&directory, all.join(directory.file_name().unwrap())).unwrap();
            directory
        }

        fn nic(&self, name: &str, way: &str, numa_node: &str) {
            let device = self.device(way, numa_node);
            let entry = self.0.path().join("class/infiniband").join(name);
            fs::create_dir_all(&entry).unwrap();
            symlink(device, entry.join("device")).unwrap();
        }

        fn level(&self, gpu: &str, nic: &str) -> &'static str {
            let gpu = of_device(self.0.path(), gpu).unwrap();
            gpu.level(&of_nics(self.0.path())[nic])
        }
    }

    #[test]
    fn how_near_a_nic_is_follows_from_the_bridges_between() {
        let tree = Tree::new();
        let switch = "pci0000:80/0000:80:01.0/0000:81:00.0";
        tree.device(&format!("{switch}/0000:82:00.0/0000:83:00.0"), "1\n");
        tree.nic(
            "mlx5_0",
            &format!("{switch}/0000:82:01.0/0000:84:00.0"),
            "1\n",
        );
        // A second switch below a port of the first.
        let below = format!("{switch}/0000:82:02.0/0000:85:00.0/0000:86:00.0/0000:87:00.0");
        tree.nic("mlx5_1", &below, "1\n");
        tree.nic("mlx5_2", "pci0000:80/0000:80:02.0/0000:90:00.0", "1\n");
        tree.nic("mlx5_3", "pci0000:a0/0000:a0:01.0/0000:a1:00.0", "1\n");
        tree.nic("mlx5_4", "pci0000:00/0000:00:01.0/0000:01:00.0", "0\n");
        // Two functions of one card, and a machine that does not report NUMA nodes.
        tree.nic("mlx5_5", "pci0001:00/0001:00:01.0/0001:01:00.0", "-1\n");
        tree.nic("mlx5_6", "pci0001:00/0001:00:01.0/0001:01:00.1", "-1\n");
        let levels = ["PIX", "PXB", "PHB", "NODE", "SYS", "SYS"];
        for (index, level) in levels.into_iter().enumerate() {
            assert_eq!(tree.level("0000:83:00.0", &format!("mlx5_{index}")), level);
        }
        assert_eq!(tree.level("0001:01:00.0", "mlx5_6"), "PIX");
        assert_eq!(
            of_device(tree.0.path(), "0000:83:00.0").unwrap().numa_node,
            1
        );
    }

    #[test]
    fn what_is_not_there_or_no_pci_device_has_no_place() {
        let tree = Tree::new();
        let sysfs = tree.0.path();
        assert!(of_nics(sysfs).is_empty());
        assert_eq!(of_device(sysfs, "0000:83:00.0"), None);
        tree.device("pci0000:80/0000:83:00.0", "nonsense");
        assert_eq!(of_device(sysfs, "../devices"), None);
        assert_eq!(of_device(sysfs, ""), None);
        assert_eq!(of_device(sysfs, "0000:83:00.0").unwrap().numa_node, -1);
        // RDMA over a network interface, without a device of its own.
        let virtual_nic = sysfs.join("devices/virtual/siw");
        fs::create_dir_all(&virtual_nic).unwrap();
        let entry = sysfs.join("class/infiniband/siw0");
        fs::create_dir_all(&entry).unwrap();
        symlink(virtual_nic, entry.join("device")).unwrap();
        assert!(of_nics(sysfs).is_empty());
    }
}
