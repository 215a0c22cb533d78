//! Arguments of the commands that only read: of a running gpuwarden, of logs and of policies.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{OutputArgs, RemoteArgs};

#[derive(Args, Debug)]
pub(crate) struct DecodeArgs {
    /// File with kernel log text, or - for standard input.
    #[arg(default_value = "-", value_name = "FILE|-")]
    pub file: String,
    /// File of changes to the catalogue (TOML); may be given several times.
    #[arg(long, value_name = "FILE")]
    pub catalog: Vec<PathBuf>,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ViewArgs {
    #[command(flatten)]
    pub remote: RemoteArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct IncidentsArgs {
    /// Incident to show with all its nodes and faults [default: all in short].
    #[arg(value_name = "ID")]
    pub id: Option<String>,
    #[command(flatten)]
    pub remote: RemoteArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct MaintenanceArgs {
    /// Maintenance to show with all that is known of it [default: all in short].
    #[arg(value_name = "ID")]
    pub id: Option<String>,
    #[command(flatten)]
    pub remote: RemoteArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct EventsArgs {
    /// Wait for new events and print them as they arrive.
    #[arg(short, long)]
    pub follow: bool,
    /// Number of the newest events to show first.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// All stored events, the oldest first, as `replay` reads them. The events are streamed,
    /// whatever their number.
    #[arg(long, conflicts_with_all = ["limit", "follow"])]
    pub all: bool,
    /// Only events of this node.
    #[arg(long = "node", value_name = "NAME")]
    pub node: Option<String>,
    #[command(flatten)]
    pub remote: RemoteArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `explain` and `why-not`.
#[derive(Args, Debug)]
pub(crate) struct ExplainArgs {
    /// Name of the node [default: the node of the running gpuwarden].
    #[arg(value_name = "NODE")]
    pub node: Option<String>,
    #[command(flatten)]
    pub remote: RemoteArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct StoreArgs {
    #[command(subcommand)]
    pub what: StoreCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum StoreCommand {
    /// Show the contents of the file, the positions of its readers, and whether the file is sound.
    /// A gpuwarden may have it open.
    #[command(
        after_help = "Examples:\n  gpuwarden store inspect\n  gpuwarden store inspect --data-dir \
                            /var/lib/gpuwarden -o json"
    )]
    Inspect {
        /// Configuration file of gpuwarden; only its key `data-dir` is used here.
        #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
        config: Option<PathBuf>,
        /// Data directory [default: that of `run`].
        #[arg(long, env = "GPUWARDEN_DATA_DIR", value_name = "DIRECTORY")]
        data_dir: Option<PathBuf>,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Args, Debug)]
pub(crate) struct SimulateArgs {
    /// Number of steps; each is one thing that can happen.
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// Seed of the random numbers; the same seed gives the same steps [default: the time].
    #[arg(long)]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ReplayArgs {
    /// Kernel logs in the forms that `decode` reads, events as `events -o json` writes them, or
    /// `NVSentinel`'s logs and store; - for standard input. A kernel log belongs to the node NODE,
    /// else to the one that the file is named after (up to the first dot).
    #[arg(required = true, value_name = "[NODE=]FILE|-")]
    pub files: Vec<String>,
    /// Policy; with two, the decisions are compared [default: the built-in one].
    #[arg(long = "policy", value_name = "FILE|preset:NAME")]
    pub policies: Vec<String>,
    /// Rules of the analysis, whose conclusions count as events: a file (TOML), or `built-in`; with
    /// two, the decisions are compared [default: no analysis].
    #[arg(long, value_name = "FILE|built-in")]
    pub rules: Vec<String>,
    /// File of changes to the catalogue (TOML); may be given several times.
    #[arg(long, value_name = "FILE")]
    pub catalog: Vec<PathBuf>,
    /// The nodes of the cluster, with their labels: `kubectl get nodes -o json`. Without it, the
    /// nodes are those that events name, with no known labels, and of the brake only limits in
    /// numbers of nodes are applied (`max = 5`), not those in percent or by label.
    #[arg(long, value_name = "FILE")]
    pub nodes: Option<PathBuf>,
    #[command(flatten)]
    pub output: OutputArgs,
}
