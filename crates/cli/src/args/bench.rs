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
    /// Where the benchmarks that write to disk do it, in a directory of their own that is
    /// removed [default: the system's temporary directory].
    #[arg(long, value_name = "DIRECTORY")]
    pub dir: Option<PathBuf>,
    /// What `run` reads its faults from in `cordon` and `idle`.
    #[arg(long, value_enum, default_value_t = BenchLog::File)]
    pub via: BenchLog,
    /// Rounds of `cordon`.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rounds: u32,
    /// How many nodes fail at once in `burst`, one burst after the other.
    #[arg(long, default_value = "150,375,750", value_delimiter = ',', value_name = "NUMBER",
          value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub nodes: Vec<u16>,
    /// How many nodes the cluster has in `fleet`, one cluster after the other.
    #[arg(long, default_value = "1000,5000", value_delimiter = ',', value_name = "NUMBER",
          value_parser = clap::value_parser!(u16).range(1..=20_000))]
    pub fleet: Vec<u16>,
    /// For how long `idle` and `fleet` watch each process (seconds).
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub seconds: u32,
    /// How to write it.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Benchmark {
    /// Time to look at a line of kernel log.
    Decode,
    /// Hundreds of thousands of lines of a few faults.
    Storm,
    /// Durable events a second, into the store and into an agent's outbox.
    Store,
    /// From a line of kernel log to a cordoned node.
    Cordon,
    /// Many nodes that fail at once: until all are cordoned, and until all are given back.
    Burst,
    /// What a process that has nothing to do needs.
    Idle,
    /// What a controller needs that has nothing to do in a cluster of many nodes.
    Fleet,
    /// What a process keeps of memory through bursts and kills in a cluster of 1,000 nodes.
    Memory,
    /// Size of the executable.
    Binary,
}

/// The kernel log of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchLog {
    /// A file of its own.
    File,
    /// The running kernel's log (needs root; every program that reads it sees the faults).
    Kmsg,
}
