//! Arguments of `gpu-reset`.

use std::path::PathBuf;

use clap::Args;

/// Arguments of `gpu-reset`.
#[derive(Args, Debug)]
pub struct GpuResetArgs {
    /// The GPUs by UUID or PCI bus id; may be given several times, or as a list with commas. In the
    /// environment an empty list stands for all GPUs, as NVSentinel has it.
    #[arg(
        long = "gpu",
        env = "NVIDIA_GPU_RESETS",
        value_name = "GPU",
        value_delimiter = ','
    )]
    pub gpus: Vec<String>,
    /// All GPUs of this machine.
    #[arg(long, conflicts_with = "gpus")]
    pub all: bool,
    /// Write each result to the logs of the machine, by which a monitor gives the GPU back
    /// [default: true].
    #[arg(long, env = "WRITE_SYSLOG_EVENT", num_args = 0..=1, default_missing_value = "true",
          value_name = "BOOL")]
    pub write_log: Option<bool>,
    /// Root directory of the driver, as seen from here; where it is not below it, the system's is
    /// taken [default: /run/nvidia/driver].
    #[arg(long, env = "DRIVER_ROOT", value_name = "DIRECTORY")]
    pub driver_root: Option<PathBuf>,
    /// The driver's library NVML itself [default: it is looked for].
    #[arg(long, value_name = "FILE")]
    pub nvml: Option<PathBuf>,
    /// The driver's tool nvidia-smi [default: it is looked for].
    #[arg(long, value_name = "FILE")]
    pub nvidia_smi: Option<PathBuf>,
    /// Socket of the system log of the machine [default: /run/systemd/journal/dev-log, else /dev/log].
    #[arg(long, value_name = "SOCKET")]
    pub system_log: Option<PathBuf>,
}
