//! The arguments of `policy`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::OutputArgs;

#[derive(Args, Debug)]
pub(crate) struct PolicyArgs {
    #[command(subcommand)]
    pub what: PolicyCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum PolicyCommand {
    /// Check a policy for errors (exit 2) and oddities (exit 1): values that no event has, rules that
    /// never match, no brake, no way to opt out.
    #[command(after_help = "Examples:\n  gpuwarden policy lint policy.toml\n  \
                            gpuwarden policy lint preset:nvsentinel -o json")]
    Lint {
        /// File or name of the policy.
        #[arg(value_name = "FILE|preset:NAME")]
        policy: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Run the tests of a policy: events in, decisions about their node out; exit 1 when one fails.
    #[command(after_help = "Examples:\n  gpuwarden policy test policy.toml\n  \
                            gpuwarden policy test policy.toml more-tests.yaml")]
    Test {
        /// File or name of the policy.
        #[arg(value_name = "FILE|preset:NAME")]
        policy: String,
        /// Files of tests, YAML or TOML [default: beside the policy: policy.test.yaml,
        /// policy.test.toml for policy.toml].
        #[arg(value_name = "TESTS")]
        tests: Vec<PathBuf>,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Compare two policies: on the events of all known monitors and of the catalogue, and on files
    /// that `replay` reads; exit 1 when the policies differ.
    #[command(
        after_help = "Examples:\n  gpuwarden policy diff preset:default policy.toml\n  \
                            gpuwarden policy diff old.toml new.toml /logs/*.log\n  gpuwarden policy diff old.toml \
                      new.toml --nodes nodes.json"
    )]
    Diff {
        /// First policy of the comparison.
        #[arg(value_name = "FILE|preset:NAME")]
        a: String,
        /// Second policy of the comparison.
        #[arg(value_name = "FILE|preset:NAME")]
        b: String,
        /// Kernel logs or exported events, see `replay`.
        #[arg(value_name = "[NODE=]FILE")]
        files: Vec<String>,
        /// The nodes of the cluster, with their labels: `kubectl get nodes -o json`. Without it, rules
        /// about nodes are not compared, and of the brake only limits in numbers of nodes are applied
        /// to files.
        #[arg(long, value_name = "FILE")]
        nodes: Option<PathBuf>,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show all settings and rules of a policy, with the defaults marked.
    #[command(
        after_help = "Examples:\n  gpuwarden policy show\n  gpuwarden policy show policy.toml -o json"
    )]
    Show {
        /// Policy [default: the built-in one].
        #[arg(env = "GPUWARDEN_POLICY", value_name = "FILE|preset:NAME")]
        policy: Option<String>,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List the built-in policies, each with its source; with a name, print that policy.
    #[command(
        after_help = "Examples:\n  gpuwarden policy presets\n  gpuwarden policy presets eks > policy.toml"
    )]
    Presets {
        /// Name of the policy to print.
        #[arg(value_name = "NAME")]
        name: Option<String>,
        #[command(flatten)]
        output: OutputArgs,
    },
}
