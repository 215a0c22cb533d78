//! The arguments of `devices` and `check`.

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
}
