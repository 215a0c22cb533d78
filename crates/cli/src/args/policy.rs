//! The arguments of `policy`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::OutputArgs;

/// Arguments of `policy`.
#[derive(Args, Debug)]
pub struct PolicyArgs {
    /// The command.
    #[command(subcommand)]
    pub what: PolicyCommand,
}

/// The commands of `policy`.
#[derive(Subcommand, Debug)]
pub enum PolicyCommand {
    /// Check a policy: what is wrong with it (exit 2), and what is odd (exit 1): values that no
    /// event has, rules that never match, no brake, no way to opt out.
    #[command(after_help = "Examples:\n  gpuwarden policy lint policy.toml\n  \
                            gpuwarden policy lint preset:nvsentinel -o json")]
    Lint {
        /// Policy.
        #[arg(value_name = "FILE|preset:NAME")]
        policy: String,
        /// The output format.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Run the tests of a policy: events in, what is wanted for their node out; exit 1 when one
    /// fails.
    #[command(after_help = "Examples:\n  gpuwarden policy test policy.toml\n  \
                            gpuwarden policy test policy.toml more-tests.yaml")]
    Test {
        /// Policy.
        #[arg(value_name = "FILE|preset:NAME")]
        policy: String,
        /// Files of tests, YAML or TOML [default: beside the policy: policy.test.yaml,
        /// policy.test.toml for policy.toml].
        #[arg(value_name = "TESTS")]
        tests: Vec<PathBuf>,
        /// The output format.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Say what changes from one policy to another: on the events of all known monitors and of
    /// the catalogue, and with files as `replay` takes them on these too; exit 1 when they differ.
    #[command(
        after_help = "Examples:\n  gpuwarden policy diff preset:default policy.toml\n  \
                            gpuwarden policy diff old.toml new.toml /logs/*.log\n  gpuwarden policy diff old.toml \
                      new.toml --nodes nodes.json"
    )]
    Diff {
        /// The one policy.
        #[arg(value_name = "FILE|preset:NAME")]
        a: String,
        /// The other.
        #[arg(value_name = "FILE|preset:NAME")]
        b: String,
        /// Kernel logs or exported events, see `replay`.
        #[arg(value_name = "[NODE=]FILE")]
        files: Vec<String>,
        /// The nodes that exist, with their labels: `kubectl get nodes -o json`. Without it
        /// rules about nodes are not compared, and of the brake only limits in numbers of nodes
        /// hold on files.
        #[arg(long, value_name = "FILE")]
        nodes: Option<PathBuf>,
        /// The output format.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show a policy with all that holds, and what of it is a default.
    #[command(
        after_help = "Examples:\n  gpuwarden policy show\n  gpuwarden policy show policy.toml -o json"
    )]
    Show {
        /// Policy [default: the built-in one].
        #[arg(env = "GPUWARDEN_POLICY", value_name = "FILE|preset:NAME")]
        policy: Option<String>,
        /// The output format.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List the policies that are built in, each with its source; with a name, print that one.
    #[command(
        after_help = "Examples:\n  gpuwarden policy presets\n  gpuwarden policy presets eks > policy.toml"
    )]
    Presets {
        /// Name.
        #[arg(value_name = "NAME")]
        name: Option<String>,
        /// The output format.
        #[command(flatten)]
        output: OutputArgs,
    },
}
