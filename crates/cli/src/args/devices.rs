//! The arguments of `devices` and `check`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::OutputArgs;

/// The Device API of a gpuwarden on this machine.
#[derive(Args, Debug, Default, Clone)]
pub(crate) struct DeviceApiArgs {
    /// Unix socket of the Device API [default: that of the running gpuwarden].
    #[arg(long, env = "GPUWARDEN_DEVICE_API", value_name = "PATH")]
    pub device_api: Option<PathBuf>,
    /// Configuration file of the running gpuwarden; only its keys `data-dir` and `device-api` are
    /// used here.
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Data directory of the running gpuwarden, to find its socket.
    #[arg(long, env = "GPUWARDEN_DATA_DIR", value_name = "DIRECTORY")]
    pub data_dir: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct DevicesArgs {
    /// Wait for changes and print them as they arrive.
    #[arg(short, long)]
    pub watch: bool,
    #[command(flatten)]
    pub api: DeviceApiArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    #[command(subcommand)]
    pub what: CheckCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum CheckCommand {
    /// Check that the GPUs of this node are fit for a job: exit 0 when they are, 1 when they are not.
    /// The answer is immediate, from gpuwarden's own state, for prologs and scripts. An unknown state
    /// is a warning, and fit.
    #[command(
        after_help = "Examples:\n  gpuwarden check node\n  gpuwarden check node --strict || exit 1"
    )]
    Node {
        /// Exit 1 also if the state of a GPU is unknown, or no gpuwarden answers.
        #[arg(long)]
        strict: bool,
        #[command(flatten)]
        api: DeviceApiArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Diagnose the GPUs of this container with DCGM before its work starts. The settings are
    /// environment variables: docs/preflight-checks.md. Exit 0 when all pass, 1 when one fails, 2 for
    /// a wrong setting.
    #[command(
        after_help = "Examples:\n  export NODE_NAME=gpu-7 DCGM_DIAG_LEVEL=1\n  gpuwarden check dcgm-diag"
    )]
    DcgmDiag,
    /// Test the links between the GPUs of this container by an all-reduce, before its work starts. The
    /// settings are environment variables: docs/preflight-checks.md. Exit 0 when they pass, 1 when
    /// they fail, 2 for a wrong setting.
    #[command(
        after_help = "Examples:\n  export NODE_NAME=gpu-7 BW_THRESHOLD_GBPS=150\n  gpuwarden check nccl-loopback"
    )]
    NcclLoopback,
    /// Test the network between the members of this pod's gang by an all-reduce over all of their
    /// GPUs, before its work starts, and name the slow member if it fails. The settings are
    /// environment variables: docs/preflight-checks.md. Exit 0 when the test passes, 1 when it fails,
    /// 2 for a wrong setting.
    #[command(
        after_help = "Examples:\n  export NODE_NAME=gpu-7 POD_NAME=train-0 GANG_CONFIG_DIR=/etc/preflight\n  gpuwarden check nccl-allreduce"
    )]
    NcclAllreduce,
    /// Test whether a third-party check keeps the contract of preflight checks: runs the check twice,
    /// as the injected container would, with a connector of its own. Exit 0 when it does, 1 when not.
    #[command(
        after_help = "Examples:\n  gpuwarden check verify -- /usr/local/bin/bandwidth-check --fast\n  \
                      gpuwarden check verify --timeout 600 -- python3 my_check.py"
    )]
    Verify {
        /// Seconds after which a run is killed and has failed.
        #[arg(long, default_value_t = 300, value_name = "SECONDS",
              value_parser = clap::value_parser!(u64).range(1..=86_400))]
        timeout: u64,
        /// Command of the check, with its arguments.
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
}
