//! `gpuwarden gpu-reset`: the command of the Job that resets GPUs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use host::gpu_reset::{GpuReset, ResetSettings, line, reset, tell};
use host::library::LibraryPlaces;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::GpuResetArgs;
use crate::exit_code;
use crate::output::{self, say};

/// Mount point of the GPU operator's driver container.
const DRIVER_ROOT: &str = "/run/nvidia/driver";
/// Sockets of the system log, in the order of preference.
const SYSTEM_LOGS: [&str; 2] = ["/run/systemd/journal/dev-log", "/dev/log"];
/// Longest time for the driver's tool. It is shorter than the Job's, which reports the result.
const TOOL_TIME: Duration = Duration::from_secs(240);
/// Environment variable with the list of GPUs.
const GPUS: &str = "NVIDIA_GPU_RESETS";

pub(super) async fn execute(args: GpuResetArgs) -> anyhow::Result<u8> {
    // A missing argument must not reset all GPUs.
    let all = args.all || std::env::var_os(GPUS).is_some_and(|list| list.is_empty());
    if args.gpus.is_empty() && !all {
        anyhow::bail!("name the GPUs with --gpu, or reset all with --all");
    }
    let settings = ResetSettings {
        targets: args.gpus,
        places: LibraryPlaces {
            path: args.nvml,
            driver_root: Some(args.driver_root.unwrap_or_else(|| DRIVER_ROOT.into())),
        },
        tool: args.nvidia_smi,
        tool_time: TOOL_TIME,
        devices: PathBuf::from("/dev"),
        processes: PathBuf::from("/proc"),
    };
    // Services that are stopped for the reset are started again before the process ends.
    let _ends = signal(SignalKind::terminate())?;
    let results = tokio::task::spawn_blocking(move || reset(&settings)).await??;
    let kernel = args.system_log.is_none();
    let sockets = match args.system_log {
        Some(socket) => vec![socket],
        None => SYSTEM_LOGS.map(|path| Path::new(path).to_owned()).to_vec(),
    };
    for result in &results {
        show(result)?;
        if args.write_log.unwrap_or(true) {
            for error in tell(result, &sockets, kernel) {
                output::warning(&output::error_text(&error.into()));
            }
        }
    }
    let well = !results.is_empty() && results.iter().all(|one| one.failure.is_none());
    Ok(exit_code(well))
}

fn show(result: &GpuReset) -> anyhow::Result<()> {
    let line = line(result);
    match &result.failure {
        None => say!("{line}")?,
        Some(why) => say!("{line}: {}", output::plain(why))?,
    }
    Ok(())
}
