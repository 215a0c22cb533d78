//! `gpuwarden completions`: completions of commands and flags for a shell, generated from the same
//! definitions as `--help`.

use clap::CommandFactory as _;
use clap_complete::{Shell, generate};

use crate::EXIT_OK;
use crate::args::Cli;
use crate::output;

pub(super) fn execute(shell: Shell) -> anyhow::Result<u8> {
    output::part(&text(shell))?;
    Ok(EXIT_OK)
}

fn text(shell: Shell) -> String {
    // `generate` panics on a broken pipe, so it writes to memory.
    let mut text = Vec::new();
    generate(shell, &mut Cli::command(), "gpuwarden", &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use clap::ValueEnum as _;

    use super::*;

    /// Returns the completions that bash offers for the last of `words`.
    fn offered(dir: &std::path::Path, words: &[&str]) -> Vec<String> {
        let script = format!(
            "source {}/gpuwarden.bash || exit 3\nCOMP_WORDS=({})\nCOMP_CWORD={}\n_gpuwarden gpuwarden \
             '{}' '{}'\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n",
            dir.display(),
            words.join(" "),
            words.len() - 1,
            words[words.len() - 1],
            words[words.len() - 2],
        );
        let found = Command::new("bash").args(["-c", &script]).output().unwrap();
        let said = String::from_utf8(found.stderr).unwrap();
        assert!(found.status.success() && said.is_empty(), "{said}");
        let text = String::from_utf8(found.stdout).unwrap();
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn bash_takes_its_completions_and_offers_commands_and_flags() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("gpuwarden.bash"), text(Shell::Bash)).unwrap();
        assert_eq!(offered(dir.path(), &["gpuwarden", "stat"]), ["status"]);
        assert_eq!(
            offered(dir.path(), &["gpuwarden", "policy", "li"]),
            ["lint"]
        );
        assert_eq!(
            offered(dir.path(), &["gpuwarden", "run", "--kernel"]),
            ["--kernel-log"]
        );
    }

    #[test]
    fn every_shell_is_told_every_command() {
        for shell in Shell::value_variants() {
            let text = text(*shell);
            let command = Cli::command();
            let visible = command.get_subcommands().filter(|it| !it.is_hide_set());
            for command in visible {
                let name = command.get_name();
                assert!(text.contains(name), "{shell} does not know {name}");
            }
        }
    }
}
