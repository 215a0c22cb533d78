//! Tests of the file, from the driver's data to the readers.

use std::fs::File;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;

use diagnosis::gpu::Nvlink;
use fakes::{FakeLink, Scenario};
use host::boot::BootId;
use host::library::LibraryPlaces;
use host::nvml::Nvml;
use serde_json::{Value, json};

use super::*;

const NOW: fn() -> Timestamp = || "2026-11-21T02:00:00.123Z".parse().unwrap();

/// A machine with a file and sysfs in a directory of its own.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("nvsentinel/gpu_metadata.json")
    }

    fn sysfs(&self) -> PathBuf {
        self.0.path().join("sys")
    }

    /// Returns the writer of a process in the boot that began at this hour.
    fn file(&self, hour: u8) -> MetadataFile {
        MetadataFile::new(MetadataConfig {
            path: self.path(),
            sysfs: self.sysfs(),
            node_name: "n1".to_owned(),
            boot: Some(Boot {
                id: BootId::from_bytes([hour; 16]),
                at: format!("2026-11-21T{hour:02}:00:00Z").parse().unwrap(),
            }),
            clock: NOW,
        })
    }

    fn read(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.path()).unwrap()).unwrap()
    }

    fn uuids(&self) -> Vec<String> {
        let gpus = self.read()["gpus"].as_array().unwrap().clone();
        gpus.iter()
            .map(|gpu| gpu["uuid"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Creates a device of sysfs with the bridges before it.
    fn device(&self, way: &str, numa_node: &str) -> PathBuf {
        let directory = self.sysfs().join("devices").join(way);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("numa_node"), numa_node).unwrap();
        let all = self.sysfs().join("bus/pci/devices");
        fs::create_dir_all(&all).unwrap();
        symlink(&directory, all.join(directory.file_name().unwrap())).unwrap();
        directory
    }

    fn nic(&self, name: &str, way: &str) {
        let entry = self.sysfs().join("class/infiniband").join(name);
        fs::create_dir_all(&entry).unwrap();
        symlink(self.device(way, "1"), entry.join("device")).unwrap();
    }
}

fn gpu(index: u32) -> Gpu {
    Gpu {
        index,
        uuid: format!("GPU-{index}"),
        pci: format!("0000:b{index}:00.0"),
        ..Gpu::default()
    }
}

fn inventory(gpus: &[Gpu]) -> Inventory {
    Inventory {
        driver_version: Some("580.65.06".to_owned()),
        gpus: gpus.to_vec(),
        ..Inventory::default()
    }
}

fn mtime(path: &Path) -> (u64, i64) {
    let metadata = File::open(path).unwrap().metadata().unwrap();
    (metadata.ino(), metadata.mtime_nsec())
}

#[test]
fn it_has_the_form_of_nvsentinels() {
    let bench = Bench::new();
    let switch = "pci0000:80/0000:80:01.0/0000:81:00.0";
    bench.device(&format!("{switch}/0000:82:00.0/0000:b0:00.0"), "1");
    bench.device("pci10000:00/10000:00:01.0/10000:b1:00.0", "0");
    bench.nic("mlx5_0", &format!("{switch}/0000:82:01.0/0000:84:00.0"));
    bench.nic("mlx5_1", "pci0000:80/0000:80:03.0/0000:90:00.0");
    let link = |link, remote: &str, is_switch, remote_link| Nvlink {
        link,
        remote_pci: Some(remote.to_owned()),
        remote_is_switch: is_switch,
        remote_link,
    };
    let first = Gpu {
        product: "NVIDIA H100 80GB HBM3".to_owned(),
        serial: Some("1654".to_owned()),
        chassis_serial: Some("1821".to_owned()),
        slowdown_margin_c: Some(-2),
        nvlinks: vec![
            link(0, "0000:c5:00.0", Some(true), Some(28)),
            link(1, "10000:c4:00.0", Some(true), None),
            link(2, "0000:b1:00.0", Some(false), Some(2)),
            link(3, "0000:b2:00.0", None, Some(2)),
        ],
        ..gpu(0)
    };
    let second = Gpu {
        pci: "10000:b1:00.0".to_owned(),
        ..gpu(1)
    };
    let machine = bench.file(1).update(&inventory(&[first, second])).unwrap();
    assert_eq!(
        bench.read(),
        json!({
            "version": "1.0",
            "timestamp": "2026-11-21T02:00:00Z",
            "node_name": "n1",
            "driver_version": "580.65.06",
            "chassis_serial": "1821",
            "gpus": [
                {
                    "gpu_id": 0,
                    "uuid": "GPU-0",
                    "pci_address": "0000:b0:00.0",
                    "serial_number": "1654",
                    "device_name": "NVIDIA H100 80GB HBM3",
                    "nvlinks": [
                        {"link_id": 0, "remote_pci_address": "0000:c5:00.0", "remote_link_id": 28},
                        {"link_id": 1, "remote_pci_address": "0000:c4:00.0", "remote_link_id": -1},
                    ],
                    "numa_node": 1,
                    "slowdown_tlimit_c": -2,
                },
                {
                    "gpu_id": 1,
                    "uuid": "GPU-1",
                    "pci_address": "0000:b1:00.0",
                    "serial_number": "",
                    "device_name": "",
                    "nvlinks": [],
                    "numa_node": 0,
                },
            ],
            "nvswitches": ["0000:c4:00.0", "0000:c5:00.0"],
            "nic_topology": {"mlx5_0": ["PIX", "SYS"], "mlx5_1": ["PHB", "SYS"]},
            "written_by": "gpuwarden",
        })
    );
    let mode = fs::metadata(bench.path()).unwrap().mode();
    assert_eq!(mode & 0o777, 0o644);
    // No other file is left in the directory.
    assert_eq!(
        fs::read_dir(bench.path().parent().unwrap())
            .unwrap()
            .count(),
        1
    );
    // The kernel log monitor reads the file.
    let linked = machine.gpu_linked_to("0000:c5:00.0", 28).unwrap();
    assert_eq!(linked.uuid.as_deref(), Some("GPU-0"));
    assert_eq!(machine.chassis_serial(), Some("1821"));
}

#[test]
fn it_is_written_only_where_something_has_changed() {
    let bench = Bench::new();
    let mut file = bench.file(1);
    assert!(file.update(&Inventory::default()).is_none());
    assert!(!bench.path().exists(), "nothing is known yet");
    assert!(file.update(&inventory(&[gpu(0)])).is_some());
    let written = mtime(&bench.path());
    assert!(file.update(&inventory(&[gpu(0)])).is_none());
    // The next process does not write either, but still sends the GPUs to the monitors.
    assert!(bench.file(1).update(&inventory(&[gpu(0)])).is_some());
    assert!(
        file.update(&Inventory::default()).is_none(),
        "the driver is away"
    );
    assert_eq!(mtime(&bench.path()), written);
    // A NIC was added, and a new driver.
    bench.device("pci0000:80/0000:80:02.0/0000:b0:00.0", "1");
    bench.nic("mlx5_0", "pci0000:80/0000:80:01.0/0000:84:00.0");
    assert!(file.update(&inventory(&[gpu(0)])).is_some());
    assert_eq!(bench.read()["nic_topology"], json!({"mlx5_0": ["PHB"]}));
    let mut newer = inventory(&[gpu(0)]);
    newer.driver_version = Some("590.1".to_owned());
    assert!(file.update(&newer).is_some());
    assert_eq!(bench.read()["driver_version"], "590.1");
    // Deleted by another program.
    fs::remove_file(bench.path()).unwrap();
    assert!(file.update(&newer).is_none());
    assert_eq!(bench.read()["driver_version"], "590.1");
}

#[test]
fn a_gpu_that_fell_off_the_bus_keeps_its_names_until_the_reboot() {
    let bench = Bench::new();
    for index in 0..3 {
        bench.device(
            &format!("pci0000:80/0000:80:0{index}.0/0000:b{index}:00.0"),
            "1",
        );
    }
    bench.nic("mlx5_0", "pci0000:a0/0000:a0:01.0/0000:a1:00.0");
    let mut file = bench.file(1);
    file.update(&inventory(&[gpu(0), gpu(1), gpu(2)]));
    fs::remove_file(bench.sysfs().join("bus/pci/devices/0000:b1:00.0")).unwrap();
    let left = inventory(&[gpu(0), gpu(2)]);
    assert!(file.update(&left).is_none());
    assert_eq!(bench.uuids(), ["GPU-0", "GPU-1", "GPU-2"]);
    // Also with the next process.
    let machine = bench.file(1).update(&left).unwrap();
    assert!(machine.gpu_at("0000:b1:00").is_some());
    assert_eq!(bench.uuids(), ["GPU-0", "GPU-1", "GPU-2"]);
    assert_eq!(
        bench.read()["nic_topology"],
        json!({"mlx5_0": ["NODE", "NODE", "NODE"]})
    );
    // Another GPU replaces the one that fell off.
    let other = Gpu {
        uuid: "GPU-9".to_owned(),
        ..gpu(1)
    };
    file.update(&inventory(&[gpu(0), other, gpu(2)]));
    assert_eq!(bench.uuids(), ["GPU-0", "GPU-9", "GPU-2"]);
    assert_eq!(
        bench.read().get("nic_topology"),
        None,
        "not known for one of them"
    );
    // The boot that began after the file was written.
    bench.file(3).update(&left).unwrap();
    assert_eq!(bench.uuids(), ["GPU-0", "GPU-2"]);
    assert_eq!(
        bench.read()["nic_topology"],
        json!({"mlx5_0": ["NODE", "NODE"]})
    );
}

#[test]
fn what_somebody_else_has_written_is_left_alone() {
    let bench = Bench::new();
    let mut file = bench.file(1);
    file.update(&inventory(&[gpu(0)]));
    assert_eq!(file.trouble.last(), None);
    // NVSentinel's collector starts.
    let others = r#"{"version": "1.0", "gpus": [{"gpu_id": 0, "uuid": "GPU-0"}]}"#;
    fs::write(bench.path(), others).unwrap();
    file.update(&inventory(&[gpu(0)]));
    assert_eq!(file.trouble.last(), None);
    // The collector does not notice a new GPU, but the monitors are informed.
    let machine = file.update(&inventory(&[gpu(0), gpu(1)])).unwrap();
    assert!(machine.gpu_with_uuid("GPU-1").is_some());
    let problem = file.trouble.last().unwrap().to_owned();
    assert!(
        problem.contains("does not name GPU-1") && problem.contains("Delete it"),
        "{problem}"
    );
    assert_eq!(fs::read_to_string(bench.path()).unwrap(), others);
    for odd in ["", "{", r#"{"written_by": 7}"#] {
        fs::write(bench.path(), odd).unwrap();
        file.update(&inventory(&[gpu(0)]));
        assert_eq!(fs::read_to_string(bench.path()).unwrap(), odd);
        assert!(file.trouble.last().unwrap().contains("leaves it alone"));
    }
    fs::remove_file(bench.path()).unwrap();
    file.update(&inventory(&[gpu(0), gpu(1)]));
    assert_eq!((bench.uuids().len(), file.trouble.last()), (2, None));
}

#[test]
fn where_it_cannot_be_written_that_is_said_and_costs_nothing_else() {
    let bench = Bench::new();
    fs::write(bench.0.path().join("nvsentinel"), "a file").unwrap();
    let mut file = bench.file(1);
    assert!(file.update(&inventory(&[gpu(0)])).is_some());
    let problem = file.trouble.last().unwrap().to_owned();
    assert!(problem.contains(" cannot be "), "{problem}");
    fs::remove_file(bench.0.path().join("nvsentinel")).unwrap();
    fs::create_dir_all(bench.path()).unwrap();
    file.update(&inventory(&[gpu(0)]));
    assert!(file.trouble.last().unwrap().contains("it is not a file"));
    fs::remove_dir(bench.path()).unwrap();
    file.update(&inventory(&[gpu(0)]));
    assert_eq!((bench.uuids().len(), file.trouble.last()), (1, None));
}

/// From the driver's library on.
#[tokio::test]
async fn it_follows_the_driver() {
    let bench = Bench::new();
    let mut scenario = Scenario::healthy(2);
    let gpu = scenario.gpu_mut(1);
    gpu.links = 1;
    gpu.link = vec![FakeLink {
        remote_link: Some(28),
        ..FakeLink::default()
    }];
    let library = fakes::install(bench.0.path(), &scenario).unwrap();
    let places = LibraryPlaces {
        path: Some(library),
        ..LibraryPlaces::default()
    };
    let nvml = Nvml::open(&places, Box::new(|_, _| {})).unwrap();
    let (seen, inventory) = watch::channel(Inventory::default());
    let (sender, mut machine) = watch::channel(None);
    let cancel = CancellationToken::new();
    let running = tokio::spawn(bench.file(1).run(inventory, sender, cancel.clone()));
    seen.send_replace(nvml.inventory().unwrap());
    machine.wait_for(Option::is_some).await.unwrap();
    assert_eq!(bench.uuids().len(), 2);
    let link = &bench.read()["gpus"][1]["nvlinks"][0];
    assert_eq!(
        *link,
        json!({"link_id": 0, "remote_pci_address": "0000:05:00.0", "remote_link_id": 28})
    );
    cancel.cancel();
    running.await.unwrap();
}
