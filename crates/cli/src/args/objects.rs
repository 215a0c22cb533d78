//! The arguments of `objects`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::OutputArgs;

#[derive(Args, Debug)]
pub(crate) struct ObjectsArgs {
    #[command(subcommand)]
    pub what: ObjectsCommand,
}

#[derive(Subcommand, Debug)]
pub(crate) enum ObjectsCommand {
    /// Check policies over Kubernetes objects for errors (exit 2) and oddities (exit 1): misspelt
    /// fields, actions that do not exist, expressions that are often meant otherwise.
    #[command(after_help = "Examples:\n  gpuwarden objects lint policies.toml\n  \
                            gpuwarden objects lint preset:node-not-ready -o json")]
    Lint {
        /// File or name of the policies.
        #[arg(value_name = "FILE|preset:NAME")]
        policies: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Run the tests of policies: changes of objects in, open faults out; exit 1 when one fails.
    #[command(after_help = "Examples:\n  gpuwarden objects test policies.toml\n  \
                            gpuwarden objects test preset:node-not-ready my-tests.yaml")]
    Test {
        /// File or name of the policies.
        #[arg(value_name = "FILE|preset:NAME")]
        policies: String,
        /// Files of tests, YAML or TOML [default: beside the policies: policies.test.yaml,
        /// policies.test.toml for policies.toml].
        #[arg(value_name = "TESTS")]
        tests: Vec<PathBuf>,
        #[command(flatten)]
        output: OutputArgs,
    },
}
