//! The arguments of `bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::OutputArgs;

#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// Benchmark to run [default: all that can run here].
    #[arg(value_enum, value_name = "NAME")]
    pub name: Option<Benchmark>,
    /// Kubeconfig of a test cluster. The benchmarks create a node object of their own there,
    /// and delete it.
    #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,
    /// Directory for the data of the started processes, which is removed at the end [default: the
    /// system's temporary directory].
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,
    /// Kernel log that the started processes read faults from.
    #[arg(long, value_enum, default_value_t = BenchLog::File)]
    pub via: BenchLog,
    /// Number of rounds of `cordon`.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rounds: u32,
    /// Length of the measurement of each process by `idle` (seconds).
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub seconds: u32,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Benchmark {
    /// Time from a line in the kernel log to a cordoned node.
    Cordon,
    /// Memory, processor time and threads of an idle process.
    Idle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchLog {
    /// A file in the benchmark's directory.
    File,
    /// The running kernel's log (needs root; every program that reads the log sees the faults).
    Kmsg,
}
