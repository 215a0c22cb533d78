//! The arguments of `doctor`: those of the role that it looks at.

use clap::{Args, Subcommand};

use super::{AgentArgs, ControllerArgs, OutputArgs, RunArgs};

/// Arguments of `doctor`.
#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// Another role.
    #[command(subcommand)]
    pub role: Option<DoctorRole>,
    /// The arguments of `run`.
    #[command(flatten)]
    pub run: RunArgs,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The role, where it is not `run`.
#[derive(Subcommand, Debug)]
pub enum DoctorRole {
    /// The same of what `agent` uses.
    #[command(
        after_help = "Examples:\n  gpuwarden doctor agent --config /etc/gpuwarden/agent.toml\n  \
                            gpuwarden doctor agent --controller https://gpuwarden.example:50051 \
                            --tls-ca ca.crt --token-file token"
    )]
    Agent(Box<DoctorAgentArgs>),
    /// The same of what `controller` uses.
    #[command(
        after_help = "Examples:\n  gpuwarden doctor controller --config /etc/gpuwarden/controller.toml\n  \
                            gpuwarden doctor controller --kubeconfig ~/.kube/config --grpc-insecure \
                            --quarantine -o json"
    )]
    Controller(Box<DoctorControllerArgs>),
}

/// Arguments of `doctor agent`.
#[derive(Args, Debug)]
pub struct DoctorAgentArgs {
    /// The arguments of `agent`.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `doctor controller`.
#[derive(Args, Debug)]
pub struct DoctorControllerArgs {
    /// The arguments of `controller`.
    #[command(flatten)]
    pub controller: ControllerArgs,
    /// The output format.
    #[command(flatten)]
    pub output: OutputArgs,
}
