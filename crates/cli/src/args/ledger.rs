//! The arguments of `ledger` and `report`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{OutputArgs, RemoteArgs, ServerArgs};

#[derive(Args, Debug)]
pub(crate) struct LedgerArgs {
    #[command(subcommand)]
    pub what: Option<LedgerCommand>,
    /// GPU, by serial number or UUID, or node, with its whole history [default: all in short].
    #[arg(value_name = "SERIAL|NODE")]
    pub name: Option<String>,
    /// Most GPUs, and most nodes, to show: first those that are marked as bad, then by score.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    #[command(flatten)]
    pub remote: RemoteArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Subcommand, Debug)]
pub(crate) enum LedgerCommand {
    /// Mark a GPU as bad, as returned to its vendor, or as good. A node in which a bad GPU is seen
    /// again is taken out of service. Runs on the machine of the controller, or in its pod.
    #[command(
        after_help = "Examples:\n  gpuwarden ledger mark 1654921000123 bad --reason 'XID 79 after two \
                            resets'\n  gpuwarden ledger mark 1654921000123 rma --reason 'case 4711'\n  \
                            kubectl exec -n gpuwarden deploy/gpuwarden-controller -- gpuwarden ledger mark \
                            1654921000123 good --reason 'passed the field diagnostic'"
    )]
    Mark(MarkArgs),
}

#[derive(Args, Debug)]
pub(crate) struct MarkArgs {
    /// GPU, by serial number or UUID. It need not be in the ledger yet.
    #[arg(value_name = "SERIAL")]
    pub gpu: String,
    /// Meaning of the mark.
    #[arg(value_enum)]
    pub mark: MarkArg,
    /// Reason, for everybody who reads the ledger.
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// The connector's Unix socket [default: that of the running gpuwarden].
    #[arg(long, env = "GPUWARDEN_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    #[command(flatten)]
    pub server: ServerArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MarkArg {
    /// The GPU must not be used.
    Bad,
    /// The GPU was, or is to be, returned to its vendor.
    Rma,
    /// The GPU may be used; ends the other two.
    Good,
}

#[derive(Args, Debug)]
pub(crate) struct ReportArgs {
    #[command(subcommand)]
    pub what: ReportCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum ReportCommand {
    /// Write the evidence about a GPU or node in one file, for a claim or a return to the vendor:
    /// times, log lines, readings, repairs and validations. The SHA-256 of the file goes to
    /// standard error.
    #[command(
        after_help = "Examples:\n  gpuwarden report evidence gpu-7 > gpu-7.html\n  gpuwarden report \
                            evidence 1654921000123 -o json > 1654921000123.json"
    )]
    Evidence(EvidenceArgs),
}

#[derive(Args, Debug)]
pub(crate) struct EvidenceArgs {
    /// GPU, by serial number or UUID, or node.
    #[arg(value_name = "NODE|SERIAL")]
    pub name: String,
    /// Format of the file.
    #[arg(short, long, value_enum, default_value_t = EvidenceFormat::Html)]
    pub output: EvidenceFormat,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EvidenceFormat {
    /// Page that needs no other file, for people.
    Html,
    /// JSON for programs.
    Json,
}
