//! Arguments of `run`, `agent` and `controller`, in groups that these roles share.
//!
//! Each argument is also an environment variable and a key of the configuration file. A flag has
//! precedence over the environment, and the environment over the file.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use serde::Deserialize;

use super::common::address;
use super::{
    ActArgs, AuditArgs, DeliveryArgs, DeviceArgs, GpuArgs, IngestArgs, LabelArgs, NodeArgs,
};

/// Defines a group of settings; each is an argument for clap and a key of the configuration file.
macro_rules! group {
    (
        $(#[$about:meta])*
        pub(crate) struct $group:ident {
            $($(#[$help:meta])* pub $name:ident: Option<$type:ty>,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Args, Clone, Debug, Default, Deserialize)]
        #[serde(rename_all = "kebab-case", default)]
        pub(crate) struct $group {
            $($(#[$help])* pub $name: Option<$type>,)*
        }

        impl $group {
            /// Sets the values that are missing here from `lower`, which has lower precedence.
            pub(crate) fn fill(&mut self, lower: Self) {
                $(self.$name = self.$name.take().or(lower.$name);)*
            }
        }
    };
}
pub(super) use group;

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct RunArgs {
    /// Configuration file (TOML; the keys are the long names of these flags).
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub node: NodeArgs,
    #[command(flatten)]
    pub gpu: GpuArgs,
    #[command(flatten)]
    pub devices: DeviceArgs,
    #[command(flatten)]
    pub process: ProcessArgs,
    #[command(flatten)]
    pub act: ActArgs,
    #[command(flatten)]
    pub audit: AuditArgs,
}

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct AgentArgs {
    /// Configuration file (TOML; the keys are the long names of these flags).
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub delivery: DeliveryArgs,
    #[command(flatten)]
    pub node: NodeArgs,
    #[command(flatten)]
    pub gpu: GpuArgs,
    #[command(flatten)]
    pub devices: DeviceArgs,
    #[command(flatten)]
    pub process: ProcessArgs,
}

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ControllerArgs {
    /// Configuration file (TOML; the keys are the long names of these flags).
    #[arg(long, env = "GPUWARDEN_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub ingest: IngestArgs,
    #[command(flatten)]
    pub election: ElectionArgs,
    #[command(flatten)]
    pub labels: LabelArgs,
    #[command(flatten)]
    pub objects: ObjectArgs,
    #[command(flatten)]
    pub process: ProcessArgs,
    #[command(flatten)]
    pub act: ActArgs,
    #[command(flatten)]
    pub audit: AuditArgs,
}

group! {
    /// Election of the controller that acts.
    pub(crate) struct ElectionArgs {
        /// Act only while this process holds the Lease gpuwarden-controller in the namespace of
        /// --namespace, and stand by while another process holds it [default: true for a controller
        /// that writes in the cluster].
        #[arg(long, env = "GPUWARDEN_LEADER_ELECT", num_args = 0..=1,
              default_missing_value = "true", value_name = "BOOL")]
        pub leader_elect: Option<bool>,
    }
}

group! {
    /// Monitor of Kubernetes objects.
    pub(crate) struct ObjectArgs {
        /// Report Kubernetes objects that are faults of a node, by policies: `NVSentinel`'s
        /// policies.toml in a file or a `ConfigMap` of the cluster (both are read again when they
        /// change), or built-in ones [default: none; default key of a `ConfigMap`: policies.toml].
        #[arg(long, env = "GPUWARDEN_OBJECTS",
              value_name = "FILE|configmap:NAMESPACE/NAME[/KEY]|preset:NAME")]
        pub objects: Option<String>,
    }
}

group! {
    /// Arguments of every process.
    pub(crate) struct ProcessArgs {
        /// Directory of events and state [default: /var/lib/gpuwarden as root, else
        /// ~/.local/state/gpuwarden].
        #[arg(long, env = "GPUWARDEN_DATA_DIR", value_name = "DIRECTORY")]
        pub data_dir: Option<PathBuf>,
        /// Address of the status page, API and metrics [default: 127.0.0.1:2112].
        #[arg(long, env = "GPUWARDEN_LISTEN", value_name = "ADDRESS:PORT", value_parser = address)]
        pub listen: Option<SocketAddr>,
        /// Log filter: error, warn, info, debug, trace, also by crate [default: info].
        #[arg(long, env = "GPUWARDEN_LOG", value_name = "FILTER")]
        pub log: Option<String>,
        /// Format of log lines [default: text].
        #[arg(long, env = "GPUWARDEN_LOG_FORMAT", value_name = "text|json")]
        pub log_format: Option<String>,
    }
}
