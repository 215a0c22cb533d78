//! The arguments of `bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::OutputArgs;

/// Arguments of `bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// Only this benchmark; without it, all that can run here.
    #[arg(value_enum, value_name = "NAME")]
    pub name: Option<Benchmark>,
    /// Kubeconfig of a test cluster, for the benchmarks that cordon a node: they make a node
    /// object of their own, and delete it.
    #[arg(long, env = "GPUWARDEN_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, env = "GPUWARDEN_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,
    /// The directory in which the benchmarks that write to disk make one of their own, and remove
    /// it [default: the system's temporary directory].
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,
    /// The kernel log from which `run` reads its faults in `cordon` and `idle`.
    #[arg(long, value_enum, default_value_t = BenchLog::File)]
    pub via: BenchLog,
    /// Rounds of `cordon`.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rounds: u32,
    /// The time for which `idle` watches each process (seconds).
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub seconds: u32,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Benchmark {
    /// Time to look at a line of kernel log.
    Decode,
    /// Durable events a second, into the store and into an agent's outbox.
    Store,
    /// From a line of kernel log to a cordoned node.
    Cordon,
    /// The needs of a process that has nothing to do: memory, processor time, threads.
    Idle,
}

/// The kernel log of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchLog {
    /// A file of its own.
    File,
    /// The running kernel's log (needs root; every program that reads it sees the faults).
    Kmsg,
}
