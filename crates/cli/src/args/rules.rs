//! The arguments of `rules`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ConnectArgs, OutputArgs, RemoteArgs};

#[derive(Args, Debug)]
pub(crate) struct RulesArgs {
    #[command(subcommand)]
    pub what: RulesCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum RulesCommand {
    /// Check rules for errors (exit 2) and oddities (exit 1): codes and checks that do not exist,
    /// actions that contradict the catalogue, conditions that are never met.
    #[command(
        after_help = "Examples:\n  gpuwarden rules lint rules.toml\n  gpuwarden rules lint \
                            configmap:gpuwarden/analysis-rules --retention 7d -o json"
    )]
    Lint {
        /// File of rules (TOML), or `built-in`; they are checked beside the built-in ones.
        #[arg(value_name = "FILE|configmap:NAMESPACE/NAME[/KEY]|built-in")]
        rules: String,
        /// Time for which events are stored, as of `run` and `controller`.
        #[arg(long, value_name = "DURATION", default_value = "30d")]
        retention: String,
        #[command(flatten)]
        connect: ConnectArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Run the tests of rules: events with their times in, conclusions out; exit 1 when one fails.
    #[command(after_help = "Examples:\n  gpuwarden rules test rules.toml\n  \
                            gpuwarden rules test built-in more-tests.yaml")]
    Test {
        /// File of rules (TOML), or `built-in`.
        #[arg(value_name = "FILE|configmap:NAMESPACE/NAME[/KEY]|built-in")]
        rules: String,
        /// Files of tests, YAML or TOML [default: beside the rules: rules.test.yaml, rules.test.toml
        /// for rules.toml].
        #[arg(value_name = "TESTS")]
        tests: Vec<PathBuf>,
        #[command(flatten)]
        connect: ConnectArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show what the groups of a rule hold, and what they lack for a conclusion: from the events of
    /// the running gpuwarden, or of files.
    #[command(
        after_help = "Examples:\n  gpuwarden rules explain RepeatedXIDErrorOnSameGPU\n  gpuwarden rules \
                            explain Mine gpu-7 --rules rules.toml --events gpu-7=/logs/kern.log"
    )]
    Explain {
        /// Name of the rule.
        #[arg(value_name = "RULE")]
        rule: String,
        /// Only groups of this node.
        #[arg(value_name = "NODE")]
        node: Option<String>,
        /// File of rules (TOML) [default: those of the running gpuwarden; with --events, the built-in
        /// rules].
        #[arg(long, value_name = "FILE|configmap:NAMESPACE/NAME[/KEY]|built-in")]
        rules: Option<String>,
        /// Kernel logs or exported events, see `replay`; may be given several times [default: the
        /// events of the running gpuwarden].
        #[arg(long, value_name = "[NODE=]FILE|-")]
        events: Vec<String>,
        /// The nodes of the cluster, with the labels that rules group by: `kubectl get nodes -o
        /// json`.
        #[arg(long, value_name = "FILE")]
        nodes: Option<PathBuf>,
        #[command(flatten)]
        remote: RemoteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show the rules in effect, one per line; with a name, all keys of that rule.
    #[command(
        after_help = "Examples:\n  gpuwarden rules show\n  gpuwarden rules show RackFault\n  \
                            gpuwarden rules show --rules rules.toml -o json"
    )]
    Show {
        /// Name of the rule.
        #[arg(value_name = "RULE")]
        rule: Option<String>,
        /// File of rules (TOML), which come beside the built-in ones [default: the built-in rules].
        #[arg(long, value_name = "FILE|configmap:NAMESPACE/NAME[/KEY]|built-in")]
        rules: Option<String>,
        #[command(flatten)]
        connect: ConnectArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Compare two sets of rules: their keys, and their conclusions from files that `replay` reads;
    /// exit 1 when they differ.
    #[command(
        after_help = "Examples:\n  gpuwarden rules diff built-in rules.toml\n  gpuwarden rules diff \
                            old.toml new.toml /logs/*.log"
    )]
    Diff {
        /// First set of rules of the comparison.
        #[arg(value_name = "FILE|configmap:NAMESPACE/NAME[/KEY]|built-in")]
        a: String,
        /// Second set of rules of the comparison.
        #[arg(value_name = "FILE|configmap:NAMESPACE/NAME[/KEY]|built-in")]
        b: String,
        /// Kernel logs or exported events, see `replay`.
        #[arg(value_name = "[NODE=]FILE|-")]
        files: Vec<String>,
        /// The nodes of the cluster, with the labels that rules group by: `kubectl get nodes -o
        /// json`.
        #[arg(long, value_name = "FILE")]
        nodes: Option<PathBuf>,
        #[command(flatten)]
        connect: ConnectArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}
