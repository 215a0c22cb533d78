//! Empty environment variables, which count as not set for all arguments of all commands.
//! Container templates set every variable, those without a value to the empty string.

use std::ffi::OsStr;

use clap::Command;
use clap::builder::Resettable;

/// Returns the command without those variables that `is_empty` returns true for.
pub(crate) fn without_empty(command: Command, is_empty: fn(&OsStr) -> bool) -> Command {
    command
        .mut_args(|arg| match arg.get_env() {
            Some(name) if is_empty(name) => arg.env(Resettable::Reset),
            _ => arg,
        })
        .mut_subcommands(|inner| without_empty(inner, is_empty))
}

/// Returns true if a variable of the process is set to the empty string.
pub(crate) fn is_empty(name: &OsStr) -> bool {
    std::env::var_os(name).is_some_and(|value| value.is_empty())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory as _;

    use super::*;
    use crate::args::Cli;

    fn variables(command: &Command) -> BTreeSet<String> {
        let own = command.get_arguments().filter_map(clap::Arg::get_env);
        own.map(|name| name.to_string_lossy().into_owned())
            .chain(command.get_subcommands().flat_map(variables))
            .collect()
    }

    #[test]
    fn every_variable_of_every_command_may_be_empty() {
        let all = variables(&Cli::command());
        for name in [
            "LISTEN",
            "NODE_NAME",
            "SERVER",
            "CONFIG",
            "POLICY",
            "CONTEXT",
        ] {
            assert!(all.contains(&format!("GPUWARDEN_{name}")), "{all:?}");
        }
        let none_is = without_empty(Cli::command(), |_| false);
        assert_eq!(variables(&none_is), all);
        let all_are = without_empty(Cli::command(), |_| true);
        assert_eq!(variables(&all_are), BTreeSet::new());
        let one_is = without_empty(Cli::command(), |name| name == "GPUWARDEN_LISTEN");
        let left = variables(&one_is);
        assert_eq!(
            all.difference(&left).collect::<Vec<_>>(),
            ["GPUWARDEN_LISTEN"]
        );
    }
}
