//! The GPUs of a node: the probes that read NVML and DCGM, and the monitor that receives their
//! reports.

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
use diagnosis::decode::MachineGpus;
use diagnosis::gpu::Inventory;
use diagnosis::gpu::dcgm::ImexUse;
use diagnosis::limits::CheckLimits;
use host::gpu_probe::ProbeSettings;
use host::nics::SYSFS;
use monitor::Frame;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::tasks::Tasks;

/// GPU metadata file of fake GPUs, in the data directory. For real GPUs, `--gpu-metadata` sets
/// the path.
const METADATA: &str = "gpu_metadata.json";
/// Directory that exists while NVIDIA's driver is loaded.
const DRIVER: &str = "/proc/driver/nvidia";
/// Time in addition to the polling interval after which a missing poll makes the state of the
/// GPUs unknown. Under load, a poll of the driver takes seconds.
const LATE_AFTER: Duration = Duration::from_secs(30);
/// Capacity of the channel from a probe to the monitor. Each poll sends two messages.
const PROBE_QUEUE: usize = 64;

/// Channels between the GPU monitor and the client of the kubelet.
pub(crate) struct GpuChannels {
    /// Current GPUs of the node.
    pub(crate) inventory: watch::Receiver<Inventory>,
    /// Receives whether pods rely on IMEX.
    pub(crate) imex: watch::Sender<ImexUse>,
}

/// Starts the GPU probes and their monitor, if enabled. The GPUs found are sent to `machine` and
/// written to the metadata file, which other monitors read.
pub(crate) fn start(
    node: &NodeSettings,
    process: &ProcessSettings,
    frame: &Frame,
    catalog: &Arc<Catalog>,
    machine: watch::Sender<Option<MachineGpus>>,
    devices: DeviceApi,
    tasks: &mut Tasks,
) -> anyhow::Result<GpuChannels> {
    let gpu = &node.gpu;
    if !gpu.enabled && gpu.dcgm.is_none() {
        return Ok(GpuChannels {
            inventory: watch::Sender::default().subscribe(),
            imex: watch::Sender::default(),
        });
    }
    let installed = match &gpu.fake {
        None => None,
        Some(fake) => Some(install(fake, &process.data_dir)?),
    };
    let config = GpuConfig {
        limits: CheckLimits {
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
        let (seen, probed) = mpsc::channel(PROBE_QUEUE);
        probing.spawn(probe::watch(probe_config(gpu, installed, None)?, seen));
        probes.nvml = Some(probed);
    }
    if let Some(address) = &gpu.dcgm {
        let (seen, probed) = mpsc::channel(PROBE_QUEUE);
        probing.spawn(probe::watch(
            probe_config(gpu, installed, Some(address))?,
            seen,
        ));
        probes.dcgm = Some(probed);
    }
    let monitor = GpuMonitor::new(config, frame, probes, devices);
    let file = MetadataFile::new(MetadataConfig {
        path: if is_fake {
            // The default path holds the metadata of the machine's real GPUs.
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
        // The kernel log is about the real GPUs.
        watch::Sender::default()
    } else {
        machine
    };
    let shared = GpuChannels {
        inventory: monitor.inventory(),
        imex: monitor.imex(),
    };
    let inventory = monitor.inventory();
    tasks.monitor("the description of the GPUs", |end| {
        file.run(inventory, machine, end)
    });
    // A probe ends once the monitor has dropped its receiver.
    tasks.monitor("the GPU monitor", |end| async move {
        monitor.run(end).await;
        while probing.join_next().await.is_some() {}
    });
    Ok(shared)
}

/// Refuses fake GPUs on a machine with real ones, if faults of GPUs have consequences (`acts`).
pub(crate) fn refuse_to_act_on_fakes(gpu: &GpuSettings, acts: bool) -> anyhow::Result<()> {
    refuse(gpu.fake.is_some(), acts, Path::new(DRIVER))
}

/// Implements [`refuse_to_act_on_fakes`]; a driver is loaded if `driver` exists.
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

/// Returns a line for the greeting that marks the GPUs as fake; empty for real ones.
pub(crate) fn greeting(gpu: &GpuSettings) -> &'static str {
    match gpu.fake {
        Some(_) => "\nfake GPUs    all data about GPUs is made up (--fake-gpus)",
        None => "",
    }
}

/// Returns the configuration of a probe. `installed` is the directory of the fake libraries.
/// `dcgm` is the address of a DCGM host engine to read instead of NVML.
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

/// Installs the fake libraries with their scenario. Returns their directory.
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
        // A link, so that later changes of the file take effect.
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
