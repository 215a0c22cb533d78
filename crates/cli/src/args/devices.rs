//! The arguments of `devices` and `check`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::OutputArgs;

/// The Device API of a gpuwarden on this machine.
#[derive(Args, Debug, Default, Clone)]
pub struct DeviceApiArgs {
    /// Unix socket of the Device API [default: that of the running gpuwarden].
    #[arg(long, env = "GPUWARDEN_DEVICE_API", value_name = "PATH")]
    pub device_api: Option<PathBuf>,
    /// Configuration file of the running gpuwarden; of its keys `data-dir` and `device-api` count
    /// here.
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Data directory of the running gpuwarden, to find its socket.
    #[arg(long, env = "GPUWARDEN_DATA_DIR", value_name = "DIRECTORY")]
    pub data_dir: Option<PathBuf>,
}

/// Arguments of `devices`.
#[derive(Args, Debug)]
pub struct DevicesArgs {
    /// Go on with each change as it comes.
    #[arg(short, long)]
    pub watch: bool,
    /// The Device API.
    #[command(flatten)]
    pub api: DeviceApiArgs,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// The thing to check.
    #[command(subcommand)]
    pub what: Check,
}

/// The things that can be checked.
#[derive(Subcommand, Debug)]
pub enum Check {
    /// Say whether this node is fit for a job, as far as its GPUs go: exit 0 when it is, 1 when it
    /// is not. Answered at once from what gpuwarden knows, for prologs and scripts. What is not
    /// known is a warning, and fit.
    #[command(
        after_help = "Examples:\n  gpuwarden check node\n  gpuwarden check node --strict || exit 1"
    )]
    Node {
        /// Exit 1 also where it is not known how a GPU does, or no gpuwarden answers.
        #[arg(long)]
        strict: bool,
        /// The Device API.
        #[command(flatten)]
        api: DeviceApiArgs,
        /// The output format.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Have DCGM diagnose the GPUs of this container before its work starts. Its settings are
    /// environment variables: docs/preflight-checks.md. Exit 0 when they pass, 1 when one fails, 2
    /// for a wrong setting.
    #[command(
        after_help = "Examples:\n  export NODE_NAME=gpu-7 DCGM_DIAG_LEVEL=1\n  gpuwarden check dcgm-diag"
    )]
    DcgmDiag,
    /// Test the links between the GPUs of this container by an all-reduce, before its work starts. Its
    /// settings are environment variables: docs/preflight-checks.md. Exit 0 when they pass, 1 when
    /// they fail, 2 for a wrong setting.
    #[command(
        after_help = "Examples:\n  export NODE_NAME=gpu-7 BW_THRESHOLD_GBPS=150\n  gpuwarden check nccl-loopback"
    )]
    NcclLoopback,
    /// Test the network between the members of this pod's gang by an all-reduce over all of their
    /// GPUs, before its work starts, and name who is to blame where it is slow. Its settings are
    /// environment variables: docs/preflight-checks.md. Exit 0 when they pass, 1 when they fail, 2
    /// for a wrong setting.
    #[command(
        after_help = "Examples:\n  export NODE_NAME=gpu-7 POD_NAME=train-0 GANG_CONFIG_DIR=/etc/preflight\n  gpuwarden check nccl-allreduce"
    )]
    NcclAllreduce,
    /// Say whether a check of somebody else keeps the contract of preflight checks: runs it twice as
    /// the injected container would, with a connector of its own. Exit 0 when it does, 1 when not.
    #[command(
        after_help = "Examples:\n  gpuwarden check verify -- /usr/local/bin/bandwidth-check --fast\n  \
                      gpuwarden check verify --timeout 600 -- python3 my_check.py"
    )]
    Verify {
        /// Seconds after which a run is ended, and has failed.
        #[arg(long, default_value_t = 300, value_name = "SECONDS",
              value_parser = clap::value_parser!(u64).range(1..=86_400))]
        timeout: u64,
        /// The check, with its arguments.
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
}
