//! Arguments that several commands share.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Address of a running gpuwarden.
#[derive(Args, Debug, Default, Clone)]
pub(crate) struct ServerArgs {
    /// Configuration file of the running gpuwarden; only its keys `server`, `data-dir`, `socket`
    /// and `listen` are used here.
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Address of a running gpuwarden [default: the one that uses the data directory, else
    /// the address in the configuration, else `http://127.0.0.1:2112`].
    #[arg(long, env = "GPUWARDEN_SERVER", value_name = "URL")]
    pub server: Option<String>,
    /// Data directory of the running gpuwarden, to find its address and socket; no other
    /// gpuwarden answers then.
    #[arg(long, env = "GPUWARDEN_DATA_DIR", value_name = "DIRECTORY")]
    pub data_dir: Option<PathBuf>,
}

/// Heading in help of the flags that lead to the controller of a cluster instead of a process of this
/// machine.
pub(crate) const REMOTE: &str = "Controller of a cluster";

/// Address of a running gpuwarden, or the cluster that it is the controller of. No variable sets the
/// cluster: the pods of a controller have those variables, too, and ask their own process.
#[derive(Args, Debug, Default, Clone)]
pub(crate) struct RemoteArgs {
    #[command(flatten)]
    pub server: ServerArgs,
    /// Kubeconfig of the cluster whose controller is asked, by `kubectl port-forward` [default of
    /// `kubectl gpuwarden`: that of kubectl].
    #[arg(long, value_name = "FILE", conflicts_with_all = ["server", "data_dir"], help_heading = REMOTE)]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig whose controller is asked, by `kubectl port-forward` [default of
    /// `kubectl gpuwarden`: the current one].
    #[arg(long, value_name = "NAME", conflicts_with_all = ["server", "data_dir"], help_heading = REMOTE)]
    pub context: Option<String>,
    /// Namespace of the controller that is asked, by `kubectl port-forward` [default of `kubectl
    /// gpuwarden`: gpuwarden].
    #[arg(short, long, value_name = "NAME", conflicts_with_all = ["server", "data_dir"], help_heading = REMOTE)]
    pub namespace: Option<String>,
}

#[derive(Args, Debug, Default, Clone)]
pub(crate) struct ConnectArgs {
    /// Kubeconfig of the cluster [default: in a pod its own service account, else $KUBECONFIG, else
    /// ~/.kube/config].
    #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,
}

/// A cluster that a command of an operator writes to.
#[derive(Args, Debug, Default, Clone)]
pub(crate) struct ClusterArgs {
    /// Configuration file of gpuwarden, which names the cluster where no flag does.
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub connect: ConnectArgs,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people to read.
    #[default]
    Text,
    /// Text for people, with more columns.
    Wide,
    /// JSON for programs to read.
    Json,
    /// YAML for programs to read.
    Yaml,
}

#[derive(Args, Debug, Default, Clone, Copy)]
pub struct OutputArgs {
    /// Format of the output.
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    pub output: Format,
}

/// Log of a process that has no configuration file for its flags.
#[derive(Args, Debug, Clone)]
pub(crate) struct LogArgs {
    /// Log filter: error, warn, info, debug, trace, also by crate.
    #[arg(
        long,
        env = "GPUWARDEN_LOG",
        value_name = "FILTER",
        default_value = "info"
    )]
    pub log: String,
    /// Format of log lines [default: text].
    #[arg(long, env = "GPUWARDEN_LOG_FORMAT", value_name = "text|json")]
    pub log_format: Option<String>,
}

/// Parses the value of a flag for an address to listen on.
pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    let hint = "write ADDRESS:PORT, such as 127.0.0.1:2112; names of hosts are not looked up";
    text.parse().map_err(|error| format!("{error}; {hint}"))
}
