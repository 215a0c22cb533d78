//! The GPUs of a node: the probes of their driver and of DCGM, and the monitor that learns from them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use agent::gpu::metadata::{MetadataConfig, MetadataFile};
use agent::gpu::probe::{self, ProbeConfig};
use agent::gpu::{GpuConfig, GpuMonitor, Probes};
use anyhow::{Context as _, bail};
use cli::{FakeGpus, GpuSettings, NodeSettings, ProcessSettings};
use devices::DeviceApi;
use diagnosis::catalog::Catalog;
use diagnosis::decode::Machine;
use diagnosis::gpu::Inventory;
use diagnosis::gpu::dcgm::ImexUse;
use diagnosis::limits::Limits;
use host::gpu_probe::ProbeSettings;
use host::nics::SYSFS;
use monitor::Frame;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::tasks::Tasks;

/// File of fake GPUs that real ones have elsewhere, in the data directory.
const METADATA: &str = "gpu_metadata.json";
/// The directory in which the kernel shows NVIDIA's driver, where that is loaded.
const DRIVER: &str = "/proc/driver/nvidia";
/// Time beyond the pause between two looks after which it is not known how the GPUs do. Drivers under
/// load take seconds for a look.
const LATE_AFTER: Duration = Duration::from_secs(30);
/// Room for what the probe says while the monitor waits: a look is two messages.
const UNHEARD: usize = 64;

/// `Gpus` are what the monitor of the GPUs shares with who asks the kubelet.
pub(crate) struct Gpus {
    /// The GPUs that there are.
    pub(crate) inventory: watch::Receiver<Inventory>,
    /// Where the monitor is told whether pods rely on IMEX.
    pub(crate) imex: watch::Sender<ImexUse>,
}

/// Starts the probes of the GPUs and their monitor, where they are to be watched. What becomes known
/// of them goes to `machine`, and into the file for other monitors.
pub(crate) fn start(
    node: &NodeSettings,
    process: &ProcessSettings,
    frame: &Frame,
    catalog: &Arc<Catalog>,
    machine: watch::Sender<Option<Machine>>,
    devices: DeviceApi,
    tasks: &mut Tasks,
) -> anyhow::Result<Gpus> {
    let gpu = &node.gpu;
    if !gpu.enabled && gpu.dcgm.is_none() {
        return Ok(Gpus {
            inventory: watch::Sender::default().subscribe(),
            imex: watch::Sender::default(),
        });
    }
    let installed = match &gpu.fake {
        None => None,
        Some(fake) => Some(install(fake, &process.data_dir)?),
    };
    let config = GpuConfig {
        limits: Limits {
            expected_gpus: gpu.expected.map(|count| count as usize),
            ..catalog.limits().clone()
        },
        is_fake: installed.is_some(),
        ignored_xids: gpu.ignored_xids.clone(),
        catalog: Arc::clone(catalog),
        driver_root: gpu.driver_root.clone(),
        late_after: gpu.interval + LATE_AFTER,
    };
    let is_fake = config.is_fake;
    let mut probes = Probes::default();
    let mut probing = JoinSet::new();
    let installed = installed.as_deref();
    if gpu.enabled {
        let (seen, probed) = mpsc::channel(UNHEARD);
        probing.spawn(probe::watch(probe_config(gpu, installed, None)?, seen));
        probes.nvml = Some(probed);
    }
    if let Some(address) = &gpu.dcgm {
        let (seen, probed) = mpsc::channel(UNHEARD);
        probing.spawn(probe::watch(
            probe_config(gpu, installed, Some(address))?,
            seen,
        ));
        probes.dcgm = Some(probed);
    }
    let monitor = GpuMonitor::new(config, frame, probes, devices);
    let file = MetadataFile::new(MetadataConfig {
        path: if is_fake {
            // Not where others look for the GPUs of this machine.
            process.data_dir.join(METADATA)
        } else {
            node.gpu_metadata.clone()
        },
        sysfs: SYSFS.into(),
        node_name: node.node_name.clone(),
        boot: frame.boot,
        clock: frame.clock,
    });
    let machine = if is_fake {
        // Lines of the kernel's log are about those that are there.
        watch::Sender::default()
    } else {
        machine
    };
    let shared = Gpus {
        inventory: monitor.inventory(),
        imex: monitor.imex(),
    };
    let inventory = monitor.inventory();
    tasks.monitor("the description of the GPUs", |end| {
        file.run(inventory, machine, end)
    });
    // A probe ends when the monitor no longer listens.
    tasks.monitor("the GPU monitor", |end| async move {
        monitor.run(end).await;
        while probing.join_next().await.is_some() {}
    });
    Ok(shared)
}

