//! `gpuwarden man-pages`: manual pages of all commands, generated from the same definitions as
//! `--help`. `cargo xtask package` puts them into the packages.

use std::path::Path;

use anyhow::Context as _;
use clap::CommandFactory as _;

use crate::EXIT_OK;
use crate::args::Cli;

pub(super) fn execute(directory: &Path) -> anyhow::Result<u8> {
    clap_mangen::generate_to(Cli::command(), directory)
        .with_context(|| format!("write manual pages into {}", directory.display()))?;
    Ok(EXIT_OK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_that_the_first_page_names() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(execute(directory.path()).unwrap(), EXIT_OK);
        let page = |name: &str| std::fs::read_to_string(directory.path().join(name));
        let first = page("gpuwarden.1").unwrap();
        let command = Cli::command();
        for command in command.get_subcommands() {
            let name = format!("gpuwarden-{}.1", command.get_name());
            assert_eq!(page(&name).is_err(), command.is_hide_set(), "{name}");
            let named = first.contains(&name.replace('-', "\\-").replace(".1", "(1)"));
            assert_eq!(named, !command.is_hide_set(), "{name}");
        }
        assert!(page("gpuwarden-policy-lint.1").is_ok());
    }

    #[test]
    fn a_directory_that_does_not_exist_is_named() {
        let error = execute(Path::new("/nonexistent/pages")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/pages"), "{error}");
    }
}
