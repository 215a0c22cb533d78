//! The arguments of `doctor`: those of the role that it checks.

use clap::{Args, Subcommand};

use super::{AgentArgs, ControllerArgs, KubeArgs, OutputArgs, RunArgs};

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    #[command(subcommand)]
    pub role: Option<DoctorRole>,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Subcommand, Debug)]
pub(crate) enum DoctorRole {
    /// Check what `agent` would use. Takes the flags of `agent`.
    #[command(
        after_help = "Examples:\n  gpuwarden doctor agent --config /etc/gpuwarden/agent.toml\n  \
                            gpuwarden doctor agent --controller https://gpuwarden.example:50051 \
                            --tls-ca ca.crt --token-file token"
    )]
    Agent(Box<DoctorAgentArgs>),
    /// Check what `controller` would use. Takes the flags of `controller`.
    #[command(
        after_help = "Examples:\n  gpuwarden doctor controller --config /etc/gpuwarden/controller.toml\n  \
                            gpuwarden doctor controller --kubeconfig ~/.kube/config --grpc-insecure \
                            --quarantine -o json"
    )]
    Controller(Box<DoctorControllerArgs>),
    /// Check gpuwarden in a cluster: its pods, the `RuntimeClass` of the agents, GPU nodes without an
    /// agent, and other programs that act on nodes. Takes permission to list pods, Events, nodes,
    /// Deployments and `DaemonSets`.
    #[command(
        after_help = "Examples:\n  gpuwarden doctor cluster\n  kubectl gpuwarden doctor cluster \
                            --namespace gpuwarden -o json"
    )]
    Cluster(Box<DoctorClusterArgs>),
}

#[derive(Args, Debug)]
pub(crate) struct DoctorAgentArgs {
    #[command(flatten)]
    pub agent: AgentArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct DoctorControllerArgs {
    #[command(flatten)]
    pub controller: ControllerArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

#[derive(Args, Debug)]
pub(crate) struct DoctorClusterArgs {
    #[command(flatten)]
    pub kube: KubeArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}
