//! Names of the machine's NICs, read from sysfs: drivers log a NIC's PCI address, people and
//! NCCL use its RDMA device.
//!
//! ```text
//! /sys/class/infiniband/mlx5_0/device      -> ../../../0000:9a:00.0
//! /sys/class/net/eth0/device               -> ../../../0000:9a:00.0
//! /sys/class/net/eth0/device/driver        -> ../../../../bus/pci/drivers/mlx5_core
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Directory where sysfs is mounted.
pub const SYSFS: &str = "/sys";
/// Most entries of a class that are read: far above any machine, with virtual functions.
const MAX_ENTRIES: usize = 4096;
/// Longest accepted name, in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Driver whose network interfaces are read; other drivers log the name of their device
/// themselves.
const MLX5: &str = "mlx5_core";

/// Returns the device of each NIC (`mlx5_0`) by PCI address with function (`0000:9a:00.0`,
/// lower case) and by network interface (`eth0`). A NIC without RDMA is named after its
/// interface.
/// interface.
/// Unreadable entries are left out; without sysfs the result is empty.
pub fn read(sysfs: &Path) -> BTreeMap<String, String> {
    let mut devices = BTreeMap::new();
    for (name, path) in entries(&sysfs.join("class/infiniband")) {
        if let Some(address) = address(&path) {
            devices.entry(address).or_insert(name);
        }
    }
    for (interface, path) in entries(&sysfs.join("class/net")) {
        if target_name(&path.join("device/driver")).as_deref() != Some(MLX5) {
            continue;
        }
        let Some(address) = address(&path) else {
            continue;
        };
        let device = devices.entry(address).or_insert_with(|| interface.clone());
        let device = device.clone();
        devices.insert(interface, device);
    }
    devices
}

/// Returns the entries of a class with plausible names, sorted so that each reading gives the
/// same.
pub(crate) fn entries(class: &Path) -> BTreeMap<String, PathBuf> {
    let listed = fs::read_dir(class).into_iter().flatten();
    let listed = listed.take(MAX_ENTRIES).filter_map(|entry| {
        let entry = entry.ok()?;
        let name = entry.file_name().into_string().ok()?;
        let plausible = name.len() <= MAX_NAME_BYTES && name.bytes().all(|b| b.is_ascii_graphic());
        plausible.then(|| (name, entry.path()))
    });
    listed.collect()
}

/// Returns the PCI address of a device's function; `None` for a device without a PCI function.
fn address(entry: &Path) -> Option<String> {
    let name = target_name(&entry.join("device"))?.to_ascii_lowercase();
    let (device, function) = name.split_once('.')?;
    let parts: Vec<&str> = device.split(':').collect();
    let hex = |text: &&str, digits: std::ops::RangeInclusive<usize>| {
        digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let [domain, bus, slot] = parts.as_slice() else {
        return None;
    };
    let whole = hex(domain, 4..=8) && hex(bus, 2..=2) && hex(slot, 2..=2) && hex(&function, 1..=1);
    whole.then_some(name)
}

/// Returns the last component of a symbolic link's target.
fn target_name(link: &Path) -> Option<String> {
    let target = fs::read_link(link).ok()?;
    target.file_name()?.to_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A sysfs tree like the kernel's, with only the files that are read.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn device(&self, address: &str, driver: Option<&str>) {
            let device = self.0.path().join("devices/pci0000:80").join(address);
            fs::create_dir_all(&device).unwrap();
            if let Some(driver) = driver {
                let target = format!("../../../bus/pci/drivers/{driver}");
                symlink(target, device.join("driver")).unwrap();
            }
        }

        fn entry(&self, class: &str, name: &str, address: Option<&str>) {
            let entry = self.0.path().join("class").join(class).join(name);
            fs::create_dir_all(&entry).unwrap();
            if let Some(address) = address {
                let target = format!("../../../devices/pci0000:80/{address}");
                symlink(target, entry.join("device")).unwrap();
            }
        }

        fn read(&self) -> BTreeMap<String, String> {
            read(self.0.path())
        }
    }

    fn pairs(map: &BTreeMap<String, String>) -> Vec<(&str, &str)> {
        map.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect()
    }

    #[test]
    fn addresses_and_interfaces_lead_to_the_rdma_device() {
        let tree = Tree::new();
        for address in [
            "0000:9a:00.0",
            "0000:9B:00.1",
            "0000:9c:00.0",
            "10000:01:00.0",
        ] {
            tree.device(address, Some("mlx5_core"));
        }
        tree.device("0000:05:00.0", Some("ixgbe"));
        tree.device("mlx5_core.sf.2", Some("mlx5_core"));
        tree.entry("infiniband", "mlx5_0", Some("0000:9a:00.0"));
        tree.entry("infiniband", "mlx5_1", Some("0000:9B:00.1"));
        tree.entry("infiniband", "mlx5_9", Some("10000:01:00.0"));
        tree.entry("infiniband", "mlx5_sf", Some("mlx5_core.sf.2"));
        tree.entry("infiniband", "rdmap0s6", None);
        tree.entry("net", "eth0", Some("0000:9a:00.0"));
        // Without RDMA, the interface names the device.
        tree.entry("net", "eth2", Some("0000:9c:00.0"));
        tree.entry("net", "eno1", Some("0000:05:00.0"));
        tree.entry("net", "lo", None);
        assert_eq!(
            pairs(&tree.read()),
            [
                ("0000:9a:00.0", "mlx5_0"),
                ("0000:9b:00.1", "mlx5_1"),
                ("0000:9c:00.0", "eth2"),
                ("10000:01:00.0", "mlx5_9"),
                ("eth0", "mlx5_0"),
                ("eth2", "eth2"),
            ]
        );
    }

    #[test]
    fn what_is_missing_or_odd_is_left_out() {
        let tree = Tree::new();
        assert!(tree.read().is_empty(), "no sysfs");
        tree.device("0000:9a:00.0", None);
        tree.entry("infiniband", &"x".repeat(65), Some("0000:9a:00.0"));
        tree.entry("infiniband", "mlx5 0", Some("0000:9a:00.0"));
        tree.entry("infiniband", "mlx5_1", Some("0000:9a:00"));
        tree.entry("infiniband", "mlx5_2", Some("9a:00.0"));
        tree.entry("infiniband", "mlx5_3", Some("0000:9a:0g.0"));
        // No driver is bound.
        tree.entry("net", "eth0", Some("0000:9a:00.0"));
        fs::write(tree.0.path().join("class/infiniband/file"), "").unwrap();
        assert!(tree.read().is_empty(), "{:?}", tree.read());
        // More than any machine has: the number is bounded.
        for index in 0..MAX_ENTRIES + 10 {
            fs::create_dir(
                tree.0
                    .path()
                    .join(format!("class/infiniband/virtual{index}")),
            )
            .unwrap();
        }
        assert!(entries(&tree.0.path().join("class/infiniband")).len() <= MAX_ENTRIES);
    }
}