/// Refuses GPUs that are not there on a machine with others, where something would be done about them.
pub(crate) fn refuse_to_act_on_fakes(gpu: &GpuSettings, acts: bool) -> anyhow::Result<()> {
    refuse(gpu.fake.is_some(), acts, Path::new(DRIVER))
}

/// Refuses them where the kernel shows a driver in `driver`.
fn refuse(are_fake: bool, acts: bool, driver: &Path) -> anyhow::Result<()> {
    if are_fake && acts && driver.exists() {
        let driver = driver.display();
        bail!(
            "--fake-gpus is refused on a machine with GPUs ({driver} is there) where nodes may be \
             taken out because of them: leave it out, or use `gpuwarden run` without --quarantine \
             or with --dry-run"
        );
    }
    Ok(())
}

/// Returns the line of the greeting that says of fake GPUs that they are; empty where there are none.
pub(crate) fn greeting(gpu: &GpuSettings) -> &'static str {
    match gpu.fake {
        Some(_) => "\nfake GPUs    what is told of GPUs is made up (--fake-gpus)",
        None => "",
    }
}

/// Returns how a probe is run. `installed` is the directory of fake GPUs, and
/// `dcgm` the host engine that it asks in the place of the driver.
fn probe_config(
    gpu: &GpuSettings,
    installed: Option<&Path>,
    dcgm: Option<&String>,
) -> anyhow::Result<ProbeConfig> {
    let library = match dcgm {
        Some(_) => fakes::DCGM_LIBRARY,
        None => fakes::LIBRARY,
    };
    let settings = ProbeSettings {
        library: installed.map(|directory| directory.join(library)),
        dcgm: dcgm.cloned(),
        driver_root: Some(gpu.driver_root.clone()),
        interval_ms: u64::try_from(gpu.interval.as_millis()).unwrap_or(u64::MAX),
    };
    ProbeConfig::of(&settings, gpu.deadline).context("write the settings of the probe")
}

/// Makes the libraries of fake GPUs, with their scenario; returns their directory.
fn install(fake: &FakeGpus, data_dir: &Path) -> anyhow::Result<PathBuf> {
    let directory = data_dir.join(fakes::DIRECTORY);
    let scenario = match fake {
        FakeGpus::Number(gpus) => fakes::Scenario {
            gpus: *gpus,
            ..fakes::Scenario::default()
        },
        FakeGpus::Scenario(file) => fakes::read(file)?,
    };
    fakes::install(&directory, &scenario)?;
    if let FakeGpus::Scenario(file) = fake {
        // The file itself is followed as it changes.
        let file = fs::canonicalize(file).context("find the scenario of the fake GPUs")?;
        let followed = directory.join(fakes::SCENARIO);
        fs::remove_file(&followed)
            .and_then(|()| symlink(&file, &followed))
            .with_context(|| format!("link {} to {}", followed.display(), file.display()))?;
    }
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fake_gpus_are_refused_beside_a_driver_where_something_is_done_because_of_them() {
        let directory = tempfile::tempdir().unwrap();
        let (there, absent) = (directory.path(), directory.path().join("nvidia"));
        for (are_fake, acts, driver, refused) in [
            (true, true, there, true),
            (true, false, there, false),
            (false, true, there, false),
            (true, true, absent.as_path(), false),
        ] {
            let result = refuse(are_fake, acts, driver);
            assert_eq!(
                result.is_err(),
                refused,
                "{are_fake} {acts} {}",
                driver.display()
            );
        }
        let error = refuse(true, true, there).unwrap_err().to_string();
        assert!(
            error.starts_with("--fake-gpus is refused") && error.contains("--dry-run"),
            "{error}"
        );
    }
}
