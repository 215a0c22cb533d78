//! The arguments of `inject`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::ServerArgs;

#[derive(Args, Debug)]
pub(crate) struct InjectArgs {
    #[command(subcommand)]
    pub what: Inject,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Inject {
    /// An XID, as the NVIDIA driver would print it.
    #[command(
        after_help = "Examples:\n  gpuwarden inject xid 79\n  gpuwarden inject xid 48 --pci 0000:3b:00 \
                            --via kmsg\n  gpuwarden inject xid 79 --gpu 3 --via nvml"
    )]
    Xid {
        /// Code of the XID.
        code: u32,
        /// PCI address of the GPU.
        #[arg(long, default_value = "0000:b3:00", value_name = "ADDRESS")]
        pci: String,
        /// Index of the fake GPU, with --via nvml.
        #[arg(long, default_value_t = 0, value_name = "INDEX")]
        gpu: u32,
        /// Way of the fault: the running kernel's log (needs root; every program that reads the log
        /// sees it), an event on gpuwarden's socket, or the fake driver of a gpuwarden that runs with
        /// --fake-gpus.
        #[arg(long, value_enum, default_value_t = Via::Socket)]
        via: Via,
        #[command(flatten)]
        target: TargetArgs,
    },
    /// Healthy events that close open faults of a node.
    #[command(
        after_help = "Examples:\n  gpuwarden inject recovery\n  gpuwarden inject recovery --code 79 \
                            --pci 0000:b3:00"
    )]
    Recovery {
        /// Only faults of the GPU at this PCI address.
        #[arg(long, value_name = "ADDRESS")]
        pci: Option<String>,
        /// Only faults of the GPU with this index.
        #[arg(long, value_name = "INDEX")]
        gpu: Option<u32>,
        /// Only faults with this code.
        #[arg(long, value_name = "CODE")]
        code: Option<String>,
        #[command(flatten)]
        target: TargetArgs,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Via {
    /// A line in the kernel log.
    Kmsg,
    /// An event on the socket.
    Socket,
    /// An event of the fake driver.
    Nvml,
}

/// The gpuwarden that receives an injected event.
#[derive(Args, Debug, Clone)]
pub(crate) struct TargetArgs {
    /// Node that has the fault [default: the node of the running gpuwarden].
    #[arg(long, env = "GPUWARDEN_NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    /// The connector's Unix socket [default: that of the running gpuwarden].
    #[arg(long, env = "GPUWARDEN_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    #[command(flatten)]
    pub server: ServerArgs,
}
