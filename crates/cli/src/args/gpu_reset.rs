//! The arguments of `gpu-reset`.

use std::path::PathBuf;

use clap::Args;

#[derive(Args, Debug)]
pub(crate) struct GpuResetArgs {
    /// UUIDs or PCI bus ids of the GPUs; may be given several times, or as a list with commas. In the
    /// environment an empty list means all GPUs, as in NVSentinel.
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
    /// Write each result to the logs of the machine, where a monitor reads it and returns the GPU
    /// [default: true].
    #[arg(long, env = "WRITE_SYSLOG_EVENT", num_args = 0..=1, default_missing_value = "true",
          value_name = "BOOL")]
    pub write_log: Option<bool>,
    /// Root directory of the driver, as this process sees it; without the library below it, the
    /// system's library is used [default: /run/nvidia/driver].
    #[arg(long, env = "DRIVER_ROOT", value_name = "DIRECTORY")]
    pub driver_root: Option<PathBuf>,
    /// File of the driver's library NVML [default: searched for].
    #[arg(long, value_name = "FILE")]
    pub nvml: Option<PathBuf>,
    /// File of the driver's tool nvidia-smi [default: searched for].
    #[arg(long, value_name = "FILE")]
    pub nvidia_smi: Option<PathBuf>,
    /// Socket of the system log of the machine [default: /run/systemd/journal/dev-log, else /dev/log].
    #[arg(long, value_name = "SOCKET")]
    pub system_log: Option<PathBuf>,
}
