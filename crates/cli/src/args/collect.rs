//! The arguments of `collect`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::{OutputArgs, ServerArgs};

/// Arguments of `collect`.
#[derive(Args, Debug)]
pub struct CollectArgs {
    /// Name of this node in the cluster [default: `NODE_NAME`, else the host name].
    #[arg(long, env = "GPUWARDEN_NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    /// The directory in which a new one is made for the files.
    #[arg(long, default_value = ".", value_name = "DIRECTORY")]
    pub directory: PathBuf,
    /// Where each file is brought by HTTP PUT as soon as it is there, below NODE/TIME/; only http://
    /// is spoken.
    #[arg(long, env = "UPLOAD_URL_BASE", value_name = "URL")]
    pub upload: Option<String>,
    /// Have nvidia-bug-report.sh ask for everything. Without it the parts are left out that may hang
    /// on a machine that is ill (its --safe-mode).
    #[arg(long)]
    pub full: bool,
    /// Seconds after which nvidia-bug-report.sh is ended; what it has written by then is taken.
    #[arg(long, default_value_t = 240, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=3_600))]
    pub timeout: u64,
    /// The directory at which the machine's root is mounted, for a container: programs are those of
    /// the machine, and run there (chroot). They write to its /tmp.
    #[arg(long, value_name = "DIRECTORY")]
    pub host_root: Option<PathBuf>,
    /// The kernel log to read: kmsg, journal (or journal:DIRECTORY), auto (kmsg if it may be read, else
    /// journal), or a file.
    #[arg(long, default_value = "auto", value_name = "auto|kmsg|journal|FILE")]
    pub kernel_log: String,
    /// The running gpuwarden, for the history of the node.
    #[command(flatten)]
    pub server: ServerArgs,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `in-root`.
#[derive(Args, Debug)]
pub struct InRootArgs {
    /// The root.
    pub root: PathBuf,
    /// The program.
    pub program: OsString,
    /// Its arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<OsString>,
}
