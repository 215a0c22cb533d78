//! The arguments of `collect`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::{OutputArgs, ServerArgs};

#[derive(Args, Debug)]
pub(crate) struct CollectArgs {
    /// Name of this node in the cluster [default: `NODE_NAME`, else the host name].
    #[arg(long, env = "GPUWARDEN_NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    /// Parent of the directory that is created for the files.
    #[arg(long, default_value = ".", value_name = "DIRECTORY")]
    pub directory: PathBuf,
    /// Address of a server for uploads. Each file is sent by HTTP PUT when it is complete, below
    /// NODE/TIME/; only http:// is supported.
    #[arg(long, env = "UPLOAD_URL_BASE", value_name = "URL")]
    pub upload: Option<String>,
    /// Collect everything with nvidia-bug-report.sh, including the parts that may hang on a faulty
    /// machine (without its --safe-mode).
    #[arg(long)]
    pub full: bool,
    /// Seconds after which nvidia-bug-report.sh is killed; its output until then is kept.
    #[arg(long, default_value_t = 240, value_name = "SECONDS",
          value_parser = clap::value_parser!(u64).range(1..=3_600))]
    pub timeout: u64,
    /// Mount point of the machine's root in a container. The machine's programs run there (chroot),
    /// and write to its /tmp.
    #[arg(long, value_name = "DIRECTORY")]
    pub host_root: Option<PathBuf>,
    /// Kernel log to read: kmsg, journal (or journal:DIRECTORY), auto (kmsg if it can be read, else
    /// journal), or a file.
    #[arg(long, default_value = "auto", value_name = "auto|kmsg|journal|FILE")]
    pub kernel_log: String,
    #[command(flatten)]
    pub server: ServerArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct InRootArgs {
    pub root: PathBuf,
    pub program: OsString,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<OsString>,
}
