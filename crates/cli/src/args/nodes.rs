//! Arguments of the commands that a person changes a cluster with, by way of its API server.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{ClusterArgs, OutputArgs, REMOTE};

#[derive(Args, Debug)]
pub(crate) struct DrainArgs {
    /// Only print the plan. Nodes are drained by a gpuwarden that runs with --drain.
    #[arg(long, required = true)]
    pub plan: bool,
    /// Name of the node.
    #[arg(value_name = "NODE")]
    pub node: String,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// File that says how pods leave [default: that of the configuration, else each is waited for
    /// until it has ended].
    #[arg(long, env = "GPUWARDEN_DRAIN_CONFIG", value_name = "FILE")]
    pub drain_config: Option<PathBuf>,
    /// Policy whose routes name the events that a node is drained for: a file, or `preset:NAME`
    /// [default: all events].
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<String>,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ReleaseArgs {
    /// Name of the node.
    #[arg(value_name = "NODE")]
    pub node: String,
    /// Reason, which becomes part of the node's story.
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Write the request, and do not wait until it is carried out.
    #[arg(long)]
    pub no_wait: bool,
    /// Longest time to wait (seconds).
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3_600),
          conflicts_with = "no_wait")]
    pub timeout: u64,
}

#[derive(Args, Debug)]
pub(crate) struct VetoArgs {
    /// Name of the node.
    #[arg(value_name = "NODE")]
    pub node: String,
    /// Withdraw the node's veto.
    #[arg(long, conflicts_with = "reason")]
    pub end: bool,
    /// Length of the veto, which ends by itself; at most 168h.
    #[arg(long = "for", default_value = "4h", value_name = "DURATION")]
    pub duration: String,
    /// Reason, which becomes part of the node's story.
    #[arg(long, value_name = "TEXT", required_unless_present = "end")]
    pub reason: Option<String>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

#[derive(Args, Debug)]
pub(crate) struct ApproveArgs {
    /// Name of the node, or id of an incident: all that waits on its nodes.
    #[arg(value_name = "NODE|INCIDENT")]
    pub name: String,
    /// Time within which the first of the approved actions has to begin; at most 24h. Later the
    /// approval has expired, and all of it is proposed again.
    #[arg(long = "for", default_value = "1h", value_name = "DURATION")]
    pub duration: String,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Address of the gpuwarden that knows the incident [default: the controller of the cluster that a
    /// flag names, else the one that runs on this machine].
    #[arg(long, env = "GPUWARDEN_SERVER", value_name = "URL", help_heading = REMOTE)]
    pub server: Option<String>,
    /// Data directory of the gpuwarden that knows the incident.
    #[arg(long, env = "GPUWARDEN_DATA_DIR", value_name = "DIRECTORY", help_heading = REMOTE)]
    pub data_dir: Option<PathBuf>,
    /// Namespace of the controller that knows the incident, by `kubectl port-forward`.
    #[arg(short, long, value_name = "NAME", conflicts_with_all = ["server", "data_dir"], help_heading = REMOTE)]
    pub namespace: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct PauseArgs {
    /// Length of the pause, which ends by itself.
    #[arg(long = "for", default_value = "1h", value_name = "DURATION")]
    pub duration: String,
    /// Pause drains and remediation of all nodes too: none begins, and no further pod is evicted.
    /// Custom resources that exist already are still carried out.
    #[arg(long)]
    pub repairs: bool,
    /// Reason, which `status` and `why-not` show.
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Name of the person who pauses [default: $USER].
    #[arg(long, env = "USER", value_name = "NAME")]
    pub by: Option<String>,
    #[command(flatten)]
    pub kube: KubeArgs,
}

#[derive(Args, Debug)]
pub(crate) struct UninstallArgs {
    /// Only print what would be changed, and what stays.
    #[arg(long)]
    pub plan: bool,
    /// Quarantined nodes: `return` to service, whatever their faults, or `leave` cordoned and
    /// tainted. Needed if there are any.
    #[arg(long, value_enum, value_name = "return|leave")]
    pub nodes: Option<NodesFate>,
    /// Also end the sessions of gpuwardens on the machines themselves (`run`), which have to be
    /// stopped there.
    #[arg(long)]
    pub machines: bool,
    /// Give up requests under way, such as a `RebootNode` or a hand-over.
    #[arg(long)]
    pub abandon: bool,
    /// Also delete the custom resource definitions without objects. `NVSentinel` uses the same ones.
    #[arg(long)]
    pub crds: bool,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Fate of quarantined nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum NodesFate {
    /// Back in service, as before the quarantine.
    Return,
    /// Out of service, without gpuwarden's marks.
    Leave,
}

/// The cluster, and the namespace in it that holds gpuwarden's own objects.
#[derive(Args, Debug, Default, Clone)]
pub(crate) struct KubeArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Namespace of gpuwarden [default: that of the configuration, else the pod's own, else
    /// gpuwarden].
    #[arg(short, long, env = "GPUWARDEN_NAMESPACE", value_name = "NAME")]
    pub namespace: Option<String>,
}
